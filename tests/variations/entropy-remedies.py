import numpy as np
import pytest
import scipy.stats
import torch
from scipy.spatial.distance import cdist
from scipy.special import softmax

import entropy_weighting

CUT = "--model cnn --width 0.125 --local-epochs 1 --clients 8 --participating 6 "
CUT += "--partition dirichlet --dirichlet 0.5 --rounds 3 --lr 0.1 --no-compare "


def test_cosine_weights_are_scipys():
    counts = np.array([[2, 2], [3, 4], [5, 0]])
    cosines = 1 - cdist(counts, [[1, 1]], "cosine").flatten()
    found = entropy_weighting.aggregation_weights("cosine", torch.from_numpy(counts))
    assert found.tolist() == pytest.approx(softmax(cosines))


def test_clients_with_the_largest_entropy_never_train(finished):
    run = finished(entropy_weighting, CUT + "--expel 0.1 --sample 5")
    counts = [run.data.y[samples].bincount() for samples in run.clients.train[:6]]
    entropies = [scipy.stats.entropy(of_client) for of_client in counts]
    expected = sorted(np.argsort(entropies)[:5])
    assert run.selected == [expected] * 3
