"""Who holds what: labels or domains -> clients, each a tensor of positions in the pool of samples.

Every function is pure: its result depends on its arguments alone, the numpy generator `rng` among them.
"""

import heapq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from common import UserError, random_at
from common.data import Dataset

MIN_SIZE = 10  # samples that every client of a Dirichlet split has at least
HELD_OUT = {"dirichlet": 0.2, "iid": 0.2, "speaker": 0.1, "domain": 0.1}  # share of a client's samples kept for testing


@dataclass
class Clients:
    """All clients, and who of them takes part.

    train, test    per client its positions in the pool, int64; `test` is held out from local training
    participating  int64 [M], ascending: the clients that may ever be selected; the others never train
    ood            int64: samples unlike those of the participating clients (the standard test set, or the domain
                   left out); empty where there are none
    domains        per client the domain that its data come from; empty strings where clients mix domains
    """

    train: list[Tensor]
    test: list[Tensor]
    participating: Tensor
    ood: Tensor
    domains: list[str]

    @property
    def sizes(self) -> Tensor:
        """n_k, the number of training samples of each client, float32 [clients]."""
        return torch.tensor([float(len(i)) for i in self.train])


# ------------------------------------------------------------------------------- pool or labels -> clients


def shuffled(samples: Tensor, rng: np.random.Generator) -> Tensor:
    """The same samples in random order."""
    return samples[torch.from_numpy(rng.permutation(len(samples)))]


def iid(pool: Tensor, clients: int, rng: np.random.Generator) -> list[Tensor]:
    """Deals the positions at random into parts of equal size (plus or minus one)."""
    return list(shuffled(pool, rng).tensor_split(clients))


def dirichlet(
    labels: Tensor, clients: int, alpha: float, rng: np.random.Generator, min_size: int = MIN_SIZE
) -> list[Tensor]:
    """Label skew: each class is divided among the clients by its own draw from Dirichlet(alpha, ..., alpha).

    Clients left with fewer than `min_size` samples are filled up one by one with random samples of whoever has most
    at that moment, so that small alpha and many clients need no second draw. Every sample goes to exactly one client.
    Returns positions in `labels`, int64. Raises UserError where there are fewer than clients * min_size samples.
    """
    if len(labels) < clients * min_size:
        raise UserError(
            f"{len(labels)} samples are too few for {clients} clients of at least {min_size}: lower --clients"
        )
    held: list[list[int]] = [[] for _ in range(clients)]
    for c in labels.unique():
        samples = rng.permutation(torch.nonzero(labels == c).flatten().numpy())
        ends = np.rint(np.cumsum(rng.dirichlet(np.full(clients, alpha))) * len(samples)).astype(int)
        for k, part in enumerate(np.split(samples, ends[:-1])):
            held[k] += part.tolist()
    richest = [(-len(h), k) for k, h in enumerate(held)]
    heapq.heapify(richest)
    for poor in held:
        while len(poor) < min_size:
            _, k = richest[0]
            poor.append(held[k].pop(rng.integers(len(held[k]))))
            heapq.heapreplace(richest, (-len(held[k]), k))
    return [torch.tensor(h, dtype=torch.long) for h in held]


def by_domain(domain: Tensor, clients: int, rng: np.random.Generator) -> list[Tensor]:
    """Several clients a domain, no client of two domains (Guo et al., Algorithm 2 in section F.1).

    Each domain begins with one client; the next one always goes to the domain with most samples per client; then each
    domain is dealt at random among its clients. Returns positions in `domain`, ordered by domain. Raises UserError
    where there are fewer clients than domains.
    """
    values, sizes = domain.unique(return_counts=True)
    if clients < len(values):
        raise UserError(f"--clients {clients} is fewer than the {len(values)} domains that train")
    share = np.ones(len(values), dtype=int)
    for _ in range(clients - len(values)):
        share[np.argmax(sizes.numpy() / share)] += 1
    return [
        part
        for value, k in zip(values, share, strict=True)
        for part in iid(torch.nonzero(domain == value).flatten(), int(k), rng)
    ]


