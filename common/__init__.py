"""What the six methods share; the first lines of each module say what it is for."""

import zlib

import numpy as np


class UserError(Exception):
    """A mistake of the user's, told in one line that says what is wrong and what to do about it."""


def first_line(error: BaseException) -> str:
    """Kind and message of another library's error, without the pages that may follow."""
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}".rstrip(": ")


def random_at(seed: int, purpose: str, *where: int) -> np.random.Generator:
    """The generator that lives at the address (seed, purpose, *where), `where` being a round, a client and the like.

    Every random draw of the project comes from such a generator and none from global state, so that what a client
    draws depends neither on who trained before it nor on whether the run was resumed.
    """
    # the length, because numpy takes [1, 2] and [1, 2, 0] for the same seed
    return np.random.default_rng([seed, zlib.crc32(purpose.encode()), len(where), *where])
