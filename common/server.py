"""What a server does with uploads, whichever clients it has selected: weights, averages, and who is away."""

import numpy as np
import torch
from torch import Tensor

from common.data import Dataset
from common.splits import Clients, label_counts


def base_weights(weighting: str, data: Dataset, clients: Clients) -> Tensor:
    """Every client's weight before it is divided by the sum over the selected [N].

    "size" is n_k, "equal" 1, and "entropy" exp of the entropy of its labels (Wu et al., equation 14).
    """
    if weighting == "size":
        return clients.sizes
    if weighting == "equal":
        return torch.ones(len(clients.train))
    p = label_counts(data, clients.train)
    p = p / p.sum(1, keepdim=True)
    return torch.exp(-torch.xlogy(p, p).sum(1))


def trimmed_mean(updates: Tensor, share: float) -> Tensor:
    """[K, P] -> [P]: each coordinate's mean without its int(share K) largest and as many smallest (Yin et al. 2018)."""
    cut = int(share * len(updates))
    return updates.sort(0).values[cut : len(updates) - cut].mean(0)


def aggregate(updates: Tensor, alpha: Tensor, trim: float) -> Tensor:
    """Clients' updates [K, P] -> one [P]: weighted by alpha [K], or their trimmed mean where trim is above 0."""
    return trimmed_mean(updates, trim) if trim else alpha.to(updates) @ updates


def has_moved(updates: Tensor, old: Tensor, threshold: float) -> Tensor:
    """Event-triggered upload: whose update [K, P] differs from its old one by at least this share of that one's norm.

    bool [K], on the CPU.
    """
    return ((updates - old).norm(dim=1) >= threshold * old.norm(dim=1)).cpu()


def present(participating: Tensor, churn: float, rng: np.random.Generator) -> Tensor:
    """Who of `participating` [M] is there this round, each being away with probability `churn`; at least one stays."""
    at_home = rng.random(len(participating)) >= churn
    if not at_home.any():
        at_home[rng.integers(len(participating))] = True
    return participating[torch.from_numpy(at_home)]