def silos(domain: Tensor, per_domain: list[int], size: int, rng: np.random.Generator) -> list[Tensor]:
    """per_domain[d] silos of `size` samples each from domain d (Zhang et al., section 4: 3 from each of 3 rotations).

    What is left over belongs to nobody. Returns positions in `domain`, ordered by domain. Raises UserError where the
    numbers do not fit the domains, or a domain is too small.
    """
    values, sizes = domain.unique(return_counts=True)
    if len(per_domain) != len(values):
        raise UserError(f"--silos gives {len(per_domain)} numbers for {len(values)} domains: give one per domain")
    if sum(per_domain) == 0:
        raise UserError("--silos gives no domain a silo")
    if bool((torch.tensor(per_domain) * size > sizes).any()):
        raise UserError(f"{per_domain} silos of {size} samples do not fit into domains of {sizes.tolist()}")
    parts = []
    for value, k in zip(values, per_domain, strict=True):
        samples = shuffled(torch.nonzero(domain == value).flatten(), rng)
        parts += samples[: k * size].view(k, size).unbind()
    return parts


def one_per_domain(domain: Tensor, clients: int, rng: np.random.Generator) -> list[Tensor]:
    """Each of `clients` domains, drawn among those with at least MIN_SIZE samples, is one client (one per speaker).

    Returns positions in `domain`. Raises UserError where there are too few such domains.
    """
    values, sizes = domain.unique(return_counts=True)
    values = values[sizes >= MIN_SIZE]
    if clients > len(values):
        raise UserError(
            f"{clients} clients of a domain each: only {len(values)} domains have {MIN_SIZE} samples or more; lower"
            " --clients"
        )
    chosen = np.sort(rng.permutation(len(values))[:clients])
    return [torch.nonzero(domain == values[d]).flatten() for d in chosen]


# ------------------------------------------------------------------------------------ clients -> their parts


def participate(clients: int, count: int, rng: np.random.Generator) -> Tensor:
    """`count` of `clients` clients, drawn with equal probability; ids ascending, int64 [count]."""
    if not 1 <= count <= clients:
        raise UserError(
            f"{count} of {clients} clients cannot participate: choose --participating between 1 and {clients}"
        )
    return torch.from_numpy(np.sort(rng.permutation(clients)[:count]))


def draw(participating: Tensor, k: int, rng: np.random.Generator) -> Tensor:
    """k of the participating clients [M], each equally likely, in ascending order: int64 [k]."""
    return participating[torch.from_numpy(np.sort(rng.choice(len(participating), k, replace=False)))]


def hold_out(clients: list[Tensor], share: float, rng: np.random.Generator) -> tuple[list[Tensor], list[Tensor]]:
    """Each client's samples in two parts, training and test: `share` of them for testing, at least one in each."""
    train, test = [], []
    for samples in clients:
        samples = shuffled(samples, rng)
        cut = min(max(round(len(samples) * share), 1), len(samples) - 1)
        test.append(samples[:cut])
        train.append(samples[cut:])
    return train, test


def label_counts(data: Dataset, clients: list[Tensor]) -> Tensor:
    """How many samples of each class each client holds, float32 [clients, classes]."""
    return torch.stack([torch.bincount(data.y[samples], minlength=len(data.classes)) for samples in clients]).float()


def symmetric_noise(
    labels: Tensor, clients: list[Tensor], noisy: float, flip: float, classes: int, rng: np.random.Generator
) -> tuple[Tensor, Tensor]:
    """Label noise as in Wu et al., section V: a Bernoulli(`noisy`) draw decides whether a client is noisy; in a noisy
    client each label is, with probability `flip`, replaced by one of the other classes, all equally likely.

    Returns the new labels, int64 of the shape of `labels`, and which clients are noisy, bool [clients].
    """
    labels = labels.clone()
    is_noisy = torch.from_numpy(rng.random(len(clients)) < noisy)
    for samples, bad in zip(clients, is_noisy, strict=True):
        if bad:
            flipped = samples[torch.from_numpy(rng.random(len(samples)) < flip)]
            labels[flipped] = (labels[flipped] + torch.from_numpy(rng.integers(1, classes, len(flipped)))) % classes
    return labels, is_noisy


