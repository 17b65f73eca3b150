from argparse import Namespace

import numpy as np
import pytest
import torch
from helpers import (
    logits_by_hand,
    loss_and_gradient,
    parsed,
    read_rows,
    sgd_by_hand,
)

import fedavg
import fediir
import uefl
from common.chance import random_at, sample
from common.runner import compare

CUT = "--model cnn --width 0.125 --local-epochs 2 --batch-size 16 --lr 0.1 --dirichlet 0.5 "
CUT += "--clients 6 --participating 4 --sample 2 --rounds 3 --no-compare "


@pytest.mark.parametrize("selection", ["random", "power_of_choice", "by_size"])
@pytest.mark.parametrize("weighting", ["size", "equal --momentum 0.9"])
def test_three_rounds_are_algorithm_1_by_hand(finished, selection, weighting):
    run = finished(fedavg, f"{CUT} --selection {selection} --weighting {weighting}")
    data, clients, trainer, w = run.data, run.clients, run.trainer, run.trainer.initial

    def loss_of(k):
        return loss_and_gradient(trainer, w, clients.train[k])[0]

    for t, row in enumerate(run.rows, 1):
        by = clients.sizes[:4] if selection == "by_size" else None
        selected = sample(clients.ids, 2, random_at(0, "select", t), by).tolist()
        if selection == "power_of_choice":
            selected = sorted(sorted(range(4), key=loss_of)[-2:])
        n = [len(clients.train[k]) if weighting == "size" else 1 for k in selected]
        ends, losses = zip(*[sgd_by_hand(run, w, t, k) for k in selected])
        w = sum(n_k / sum(n) * end for n_k, end in zip(n, ends))
        assert run.selected[t - 1] == selected
        assert float(row["train_loss"]) == pytest.approx(np.mean(losses), rel=1e-4)
        right = logits_by_hand(trainer, w, data.test).argmax(1) == data.y[data.test]
        assert float(row["ood_accuracy"]) == pytest.approx(right.float().mean().item(), abs=1e-5)
    assert t == 3 and torch.allclose(run.state["w"], w, atol=1e-5)


SHARED = "--rounds 3 --local-epochs 1 --batch-size 10 --lr 0.1 --evaluate-every 1 --no-compare "
SHARED += "--optimizer sgd --momentum 0 --partition domain "
WITHOUT = """
--gamma 0; --model convnet --width 0.1 --test-domain dark --clients 4 --sample 2; --weighting equal
--codebook-size 0 --no-token-norm --dropout 0; --model resblocks --width 0.01;
"""  # the method without its idea; what both have; what FedAvg has


@pytest.mark.parametrize("flags", WITHOUT.strip().split("\n"))
def test_a_method_without_its_idea_is_fedavg(finished, flags):
    without, shared, plain = flags.split(";")
    mine = finished(fediir if "gamma" in without else uefl, SHARED + shared + " " + without)
    theirs = finished(fedavg, f"{SHARED} {shared} {plain} --out fedavg")
    assert torch.allclose(mine.state["theta"], theirs.state["w"], atol=1e-6)
    for column in ("selected", "id_accuracy", "ood_accuracy", "hits"):
        assert [row[column] for row in mine.rows] == [row[column] for row in theirs.rows]


def test_power_of_choice_takes_the_largest_losses_and_breaks_ties_by_id():
    losses = torch.tensor([0.5, 0.9, 0.5, 0.1, 0.5])
    assert fedavg.power_of_choice(losses, 3).tolist() == [0, 1, 2]


# ---------------------------------------------------------------- what is printed of every run


def test_without_held_out_samples_only_ood_is_measured(start):
    rows = read_rows(start(fedavg, CUT + "--held-out 0"))
    assert all(row["ood_accuracy"] and row["hits"] for row in rows)
    assert not any(column.startswith("id_") for column in rows[0])


# ---------------------------------------------------------------- the prediction for the example


def test_the_untouched_example_ends_with_a_verdict(start, capsys, monkeypatch):
    monkeypatch.setitem(fedavg.SETTINGS["glyphs"], "rounds", 1)
    start(fedavg, "--out run --seed 3")
    assert "Prediction: " in capsys.readouterr().out
    start(fedavg, "--out other --dirichlet 0.2")
    assert "Prediction: " not in capsys.readouterr().out


def test_another_flag_makes_it_another_experiment():
    assert parsed(uefl, "--out run --seed 1 2").is_example
    for words in ("--gamma 9", "--test-domain one", "--dataset mnist"):
        assert not parsed(uefl, words).is_example


@pytest.mark.parametrize("case", ["0.52 above yes", "0.5002 above", "0.48 below yes", "0.5 below"])
def test_only_a_difference_that_shows_is_as_predicted(case, capsys):
    ours, side, *holds = case.split()
    accuracies = {"a": float(ours), "b": 0.5}
    runs = {name: [Namespace(rows=[{"id_accuracy": x}])] for name, x in accuracies.items()}
    compare.verdict(runs, "ID changes", {"id_accuracy": side})
    assert ("NOT as predicted" in capsys.readouterr().out) == (not holds)
