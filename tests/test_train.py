import random
from copy import deepcopy
from itertools import cycle, islice
from pickle import dumps, loads

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from common import RunError, UserError, chance, devices
from common.evaluation import evaluate
from common.models import build
from common.splits import Clients, make_clients
from common.train import (
    LocalTraining,
    Trainer,
    averaging_weights,
    get_weights,
    local_solver,
    set_weights,
    unflatten,
)


def trained(trainer, ids=(0,), t=1, update=local_solver, **more):
    """What these clients return, who start from the initial weights."""
    return trainer.train(update, trainer.initial, ids, t, **more)


# ----------------------------------------------------------------------------------- local training


def test_adams_first_step_has_the_size_of_the_learning_rate(trainer):
    trainer.local = LocalTraining(epochs=1, batch_size=1000, lr=1e-3, optimizer="adam")
    step = (trained(trainer)[0] - trainer.initial).abs()
    assert step.max() < 1e-3 * 1.001
    assert (step > 0.95e-3).float().mean() > 0.5  # a gradient well above epsilon moves it by lr


def draw(*given):
    return torch.tensor([random.random(), np.random.rand(), torch.rand(()).item()])


def learn_and_draw(*given):
    local_solver(*given)
    return draw().sum().numpy()


def test_what_a_client_learns_and_draws_does_not_depend_on_who_trained_before(tiny, trainer):
    model = build("resblocks", (1, 8, 8), 3, width=0.01, dropout=0.5)
    local, done = LocalTraining(epochs=2, lr=0.01, optimizer="adam"), []
    trainer = Trainer(tiny, trainer.clients, model, local=local)
    trainer.progress = lambda *of_batch: done.append(of_batch)
    chance.seed_all(0, "test")
    expected = draw()
    chance.seed_all(0, "test")
    both, losses = trained(trainer, (0, 1), update=learn_and_draw)
    rounds, shares = zip(*done)
    assert {*rounds} == {1} and sum(shares) == pytest.approx(1)  # the clock has moved by a round
    [noise] = trainer.map(draw, trainer.initial, torch.tensor([0, 1]), [tiny.train] * 2, 1)
    assert torch.equal(draw(), expected)  # training leaves the generators alone
    alone, loss = trained(trainer, (1,), update=learn_and_draw)
    assert torch.equal(both[1], alone[0]) and losses[1] == loss != losses[0]
    assert not torch.equal(trained(trainer, (1,), 2)[0], alone)  # another round has other batches
    [same] = trainer.map(draw, trainer.initial, torch.tensor([1]), [tiny.train] * 2, 1)
    assert torch.equal(noise[1], same[0]) and len(noise.unique()) == 6


def test_each_client_gets_its_own_value_and_all_get_the_shared_one(tiny, trainer):
    """And the weights theta, whatever a client before it has left in the model."""

    def update(model, batches, optimizer, own, same):
        assert model.training and torch.equal(get_weights(model), trainer.initial)
        set_weights(model, 0 * trainer.initial + own + same)
        return torch.tensor(own)

    def of_client(model, batches, own, same):
        assert torch.equal(get_weights(model), trainer.initial) and not model.training
        set_weights(model, 0 * trainer.initial)
        return torch.full((2,), own + same), torch.cat([y for _, y in batches])

    own, ids = {"own": [1.0, 2.0, 4.0]}, torch.tensor([2, 0])
    thetas, losses = trained(trainer, (2, 0), 1, update, per_client=own, same=100.0)
    assert (thetas[0] == 104).all() and (thetas[1] == 101).all()  # row i belongs to client ids[i]
    assert losses.tolist() == [4, 1]
    trainer.chunk, samples = 9, tiny.train.split(30)
    sums, labels = trainer.map(of_client, trainer.initial, ids, samples, 1, own, same=100.0)
    assert sums.tolist() == [[104, 104], [101, 101]]
    assert torch.equal(labels, tiny.y[torch.stack([samples[2], samples[0]])])
    trained(trainer, (1,), 1, update, per_client=own, same=0.0)  # it is in training mode again
    with pytest.raises(UserError, match="own has 1 values: per_client takes them by id"):
        trained(trainer, (0,), 1, update, per_client={"own": [1.0]})


