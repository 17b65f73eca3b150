"""Which client holds which samples. Labels or domains -> clients, each a tensor of positions in the pool of samples.

The result of every function depends only on its arguments. `rng` is a numpy generator.
"""

from argparse import Namespace
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from common import UserError, random_at
from common.data import Dataset

MIN_SIZE = 10  # every client has at least this many samples
RARE = 3  # classes that few clients hold, in the partitions rare and twins
HELD_OUT = 0.2  # share of a client's samples that it is tested on
USUAL_SIZE = 30  # small data sets get fewer clients by default, so that a client has at least this many on average


@dataclass
class Clients:
    """All N clients. The first M of them participate; the others never train.

    train, test    for each client its positions in the pool, int64; local training never sees `test`
    participating  M; the participating clients have the ids 0 .. M-1, so an id is also the row in every table
    sample         K, how many of the participating clients a method selects per round
    groups         for each client what it has in common with others, such as its domain; "" if clients mix domains
    tests          test sets that belong to no client, int64, by name. ood: the standard test set, or the domain left
                   out; rare: its samples of the rare classes, if the partition has some
    """

    train: list[Tensor]
    test: list[Tensor]
    participating: int
    sample: int
    groups: list[str]
    tests: dict[str, Tensor]

    @property
    def ids(self) -> Tensor:
        """The participating clients, int64 [M]."""
        return torch.arange(self.participating)

    @property
    def sizes(self) -> Tensor:
        """n_k, the number of training samples of each client, float32 [N]."""
        return torch.tensor([float(len(samples)) for samples in self.train])

    @property
    def held_out(self) -> Tensor:
        """The test samples of all participating clients together."""
        return torch.cat(self.test[: self.participating])


def shuffled(samples: Tensor, rng: np.random.Generator) -> Tensor:
    """The same samples in random order."""
    return samples[torch.from_numpy(rng.permutation(len(samples)))]


def draw(
    clients: Tensor, k: int, rng: np.random.Generator, weights: Tensor | None = None
) -> Tensor:
    """k of these clients at random, in ascending order: int64 [k].

    weights  one per client: they are drawn with probabilities proportional to it; by default all are equally likely
    """
    p = None if weights is None else (weights.double() / weights.double().sum()).numpy()
    return clients[torch.from_numpy(np.sort(rng.choice(len(clients), k, replace=False, p=p)))]


def iid(pool: Tensor, clients: int, rng: np.random.Generator) -> list[Tensor]:
    """Divides the samples at random into equal parts. The sizes differ by at most one."""
    return list(shuffled(pool, rng).tensor_split(clients))


def dirichlet(
    labels: Tensor, clients: int, alpha: float, rng: np.random.Generator, min_size: int = MIN_SIZE
) -> list[Tensor]:
    """Label skew: each class is divided among the clients by its own draw from Dirichlet(alpha, ..., alpha).

    A client with fewer than `min_size` samples then gets random samples from the client that has the most samples.
    Every sample belongs to exactly one client. Returns positions in `labels`, int64. Raises UserError if there are
    fewer than clients * min_size samples.
    """
    if len(labels) < clients * min_size:
        raise UserError(
            f"{len(labels)} samples are too few for {clients} clients of at least {min_size}: lower --clients"
        )
    alpha = min(alpha, 1e9)  # equal shares; numpy gives zeros if the sum of the alphas overflows
    held: list[list[int]] = [[] for _ in range(clients)]
    for c in labels.unique():
        samples = rng.permutation(torch.nonzero(labels == c).flatten().numpy())
        cuts = np.rint(np.cumsum(rng.dirichlet(np.full(clients, alpha))) * len(samples)).astype(int)
        for k, share in enumerate(np.split(samples, cuts[:-1])):
            held[k] += share.tolist()
    sizes = np.array([len(samples) for samples in held])
    for k in range(clients):
        while sizes[k] < min_size:
            rich = sizes.argmax()
            held[k].append(held[rich].pop(rng.integers(sizes[rich])))
            sizes[k] += 1
            sizes[rich] -= 1
    return [torch.tensor(h, dtype=torch.long) for h in held]


def by_domain(domain: Tensor, clients: int, rng: np.random.Generator) -> list[Tensor]:
    """Each client holds samples of one domain (Guo et al., Algorithm 2 in section F.1).

    Each domain starts with one client. The next client always goes to the domain with the most samples per client.
    Then each domain is divided at random among its clients. Returns positions in `domain`, ordered by domain. Raises
    UserError if there are fewer clients than domains.
    """
    values, sizes = domain.unique(return_counts=True)
    if clients < len(values):
        raise UserError(
            f"--clients {clients} is fewer than the {len(values)} domains in the training data"
        )
    count = np.ones(len(values), dtype=int)
    for _ in range(clients - len(values)):
        count[np.argmax(sizes.numpy() / count)] += 1
    return [
        c
        for d, k in zip(values, count, strict=True)
        for c in iid(torch.nonzero(domain == d).flatten(), k, rng)
    ]


