"""Which client holds which samples: labels or domains -> clients, each a tensor of positions.

Every function's result depends only on its arguments. `rng` is a numpy generator.
"""

from argparse import Namespace
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from common import UserError, random_at
from common.data import Dataset

MIN_SIZE = 10  # every client has at least this many samples
MEAN_SIZE = 30  # by default there are so few clients that they have this many on average
HELD_OUT = 0.2  # the share of its samples that a client is tested on
RARE = 3  # how many classes are rare in the partitions rare and twins


@dataclass
class Clients:
    """All N clients. The first M of them participate; the others never train.

    train, test    for each client its positions in the pool, int64; training never sees `test`
    participating  M; these clients have the ids 0 .. M-1, so an id is also the row in a table
    sample         K, how many of the participating clients a method selects per round
    groups         for each client what it has in common with others, such as its domain, or ""
    tests          test sets that belong to no client, int64, by name. ood: the standard test set,
                   or the domain left out; rare: its samples of the rare classes, if there are any
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


def draw(clients: Tensor, k: int, rng: np.random.Generator, sizes: Tensor | None = None) -> Tensor:
    """k of these clients at random, in ascending order: int64 [k].

    sizes  one per client: their probabilities are proportional to it; by default all are equal
    """
    p = None
    if sizes is not None:
        p = (sizes.double() / sizes.double().sum()).numpy()
    chosen = rng.choice(len(clients), k, replace=False, p=p)
    return clients[torch.from_numpy(np.sort(chosen))]


def iid(pool: Tensor, clients: int, rng: np.random.Generator) -> list[Tensor]:
    """Divides the samples at random into equal parts. The sizes differ by at most one."""
    return list(shuffled(pool, rng).tensor_split(clients))


def dirichlet(
    labels: Tensor, clients: int, alpha: float, rng: np.random.Generator, min_size: int = MIN_SIZE
) -> list[Tensor]:
    """Label skew: each class is divided by its own draw from Dirichlet(alpha, ..., alpha).

    A client with fewer than `min_size` samples then gets random samples of the client with the
    most. Every sample belongs to exactly one client. Returns positions in `labels`, int64. Raises
    UserError if there are fewer than clients * min_size samples.
    """
    if len(labels) < clients * min_size:
        raise UserError(f"{len(labels)} samples are too few for {clients} clients: lower --clients")
    alpha = min(alpha, 1e9)  # equal shares; numpy gives zeros if the sum of the alphas overflows
    held: list[list[int]] = [[] for _ in range(clients)]
    for c in labels.unique():
        samples = rng.permutation(torch.nonzero(labels == c).flatten().numpy())
        shares = rng.dirichlet(np.full(clients, alpha))
        cuts = np.rint(np.cumsum(shares) * len(samples)).astype(int)
        for k, part in enumerate(np.split(samples, cuts[:-1])):
            held[k] += part.tolist()
    sizes = np.array([len(samples) for samples in held])
    for k in range(clients):
        while sizes[k] < min_size:
            rich = sizes.argmax()
            held[k].append(held[rich].pop(rng.integers(sizes[rich])))
            sizes[k] += 1
            sizes[rich] -= 1
    return [torch.tensor(samples, dtype=torch.long) for samples in held]


def by_domain(domain: Tensor, clients: int, rng: np.random.Generator) -> list[Tensor]:
    """Each client holds samples of one domain (Guo et al., Algorithm 2 in section F.1).

    Each domain starts with one client. The next client always goes to the domain with the most
    samples per client. Then each domain is divided at random among its clients. Returns positions
    in `domain`, ordered by domain. Raises UserError if there are fewer clients than domains.
    """
    values, sizes = domain.unique(return_counts=True)
    if clients < len(values):
        raise UserError(f"--clients {clients} is fewer than the {len(values)} training domains")
    count = np.ones(len(values), dtype=int)
    for _ in range(clients - len(values)):
        count[np.argmax(sizes.numpy() / count)] += 1
    parts = []
    for d, k in zip(values, count, strict=True):
        parts += iid(torch.nonzero(domain == d).flatten(), k, rng)
    return parts


def silos(domain: Tensor, per_domain: list[int], size: int, rng) -> list[Tensor]:
    """Makes per_domain[d] silos of `size` samples from domain d (Zhang et al., section 4).

    The remaining samples belong to nobody. Returns positions in `domain`, ordered by domain. Raises
    UserError if the numbers do not fit the domains.
    """
    values, sizes = domain.unique(return_counts=True)
    if len(per_domain) != len(values) or not sum(per_domain):
        raise UserError(f"--silos {per_domain}: give a number for each of {len(values)} domains, "
                        "not all of them 0")  # fmt: skip
    if (torch.tensor(per_domain) * size > sizes).any():
        raise UserError(f"{per_domain} silos of {size} samples do not fit into domains of "
                        f"{sizes.tolist()}: lower --silo-size")  # fmt: skip
    parts = []
    for d, k in zip(values, per_domain, strict=True):
        of_domain = shuffled(torch.nonzero(domain == d).flatten(), rng)
        parts += of_domain[: k * size].view(k, size).unbind()
    return parts


def wanted_classes(partition: str, classes: int, clients: int) -> list[list[int]]:
    """The classes that each client holds in three partitions that show one idea at work.

    rare         each of the last three classes is held by one client, which holds nothing else
    twins        the same, with two clients for each of these classes
    specialists  three of four clients hold one class each, and the others hold all classes

    Raises UserError if there are too few classes or clients for rare and twins.
    """
    every = list(range(classes))
    if partition == "specialists":
        specialists = 3 * clients // 4
        return [[k % classes] for k in range(specialists)] + [every] * (clients - specialists)
    holders = [[c] for c in every[-RARE:]] * (2 if partition == "twins" else 1)
    if classes < 5 or clients <= len(holders):
        raise UserError(f"--partition {partition} needs 5 classes, and over {len(holders)} clients")
    return holders + [every[:-RARE]] * (clients - len(holders))


def of_classes(labels: Tensor, wanted: list[list[int]], size: int, rng) -> list[Tensor]:
    """Client k holds `size` random samples of the classes wanted[k]; no sample has two owners.

    Returns positions in `labels`, int64. Raises UserError if there are too few samples of a class.
    """
    left, parts = shuffled(torch.arange(len(labels)), rng), {}
    # Those who want all classes come first. The others would take the first samples of their class.
    for k in sorted(range(len(wanted)), key=lambda k: -len(wanted[k])):
        suits = torch.isin(labels[left], torch.tensor(wanted[k]))
        parts[k] = left[suits][:size]
        left = left[~torch.isin(left, parts[k])]
        if len(parts[k]) < size:
            raise UserError(f"too few samples of the classes {wanted[k]}: raise --clients")
    return [parts[k] for k in range(len(wanted))]


def hold_out(clients: list[Tensor], share: float, rng) -> tuple[list[Tensor], list[Tensor]]:
    """Divides each client's samples at random: training samples, and this share for testing."""
    train, test = [], []
    for samples in clients:
        mixed, tested = shuffled(samples, rng), round(len(samples) * share)
        cut = len(samples) - min(max(tested, 1), len(samples) - 1)
        train.append(mixed[:cut])
        test.append(mixed[cut:])
    return train, test


