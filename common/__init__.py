"""What the six methods share. The first lines of each module say what it is for."""

import sys
import zlib

import numpy as np
import torch

if torch.__version__ < (2, 11):
    print(f"torch {torch.__version__} is too old: install 2.11 or newer", file=sys.stderr)
    sys.exit(2)


class UserError(Exception):
    """A user's mistake. The message is one line: what is wrong, and what to do about it."""


class RunError(UserError):
    """One run cannot go on: it diverged, or its files are damaged. Runs with other seeds can."""


def first_line(error):
    """One line for an error of another library: its class and the first line of its message."""
    return f"{type(error).__name__}: {error}".splitlines()[0].rstrip(": ")


def random_at(seed, purpose, *where):
    """The random generator of (seed, purpose, *where); `where` is a round, a client and so on.

    Every random draw of a run depends only on such an address, never on global state. So a client's
    draws do not depend on which clients trained before it, and a resumed run draws the same
    numbers.
    """
    # numpy treats [1, 2] and [1, 2, 0] as the same seed, so the length is part of the address
    return np.random.default_rng([seed, zlib.crc32(purpose.encode()), len(where), *where])
