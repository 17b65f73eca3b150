import math

import numpy as np
import pytest
import scipy.stats
import torch

import entropy_weighting

CUT = "--model cnn --width 0.125 --local-epochs 1 --clients 8 --participating 6 "
CUT += "--partition dirichlet --dirichlet 0.5 --rounds 3 --lr 0.1 --no-compare "


def test_cosine_weights_on_a_worked_example():
    """[2, 2] has cosine 1 with [1, 1], [3, 4] has 7 / (5 sqrt 2), and [5, 0] has 1 / sqrt 2."""
    powers = [math.exp(cosine) for cosine in (1, 7 / (5 * math.sqrt(2)), 1 / math.sqrt(2))]
    counts = torch.tensor([[2.0, 2], [3, 4], [5, 0]])
    found = entropy_weighting.aggregation_weights("cosine", counts)
    assert found.tolist() == pytest.approx([power / sum(powers) for power in powers])


@pytest.mark.parametrize("words", ["0.5 --sample 3", "0.1 --sample 5", "0.0 --sample 6"])
def test_clients_with_the_largest_entropy_never_train(finished, words):
    run = finished(entropy_weighting, f"{CUT}--expel {words}")
    counts = [run.data.y[samples].bincount() for samples in run.clients.train[:6]]
    entropies = [scipy.stats.entropy(of_client) for of_client in counts]
    expected = sorted(np.argsort(entropies)[: int(words[-1])])
    assert run.selected == [expected] * 3