def silos(
    domain: Tensor, per_domain: list[int], size: int, rng: np.random.Generator
) -> list[Tensor]:
    """Makes per_domain[d] silos of `size` samples from domain d (Zhang et al., section 4: 3 from each of 3 rotations).

    The remaining samples belong to nobody. Returns positions in `domain`, ordered by domain. Raises UserError if the
    numbers do not fit the domains.
    """
    values, sizes = domain.unique(return_counts=True)
    if len(per_domain) != len(values) or not sum(per_domain):
        raise UserError(
            f"--silos {per_domain}: give a number for each of the {len(values)} domains, not all of them 0"
        )
    if bool((torch.tensor(per_domain) * size > sizes).any()):
        raise UserError(
            f"{per_domain} silos of {size} samples do not fit into domains of {sizes.tolist()}: lower --silo-size"
        )
    dealt = []
    for d, k in zip(values, per_domain, strict=True):
        dealt += (
            shuffled(torch.nonzero(domain == d).flatten(), rng)[: k * size].view(k, size).unbind()
        )
    return dealt


def wanted_classes(partition: str, classes: int, clients: int) -> list[list[int]]:
    """The classes that each client holds in three partitions that show one idea at work.

    rare         each of the last three classes is held by one client alone, which holds nothing else
    twins        the same, with two clients for each of these classes
    specialists  three of four clients hold one class each, and the others hold all classes

    Raises UserError if there are too few classes or clients for rare and twins.
    """
    every = list(range(classes))
    if partition == "specialists":
        return [[k % classes] for k in range(3 * clients // 4)] + [every] * (
            clients - 3 * clients // 4
        )
    rare = [[c] for c in every[-RARE:]] * (2 if partition == "twins" else 1)
    if classes < 5 or clients <= len(rare):
        raise UserError(
            f"--partition {partition} needs 5 classes and more than {len(rare)} clients"
        )
    return rare + [every[:-RARE]] * (clients - len(rare))


def of_classes(
    labels: Tensor, wanted: list[list[int]], size: int, rng: np.random.Generator
) -> list[Tensor]:
    """Client k holds `size` random samples of the classes wanted[k], and no sample has two owners.

    Returns positions in `labels`, int64. Raises UserError if there are too few samples of a class.
    """
    free, dealt = shuffled(torch.arange(len(labels)), rng), {}
    for k in sorted(
        range(len(wanted)), key=lambda k: -len(wanted[k])
    ):  # else clients of one class take its first
        samples = free[torch.isin(labels[free], torch.tensor(wanted[k]))][
            :size
        ]  # samples, which others then lack
        if len(samples) < size:
            raise UserError(
                f"too few samples of the classes {wanted[k]} for clients of {size}: raise --clients"
            )
        free, dealt[k] = free[~torch.isin(free, samples)], samples
    return [dealt[k] for k in range(len(wanted))]


def hold_out(
    clients: list[Tensor], share: float, rng: np.random.Generator
) -> tuple[list[Tensor], list[Tensor]]:
    """Divides each client's samples at random into training and test samples. `share` of them are for testing."""
    mixed = [shuffled(samples, rng) for samples in clients]
    cuts = [
        len(samples) - min(max(round(len(samples) * share), 1), len(samples) - 1)
        for samples in mixed
    ]
    return [s[:cut] for s, cut in zip(mixed, cuts, strict=True)], [
        s[cut:] for s, cut in zip(mixed, cuts, strict=True)
    ]


def label_counts(data: Dataset, clients: list[Tensor]) -> Tensor:
    """How many samples of each class each client holds, float32 [clients, classes]."""
    return torch.stack(
        [torch.bincount(data.y[samples], minlength=len(data.classes)) for samples in clients]
    ).float()


def pools(data: Dataset, args: Namespace) -> tuple[Tensor, Tensor, Tensor]:
    """The samples that the clients divide, the standard test samples, and the OOD samples, all int64.

    Without a test domain, the OOD samples are the standard test set, or none for silos. With one, they
    are all samples of this domain, which no client has, and the clients divide the rest of the standard
    training and test sets together, as in Guo et al. (silos: of the training set).
    """
    is_silos, names = args.partition == "silos", ", ".join(data.domains)
    if args.partition in ("domain", "silos") and data.domain is None:
        raise UserError(
            f"{data.name} has no domains: make some with --rotate, or choose --partition dirichlet or iid"
        )
    if args.test_domain is None:
        return data.train, data.test, data.test[:0] if is_silos else data.test
    if args.test_domain not in data.domains:
        raise UserError(
            f"--test-domain: no domain {args.test_domain!r} in {data.name}; its domains are {names or 'none; make some with --rotate'}"
        )
    left_out = data.domain == data.domains.index(args.test_domain)
    pool = data.train if is_silos else torch.cat([data.train, data.test])
    pool = pool[~left_out[pool]]
    if not len(pool):
        raise UserError(f"--test-domain {args.test_domain}: no domain is left to train on")
    return pool, data.test[~left_out[data.test]], torch.nonzero(left_out).flatten()


def divide(
    data: Dataset, pool: Tensor, args: Namespace, rng: np.random.Generator
) -> tuple[list[Tensor], list[str]]:
    """Each client's samples, and what it has in common with others, such as its domain ("" if nothing)."""
    labels, count = data.y[pool], args.clients or max(1, min(100, len(pool) // USUAL_SIZE))
    if count > len(pool):
        raise UserError(f"{len(pool)} samples are too few for {count} clients: lower --clients")
    groups = [""] * count
    if args.partition == "dirichlet":
        parts = dirichlet(labels, count, args.dirichlet, rng)
    elif args.partition == "iid":
        parts = iid(torch.arange(len(pool)), count, rng)
    elif args.partition in ("domain", "silos"):
        domain = data.domain[pool]
        if args.partition == "silos":
            if args.silos is None:
                raise UserError(
                    "--partition silos needs --silos: give the number of silos of each domain"
                )
            size = args.silo_size if len(data.test) else round(args.silo_size / (1 - HELD_OUT))
            parts = silos(domain, args.silos, size, rng)
        else:
            parts = by_domain(domain, args.clients or len(domain.unique()), rng)
        groups = [data.domains[domain[samples[0]]] for samples in parts]
    else:
        wanted = wanted_classes(args.partition, len(data.classes), count)
        parts = of_classes(labels, wanted, len(pool) // (2 * count), rng)
        groups = ["one class" if len(classes) == 1 else "more classes" for classes in wanted]
    return [pool[samples] for samples in parts], groups


def deal(data: Dataset, args: Namespace) -> Clients:
    """The clients of a run, from these flags.

    seed           of every draw
    partition      dirichlet, iid: divide the training samples among `clients` (default 100, or fewer)
                   domain: each of `clients` (default: one per domain) holds samples of one domain
                   silos: silos[d] silos of silo_size training samples from domain d
                   rare, twins, specialists: see wanted_classes; `clients` of equal size hold half of
                   the samples
    dirichlet      alpha of dirichlet
    test_domain    no client has this domain: see pools
    participating  how many participate (default: 40 percent, as in Wu et al., with dirichlet and iid,
                   else all)
    sample         how many of these a method selects per round (default: all silos, one per domain,
                   else a quarter)

    A client's test samples are a tenth (domain) or a fifth of its own samples; those of silos come from
    the standard test set if there is one. Raises UserError if the numbers do not fit the data.
    """
    pool, test_pool, ood = pools(data, args)
    rng, partition = random_at(args.seed, "split"), args.partition
    held, groups = divide(data, pool, args, rng)
    if partition == "silos" and len(data.test):
        sizes = [int((data.domain[test_pool] == d).sum()) for d in data.domain[pool].unique()]
        size = min(n // k for n, k in zip(sizes, args.silos, strict=True) if k)
        tests = silos(data.domain[test_pool], args.silos, size, rng)
        train, test = held, [test_pool[samples] for samples in tests]
    else:
        share = 0.1 if partition == "domain" else HELD_OUT
        train, test = hold_out(held, share, random_at(args.seed, "held out"))
    smallest = min(len(a) + len(b) for a, b in zip(train, test, strict=True))
    if smallest < MIN_SIZE:
        raise UserError(
            f"a client would have {smallest} samples, and needs {MIN_SIZE}: lower --clients or --silos, or add samples"
        )

    m, k = args.participating, args.sample
    if m is None:
        m = max(1, round(0.4 * len(train))) if partition in ("dirichlet", "iid") else len(train)
    if k is None:
        k = min(m, {"silos": m, "domain": len(set(groups))}.get(partition, max(2, m // 4)))
    if m > len(train):
        raise UserError(
            f"--participating {m} is more than the {len(train)} clients: lower it, or raise --clients"
        )
    if k > m:
        raise UserError(
            f"--sample {k}: only {m} clients participate; lower it, or raise --participating"
        )
    chosen = draw(torch.arange(len(train)), m, random_at(args.seed, "participate")).tolist()
    order = chosen + sorted(set(range(len(train))) - set(chosen))  # the participating clients first
    tests = {"ood": ood, **data.extra}
    if partition in ("rare", "twins"):
        tests["rare"] = ood[data.y[ood] >= len(data.classes) - RARE]
    return Clients(
        train=[train[k] for k in order],
        test=[test[k] for k in order],
        participating=m,
        sample=k,
        groups=[groups[k] for k in order],
        tests={name: positions for name, positions in tests.items() if len(positions)},
    )
