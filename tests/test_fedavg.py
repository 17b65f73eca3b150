from argparse import Namespace

import pytest
import torch

import fedavg
import fediir
import uefl
from common.runner import compare

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


# ---------------------------------------------------------------- the prediction for the example


def test_the_untouched_example_ends_with_a_verdict(start, capsys, monkeypatch):
    monkeypatch.setitem(fedavg.SETTINGS["glyphs"], "rounds", 1)
    start(fedavg, "--out run --seed 3")
    assert "Prediction: " in capsys.readouterr().out
    start(fedavg, "--out other --dirichlet 0.2")
    said = capsys.readouterr().out
    assert "Prediction: " not in said and "No verdict, because" in said


@pytest.mark.parametrize(("ours", "holds"), [(0.52, True), (0.5002, False), (0.48, False)])
def test_only_a_difference_that_shows_is_as_predicted(ours, holds, capsys):
    rows = {"ours": ours, "theirs": 0.5}
    runs = {name: [Namespace(rows=[{"id_accuracy": x}])] for name, x in rows.items()}
    compare.verdict(runs, "ID changes", {"id_accuracy": "above"})
    assert ("NOT as predicted" in capsys.readouterr().out) != holds
