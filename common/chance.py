"""Chance: where each random number of a run comes from.

    rng = random_at(seed, "select", t)             # of round t, whatever was drawn before
    selected = sample(clients.ids, 10, rng)

rng is a numpy Generator here, and a draw depends only on its address. So a client's draws do not
depend on which clients trained before it, and a resumed run draws the same numbers.
"""

import random
import zlib
from contextlib import contextmanager

import numpy as np
import torch


def random_at(seed, purpose, *where):
    """The random generator of (seed, purpose, *where); `where` is a round, a client and so on."""
    # numpy treats [1, 2] and [1, 2, 0] as the same seed, so the length is part of the address
    return np.random.default_rng([seed, zlib.crc32(purpose.encode()), len(where), *where])


def shuffled(samples, rng):
    """The same samples in random order."""
    return samples[torch.from_numpy(rng.permutation(len(samples)))]


def sample(clients, k, rng, sizes=None):
    """k of these clients at random, in ascending order: int64 [k].

    sizes  one per client: their probabilities are proportional to it; by default all are equal
    """
    p = None if sizes is None else (sizes.double() / sizes.double().sum()).numpy()
    chosen = rng.choice(len(clients), k, replace=False, p=p)
    return clients[torch.from_numpy(np.sort(chosen))]


def seed_all(seed, purpose, *where):
    """Starts the global generators of random, numpy and torch at this address.

    Dropout and the initial weights draw from torch's, and a line of yours from any of them.
    """
    rng = random_at(seed, purpose, *where)
    torch.manual_seed(int(rng.integers(2**63)))
    random.seed(int(rng.integers(2**63)))
    np.random.seed(rng.integers(2**32, size=4))


@contextmanager
def seeded(device, seed, purpose, *where):
    """Inside, the global generators start at this address, and afterwards they go on as before."""
    of_random, of_numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        seed_all(seed, purpose, *where)
        try:
            yield
        finally:
            random.setstate(of_random)
            np.random.set_state(of_numpy)
