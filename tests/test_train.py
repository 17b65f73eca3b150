import pytest
import torch
import torch.nn.functional as F
from helpers import settings, sgd_by_hand
from torch.utils._python_dispatch import TorchDispatchMode

from common import UserError
from common.devices import pick_precision, seeded
from common.models import build
from common.splits import Clients
from common.train import (
    Trainer,
    get_weights,
    local_solver,
    new_table,
    set_weights,
    unflatten,
    weights_of,
)


@pytest.fixture
def model():
    with seeded(torch.device("cpu"), 0, "model"):
        return build("cnn", (1, 8, 8), 3, width=0.125)


def trained(trainer, model, theta=None, ids=(0,), t=1, update=local_solver, **more):
    """The outcome of trainer.train, by default of client 0 from the model's weights."""
    theta = get_weights(model) if theta is None else theta
    return trainer.train(update, model, theta, torch.tensor(ids), t, **more)


# ----------------------------------------------------------------------------------- local training


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_local_training_is_sgd(tiny, trainer, model, momentum):
    trainer.args.momentum = momentum
    trainer.clients.train = [tiny.train[:50], tiny.train[50:]]
    theta = get_weights(model)
    ids, thetas, _ = trained(trainer, model, theta, (1, 0), 3)
    assert ids.tolist() == [1, 0]
    for found, k in zip(thetas, (1, 0), strict=True):
        samples = trainer.clients.train[k]
        expected = sgd_by_hand(trainer.args, tiny, model, theta, samples, 3, k)
        assert torch.allclose(found, expected, atol=1e-5)
        assert (expected - theta).abs().max() > 1e-2


def test_adams_first_step_has_the_size_of_the_learning_rate(tiny, trainer, model):
    trainer.args = settings(optimizer="adam", local_epochs=1, batch_size=1000, lr=1e-3)
    theta = get_weights(model)
    step = (trained(trainer, model)[1] - theta).abs()
    assert step.max() < 1e-3 * 1.001
    assert (step > 0.95e-3).float().mean() > 0.5, "a gradient well above epsilon moves it by lr"


def test_what_a_client_learns_does_not_depend_on_who_trained_before(trainer):
    trainer.args = settings(optimizer="adam", lr=0.01, local_epochs=2)
    model = build("resblocks", (1, 8, 8), 3, width=0.01, dropout=0.5)
    theta, before = get_weights(model), torch.get_rng_state()
    _, both, losses = trained(trainer, model, theta, (0, 1))
    assert torch.equal(torch.get_rng_state(), before), "training leaves the generator alone"
    torch.rand(7)
    _, alone, loss = trained(trainer, model, theta, (1,))
    assert torch.equal(both[1], alone[0]) and losses[1] == loss[0]
    _, later, _ = trained(trainer, model, theta, (1,), 2)
    assert not torch.equal(later[0], alone[0]), "another round has other batches"


def test_each_client_gets_its_own_value_and_all_get_the_shared_one(trainer, model):
    def update(model, theta, batches, optimizer, autocast, own, listed, same):
        set_weights(model, theta + own + same)
        return torch.tensor(listed)

    own = {"own": torch.tensor([1.0, 2.0, 4.0]), "listed": [10.0, 20.0, 40.0]}
    zeros = torch.zeros(len(get_weights(model)))
    ids, thetas, losses = trained(
        trainer, model, zeros, (2, 0), 1, update, per_client=own, same=100.0
    )
    assert ids.tolist() == [2, 0]
    assert (thetas[0] == 104).all() and (thetas[1] == 101).all(), "row i belongs to client ids[i]"
    assert losses.tolist() == [40, 10]


def test_the_training_loss_is_a_mean_over_samples(tiny, trainer, model):
    trainer.args.lr = 1e-9
    trainer.clients.train = [tiny.train[:50]]  # in batches of 16, 16, 16 and 2
    _, _, losses = trained(trainer, model)
    _, expected, _ = trainer.measure(model, get_weights(model), [tiny.train[:50]])
    assert losses[0].item() == pytest.approx(expected[0].item(), rel=1e-4)


def test_bfloat16_keeps_weights_in_float32_and_ends_nearby(trainer, model):
    theta = get_weights(model)
    exact = trained(trainer, model, theta)[1] - theta
    trainer.args.precision = "bfloat16"
    rough = trained(trainer, model, theta)[1] - theta
    assert rough.dtype == torch.float32 and not torch.equal(exact, rough)
    assert F.cosine_similarity(exact[0], rough[0], dim=0) > 0.98


# ------------------------------------------------------------------------------- evaluation and map


