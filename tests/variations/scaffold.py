"""Karimireddy et al. 2020, Algorithm 1 with option II: client k adds c - c_k to its gradients."""

import pytest
import torch
from helpers import kept, loss_and_gradient, outcome, prepared

import entropy_weighting
import fedavg
from common import UserError, random_at

CUT = "--model cnn --width 0.125 --batch-size 16 --lr 0.1 --partition dirichlet --dirichlet 0.5 "
CUT += "--no-compare --local-epochs 2 "
SOME = CUT + "--clients 5 --participating 4 --sample 2 --weighting size "
ALL = CUT + "--clients 3 --participating 3 --sample 3 --weighting equal --rounds 2 "


def test_the_first_round_is_fedavg_and_c_is_the_mean_of_c_k(start):
    plain = kept(start(entropy_weighting, SOME + "--rounds 1"))
    found = kept(start(fedavg, SOME + "--rounds 1 --out scaffold"))
    assert torch.allclose(found["w"], plain["w"], atol=1e-6)
    assert torch.allclose(found["c"], found["c_k"].mean(0), atol=1e-5)


def test_two_rounds_are_algorithm_1_by_hand(start):
    found = kept(start(fedavg, ALL))
    _, data, clients, trainer = prepared(fedavg, ALL)
    w, samples = trainer.initial, clients.train
    assert len({-(-len(of_client) // 16) for of_client in samples}) > 1, "they differ in steps"
    c, c_k = 0 * w, [0 * w] * 3
    for t in (1, 2):
        ends, new = [], []
        for k in range(3):
            y_k, steps, rng = w, 0, random_at(0, "batches", t, k)
            for _ in range(2):
                order = samples[k][torch.from_numpy(rng.permutation(len(samples[k])))]
                for batch in order.split(16):
                    _, slope = loss_and_gradient(trainer.model, y_k, data, batch)
                    y_k, steps = y_k - 0.1 * (slope - c_k[k] + c), steps + 1
            ends.append(y_k)
            new.append(c_k[k] - c + (w - y_k) / (steps * 0.1))
        c = c + sum(new[k] - c_k[k] for k in range(3)) / 3
        w, c_k = sum(ends) / 3, new
    assert torch.allclose(found["w"], w, atol=1e-5)
    assert torch.allclose(found["c"], c, atol=1e-4)
    assert torch.allclose(found["c_k"], torch.stack(c_k), atol=1e-4)


def test_a_stopped_run_goes_on_with_its_control_variates(start, start_and_stop):
    whole = start(fedavg, SOME + "--rounds 3")
    start_and_stop(fedavg, SOME + "--rounds 3 --out cut", 3, "cut")
    assert outcome(start(fedavg, "--resume cut")) == outcome(whole)


@pytest.mark.parametrize("words", ["--optimizer adam", "--momentum 0.9", "--lr-decay 0.9"])
def test_another_optimizer_is_refused(start, words):
    with pytest.raises(UserError, match="plain SGD"):
        start(fedavg, SOME + words)