def test_a_trainer_begins_with_the_weights_that_its_model_has_by_then(tiny, trainer):
    trainer.model.classifier[-1].bias.data.fill_(7)
    trainer.predict(0 * get_weights(trainer.model), tiny.test)
    assert (trainer.initial[-3:] == 7).all()
    trainer.y += 1  # is the trainer's own
    assert (trainer.y == tiny.y + 1).all()


def test_only_participating_clients_train_and_at_least_one(trainer):
    """Of nobody's weights the sum would be 0, and of three clients the ids are 0 to 2."""
    with pytest.raises(UserError, match=r"round 1 selects \[0, 3\]: only 0 to 2 participate"):
        trained(trainer, (0, 3))
    with pytest.raises(UserError, match="client_update returns no number"):
        trained(trainer, update=print)
    for wrong in ([True, False, True], [[0, 1]], [0.0, 1.0]):
        with pytest.raises(UserError, match=r"clients are ids, int64 \[K\], and not"):
            trained(trainer, torch.tensor(wrong))
    with pytest.raises(UserError, match="nobody was selected in round 1"):
        trained(trainer, ())


def test_samples_are_counted_where_they_are_used(trainer):
    """Two epochs of 40 samples are six batches. A batch may be used again, or not at all."""

    def update(model, batches, optimizer, count):
        return local_solver(model, islice(cycle(batches), count), optimizer)

    for count, samples in ((6, 80), (2, 32), (9, 120)):
        before = trainer.samples
        trained(trainer, (0,), 1, update, count=count)
        assert trainer.samples - before == samples


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_weight_decay_and_a_falling_learning_rate_by_hand(tiny, trainer, optimizer):
    """In round 3 the learning rate has fallen twice. The client takes four steps, of two epochs."""
    batches = []
    trainer.local = LocalTraining(9, 16, 0.02, optimizer, 0.0, 0.3, 0.5, steps=4)
    draw = trainer._batches
    trainer._batches = lambda *where: (batches.append(batch) or batch for batch in draw(*where))
    [found], _ = trained(trainer, (1,), 3)
    assert [len(y) for _, y in batches] == [16, 16, 8, 16]
    theta, m, v = trainer.initial, 0, 0
    for i, (x, y) in enumerate(batches, 1):
        set_weights(trainer.model, theta)
        loss = F.cross_entropy(trainer.model(x), y)
        parts = torch.autograd.grad(loss, [*trainer.model.parameters()])
        g = torch.cat([part.flatten() for part in parts]) + 0.3 * theta
        if optimizer == "adam":
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
            g = (m / (1 - 0.9**i)) / ((v / (1 - 0.999**i)).sqrt() + 1e-8)
        theta = theta - 0.02 * 0.25 * g
    assert torch.allclose(found, theta, atol=1e-5)


def test_a_name_that_selects_nothing_is_refused(tiny, trainer):
    trainer.local.optimizer = "AdamW"
    with pytest.raises(UserError, match="'AdamW' is none of sgd, adam"):
        trained(trainer)
    with pytest.raises(UserError, match="'Size' is none of size, equal"):
        averaging_weights("Size", torch.ones(3))
    with pytest.raises(UserError, match="'IID' is none of dirichlet, iid"):
        make_clients(tiny, partition="IID")
    with pytest.raises(UserError, match="'CNN' is none of cnn, convnet"):
        build("CNN", (1, 8, 8), 3)


class Counting(torch.nn.Module):
    """Keeps how often it saw a batch in a buffer of this type."""

    def __init__(self, dtype):
        super().__init__()
        self.layer = torch.nn.Linear(64, 3)
        self.register_buffer("seen", torch.zeros(1, dtype=dtype))

    def forward(self, x):
        if self.training:
            self.seen += 1
        return self.layer(x.flatten(1)) + 0 * self.seen


def test_a_buffer_that_training_changes_is_sent_or_refused(tiny, trainer):
    sent = Trainer(tiny, trainer.clients, Counting(torch.float32), local=trainer.local)
    assert trained(sent)[0][0, -1] == 6
    kept = Trainer(tiny, trainer.clients, Counting(torch.int64), local=trainer.local)
    with pytest.raises(UserError, match="no client sends: register it as float32"):
        trained(kept)


