import numpy as np
import pytest
import torch
from common.noise import symmetric_noise, trimmed_mean
from helpers import kept, prepared, read_rows, selections
from scipy.stats import chisquare, trim_mean

import convex_hull_select
import entropy_weighting
import minimax_select
from common import data, random_at
from common.train import local_solver

CUT = "--model cnn --width 0.125 --local-epochs 2 --clients 8 --participating 6 --sample 5 "
CUT += "--partition dirichlet --dirichlet 0.5 --rounds 1 --lr 0.1 --no-compare "


def test_the_requested_share_of_labels_changes_evenly_into_other_classes():
    rng = random_at(0, "test")
    labels = torch.from_numpy(rng.integers(0, 4, 40_000))
    clients = [*torch.arange(20_000).split(200)]
    noisy = symmetric_noise(labels, clients, 0.3, 0.5, 4, rng)
    changed = torch.stack([(noisy[c] != labels[c]).float().mean() for c in clients])
    assert torch.equal(noisy[20_000:], labels[20_000:]), "nobody's samples"
    assert 18 <= (changed > 0).sum() <= 42, "30 of 100, within 2.6 standard deviations"
    assert abs(changed[changed > 0].mean() - 0.5) < 0.03
    moves = (noisy - labels)[noisy != labels] % 4
    assert chisquare(torch.bincount(moves, minlength=4)[1:].numpy()).pvalue > 1e-3
    assert torch.equal(symmetric_noise(labels, clients, 0.0, 1.0, 4, rng), labels)


def test_noise_reaches_training_alone_and_a_baseline_has_the_same(tiny, monkeypatch):
    monkeypatch.setattr(data, "load", lambda *args: tiny)  # the loaded data set is shared
    clean, words = tiny.y.clone(), CUT + "--label-noise 1 0.9"
    (_, first, clients, trainer), (_, second, *_) = (
        prepared(entropy_weighting, words) for _ in range(2)
    )
    train, test = torch.cat(clients.train), torch.cat([*clients.test, first.test])
    assert torch.equal(first.y[test], clean[test])
    assert (first.y[train] != clean[train]).float().mean() > 0.8
    assert torch.equal(first.y, second.y) and torch.equal(trainer.y, first.y)
    assert torch.equal(tiny.y, clean)
    counts = [first.y[samples].bincount(minlength=3).tolist() for samples in clients.train]
    assert clients.label_counts.tolist() == counts, "a client counts its wrong labels"


def test_trimmed_mean_is_that_of_sorted_values():
    g = random_at(0, "test").standard_normal((10, 6))
    rows = torch.from_numpy(g)
    assert np.allclose(trimmed_mean(rows, 0.33), np.sort(g, 0)[3:7].mean(0))
    assert np.allclose(trimmed_mean(rows, 0.01), np.sort(g, 0)[1:9].mean(0)), "at least one"
    for k in (1, 2, 3, 10):
        assert np.allclose(trimmed_mean(rows[:k], 0.5), np.median(g[:k], 0))


@pytest.mark.parametrize("method", [minimax_select, convex_hull_select])
def test_a_round_takes_the_trimmed_mean_of_its_updates(start, method):
    folder = start(method, CUT + "--trim 0.34")
    before = prepared(method, CUT)[-1].initial.numpy()
    (selected,) = selections(read_rows(folder))
    g = kept(folder)["table"][selected].numpy()
    assert np.allclose(kept(folder)["w"], before - trim_mean(g, 0.34), atol=1e-6)
    assert not np.allclose(kept(folder)["w"], before - g.mean(0), atol=1e-3)


def test_total_variation_is_the_l1_distance():
    """From zero, both classes have probability 1/2, so the gradient is [[-1/2, 0], [1/2, 0]].

    Then the L1 distance is 1, and class 1 has probability p = 1 / (1 + e). The penalty pulls both
    moved weights back by 1/4.
    """
    model = torch.nn.Linear(2, 2, bias=False)
    batch = torch.tensor([[1.0, 0.0]]), torch.tensor([0])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loss = local_solver(model, torch.zeros(4), [batch] * 2, optimizer, tv=0.25).item()
    assert loss == pytest.approx((np.log(2) + np.log(1 + np.exp(-1)) + 0.25 * 1) / 2)
    p = 1 / (1 + np.e)
    assert np.allclose(model.weight.detach(), [[0.5 + p - 0.25, 0], [-0.5 - p + 0.25, 0]])
