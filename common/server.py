"""What a server does with uploads in both of Wu et al.'s selections: the gradient table, churn, weights and averages.

`GradientTable` (with `sketch`) and `trimmed_mean` need only torch and numpy, and can be copied alone.
"""

from dataclasses import dataclass

import numpy as np
import torch
from scipy.stats import rankdata
from torch import Tensor

from common import flags
from common.data import Dataset
from common.splits import Clients, draw, label_counts


@dataclass
class GradientTable:
    """The latest update of each of M clients, and the inner products of these updates (Wu et al., section IV-B).

    An update is w before local training minus w after it. A client's id is its row.

    updates   [M, P], float32; or sketches of them [M, S] if `sketched` is true
    products  inner products of the rows, float64 [M, M]
    uploads   how often each client has uploaded, int64 [M]
    """

    updates: Tensor
    products: Tensor
    uploads: Tensor
    sketched: bool = False

    @classmethod
    def empty(cls, clients: int, size: int, device: torch.device | str = "cpu", sketched: bool = False):
        """A table for this many clients, with `size` numbers for each."""
        return cls(
            torch.zeros(clients, size, device=device),
            torch.zeros(clients, clients, dtype=torch.float64, device=device),
            torch.zeros(clients, dtype=torch.long, device=device),
            sketched,
        )

    def known(self, ids: Tensor) -> Tensor:
        """The clients among `ids`, int64 [n], with a usable update. An update of zeros has no direction to compare."""
        squares = self.products.diagonal()[ids.to(self.products.device)].to(ids.device)
        return ids[(squares > 0) & torch.isfinite(squares)]

    def missing(self, ids: Tensor) -> Tensor:
        """The clients among `ids`, int64 [n], without a usable update."""
        return ids[~torch.isin(ids, self.known(ids))]

    @torch.no_grad()
    def put(self, ids: Tensor, updates: Tensor, threshold: float = 0.0) -> Tensor:
        """Stores the updates [K, P] of these clients, int64 [K]. Returns the updates that the server then uses [K, P].

        With a threshold, a client uploads only if |new - old| >= threshold |old|. Otherwise the server uses the old
        update again. A table of sketches keeps no old updates, so it takes no threshold. Computes the products of the
        new rows only, which takes K M P multiplications. Raises ValueError for a wrong shape.
        """
        size = self.updates.shape[1]
        fits = updates.dim() == 2 and len(updates) == len(ids) and (self.sketched or updates.shape[1] == size)
        if not fits or (self.sketched and threshold):
            raise ValueError(f"{tuple(updates.shape)} updates of {len(ids)} clients do not fit a table of size {size}")
        ids = ids.to(self.updates.device)
        if threshold:
            last = self.updates[ids]
            moved = (updates - last).norm(dim=1) >= threshold * last.norm(dim=1)
            updates = torch.where(moved[:, None], updates, last)
            self.uploads[ids[moved]] += 1
        else:
            self.uploads[ids] += 1
        self.updates[ids] = (sketch(updates, size) if self.sketched else updates).to(self.updates)
        new = torch.zeros(len(ids), len(self.updates), dtype=torch.float64, device=self.updates.device)
        for part in self.updates.split(2**11, dim=1):  # short float32 sums, added up in float64
            new += part[ids] @ part.T
        self.products[ids] = new
        self.products[:, ids] = new.T
        return updates

    def cosines(self, ids: Tensor) -> Tensor:
        """Cosine similarities of these clients' updates, float64 [n, n]."""
        products = self.products[ids][:, ids]
        length = products.diagonal().sqrt()
        return products / (length[:, None] * length)


def sketch(updates: Tensor, size: int) -> Tensor:
    """[K, P] -> [K, size]. Inner products change by about |x| |y| / sqrt(size) (Charikar et al. 2002).

    Each of the P coordinates is added to, or subtracted from, one of `size` random sums.
    """
    rng = np.random.default_rng(0)
    into = torch.from_numpy(rng.integers(size, size=updates.shape[1])).to(updates.device)
    sign = torch.from_numpy(rng.integers(2, size=updates.shape[1], dtype=np.int8)).to(updates.device) * 2 - 1
    sums = torch.zeros(len(updates), size, dtype=torch.float64, device=updates.device)
    for of_client, update in zip(sums, updates, strict=True):  # one by one, because all in float64 need twice [K, P]
        of_client.index_add_(0, into, update.double() * sign)  # in float64 the order of the sums hardly matters
    return sums.to(updates.dtype)


