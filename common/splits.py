"""Which client holds which samples: labels or domains -> clients, each a tensor of positions.

Every function's result depends only on its arguments. Here `pool`, `samples` and what a function
returns are int64 positions in the data set, `labels` and `domain` are int64 [n], `clients` is how
many there are, `parts` has the samples of each one, and rng is as in chance.py.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from common import UserError, check_tensor, one_of
from common.chance import random_at, sample, shuffled

MIN_SIZE = 10  # every client has at least this many samples
MEAN_SIZE = 30  # by default there are so few clients that they have this many on average
PARTITIONS = ["dirichlet", "iid", "shards", "domain", "rare", "specialists"]  # and silos
RARE = 3  # how many classes are rare in the partition rare


@dataclass
class Clients:
    """All N clients. The first M of them participate; the others never train.

    train, test    each client's training and test samples, int64 positions in the data set
    participating  M; these clients have the ids 0 .. M-1, so an id is also the row in a table
    per_round      K, how many of the participating clients a method selects per round
    groups         each client's domain, in the partitions domain and silos, and else ""
    tests          test sets that belong to no client, by name. ood: the standard test set,
                   or the domain left out; rare: its samples of the rare classes, if there are any
    label_counts   how many training samples of each class a client holds, float32 [N, C]; whoever
                   changes labels later counts them again
    """

    train: list
    test: list
    participating: int
    per_round: int
    groups: list
    tests: dict
    label_counts: Tensor = None

    def __post_init__(self):
        for samples in (*self.train, *self.test, *self.tests.values()):
            check_tensor("a client's or a test set's samples", samples, torch.int64, 1)

    @property
    def ids(self):
        """The participating clients, int64 [M]."""
        return torch.arange(self.participating)

    @property
    def sizes(self):
        """n_k, the number of training samples of each client, float32 [N]."""
        return torch.tensor([float(len(samples)) for samples in self.train])


def iid(pool, clients, rng):
    """Divides the samples at random into equal parts. The sizes differ by at most one."""
    return list(shuffled(pool, rng).tensor_split(clients))


def dirichlet(labels, clients, alpha, rng):
    """Label skew: each class is divided by its own draw from Dirichlet(alpha, ..., alpha).

    A client with fewer than MIN_SIZE samples then gets random samples of the client with the
    most, so at least clients * MIN_SIZE samples are needed. Every sample belongs to exactly one
    client. Returns positions in `labels`, int64.
    """
    held = [[] for _ in range(clients)]
    for c in labels.unique():
        samples = rng.permutation(torch.nonzero(labels == c).flatten().numpy())
        shares = rng.dirichlet(np.full(clients, alpha))
        cuts = np.rint(np.cumsum(shares) * len(samples)).astype(int)
        for mine, part in zip(held, np.split(samples, cuts[:-1])):
            mine += part.tolist()
    for samples in held:
        for _ in range(MIN_SIZE - len(samples)):
            richest = max(held, key=len)
            samples.append(richest.pop(rng.integers(len(richest))))
    return [torch.tensor(samples, dtype=torch.long) for samples in held]


def shards(labels, clients, rng):
    """Label skew with equal sizes (McMahan et al., section 3): each client has two shards.

    The samples, sorted by label, are cut into 2 * clients shards, whose sizes differ by at most
    one, and each client gets two of them at random. Returns positions in `labels`, int64.
    """
    mixed = shuffled(torch.arange(len(labels)), rng)
    pieces = mixed[labels[mixed].argsort(stable=True)].tensor_split(2 * clients)
    pairs = rng.permutation(2 * clients).reshape(clients, 2)
    return [torch.cat([pieces[i], pieces[j]]) for i, j in pairs]


def by_domain(domain, clients, rng):
    """Each client holds samples of one domain (Guo et al., Algorithm 2 in section F.1).

    Each domain starts with one client. The next client always goes to the domain with the most
    samples per client. Then each domain is divided at random among its clients. Returns positions
    in `domain`, ordered by domain. Raises UserError if there are fewer clients than domains.
    """
    values, sizes = domain.unique(return_counts=True)
    if clients < len(values):
        raise UserError(f"--clients {clients} is fewer than the {len(values)} training domains")
    count = [1] * len(values)
    for _ in range(clients - len(values)):
        count[np.argmax(sizes.numpy() / count)] += 1
    parts = []
    for d, k in zip(values, count):
        parts += iid(torch.nonzero(domain == d).flatten(), k, rng)
    return parts


def by_class(labels, partition, classes, clients, rng):
    """Two partitions that show one idea at work. Each client holds equally many random samples.

    rare         each of the last three classes is held by one client, which holds nothing else
    specialists  three of four clients hold one class each, and the others hold all classes

    All clients together hold half of the samples, and no sample has two owners. Returns positions
    in `labels`, int64. Raises UserError if the samples of a class are too few.
    """
    every = list(range(classes))
    if partition == "specialists":
        ones = [[k % classes] for k in range(3 * clients // 4)]
        others = every
    else:
        ones = [[c] for c in every[-RARE:]]
        others = every[:-RARE]
    wanted = ones + [others] * (clients - len(ones))
    size = len(labels) // (2 * clients)
    parts = {}
    left = shuffled(torch.arange(len(labels)), rng)
    # Those who want many classes come first. The others would take the first samples of their class
    for k in sorted(range(clients), key=lambda k: -len(wanted[k])):
        mine = left[torch.isin(labels[left], torch.tensor(wanted[k]))][:size]
        if len(mine) < size or not others:
            raise UserError(
                f"--partition {partition} takes {size} samples of the classes {wanted[k]} for a "
                f"client (rare needs more than {RARE} classes): change --clients or --partition"
            )
        parts[k] = mine
        left = left[~torch.isin(left, mine)]
    return [parts[k] for k in range(clients)]


def hold_out(parts, share, rng):
    """Divides each client's samples at random: this share, but at least one, is for testing.

    With the share 0, it is none.
    """
    train, test = [], []
    for samples in parts:
        mixed = shuffled(samples, rng)
        tested = max(1, round(len(samples) * share)) if share else 0
        first = len(samples) - tested
        train.append(mixed[:first])
        test.append(mixed[first:])
    return train, test


def count_labels(data, parts):
    """How many of a client's samples are of each class, float32 [clients, classes]."""
    classes = len(data.classes)
    counts = [data.y[samples].bincount(minlength=classes) for samples in parts]
    return torch.stack(counts).float()


