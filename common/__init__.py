"""What the six methods share; the first lines of each module say what it is for."""

import zlib

import numpy as np


class UserError(Exception):
    """A mistake of the user's, told in one line that says what is wrong and what to do about it."""


def random_at(seed: int, purpose: str, *where: int) -> np.random.Generator:
    """The generator that lives at the address (seed, purpose, *where), `where` being a round, a client and the like.

    Every random draw of the project comes from such a generator and none from global state, so that what a client
    draws depends neither on who trained before it nor on whether the run was resumed.
    """
    return np.random.default_rng([seed, zlib.crc32(purpose.encode()), *where])
