import copy

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from common import UserError, random_at, steps
from common.models import build
from common.train import (
    Trainer,
    cross_entropy,
    get_weights,
    pick_device,
    pick_precision,
    seeded,
    set_weights,
    span,
    weights_of,
)


@pytest.fixture
def model():
    with seeded(torch.device("cpu"), 0, "model"):
        return build("cnn", (1, 8, 8), 3, width=0.125)


def sgd_by_hand(model, trainer, samples, round, client, momentum=0.0):
    """Local epochs as the definition has them: v <- momentum v + grad, theta <- theta - lr v."""
    model = copy.deepcopy(model)
    velocity = [torch.zeros_like(p) for p in model.parameters()]
    rng = random_at(trainer.seed, "batches", round, client)
    for _ in range(trainer.epochs):
        order = samples[torch.from_numpy(rng.permutation(len(samples)))]
        for start in range(0, len(order), trainer.batch_size):
            batch = order[start : start + trainer.batch_size]
            x = trainer.x[batch].float() / 127.5 - 1
            loss = F.cross_entropy(model(x), trainer.y[batch])
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            with torch.no_grad():
                for p, v, g in zip(model.parameters(), velocity, gradients, strict=True):
                    v.mul_(momentum).add_(g)
                    p.sub_(trainer.lr * v)
    return get_weights(model)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_local_training_is_sgd(tiny, trainer, model, momentum):
    trainer.momentum = momentum
    samples = [tiny.train[:50], tiny.train[50:]]
    w = get_weights(model)
    _, updates, _ = trainer.local_updates(copy.deepcopy(model), w, torch.tensor([1, 0]), samples, round=3)
    for row, client in ((0, 1), (1, 0)):
        expected = w - sgd_by_hand(model, trainer, samples[client], 3, client, momentum)
        assert torch.allclose(updates[row], expected, atol=1e-5)
        assert expected.abs().max() > 1e-2


def test_adams_first_step_has_the_size_of_the_learning_rate(tiny, trainer, model):
    trainer.optimizer, trainer.epochs, trainer.batch_size, trainer.lr = "adam", 1, 1000, 1e-3
    w = get_weights(model)
    _, updates, _ = trainer.local_updates(model, w, torch.tensor([0]), [tiny.train], round=1)
    assert updates.abs().max() < 1e-3 * 1.001
    assert (updates.abs() > 0.95e-3).float().mean() > 0.5, "a gradient well above epsilon moves its weight by lr"


def test_what_a_client_learns_does_not_depend_on_who_trained_before(tiny, trainer):
    model = build("resblocks", (1, 8, 8), 3, width=0.01, dropout=0.5)
    samples = [tiny.train[:40], tiny.train[40:]]
    w = get_weights(model)
    _, both, losses = trainer.local_updates(model, w, torch.tensor([0, 1]), samples, round=1)
    torch.rand(7)
    _, alone, loss = trainer.local_updates(model, w, torch.tensor([1]), samples, round=1)
    assert torch.equal(both[1], alone[0]) and losses[1] == loss[0]


def test_training_leaves_the_global_generator_alone(tiny, trainer, model):
    before = torch.get_rng_state()
    trainer.local_updates(model, get_weights(model), torch.tensor([0]), [tiny.train], round=1)
    assert torch.equal(torch.get_rng_state(), before)


def test_weights_go_to_a_vector_and_back_with_the_statistics_of_batch_norm():
    model, other = (build("resblocks", (1, 8, 8), 3, width=0.01) for _ in range(2))
    model(torch.rand(5, 1, 8, 8))
    w = get_weights(model)
    assert len(w) == sum(t.numel() for t in weights_of(model))
    set_weights(other, w)
    x = torch.rand(5, 1, 8, 8)
    assert torch.equal(model.eval()(x), other.eval()(x))


def test_span_finds_a_parameter(model):
    w = get_weights(model)
    for name, parameter in model.named_parameters():
        assert torch.equal(w[span(model, name)].view_as(parameter), parameter)


