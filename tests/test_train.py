import random
from itertools import cycle, islice

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from common import RunError, UserError, chance
from common.evaluation import by_client, evaluate
from common.models import build
from common.splits import Clients, make_clients
from common.train import (
    LocalTraining,
    Trainer,
    get_weights,
    local_solver,
    set_weights,
)


def trained(trainer, ids=(0,), t=1, update=local_solver, **more):
    """What these clients return, who start from the initial weights."""
    return trainer.train(update, trainer.initial, ids, t, **more)


# ----------------------------------------------------------------------------------- local training


def draw():
    return torch.tensor([random.random(), np.random.rand(), torch.rand(()).item()])


def learn_and_draw(*given):
    local_solver(*given)
    return draw().sum().numpy()


def test_what_a_client_learns_and_draws_does_not_depend_on_who_trained_before(trainer):
    chance.seed_all(0, "test")
    expected = draw()
    chance.seed_all(0, "test")
    both, losses = trained(trainer, (0, 1), update=learn_and_draw)
    alone, loss = trained(trainer, (1,), update=learn_and_draw)
    assert torch.equal(both[1], alone[0]) and losses[1] == loss != losses[0]
    assert not torch.equal(trained(trainer, (1,), 2)[0], alone)  # another round has other batches
    assert torch.equal(draw(), expected)  # training leaves the generators alone


def test_each_client_gets_its_own_value_and_all_get_the_shared_one(trainer):
    """And the weights theta, whatever a client before it has left in the model."""

    def update(model, batches, optimizer, own, same):
        assert model.training
        assert torch.equal(get_weights(model), trainer.initial)
        set_weights(model, torch.full_like(trainer.initial, own + same))
        return own

    def of_client(model, batches, own, same):
        assert not model.training
        return update(model.train(), batches, None, own, same)

    own, ids = {"own": torch.tensor([1.0, 2, 4])}, torch.tensor([2, 0])
    thetas, losses = trained(trainer, ids, 1, update, per_client=own, same=100)
    assert thetas[:, 0].tolist() == [104, 101]  # row i belongs to client ids[i]
    [found] = trainer.map(of_client, trainer.initial, ids, trainer.clients.train, 1, own, same=9)
    assert losses.tolist() == found.tolist() == [4, 1]


def test_a_trainer_begins_with_the_weights_that_its_model_has_by_then(tiny, trainer):
    trainer.model.classifier[-1].bias.data.fill_(7)
    trainer.predict(0 * get_weights(trainer.model), tiny.test)
    assert (trainer.initial[-3:] == 7).all()
    trainer.y += 1  # is the trainer's own
    assert (trainer.y == tiny.y + 1).all()


def test_only_participating_clients_train_and_at_least_one(trainer):
    """Of nobody's weights the sum would be 0, and of three clients the ids are 0 to 2."""
    with pytest.raises(UserError, match=r"clients \[0, 3\]: only 0 to 2 can be selected here"):
        trained(trainer, (0, 3))
    mask, says = torch.tensor([True, False, True]), "clients must be a 1-dimensional tensor"
    with pytest.raises(UserError, match=says):
        trained(trainer, mask)
    with pytest.raises(UserError, match=says):
        trainer.map(None, trainer.initial, mask, trainer.clients.test, 1)
    with pytest.raises(UserError, match="nobody was selected in round 1"):
        trained(trainer, ())


def test_samples_are_counted_where_they_are_used(trainer):
    """Two epochs of 40 samples are six batches. A batch may be used again, or not at all.

    Steps take the place of epochs.
    """

    def update(model, batches, optimizer, count):
        return local_solver(model, islice(cycle(batches), count), optimizer)

    for count, samples in ((2, 32), (9, 120)):
        before = trainer.samples
        trained(trainer, (0,), 1, update, count=count)
        assert trainer.samples - before == samples
    trainer.local = LocalTraining(epochs=9, batch_size=16, steps=4)
    trained(trainer)
    assert trainer.samples - before == 120 + 16 + 16 + 8 + 16


def test_a_name_that_selects_nothing_is_refused(tiny, trainer):
    trainer.local.optimizer = "AdamW"
    with pytest.raises(UserError, match="'AdamW' is none of sgd, adam"):
        trained(trainer)
    with pytest.raises(UserError, match="'IID' is none of dirichlet, iid"):
        make_clients(tiny, partition="IID")


def test_under_bfloat16_the_forward_pass_alone_rounds(trainer):
    """Its weights stay in float32, and end near those of a run in float32."""

    def update(model, batches, optimizer):
        x, y = next(batches)
        logits = model(x)
        assert model.encode(x).dtype == torch.bfloat16 and logits.dtype == torch.float32
        assert not torch.is_autocast_enabled("cpu")
        return F.cross_entropy(logits, y).detach()

    exact = trained(trainer)[0] - trainer.initial
    trainer.model.precision = "bfloat16"
    rough = trained(trainer)[0] - trainer.initial
    assert rough.dtype == torch.float32 and not torch.equal(exact, rough)
    assert F.cosine_similarity(exact[0], rough[0], dim=0) > 0.98
    trained(trainer, update=update)


