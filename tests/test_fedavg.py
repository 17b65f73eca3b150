import copy
from argparse import Namespace

import numpy as np
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
from ranks import CALLS

import convex_hull_select
import entropy_weighting
import fedavg
import fediir
import uefl
from common import random_at
from common.runner import compare
from common.splits import sample
from common.train import get_weights, local_solver, worst_tenth

CUT = "--model cnn --width 0.125 --local-epochs 2 --batch-size 16 --lr 0.1 --dirichlet 0.5 "
CUT += "--clients 6 --participating 4 --sample 2 --rounds 3 --no-compare "


@pytest.mark.parametrize("selection", ["random", "power_of_choice"])
@pytest.mark.parametrize("weighting", ["size", "equal"])
def test_three_rounds_are_algorithm_1_by_hand(start, selection, weighting):
    words = f"{CUT} --selection {selection} --weighting {weighting}"
    folder = start(fedavg, words)
    args, data, clients, trainer = prepared(fedavg, words)
    model, train, w = trainer.model, clients.train, trainer.initial

    def loss_of(k):
        return loss_and_gradient(model, w, data, train[k])[0]

    def accuracy_of(samples):
        right = logits_by_hand(model, w, data, samples).argmax(1) == data.y[samples]
        return right.float().mean().item()

    for t, row in enumerate(read_rows(folder), 1):
        selected = sample(clients.ids, 2, random_at(0, "select", t)).tolist()
        if selection == "power_of_choice":
            selected = sorted(sorted(range(4), key=loss_of)[-2:])
        n = [len(train[k]) if weighting == "size" else 1 for k in selected]
        ends = [sgd_by_hand(args, data, model, w, train[k], t, k).detach() for k in selected]
        w = sum(n_k / sum(n) * end for n_k, end in zip(n, ends, strict=True))
        assert row["selected"] == " ".join(map(str, selected))
        of_selected = torch.cat([clients.test[k] for k in selected])
        each = [accuracy_of(samples) for samples in clients.test[:4]]
        expected = {
            "id_accuracy": accuracy_of(clients.held_out), "id_selected": accuracy_of(of_selected),
            "ood_accuracy": accuracy_of(data.test), "worst_tenth": min(each),
        }  # fmt: skip
        assert {c: float(row[c]) for c in expected} == pytest.approx(expected, abs=1e-5)
        assert [*map(float, row["accuracies"].split())] == pytest.approx(each, abs=1e-5)
    assert t == 3 and torch.allclose(kept(folder)["w"], w, atol=1e-5)


@pytest.mark.parametrize("solver", [fedavg.client_update, local_solver])
def test_a_client_takes_its_steps_and_returns_the_mean_of_their_losses(tiny, trainer, solver):
    model, w, losses = trainer.model, trainer.initial, []
    batches = [tiny.train[:10], tiny.train[10:14]]  # a mean over samples would be another number
    for samples in batches:
        loss, gradient = loss_and_gradient(model, w, tiny, samples)
        w = w - 0.5 * gradient
        losses.append(loss.item())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    found = solver(model, map(trainer.batch, batches), optimizer)
    assert found.item() == pytest.approx(np.mean(losses), abs=1e-6)
    assert torch.allclose(get_weights(model), w, atol=1e-6)


@pytest.mark.parametrize(("clients", "expected"), [(3, 0), (19, 0), (20, 0.5), (39, 1), (40, 1.5)])
def test_the_worst_tenth_is_the_mean_of_one_client_in_ten(clients, expected, rng):
    assert worst_tenth(torch.from_numpy(rng.permutation(clients)).float()) == expected


@pytest.mark.parametrize("method", CALLS)
def test_a_run_goes_on_from_any_of_its_states_as_if_it_had_not_stopped(start, method):
    """In a notebook, where federate() runs without the runner. It may change a state in place."""
    args, _, clients, trainer = prepared(method, CALLS[method])

    def rounds_from(state):
        trainer.samples, trainer.megabytes = 0, 0.0
        rounds = []
        for of_round, row in method.federate(args, clients, trainer, copy.deepcopy(state)):
            del row["samples"], row["megabytes"]  # of this trainer, and not of the state
            rounds.append(copy.deepcopy((of_round, row)))
        return rounds

    whole = rounds_from({})
    assert [state["t"] for state, _ in whole] == [1, 2, 3]
    for t, (state, _) in enumerate(whole, 1):
        torch.testing.assert_close(rounds_from(state), whole[t:], rtol=0, atol=0)


def test_power_of_choice_takes_the_largest_losses_and_breaks_ties_by_id():
    losses = torch.tensor([0.5, 0.9, 0.5, 0.1, 0.5])
    assert fedavg.power_of_choice(losses, 3).tolist() == [0, 1, 2]


def test_with_everybody_selected_it_does_not_matter_how(start):
    kinds = ("random", "power_of_choice", "by_size")
    first, *others = (
        kept(start(fedavg, f"{CUT} --sample 4 --selection {kind} --out {kind}")) for kind in kinds
    )
    assert all(torch.equal(other["w"], first["w"]) for other in others)


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
    n = len(prepared(fedavg, CUT)[2].held_out)
    errors = [100 * 1.96 * (0.25 / of_part) ** 0.5 for of_part in (n, 60)]
    assert "Chance: 33.3. Sampling error (95 %), in points: at most " in printed
    assert "± {:.1f} ID, ± {:.1f} OOD.\n".format(*errors) in printed


def test_without_held_out_samples_only_ood_is_measured(start, capsys):
    rows = read_rows(start(fedavg, CUT + "--held-out 0"))
    assert all(row["ood_accuracy"] and row["hits"] for row in rows)
    assert not any(column.startswith("id_") for column in rows[0])
    assert "± 12.7 OOD." in capsys.readouterr().out


def test_a_class_without_test_images_has_no_accuracy(tiny, capsys):
    confusion = torch.tensor([[5, 0, 15], [0, 0, 0], [0, 0, 20]])
    compare.describe("FedAvg", [Namespace(data=tiny, confusion=confusion)])
    assert "by class: a: 25.0, b: \N{EN DASH}, c: 100.0" in capsys.readouterr().out


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


def test_methods_differ_in_their_own_code_and_share_that_of_common():
    one, other = parsed(fedavg, ""), parsed(uefl, "")
    assert one.code != other.code
    assert one.code_of_common == other.code_of_common


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