def test_evaluation_is_a_mean_over_samples(tiny, trainer, model):
    parts = [tiny.test[:13], tiny.test[13:], tiny.train]
    accuracy, loss = trainer.evaluate(model, get_weights(model), parts)
    for i, part in enumerate(parts):
        logits = [model(tiny.x[k : k + 1].float() / 127.5 - 1)[0] for k in part]
        right = [logit.argmax().item() == tiny.y[k].item() for logit, k in zip(logits, part, strict=True)]
        nll = [-logit.log_softmax(0)[tiny.y[k]].item() for logit, k in zip(logits, part, strict=True)]
        assert accuracy[i].item() == pytest.approx(sum(right) / len(part))
        assert loss[i].item() == pytest.approx(sum(nll) / len(part), rel=1e-4)


def test_the_training_loss_is_a_mean_over_samples(tiny, trainer, model):
    trainer.lr, trainer.epochs = 1e-9, 1
    samples = tiny.train[:50]  # in batches of 16, 16, 16 and 2
    _, _, losses = trainer.local_updates(model, get_weights(model), torch.tensor([0]), [samples], round=1)
    _, expected = trainer.evaluate(model, get_weights(model), [samples])
    assert losses[0].item() == pytest.approx(expected[0].item(), rel=1e-4)


def test_bfloat16_keeps_weights_in_float32_and_ends_nearby(tiny, trainer, model):
    w = get_weights(model)
    _, exact, _ = trainer.local_updates(model, w, torch.tensor([0]), [tiny.train], round=1)
    _, rough, _ = Trainer(
        tiny, torch.device("cpu"), seed=0, epochs=2, batch_size=16, lr=0.1, precision="bfloat16"
    ).local_updates(model, w, torch.tensor([0]), [tiny.train], round=1)
    assert rough.dtype == torch.float32 and not torch.equal(exact, rough)
    assert F.cosine_similarity(exact[0], rough[0], dim=0) > 0.98


def test_a_device_that_is_not_there_is_refused():
    assert pick_device("cpu").type == "cpu"
    with pytest.raises(UserError, match="choose auto or cpu"):
        pick_device("cuda:99")
    with pytest.raises(UserError, match="choose auto or cpu"):
        pick_device("toaster")


def test_a_models_parameters_come_before_its_buffers():
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
    model(torch.tensor([[0.0, 2.0], [2.0, 6.0]]))
    assert get_weights(model)[:4].tolist() == [1, 1, 0, 0]
    assert get_weights(model)[7:].tolist() == pytest.approx([0.1, 0.4, 0.9 + 0.1 * 2, 0.9 + 0.1 * 8])


def test_a_device_multiplies_in_bfloat16_only_where_its_hardware_does(monkeypatch):
    cpu = torch.device("cpu")
    for capabilities, precision in (({"avx512_bf16": True}, "bfloat16"), ({"avx2": True}, "float32")):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda found=capabilities: found)
        assert pick_precision("auto", cpu) == precision
        assert pick_precision("float32", cpu) == "float32"


@pytest.mark.parametrize(
    ("optimizer", "momentum", "name"), [("sgd", 0.0, "cnn"), ("sgd", 0.9, "cnn"), ("adam", 0.0, "resblocks")]
)
def test_recorded_steps_are_steps(tiny, trainer, monkeypatch, optimizer, momentum, name):
    """All of --cuda-graphs but the graph: warming up leaves no trace, and each client starts anew."""

    def record(step):
        for _ in range(3):
            step()
        return step

    monkeypatch.setattr(steps, "record", record)
    trainer.optimizer, trainer.momentum, trainer.batch_size, trainer.lr = optimizer, momentum, 16, 0.01
    samples = [tiny.train[:40], tiny.train[40:72], tiny.train[:10]]  # with a last batch of 8, without, with no full one
    with seeded(torch.device("cpu"), 0, "model"):
        model = build(name, (1, 8, 8), 3, width=0.05)
    w, found = get_weights(model), []
    for trainer.graphs in (False, True):
        found += [trainer.local_updates(model, w, torch.arange(3), samples, t) for t in (1, 2)]
    for (_, updates, losses), (_, again, losses_again) in zip(found[:2], found[2:], strict=True):
        assert torch.allclose(updates, again, atol=1e-7)
        assert torch.allclose(losses, losses_again)
    assert trainer.recorded.fits(model, cross_entropy)
    assert not trainer.recorded.fits(copy.deepcopy(model), cross_entropy)
    assert not trainer.recorded.fits(model, lambda model, x, y: cross_entropy(model, x, y))
