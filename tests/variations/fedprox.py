import numpy as np
import pytest
import torch
from helpers import loss_and_gradient, sgd_by_hand

import fedavg

CUT = "--model cnn --width 0.125 --batch-size 16 --lr 0.1 --partition dirichlet --dirichlet 0.5 "
CUT += "--clients 5 --participating 4 --sample 2 --local-epochs 2 --rounds 2 --no-compare "


def test_two_rounds_are_algorithm_2_by_hand(finished):
    """The loss of a step is that of FedAvg and mu / 2 |theta - w|^2."""
    run, mu = finished(fedavg, CUT + "--mu 0.3"), 0.3
    w = run.trainer.initial

    def proximal(trainer, theta, batch):
        loss, gradient = loss_and_gradient(trainer, theta, batch)
        return loss + mu / 2 * (theta - w).square().sum(), gradient + mu * (theta - w)

    for t, selected in enumerate(run.selected, 1):
        found = [sgd_by_hand(run, w, t, k, proximal) for k in selected]
        ends, losses = zip(*found)
        n = [len(run.clients.train[k]) for k in selected]
        w = sum(n_k * end for n_k, end in zip(n, ends)) / sum(n)
        assert float(run.rows[t - 1]["train_loss"]) == pytest.approx(np.mean(losses), rel=1e-4)
    assert t == 2 and torch.allclose(run.state["w"], w, atol=1e-5)