def pools(data, partition, test_domain):
    """The samples that the clients divide, and the OOD samples: two int64 tensors.

    Without a test domain, they are the standard training and test sets, but silos have no OOD
    samples. With a test domain, all its samples are OOD, and the clients divide the others. These
    are of both the training and the test set, as in Guo et al., or for silos of the former alone.
    """
    is_silos = partition == "silos"
    if data.domain is None and (test_domain or is_silos or partition == "domain"):
        raise UserError(
            f"{data.name} has no domains, which --test-domain and the partitions domain and silos "
            "need: make some with --rotate, or sort the images as DOMAIN/CLASS/"
        )
    if test_domain is None:
        return data.train, data.test[:0] if is_silos else data.test
    if test_domain not in data.domains:
        raise UserError(
            f"--test-domain: {test_domain!r} is not in {data.name}, but {', '.join(data.domains)}"
        )
    left_out = data.domain == data.domains.index(test_domain)
    pool = data.train if is_silos else torch.cat([data.train, data.test])
    pool = pool[~left_out[pool]]
    if not torch.isin(data.y[left_out], data.y[pool]).any():
        raise UserError(
            f"--test-domain {test_domain} shares no class with the others: are there others, or "
            "are the two levels of folders confused?"
        )
    return pool, torch.nonzero(left_out).flatten()


