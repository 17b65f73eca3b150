import numpy as np
import pytest
import torch
from helpers import kept, loss_and_gradient, prepared, read_rows, selections, sgd_by_hand

import fedavg

CUT = "--model cnn --width 0.125 --batch-size 16 --lr 0.1 --partition dirichlet --dirichlet 0.5 "
CUT += "--clients 5 --participating 4 --sample 2 --local-epochs 2 --rounds 2 --no-compare "


def test_two_rounds_are_algorithm_2_by_hand(start):
    """The loss of a step is that of FedAvg and mu / 2 |theta - w|^2."""
    folder, mu = start(fedavg, CUT + "--mu 0.3"), 0.3
    args, _, clients, trainer = prepared(fedavg, CUT)
    w = trainer.initial

    def proximal(trainer, theta, batch):
        loss, gradient = loss_and_gradient(trainer, theta, batch)
        return loss + mu / 2 * (theta - w).square().sum(), gradient + mu * (theta - w)

    rows = read_rows(folder)
    for t, selected in enumerate(selections(rows), 1):
        found = [sgd_by_hand(args, trainer, w, t, k, proximal) for k in selected]
        ends, losses = zip(*found, strict=True)
        n = [len(clients.train[k]) for k in selected]
        w = sum(n_k * end for n_k, end in zip(n, ends, strict=True)) / sum(n)
        assert float(rows[t - 1]["train_loss"]) == pytest.approx(np.mean(losses), rel=1e-4)
    assert t == 2 and torch.allclose(kept(folder)["w"], w, atol=1e-5)
