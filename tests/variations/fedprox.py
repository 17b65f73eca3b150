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
    args, data, clients, trainer = prepared(fedavg, CUT)
    w, samples = trainer.initial, clients.train

    def proximal(model, theta, data, batch):
        loss, gradient = loss_and_gradient(model, theta, data, batch)
        losses[-1].append(loss.item() + mu / 2 * (theta - w).square().sum().item())
        return [gradient + mu * (theta - w)]

    rows = read_rows(folder)
    for t, selected in enumerate(selections(rows), 1):
        ends, losses = [], []
        for k in selected:
            losses.append([])
            end = sgd_by_hand(args, data, trainer.model, w, samples[k], t, k, proximal)
            ends.append(len(samples[k]) * end)
        w = sum(ends) / sum(len(samples[k]) for k in selected)
        expected = np.mean([*map(np.mean, losses)])
        assert float(rows[t - 1]["train_loss"]) == pytest.approx(expected, rel=1e-4)
    assert t == 2 and torch.allclose(kept(folder)["w"], w, atol=1e-5)