@pytest.mark.parametrize("chunk", [250, 9])
def test_accuracy_and_loss_are_means_over_samples(tiny, trainer, chunk):
    trainer.chunk = chunk
    model = build("resblocks", (1, 8, 8), 3, width=0.01, dropout=0.5)
    model(torch.rand(20, 1, 8, 8))  # gives batch norm other statistics
    theta = get_weights(model)
    parts = [tiny.test[:13], tiny.test[13:], tiny.train]
    accuracy, loss, predictions = trainer.measure(model.train(), theta, parts)
    assert torch.equal(get_weights(model), theta), "evaluation changes no statistics"
    model.eval()
    for i, part in enumerate(parts):
        logits = torch.cat([model(tiny.x[k : k + 1].float() / 127.5 - 1) for k in part])
        guess, y = logits.argmax(1), tiny.y[part]
        nll = -logits.log_softmax(1)[range(len(part)), y].mean().item()
        assert accuracy[i].item() == pytest.approx((guess == y).float().mean().item())
        assert torch.equal(predictions[i], torch.stack([guess, y]))
        assert loss[i].item() == pytest.approx(nll, rel=1e-4)


class Syncs(TorchDispatchMode):
    """Counts the operators for which a program must wait for its GPU."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        self.count += name in ("nonzero", "bincount", "_local_scalar_dense", "_unique2", "equal")
        return function(*args, **(kwargs or {}))


def test_an_evaluation_of_many_batches_waits_as_often_as_one_of_few(tiny, trainer, model):
    found = []
    for trainer.chunk in (60, 10):
        with Syncs() as syncs:
            trainer.measure(model, get_weights(model), [tiny.test, tiny.train])
        found.append(syncs.count)
    assert 1 <= found[0] == found[1]


def test_evaluation_uses_the_weights_and_the_test_sets_that_it_is_given(tiny, trainer, model):
    theta = torch.zeros(len(get_weights(model)))
    theta[-2] = 5.0  # the bias of class 1; the logits of all samples are 0, 5, 0
    trainer.clients = Clients(
        train=[tiny.train[:40], tiny.train[40:50], tiny.train[50:]],
        test=[*tiny.test.split(20)], participating=2, sample=2,
        groups=["one class", "more classes", ""],
        tests={"ood": tiny.test[30:], "rare": tiny.test[:7]},
    )  # fmt: skip

    def share(samples):
        return (tiny.y[samples] == 1).float().mean().item()

    assert trainer.evaluate(model, theta, torch.tensor([0, 1]))["rare_selected"] == 1 / 2
    found = trainer.evaluate(model, theta, torch.tensor([1]))
    assert found["rare_selected"] == 0
    assert found["selected_size"] == 10
    assert found["id_accuracy"] == pytest.approx(share(tiny.test[:40]))
    assert found["id_selected"] == pytest.approx(share(tiny.test[20:40]))
    assert found["ood_accuracy"] == pytest.approx(share(tiny.test[30:]))
    assert found["rare_accuracy"] == pytest.approx(share(tiny.test[:7]))
    ones = (tiny.y[tiny.test[30:]] == 1).sum().item()
    assert found["confusion"].sum(0).tolist() == [0, 30, 0] and found["confusion"][1, 1] == ones


def test_what_map_draws_belongs_to_the_client_and_the_round(tiny, trainer, model):
    def function(model, batches, autocast):
        return torch.rand(3)

    def drawn(ids, t):
        return trainer.map(function, model, get_weights(model), ids, tiny.train.split(40), t)

    all_three, one = drawn(torch.arange(3), 1), torch.tensor([1])
    assert torch.equal(drawn(one, 1)[0], all_three[1]) and len(all_three.unique()) == 9
    assert not torch.equal(drawn(one, 2)[0], all_three[1])


# ------------------------------------------------------------------------------- what is not finite


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_evaluation_of_logits_that_are_not_finite_is_an_error(tiny, trainer, model, value):
    theta = get_weights(model)
    theta[-1] = value  # the bias of class 2: NaN logits would count as class 0
    with pytest.raises(UserError, match="not finite: lower --lr"):
        trainer.measure(model, theta, [tiny.train, tiny.test])


DAMAGE = {1: [torch.nan, 0.0], 2: [0.0, -torch.inf], 4: [torch.inf, -torch.inf]}


@pytest.mark.parametrize("damaged", ["own", "loss"])
def test_clients_with_weights_or_a_loss_that_are_not_finite_are_left_out(
    tiny, trainer, model, damaged, capsys
):
    trainer.clients.train = tiny.train.split(20)

    def update(model, theta, batches, optimizer, autocast, own, loss):
        theta = theta.clone()
        theta[:2] = own
        set_weights(model, theta)
        return loss

    def of_clients(damage, ids):
        good = torch.tensor([[k + 1.0, 0.0] for k in range(6)])
        own = {"own": good.clone(), "loss": good.sum(1) + 9}
        for k, values in damage.items():
            own[damaged][k] = torch.tensor(values) if damaged == "own" else sum(values)
        return trained(trainer, model, None, ids, 7, update, per_client=own)

    order = (5, 1, 0, 4, 2, 3)
    ids, thetas, losses = of_clients(DAMAGE, order)
    assert ids.tolist() == [5, 0, 3] and losses.tolist() == [15, 10, 13]
    assert thetas[:, 0].tolist() == [6, 1, 4], "row i belongs to the client ids[i]"
    said = "".join(capsys.readouterr())
    assert said == "round 7: 3 of 6 uploads were not finite: left out\n"
    assert of_clients({}, order)[0].tolist() == [*order]
    with pytest.raises(UserError, match="diverged in round 7"):
        of_clients(DAMAGE, (1, 2, 4))


# ------------------------------------------------------------------------- the table of updates


def test_a_large_table_tells_its_size_and_an_impossible_one_is_refused(capsys):
    new_table(10, 10**8, torch.device("meta"))  # has no memory
    assert "4.0 GB in each process" in "".join(capsys.readouterr())
    assert torch.equal(new_table(2, 3, torch.device("cpu")), torch.zeros(2, 3))
    with pytest.raises(UserError, match=r"takes 4000000\.0 GB, which is too much"):
        new_table(10**6, 10**9, torch.device("cpu"))


# ------------------------------------------------------------------- weights, devices and precision


def test_weights_go_to_a_vector_and_back_with_the_statistics_of_batch_norm():
    model, other = (build("resblocks", (1, 8, 8), 3, width=0.01) for _ in range(2))
    x = torch.rand(5, 1, 8, 8)
    model(x)
    theta = get_weights(model)
    assert len(theta) == sum(t.numel() for t in weights_of(model))
    set_weights(other, theta)
    assert torch.equal(model.eval()(x), other.eval()(x))
    theta += 1
    assert not torch.equal(get_weights(model), theta), "theta is a copy"
    for part, parameter in zip(unflatten(other, theta), other.parameters(), strict=False):
        assert torch.equal(part, parameter + 1), "parameters come before the statistics"


def test_only_batch_norms_count_is_reset_among_buffers_of_integers():
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 2))
    model.register_buffer("index", torch.tensor([2, 0, 1]))  # as in torchvision's swin_t
    model(torch.rand(3, 2))
    set_weights(model, get_weights(model))
    assert model.index.tolist() == [2, 0, 1] and model[0].num_batches_tracked == 0


def test_a_device_multiplies_in_bfloat16_only_if_its_hardware_does(monkeypatch):
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    for found, precision in (({"avx512_bf16": True}, "bfloat16"), ({"avx2": True}, "float32")):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda found=found: found)
        assert pick_precision("auto", cpu, "resnet18") == precision
        assert pick_precision("float32", cpu, "resnet18") == "float32"
    for has_it, precision in ((True, "bfloat16"), (False, "tf32")):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda emulated, has_it=has_it: has_it)
        assert pick_precision("auto", gpu, "resnet18") == precision
        assert pick_precision("auto", gpu, "cnn") == "tf32", "casts cost more than they save"


def test_tf32_lets_a_gpus_convolutions_round_and_float32_does_not(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    for name, device, rounds in (
        ("float32", gpu, False),
        ("tf32", gpu, True),
        ("tf32", cpu, False),
    ):
        assert pick_precision(name, device, "vgg16") == ("tf32" if rounds else "float32")
        assert torch.backends.cudnn.allow_tf32 == rounds
        assert not torch.backends.cuda.matmul.allow_tf32, "the server's products stay exact"


@pytest.mark.parametrize(("size", "most"), [(8, 250), (224, 99), (3000, 1)])
def test_large_images_are_evaluated_in_smaller_batches(tiny, trainer, size, most):
    class Sizes(torch.nn.Module):
        def forward(self, x):
            found.append(len(x))
            return torch.zeros(len(x), 3)

    samples, found = (500 if size < 3000 else 3), []
    tiny.x = torch.zeros(1, 1, size, size, dtype=torch.uint8).expand(samples, 1, size, size)
    tiny.y = torch.zeros(samples, dtype=torch.long)
    trainer = Trainer(tiny, trainer.clients, trainer.device, trainer.args)
    model = Sizes()
    model.register_buffer("none", torch.zeros(1))
    trainer.measure(model, torch.zeros(1), [torch.arange(samples)])
    assert max(found) == most and sum(found) == samples