def label_counts(data: Dataset, clients: list[Tensor]) -> Tensor:
    """How many samples of each class each client holds, float32 [clients, classes]."""
    classes = len(data.classes)
    counts = [torch.bincount(data.y[samples], minlength=classes) for samples in clients]
    return torch.stack(counts).float()


def pools(data: Dataset, args: Namespace) -> tuple[Tensor, Tensor]:
    """The samples that the clients divide, and the OOD samples: two int64 tensors.

    Without a test domain, they are the standard training and test sets; silos have no OOD samples.
    With one, all samples of this domain are OOD, and the clients divide those of the others, of
    both the training and the test set, as in Guo et al. (silos: of the training set).
    """
    if args.partition in ("domain", "silos") and data.domain is None:
        raise UserError(f"{data.name} has no domains: make some with --rotate, or choose another "
                        "--partition, such as dirichlet or iid")  # fmt: skip
    if args.test_domain is None:
        return data.train, data.test[:0] if args.partition == "silos" else data.test
    if args.test_domain not in data.domains:
        names = ", ".join(data.domains) or "none; make some with --rotate"
        wrong = f"--test-domain: no domain {args.test_domain!r} in {data.name}"
        raise UserError(f"{wrong}; its domains are {names}")
    left_out = data.domain == data.domains.index(args.test_domain)
    pool = data.train if args.partition == "silos" else torch.cat([data.train, data.test])
    pool = pool[~left_out[pool]]
    if not len(pool):
        raise UserError(f"--test-domain {args.test_domain}: no domain is left to train on")
    return pool, torch.nonzero(left_out).flatten()