def test_a_negative_variance_is_named(tiny, trainer):
    """As a server's Adam makes it, which steps on batch norm's statistics, too."""
    model = build("resblocks", (1, 8, 8), 3, width=0.01)
    trainer = Trainer(tiny, trainer.clients, model)
    theta = trainer.initial.clone()
    theta[trainer.parameters :] -= 1.5
    with pytest.raises(RunError, match="running_var is negative, so let the server step on"):
        trainer.predict(theta, tiny.test)


def test_under_bfloat16_the_forward_pass_alone_rounds(tiny, trainer):
    """Its weights stay in float32, and end near those of a run in float32."""
    exact, backward = trained(trainer)[0] - trainer.initial, []
    set_weights(trainer.model, trainer.initial)
    trainer = Trainer(tiny, trainer.clients, trainer.model, "cpu", trainer.local, 0, "bfloat16")
    rough = trained(trainer)[0] - trainer.initial
    assert rough.dtype == torch.float32 and not torch.equal(exact, rough)
    assert F.cosine_similarity(exact[0], rough[0], dim=0) > 0.98

    def update(model, batches, optimizer):
        x, y = next(batches)
        z, logits, other = model.encode(x), model(x), deepcopy(loads(dumps(model)))
        set_weights(other, 0 * trainer.initial)
        assert not other(x).any()  # a copy has weights of its own
        logits.register_hook(lambda _: backward.append(torch.is_autocast_enabled("cpu")))
        loss = F.cross_entropy(logits, y)
        loss.backward()
        assert z.dtype == torch.bfloat16 and logits.dtype == loss.dtype == torch.float32
        return loss.detach()

    trained(trainer, update=update)
    assert backward == [False]


# ------------------------------------------------------------------------------- evaluation and map


@pytest.mark.parametrize("chunk", [250, 9])
def test_answers_to_single_samples_are_those_to_batches(tiny, trainer, chunk):
    model = build("resblocks", (1, 8, 8), 3, width=0.01, dropout=0.5)
    model(torch.rand(20, 1, 8, 8))  # gives batch norm other statistics
    trainer = Trainer(tiny, trainer.clients, model.train())
    trainer.chunk, samples, found = chunk, tiny.train[5:70].flip(0), []
    model.register_forward_pre_hook(lambda model, x: found.append(len(x[0])))
    losses, predicted = trainer.predict(trainer.initial, samples)
    assert max(found) == min(chunk, 65) and sum(found) == 65
    assert torch.equal(get_weights(model), trainer.initial)  # evaluation changes no statistics
    logits = torch.cat([model.eval()(tiny.x[k : k + 1].float() / 127.5 - 1) for k in samples])
    nll = -logits.log_softmax(1)[range(len(samples)), tiny.y[samples]]
    assert torch.equal(predicted, logits.argmax(1)) and torch.allclose(losses, nll, atol=1e-5)