def trimmed_mean(updates: Tensor, share: float) -> Tensor:
    """[K, P] -> [P]: each coordinate's mean without its int(share K) largest and smallest values (Yin et al. 2018).

    Removes at least one value at each end, if a value then remains.
    """
    k = len(updates)
    cut = min(max(1, int(share * k + 1e-9)), (k - 1) // 2)
    return updates.sort(0).values[cut : k - cut].mean(0)


def aggregate(updates: Tensor, weights: Tensor, trim: float) -> Tensor:
    """Updates [K, P] -> [P]: sum of alpha_i g_i, with alpha = weights [K] / their sum, or the trimmed mean."""
    return trimmed_mean(updates, trim) if trim else (weights / weights.sum()).to(updates) @ updates


def base_weights(weighting: str, data: Dataset, clients: Clients) -> Tensor:
    """Every client's weight [N]. aggregate() divides the weights of the selected clients by their sum.

    "size" gives n_k, "equal" gives 1, and "entropy" gives exp(H_k) (Wu et al., equation 14). H_k is the entropy of the
    labels, in nats.
    """
    if weighting == "size":
        return clients.sizes
    if weighting == "equal":
        return torch.ones(len(clients.train))
    counts = label_counts(data, clients.train)
    return torch.special.entr(counts / counts.sum(1, keepdim=True)).sum(1).exp()


def label_divergence(counts: Tensor) -> Tensor:
    """The Jensen-Shannon divergence of every two clients' label distributions, in nats (at most log 2).

    counts  how many samples of each class each client has [M, C]; returns float64 [M, M]
    """
    p = counts.double() / counts.sum(1, keepdim=True)
    entropy = torch.special.entr(p).sum(1)
    of_middle = torch.stack([torch.special.entr((p + of_client) / 2).sum(1) for of_client in p])
    return of_middle - (entropy[:, None] + entropy) / 2


def rank_correlation(x: Tensor, y: Tensor) -> float | None:
    """Spearman's rank correlation of two symmetric matrices [M, M] over all pairs i < j.

    Returns None if there are fewer than two pairs, or if all pairs are equal in one of the matrices.
    """
    upper = torch.triu_indices(*x.shape, offset=1).unbind()
    ranks = np.stack([rankdata(matrix.cpu()[upper]) for matrix in (x, y)])
    return float(np.corrcoef(ranks)[0, 1]) if ranks.size and (np.ptp(ranks, axis=1) > 0).all() else None


def present(ids: Tensor, churn: float, rng: np.random.Generator) -> Tensor:
    """The clients, int64, that are present this round. Each is away with probability `churn`; at least one stays."""
    stays = torch.from_numpy(rng.random(len(ids)) >= churn)
    return ids[stays] if stays.any() else draw(ids, 1, rng)


def table_flags(add) -> None:
    """The flags of a method with a gradient table."""
    add("--weighting", choices=["equal", "size", "entropy"], default="equal", help="aggregation weights alpha_i",
        idle_if=lambda a: a.trim and "the trimmed mean has no weights")  # fmt: skip
    add("--trim", type=flags.at_least(0, float, 0.49), default=0.0, help="trimmed mean: share removed at each end")
    add("--churn", type=flags.at_least(0, float, 0.99), default=0.0, help="probability that a client is away")
    add("--event-threshold", type=flags.at_least(0, float), default=0.0,
        help="a client uploads only if its update changed by at least this share of the old norm",
        idle_if=lambda a: a.sketch and "a --sketch does not keep old updates")  # fmt: skip
    add("--sketch", type=flags.at_least(0), default=0, metavar="N",
        help="saves memory: keep only N random sums (a sketch) of each update; 0 keeps all of it")  # fmt: skip
