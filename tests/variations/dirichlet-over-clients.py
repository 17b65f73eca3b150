import torch

from common.chance import random_at
from common.splits import dirichlet


def test_sizes_are_equal_and_shares_of_classes_are_not():
    labels, most = torch.arange(1000) % 10, {}
    for alpha in (1e-3, 1e6):
        parts = dirichlet(labels, 10, alpha, random_at(0, "test"))
        assert [len(samples) for samples in parts] == [100] * 10
        assert torch.equal(torch.cat(parts).sort().values, torch.arange(1000))
        most[alpha] = labels[parts[0]].bincount().max()  # of one class
    assert most[1e-3] == 100 and most[1e6] < 25