def test_an_evaluation_by_hand(tiny, trainer):
    """The model always answers class 1. The clients from 20 on never train.

    Of these, one has nine samples, too few to be among the worst, and two of eleven are a tenth.
    """
    tests = {"ood": tiny.test[30:], "rare": tiny.test[:7]}
    zeros, ones = (torch.nonzero(tiny.y == c).flatten() for c in (0, 1))
    silent = [torch.cat([ones[:k], zeros[: 10 - k]]) for k in (9, 1, 8, 3, 2, 7, 9, 9, 5, 6, 4)]
    parts = [*tiny.test.split(3), zeros[:9], *silent]
    train = [tiny.train[: 10 + k] for k in range(32)]
    counts = torch.zeros(32, 4)
    counts[:, 0], counts[:, -1] = 9, 1
    counts[1, -1] = 10  # client 1 holds one of the last three classes, and others wrong labels
    trainer.clients = Clients(train, parts, 20, 2, [""] * 32, tests, counts)
    theta = torch.zeros_like(trainer.initial)
    theta[-2] = 5.0  # the bias of class 1; the logits of all samples are 0, 5, 0
    selected, losses = [1, 4], torch.tensor([0.5, 1.0])

    def share(samples):
        return pytest.approx((tiny.y[samples] == 1).float().mean().item())

    found = evaluate(trainer, theta, 1, selected, losses)
    assert found.pop("selected") == selected
    confusion = torch.zeros(3, 3, dtype=torch.long)
    confusion[:, 1] = tiny.y[tiny.test[30:]].bincount(minlength=3)
    assert torch.equal(found.pop("confusion"), confusion)
    accuracies = found.pop("accuracies").tolist()
    assert accuracies == [share(part) for part in parts[:20]] and len({*accuracies}) > 2
    unseen = found.pop("unseen_accuracies").tolist()
    assert unseen == pytest.approx([0, 0.9, 0.1, 0.8, 0.3, 0.2, 0.7, 0.9, 0.9, 0.5, 0.6, 0.4])
    assert found == {
        "train_loss": 0.75,
        "samples": 0,
        "megabytes": 0,
        "id_accuracy": share(tiny.test),
        "unseen_accuracy": pytest.approx(63 / 119),
        "unseen_worst": pytest.approx(0.15),
        "participation_gap": pytest.approx(share(tiny.test).expected - 63 / 119),
        "id_selected": share(torch.cat([parts[1], parts[4]])),
        "ood_accuracy": share(tiny.test[30:]),
        "rare_accuracy": share(tiny.test[:7]),
        "selected_size": 12.5,
        "rare_selected": 0.5,
    }


# ------------------------------------------------------------------------------- what is not finite


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_results_that_are_not_finite_are_an_error(tiny, trainer, value):
    theta = trainer.initial.clone()
    theta[-1] = value  # the bias of class 2: NaN logits would count as class 0
    with pytest.raises(RunError, match="not finite: lower --lr"):
        trainer.predict(theta, tiny.train)
    with pytest.raises(RunError, match="not finite: lower --lr"):
        trainer.map(lambda *_: torch.tensor(value), theta, torch.arange(3), [tiny.train] * 3, 1)


@pytest.mark.parametrize("damage", ["nan 0 0", "inf -inf 0", "0 0 nan", "1e20 0 0"])
def test_the_first_client_with_weights_or_a_loss_that_are_not_finite_is_named(trainer, damage):
    def update(model, batches, optimizer, own):
        set_weights(model, torch.cat([own[:2], trainer.initial[2:]]))
        return own[2]

    own = torch.ones(3, 3)
    own[[0, 1]] = torch.tensor([*map(float, damage.split())])
    with pytest.raises(RunError, match="client 1 diverged in round 7: lower --lr"):
        trained(trainer, (2, 1, 0), 7, update, per_client={"own": own})


# ------------------------------------------------------------------- weights, devices and precision


def test_weights_go_to_a_vector_and_back_with_the_statistics_of_batch_norm():
    model, other = (build("resblocks", (1, 8, 8), 3, width=0.01) for _ in range(2))
    x = torch.rand(5, 1, 8, 8)
    model(x)
    theta = get_weights(model)
    set_weights(other, theta)
    assert torch.allclose(model.eval()(x), other.eval()(x))
    for part, parameter in zip(unflatten(other, theta), other.parameters(), strict=False):
        assert torch.equal(part, parameter)  # parameters come before the statistics


@pytest.mark.parametrize("has_it", [True, False])
def test_auto_takes_bfloat16_only_if_the_hardware_has_it(monkeypatch, has_it):
    can, fast = {"avx512_bf16": has_it, "avx2": True}, "bfloat16" if has_it else "float32"
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: can)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda emulated: has_it)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    for name, device, model, expected in (
        ("auto", "cpu", "resnet18", fast),
        ("auto", "cuda", "resnet18", fast),
        ("auto", "cuda", "cnn", "float32"),  # casts would cost more than they save
        ("float32", "cuda", "vgg16", "float32"),
    ):
        monkeypatch.setattr(devices, "_device", lambda name, device=device: torch.device(device))
        assert devices.set_up("any", name, model)[1] == expected
        assert not torch.backends.cuda.matmul.allow_tf32  # the server's products stay exact