def silos(data, pool, numbers, size, seed):
    """Training and test samples of numbers[d] silos for each domain d (Zhang et al., section 4).

    A silo has `size` training samples from the pool. It is tested on samples of its domain from the
    test set, and each silo has equally many. The remaining samples belong to nobody. Raises
    UserError if the numbers do not fit the domains.
    """
    rng = random_at(seed, "split")
    domains, available = data.domain[pool].unique(return_counts=True)
    fit = len(numbers) == len(domains) and (torch.tensor(numbers) * size <= available).all()
    if not fit or not sum(numbers):
        raise UserError(
            f"--partition silos needs --silos: give a number for each of {len(domains)} domains, "
            f"not all of them 0, or lower --silo-size, because a silo takes {size} samples, and "
            f"the domains have {available.tolist()}"
        )

    def of_domains(samples):
        return [shuffled(samples[data.domain[samples] == d], rng) for d in domains]

    to_train = of_domains(pool)
    to_test = of_domains(data.test)
    tested = min(len(samples) // k for samples, k in zip(to_test, numbers) if k)
    train, test = [], []
    for d, k in enumerate(numbers):
        train += to_train[d][: k * size].view(k, size)
        test += to_test[d][: k * tested].view(k, tested)
    return train, test


def divide(data, pool, partition, clients, alpha, seed):
    """All samples of each client, for training and for testing, in every partition but silos.

    Raises UserError if the clients are too many or too few.
    """
    rng = random_at(seed, "split")
    labels = data.y[pool]
    if not clients and partition == "domain":
        clients = len(data.domain[pool].unique())
    clients = clients or max(1, min(100, len(pool) // MEAN_SIZE))
    if len(pool) < clients * MIN_SIZE:
        raise UserError(
            f"each client needs {MIN_SIZE} samples, and there are {len(pool)} for {clients}: add "
            "some, or take fewer clients"
        )
    if partition == "domain":
        parts = by_domain(data.domain[pool], clients, rng)
    elif partition == "iid":
        parts = iid(torch.arange(len(pool)), clients, rng)
    elif partition == "shards":
        parts = shards(labels, clients, rng)
    elif partition == "dirichlet":
        parts = dirichlet(labels, clients, alpha, rng)
    else:
        parts = by_class(labels, partition, len(data.classes), clients, rng)
    return [pool[samples] for samples in parts]


def participation(partition, clients, groups, m, k):
    """M and K: how many clients participate, and how many of these a method selects per round.

    Those that are None have a default. M is 40 % of the clients with dirichlet, iid and shards, as
    in Wu et al., and else all. K is M with silos, one per domain with domain, and else M / 4.

    groups  how many different groups there are: with domain, the number of domains

    Raises UserError if m or k is more than there are.
    """
    share = 0.4 if partition in ("dirichlet", "iid", "shards") else 1.0
    m = m or max(1, round(share * clients))
    if not k:
        k = {"silos": m, "domain": groups}.get(partition, max(2, m // 4))
        k = min(k, m)
    if m > clients:
        raise UserError(f"--participating {m} is more than the {clients} clients: lower it")
    if k > m:
        raise UserError(
            f"only {m} of {clients} clients participate, and a round takes {k}: lower --sample, or "
            "raise --participating"
        )
    return m, k


def make_clients(
    data,
    seed=0,
    partition="dirichlet",
    *,
    clients=None,
    participating=None,
    per_round=None,
    alpha=0.1,
    silo_numbers=(),
    silo_size=2000,
    test_domain=None,
    held_out=None,
):
    """The clients of a run.

    seed           of every draw
    partition      dirichlet (with this alpha), iid, shards: divide the training samples among
                   `clients` (default: <= 100).
                   domain: each of `clients` (default: one per domain) holds samples of one domain.
                   silos: silo_numbers[d] silos of silo_size training samples from domain d.
                   rare, specialists: see by_class
    participating, per_round  M and K: see participation for the defaults
    test_domain    no client has this domain: see pools
    held_out       the share of its own samples that a client is tested on (default: a tenth with
                   domain, else a fifth); 0 needs OOD samples, and ID is not measured

    A silo is tested on samples of the standard test set. If the data have none, a fifth of the
    samples is drawn for it, but not where a test domain, or the clients' own samples with domain,
    serve for testing. Raises UserError if the numbers do not fit the data.
    """
    one_of(partition, [*PARTITIONS, "silos"])
    needs_test = partition == "silos" or (test_domain is None and partition != "domain")
    if needs_test and not len(data.test):
        mixed = shuffled(data.train, random_at(seed, "ood"))
        test, train = mixed.tensor_split([len(mixed) // 5])
        data = replace(data, train=train, test=test)
    pool, ood = pools(data, partition, test_domain)
    if held_out is None:
        held_out = 0.1 if partition == "domain" else 0.2
    if partition == "silos":
        train, test = silos(data, pool, silo_numbers, silo_size, seed)
    else:
        parts = divide(data, pool, partition, clients, alpha, seed)
        train, test = hold_out(parts, held_out, random_at(seed, "held out"))
    held = [torch.cat(samples) for samples in zip(train, test)]
    groups = [""] * len(held)
    if partition in ("domain", "silos"):
        groups = [data.domains[data.domain[samples[0]]] for samples in held]
    for samples, name in zip(held, groups):
        if len(samples) < MIN_SIZE:
            whose = f"a client of {name}" if name else "a client"
            raise UserError(
                f"{whose} has {len(samples)} samples, and needs {MIN_SIZE}: add some, take fewer "
                "clients or larger silos, or remove a domain with so few"
            )
    if not all(map(len, test)) and (held_out or not len(ood)):
        raise UserError("a client would have nothing to test on: raise --held-out or --silo-size")
    n = len(train)
    m, k = participation(partition, n, len(set(groups)), participating, per_round)
    chosen = sample(torch.arange(n), m, random_at(seed, "participate")).tolist()
    order = chosen + sorted({*range(n)} - {*chosen})
    train, test, groups = ([part[i] for i in order] for part in (train, test, groups))
    tests = {"ood": ood}
    if not torch.isin(pool, data.test).any():  # else clients train on the shapes in data.extra
        tests |= data.extra
    if partition == "rare":
        tests["rare"] = ood[data.y[ood] >= len(data.classes) - RARE]
    tests = {name: positions for name, positions in tests.items() if len(positions)}
    return Clients(train, test, m, k, groups, tests, count_labels(data, train))
