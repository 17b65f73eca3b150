"""The controls that change the data or FedAvg: each diff does what its paragraph says.

What a diff of one line does can be read in it.
"""

import runpy
from dataclasses import replace

import pytest
import torch
from helpers import logits_by_hand, prepared, ten_classes
from test_models import is_torchvisions_resnet18_with_another_stem
from test_variations import apply

import fedavg
from common.chance import random_at, shuffled
from common.glyphs import coloured
from common.train import local_solver, set_weights


@pytest.fixture
def patched(tmp_path):
    """patched(name, file): what is defined in this file after this diff."""

    def load(name, file):
        tree = tmp_path / name
        if not tree.exists():
            apply(name, tree)
        return runpy.run_path(str(tree / file))

    return load


def test_in_the_control_of_colours_both_clients_trust_the_colour_equally(patched):
    data = patched("colours-control", "common/glyphs.py")["coloured"]()
    green = data["x"].amax((2, 3))[:, 1] > 0
    for d, expected in enumerate((0.8, 0.8, 0.1)):
        here = data["domain"] == d
        share = (green == data["y"])[here].double().mean()
        assert abs(share - expected) < 4 * (expected * (1 - expected) / here.sum()) ** 0.5
    assert torch.equal(data["y"], coloured()["y"])


def test_twins_are_two_clients_for_each_rare_class(patched):
    data = ten_classes()
    clients = patched("twins", "common/splits.py")["make_clients"](data, 3, "rare", clients=20)
    held = [{*data.y[samples].tolist()} for samples in clients.train]
    assert [held.count({c}) for c in (7, 8, 9)] == [2, 2, 2]
    assert sum(classes <= {*range(7)} for classes in held) == 14


# ------------------------------------------------------------------------------------------- FedAvg


def test_the_momentum_of_one_optimizer_goes_to_the_next_client(patched, trainer, tiny):
    """By hand, for one step each: the second client's has 0.9 times the first's in it."""
    local = replace(trainer.local, epochs=1, batch_size=40, momentum=0.9)
    steps = []
    for kind in (patched("one-optimizer", "common/train.py")["Trainer"], type(trainer)):
        of = kind(tiny, trainer.clients, trainer.model, local=local)
        thetas, _ = of.train(local_solver, trainer.initial, torch.tensor([0, 1]), 1)
        steps.append(thetas - trainer.initial)
    found, correct = steps
    assert torch.equal(found[0], correct[0])
    assert torch.allclose(found[1], correct[1] + 0.9 * correct[0], atol=1e-6)
    assert correct[0].abs().max() > 1e-3


def test_dirichlet_over_clients_gives_equal_sizes(patched):
    dirichlet = patched("dirichlet-over-clients", "common/splits.py")["dirichlet"]
    labels, most = torch.arange(1000) % 10, {}
    for alpha in (1e-3, 1e6):
        parts = dirichlet(labels, 10, alpha, random_at(0, "test"))
        assert [len(samples) for samples in parts] == [100] * 10
        assert torch.equal(torch.cat(parts).sort().values, torch.arange(1000))
        most[alpha] = labels[parts[0]].bincount().max()  # of one class
    assert most[1e-3] == 100 and most[1e6] < 25


@pytest.mark.usefixtures("start")
def test_own_models_are_tested_before_averaging(patched):
    words = "--model cnn --width 0.125 --partition iid --clients 3 --participating 3 --sample 2"
    args, data, clients, trainer = prepared(fedavg, f"{words} --held-out 0.4 --lr 0.1")
    _, row = next(patched("own-models", "fedavg.py")["federate"](args, clients, trainer))
    right = []
    thetas, _ = trainer.train(fedavg.client_update, trainer.initial, row["selected"], 1)
    for k, theta in zip(row["selected"], thetas, strict=True):
        logits = logits_by_hand(trainer, theta, clients.test[k])
        right += (logits.argmax(1) == data.y[clients.test[k]]).tolist()
    assert row["id_selected"] == pytest.approx(sum(right) / len(right))


def test_batch_norm_is_tested_in_four_ways(patched, trainer, tiny):
    """By hand, for batches of 15 images of one class."""
    by_class = [tiny.test[tiny.y[tiny.test] == c][:15] for c in range(3)]
    ood = torch.cat(by_class)
    clients = replace(trainer.clients, test=[tiny.test[:0]] * 3, tests={"ood": ood})
    model = patched("batch-norm", "common/models.py")["build"]("cnn", (1, 8, 8), 3, width=0.125)
    kind = patched("batch-norm", "common/train.py")["Trainer"]
    trainer = kind(tiny, clients, model, local=trainer.local)
    trainer.chunk = 15
    thetas, losses = trainer.train(local_solver, trainer.initial, clients.ids, 1)
    theta = thetas.mean(0)
    evaluate = patched("batch-norm", "common/evaluation.py")["evaluate"]
    row = evaluate(trainer, theta, 1, clients.ids, losses)

    def right(samples):
        answers = model(tiny.x[samples].float() / 127.5 - 1).argmax(1)
        return (answers == tiny.y[samples]).float().mean().item()

    set_weights(model, theta)
    model.eval()
    expected = [right(ood)]
    for part in model.features:
        if isinstance(part, torch.nn.BatchNorm2d):
            part.reset_running_stats()
    expected.append(right(ood))
    model.train()
    for batches in (shuffled(ood, random_at(0, "mixed")).split(15), by_class):
        expected.append(sum(right(samples) for samples in batches) / 3)
    assert row["accuracies"].tolist() == pytest.approx(expected)
    assert row["ood_accuracy"] == pytest.approx(expected[0])
    assert len({*expected}) > 2, expected


def test_a_resnet_with_batch_norm_is_torchvisions(patched):
    """With its batch's statistics, which differ from those that it begins with."""
    build = patched("batch-norm-resnet", "common/models.py")["build"]
    ours = build("resnet18-cifar", (3, 32, 32), 10)
    assert is_torchvisions_resnet18_with_another_stem(ours, torch.nn.BatchNorm2d)