def silo_tests(data: Dataset, domains: Tensor, per_domain: list[int], rng) -> list[Tensor]:
    """Test samples for each silo, from the standard test set: equally many of the silo's domain."""
    pool = data.test[torch.isin(data.domain[data.test], domains)]
    domain = data.domain[pool]
    numbers = zip(domains, per_domain, strict=True)
    size = min(int((domain == d).sum()) // k for d, k in numbers if k)
    return [pool[samples] for samples in silos(domain, per_domain, size, rng)]


def divide(data: Dataset, pool: Tensor, args: Namespace) -> tuple[list[Tensor], list[Tensor], list]:
    """Each client's training and test samples, and what it has in common with others, or ""."""
    rng, partition = random_at(args.seed, "split"), args.partition
    count = args.clients or max(1, min(100, len(pool) // MEAN_SIZE))
    if count > len(pool):
        raise UserError(f"{len(pool)} samples are too few for {count} clients: lower --clients")
    groups, test = [""] * count, None
    if partition == "dirichlet":
        parts = dirichlet(data.y[pool], count, args.dirichlet, rng)
    elif partition == "iid":
        parts = iid(torch.arange(len(pool)), count, rng)
    elif partition == "domain":
        domain = data.domain[pool]
        parts = by_domain(domain, args.clients or len(domain.unique()), rng)
        groups = [data.domains[domain[samples[0]]] for samples in parts]
    elif partition == "silos":
        if args.silos is None:
            raise UserError("--partition silos needs --silos: the number of silos of each domain")
        domain = data.domain[pool]
        size = args.silo_size if len(data.test) else round(args.silo_size / (1 - HELD_OUT))
        parts = silos(domain, args.silos, size, rng)
        groups = [data.domains[domain[samples[0]]] for samples in parts]
        if len(data.test):
            test = silo_tests(data, domain.unique(), args.silos, rng)
    else:
        wanted = wanted_classes(partition, len(data.classes), count)
        parts = of_classes(data.y[pool], wanted, len(pool) // (2 * count), rng)
        groups = ["one class" if len(classes) == 1 else "more classes" for classes in wanted]
    train = [pool[samples] for samples in parts]
    if test is None:
        share = 0.1 if partition == "domain" else HELD_OUT
        train, test = hold_out(train, share, random_at(args.seed, "held out"))
    return train, test, groups


def deal(data: Dataset, args: Namespace) -> Clients:
    """The clients of a run, from these flags.

    seed           of every draw
    partition      dirichlet, iid: divide the training samples among `clients` (default: <= 100)
                   domain: each of `clients` (default: one per domain) holds samples of one domain
                   silos: silos[d] silos of silo_size training samples from domain d
                   rare, twins, specialists: see wanted_classes; all clients together hold half of
                   the samples, equally many each
    test_domain    no client has this domain: see pools
    participating  how many participate (default: with dirichlet and iid 40 percent, as in Wu et
                   al., else all)
    sample         how many of these are selected per round (default: all silos, one per domain, or
                   a quarter)

    A client is tested on a tenth (domain) or a fifth of its own samples, and a silo on samples of
    the standard test set if there is one. Raises UserError if the numbers do not fit the data.
    """
    pool, ood = pools(data, args)
    train, test, groups = divide(data, pool, args)
    smallest = min(len(a) + len(b) for a, b in zip(train, test, strict=True))
    if smallest < MIN_SIZE or not all(map(len, test)):
        wrong = f"a client would have {smallest} samples, and needs {MIN_SIZE}, some for testing"
        raise UserError(f"{wrong}: lower --clients or --silos, or add samples")
    n, m, k = len(train), args.participating, args.sample
    if m is None:
        m = max(1, round(0.4 * n)) if args.partition in ("dirichlet", "iid") else n
    if k is None:
        k = {"silos": m, "domain": len(set(groups))}.get(args.partition, max(2, m // 4))
        k = min(k, m)
    if m > n:
        raise UserError(f"--participating {m} is more than the {n} clients: lower it")
    if k > m:
        raise UserError(f"--sample {k}: only {m} clients participate; lower it")
    chosen = draw(torch.arange(n), m, random_at(args.seed, "participate")).tolist()
    order = chosen + sorted(set(range(n)) - set(chosen))  # the participating clients first
    tests = {"ood": ood, **data.extra}
    if args.partition in ("rare", "twins"):
        tests["rare"] = ood[data.y[ood] >= len(data.classes) - RARE]
    return Clients(
        train=[train[i] for i in order],
        test=[test[i] for i in order],
        participating=m,
        sample=k,
        groups=[groups[i] for i in order],
        tests={name: positions for name, positions in tests.items() if len(positions)},
    )