# ------------------------------------------------------------------------------------------------ all of it


def deal(
    data: Dataset, seed: int, partition: str, *, alpha: float = 0.1, clients: int | None = None,
    participating: int | None = None, test_domain: str | None = None, silos_per_domain: list[int] | None = None,
    silo_size: int = 2000,
) -> Clients:  # fmt: skip
    """The clients of a run.

    partition         dirichlet, iid: the standard training set over `clients` (default 100)
                      speaker: each of `clients` (default 100) domains is one client
                      domain: `clients` (default: one a domain), none of them with data of two domains
                      silos: silos_per_domain[d] silos of silo_size samples from domain d, all of them participating
    participating     how many of them take part (default: all under domain and silos, else 4 in 10 as in Wu et al.)
    test_domain       this domain belongs to no client; all of it, with the standard test set joined to the standard
                      training set as in Guo et al., becomes `ood`. Without it `ood` is the standard test set (under
                      speaker that of the clients' speakers), and for silos nothing

    A client's held-out samples come out of its own (HELD_OUT), but for silos out of the standard test set where there
    is one, as many each as the smallest share of a domain has. Raises UserError where the numbers do not fit the data.
    """
    if partition in ("domain", "silos", "speaker") and data.domain is None:
        raise UserError(f"{data.name} has no domains: make some with --rotate, or choose --partition dirichlet or iid")
    pool, ood = data.train, data.test if partition != "silos" else data.test[:0]
    if test_domain is not None:
        if test_domain not in data.domains:
            those = f"give one of {', '.join(data.domains)}" if data.domains else "it has none; make some with --rotate"
            raise UserError(f"--test-domain: no domain {test_domain!r} in {data.name}: {those}")
        left_out = data.domain == data.domains.index(test_domain)
        ood = torch.nonzero(left_out).flatten()
        pool = torch.cat([data.train, data.test]) if partition != "silos" else pool
        pool = pool[~left_out[pool]]

    rng = random_at(seed, "split")
    if partition == "silos":
        if silos_per_domain is None:
            raise UserError("--partition silos needs --silos: how many each domain has")
        parts = [pool[i] for i in silos(data.domain[pool], silos_per_domain, silo_size, rng)]
        train, test = _silo_tests(data, parts, silo_size, silos_per_domain, test_domain, rng)
    else:
        if partition == "dirichlet":
            parts = dirichlet(data.y[pool], clients or 100, alpha, rng)
        elif partition == "iid":
            parts = iid(torch.arange(len(pool)), clients or 100, rng)
        elif partition == "speaker":
            parts = one_per_domain(data.domain[pool], clients or 100, rng)
        else:
            parts = by_domain(data.domain[pool], clients or len(data.domain[pool].unique()), rng)
        train, test = hold_out([pool[i] for i in parts], HELD_OUT[partition], random_at(seed, "held out"))
    if not all(len(a) and len(b) for a, b in zip(train, test, strict=True)):
        raise UserError("a client has no samples to train on, or none to hold out: lower --clients, or --silos")
    if partition == "speaker" and test_domain is None:
        ood = ood[torch.isin(data.domain[ood], torch.stack([data.domain[i[0]] for i in train]))]

    everyone = partition in ("domain", "silos")
    domains = [data.domains[data.domain[i[0]]] if everyone or partition == "speaker" else "" for i in train]
    count = participating or (len(train) if everyone else max(1, round(0.4 * len(train))))
    return Clients(train, test, participate(len(train), count, random_at(seed, "participate")), ood, domains)


def _silo_tests(data, parts, size, per_domain, test_domain, rng) -> tuple[list[Tensor], list[Tensor]]:
    """The silos' training and test samples, the latter out of the standard test set where there is one."""
    if not len(data.test):
        return hold_out(parts, 0.2, rng)
    pool = data.test
    if test_domain is not None:
        pool = pool[data.domain[pool] != data.domains.index(test_domain)]
    sizes = data.domain[pool].unique(return_counts=True)[1].tolist()
    test_size = min(n // k for n, k in zip(sizes, per_domain, strict=True) if k)
    return parts, [pool[i] for i in silos(data.domain[pool], per_domain, test_size, rng)]
