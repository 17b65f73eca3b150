import numpy as np
import pytest
import torch
from common.noise import with_noise
from helpers import ten_classes
from scipy.stats import chisquare, trim_mean

import convex_hull_select
import minimax_select
from common.evaluation import evaluate
from common.splits import Clients
from common.train import local_solver

CUT = "--model cnn --width 0.125 --local-epochs 2 --clients 8 --participating 6 --sample 5 "
CUT += "--partition dirichlet --dirichlet 0.5 --rounds 1 --lr 0.1 --no-compare "


def test_the_requested_share_of_labels_changes_evenly_into_other_classes():
    data = ten_classes(20_000)
    labels, clients = data.y, [*data.train.split(200)]
    everybody = Clients(clients, [], 100, 1, [], {})
    noisy = with_noise(data, everybody, 0.3, 0.5, seed=0).y
    changed = torch.stack([(noisy[c] != labels[c]).float().mean() for c in clients])
    assert 18 <= (changed > 0).sum() <= 42  # 30 of 100, within 2.6 standard deviations
    assert abs(changed[changed > 0].mean() - 0.5) < 0.03
    moves = (noisy - labels)[noisy != labels] % 10
    assert chisquare(torch.bincount(moves, minlength=10)[1:].numpy()).pvalue > 1e-3
    counts = [noisy[samples].bincount(minlength=10).tolist() for samples in clients]
    assert everybody.label_counts.tolist() == counts  # a client counts its wrong labels


def test_a_run_trains_on_the_wrong_labels_and_is_tested_on_the_right_ones(finished):
    run = finished(minimax_select, CUT + "--label-noise 1 0.9")
    data, clients, trainer = run.data, run.clients, run.trainer
    (row,), selected = run.rows, torch.tensor(run.selected[0])
    trainer.y = with_noise(data, clients, 1, 0.9, seed=0).y
    w_i, losses = trainer.train(local_solver, trainer.initial, selected, 1)
    expected = evaluate(trainer, w_i.mean(0), 1, selected, losses)  # with the labels of `data`
    assert torch.allclose(run.state["w"], w_i.mean(0), atol=1e-6)
    assert float(row["id_accuracy"]) == pytest.approx(expected["id_accuracy"].item(), abs=1e-5)


@pytest.mark.parametrize("method", [minimax_select, convex_hull_select])
def test_a_round_takes_the_trimmed_mean_of_its_updates(finished, method):
    run = finished(method, CUT + "--trim 0.34")
    before, (selected,) = run.trainer.initial.numpy(), run.selected
    g = run.state["table"][selected].numpy()
    assert np.allclose(run.state["w"], before - trim_mean(g, 0.34), atol=1e-6)
    assert not np.allclose(trim_mean(g, 0.34), g.mean(0), atol=1e-3)


def test_total_variation_is_the_l1_distance():
    """From zero, both classes have probability 1/2, so the gradient is [[-1/2, 0], [1/2, 0]].

    Then the L1 distance is 1, and class 1 has probability p = 1 / (1 + e). The penalty pulls both
    moved weights back by 1/4.
    """
    model = torch.nn.Linear(2, 2, bias=False)
    torch.nn.init.zeros_(model.weight)
    batch = torch.tensor([[1.0, 0.0]]), torch.tensor([0])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loss = local_solver(model, [batch] * 2, optimizer, tv=0.25).item()
    assert loss == pytest.approx((np.log(2) + np.log(1 + np.exp(-1)) + 0.25 * 1) / 2)
    p = 1 / (1 + np.e)
    assert np.allclose(model.weight.detach(), [[0.5 + p - 0.25, 0], [-0.5 - p + 0.25, 0]])