# ------------------------------------------------------------------------------- evaluation and map


def test_answers_to_single_samples_are_those_to_batches(tiny, trainer):
    """Those of a model that theta makes the same: its parameters, then batch norm's statistics."""
    model, other = (build("resblocks", (1, 8, 8), 3, width=0.01, dropout=0.5) for _ in range(2))
    model(torch.rand(20, 1, 8, 8))  # gives batch norm other statistics
    trainer = Trainer(tiny, trainer.clients, model.train())
    trainer.chunk, samples = 9, tiny.train[5:70].flip(0)
    losses, predicted = trainer.predict(trainer.initial, samples)
    assert torch.equal(get_weights(model), trainer.initial)  # evaluation changes no statistics
    parameters = torch.cat([p.flatten() for p in model.parameters()])
    assert torch.equal(trainer.initial[: trainer.parameters], parameters)
    set_weights(other.eval(), trainer.initial)
    logits = torch.cat([other(tiny.x[k : k + 1].float() / 127.5 - 1) for k in samples])
    nll = F.nll_loss(logits.log_softmax(1), tiny.y[samples], reduction="none")
    assert torch.equal(predicted, logits.argmax(1)) and torch.allclose(losses, nll, atol=1e-5)


def test_an_evaluation_by_hand(tiny, trainer):
    """The model always answers class 1, so an accuracy is the share of this class.

    Three of four clients participate, and two have trained. Client 0 holds a single sample of the
    rare classes, which may be a wrong label.
    """
    theta = torch.zeros_like(trainer.initial)
    theta[-2] = 5.0  # the bias of class 1; the logits of all samples are 0, 5, 0
    tests = {"ood": tiny.test[30:], "rare": tiny.test[:7]}
    train = tiny.train.split([10, 20, 80, 10])
    parts = tiny.test.split([11, 12, 17, 20])
    counts = torch.tensor([[9, 0, 0, 1], [0, 0, 0, 20], [80, 0, 0, 0], [10, 0, 0, 0]])
    trainer.clients = Clients(train, parts, 3, 2, [""] * 4, tests, counts)

    def share(samples):
        return (tiny.y[samples] == 1).float().mean().item()

    found = evaluate(trainer, theta, 1, [0, 1], torch.tensor([0.5, 1.0]))
    for column, expected in {
        "accuracies": [share(part) for part in parts[:3]],
        "id_accuracy": share(tiny.test[:40]),
        "id_selected": share(tiny.test[:23]),
        "rare_accuracy": share(tiny.test[:7]),
        "selected_size": 15,
        "rare_selected": 0.5,
    }.items():
        assert found[column].tolist() == pytest.approx(expected), column


def test_clients_that_never_train_by_hand():
    """One has nine samples, too few to be among the worst, and two of the eleven are a tenth."""
    silent = torch.zeros(12, 2, 2)
    silent[:, 0, 0] = torch.tensor([0, 9, 1, 8, 3, 2, 7, 9, 9, 5, 6, 4])
    silent[:, 0, 1] = 10 - silent[:, 0, 0]
    silent[0, 0, 1] = 9
    row = by_client(silent[1:3], silent)
    for column, expected in {
        "unseen_accuracy": 63 / 119,
        "unseen_worst": (0.1 + 0.2) / 2,
        "participation_gap": 10 / 20 - 63 / 119,
    }.items():
        assert row[column].item() == pytest.approx(expected), column


# ------------------------------------------------------------------------------- what is not finite


def test_results_that_are_not_finite_are_an_error(trainer):
    theta = trainer.initial.clone()
    theta[-1] = torch.nan  # the bias of class 2: NaN logits would count as class 0
    samples, ids = trainer.clients.train, trainer.clients.ids
    with pytest.raises(RunError, match="not finite: lower --lr"):
        trainer.predict(theta, samples[0])
    with pytest.raises(RunError, match="not finite: lower --lr"):
        trainer.map(lambda *_: torch.tensor(torch.inf), theta, ids, samples, 1)


@pytest.mark.parametrize("damage", [(1e20, 0), (0, torch.nan)])
def test_the_first_client_with_weights_or_a_loss_that_are_not_finite_is_named(trainer, damage):
    """Squares of 1e20 are infinite in float32: the next round would be."""

    def update(model, batches, optimizer, own):
        weight, loss = own
        set_weights(model, trainer.initial + weight)
        return loss

    own = {"own": [damage, damage, (0, 1)]}
    with pytest.raises(RunError, match="client 1 diverged in round 7: lower --lr"):
        trained(trainer, (2, 1, 0), 7, update, per_client=own)
