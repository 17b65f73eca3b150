from argparse import Namespace

import pytest
import torch
from helpers import (
    kept,
    logits_by_hand,
    loss_and_gradient,
    parsed,
    prepared,
    read_rows,
    sgd_by_hand,
)

import convex_hull_select
import entropy_weighting
import fedavg
import fediir
import uefl
from common import random_at
from common.runner import compare
from common.splits import draw

CUT = "--model cnn --width 0.125 --local-epochs 2 --batch-size 16 --lr 0.1 --dirichlet 0.5 "
CUT += "--clients 6 --participating 4 --sample 2 --rounds 3 --no-compare "


@pytest.mark.parametrize("selection", ["random", "power_of_choice"])
@pytest.mark.parametrize("weighting", ["size", "equal"])
def test_three_rounds_are_algorithm_1_by_hand(start, selection, weighting):
    words = f"{CUT} --selection {selection} --weighting {weighting} --server-lr 0.7"
    folder = start(fedavg, words)
    data, clients, model, trainer, theta = prepared(fedavg, words)
    train = clients.train

    def loss_of(k):
        return loss_and_gradient(model, theta, data, train[k])[0]

    for t, row in enumerate(read_rows(folder), 1):
        selected = draw(clients.ids, 2, random_at(0, "select", t)).tolist()
        if selection == "power_of_choice":
            selected = sorted(sorted(range(4), key=loss_of)[-2:])
        n = [len(train[k]) if weighting == "size" else 1 for k in selected]
        ends = [sgd_by_hand(trainer.args, data, model, theta, train[k], t, k) for k in selected]
        mean = sum(n_k * end for n_k, end in zip(n, ends, strict=True)) / sum(n)
        theta = (theta + 0.7 * (mean - theta)).detach()
        assert row["selected"] == " ".join(map(str, selected))
        of_selected = torch.cat([clients.test[k] for k in selected])
        tests = {"id": clients.held_out, "id_selected": of_selected, "ood": data.test}
        for column, samples in tests.items():
            right = logits_by_hand(model, theta, data, samples).argmax(1) == data.y[samples]
            found = row.get(f"{column}_accuracy") or row[column]
            assert float(found) == pytest.approx(right.float().mean().item(), abs=1e-5)
    assert t == 3 and torch.allclose(kept(folder)["theta"], theta, atol=1e-5)


def test_power_of_choice_takes_the_largest_losses_and_breaks_ties_by_id():
    losses = torch.tensor([0.5, 0.9, 0.5, 0.1, 0.5])
    assert fedavg.power_of_choice(losses, 3).tolist() == [0, 1, 2]


def test_with_everybody_selected_it_does_not_matter_how(start):
    kinds = ("random", "power_of_choice", "by_size")
    first, *others = (
        kept(start(fedavg, f"{CUT} --sample 4 --selection {kind} --out {kind}")) for kind in kinds
    )
    assert all(torch.equal(other["theta"], first["theta"]) for other in others)


# ---------------------------------------------------------------- what is printed of every run


def test_a_run_ends_with_chance_the_sampling_errors_and_the_accuracy_of_each_class(
    start, tiny, capsys
):
    hits = read_rows(start(fedavg, CUT))[-1]["hits"].split()
    printed = capsys.readouterr().out
    labels = tiny.y[tiny.test].bincount().tolist()
    right = [f"{c}: {100 * int(h) / n:.1f}" for c, h, n in zip("abc", hits, labels, strict=True)]
    assert f"right in the last round, by class: {', '.join(right)}\n" in printed
    assert labels == [15, 22, 23] and "(always answering c: 38.3)" in printed
    n = len(prepared(fedavg, CUT)[1].held_out)
    errors = [100 * 1.96 * (0.25 / of_part) ** 0.5 for of_part in (n, 60)]
    assert "Chance: 33.3. Sampling error (95 %), in points: at most " in printed
    assert "± {:.1f} ID, ± {:.1f} OOD.\n".format(*errors) in printed


def test_without_held_out_samples_only_ood_is_measured(start, capsys):
    rows = read_rows(start(fedavg, CUT + "--held-out 0"))
    assert all(row["ood_accuracy"] and row["hits"] for row in rows)
    assert not any(column.startswith("id_") for column in rows[0])
    assert "± 12.7 OOD." in capsys.readouterr().out


@pytest.mark.parametrize(("most", "warns"), [(55, True), (54, False)])
def test_a_model_that_nearly_always_says_the_same_is_named(tiny, capsys, most, warns):
    confusion = torch.tensor([[60 - most, 0, most - 9], [0, 0, 0], [0, 0, 9]])
    compare.describe("FedAvg", [Namespace(data=tiny, confusion=confusion, folder="here")])
    assert ("here nearly always answers c: " in capsys.readouterr().out) == warns


# ---------------------------------------------------------------- the prediction for the example


def test_the_untouched_example_ends_with_a_verdict(start, capsys, monkeypatch):
    monkeypatch.setitem(fedavg.SETTINGS["glyphs"], "rounds", 1)
    start(fedavg, "--out run --seed 3")
    assert "Prediction: " in capsys.readouterr().out
    start(fedavg, "--out other --dirichlet 0.2")
    assert "Prediction: " not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (entropy_weighting, "--weighting size"),
        (convex_hull_select, "--selection interior"),
        (fediir, "--test-domain one"),
        (uefl, "--dataset mnist"),
    ],
)
def test_another_flag_makes_it_another_experiment(method, words):
    assert parsed(method, "--device cpu --out run --seed 1 2").is_example
    assert not parsed(method, words).is_example


@pytest.mark.parametrize(
    ("ours", "side", "holds"),
    [
        (0.52, "above", True),
        (0.5002, "above", False),
        (0.48, "below", True),
        (0.5, "below", False),
    ],
)
def test_only_a_difference_that_shows_is_as_predicted(ours, side, holds, capsys):
    accuracies = {"a": ours, "b": 0.5}
    runs = {name: [Namespace(rows=[{"id_accuracy": x}])] for name, x in accuracies.items()}
    compare.verdict(runs, "ID changes", {"id_accuracy": side})
    assert ("NOT as predicted" in capsys.readouterr().out) != holds
