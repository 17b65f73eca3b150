"""The table of lengths in docs/, for two features under FedIIR's penalty, by a global search.

Nothing in the code computes these numbers, so nothing else would notice a wrong one.
"""

import re
from itertools import product

import numpy as np
import pytest
from helpers import ROOT
from scipy.optimize import shgo

MARK = "<!-- lengths -->\n"
(PAGE,) = [text for page in ROOT.glob("docs/*.md") if MARK in (text := page.read_text())]


def loss(a, gamma, batch, colour, shape=0.75):
    """The expected loss for lengths a [2], from all four cases in each domain."""
    cases = np.array([*product((1, -1), repeat=2)])  # 1: the shape, the colour is right
    of_shape = np.where(cases[:, 0] == 1, shape, 1 - shape)
    shares = np.array([of_shape * np.where(cases[:, 1] == 1, c, 1 - c) for c in colour])
    margins = cases @ a
    gradients = -a * cases / (1 + np.exp(margins))[:, None]
    means = shares @ gradients  # [domains, 2]
    variances = shares @ (gradients**2).sum(1) - (means**2).sum(1)
    distances = ((means - means.mean(0)) ** 2).sum(1)
    risks = shares @ np.log1p(np.exp(-margins))
    return (risks + gamma / 2 * (distances + variances / batch)).mean()


def table():
    """The rows of the table: the agreements, the batch size, and (shape, colour) for each gamma."""
    rows, colour = [], None
    header, _, *lines = PAGE.split(MARK)[1].split("\n\n")[0].split("\n")
    gammas = re.findall(r"\d+", header)
    for line in lines:
        name, batch, *pairs = line.split("|")[1:-1]
        colour = [int(share) / 100 for share in re.findall(r"(\d+) %", name)] or colour
        lengths = dict(zip(map(int, gammas), pairs, strict=True))
        rows.append((colour, float(batch.replace("all", "inf")), lengths))
    return rows


@pytest.mark.parametrize(("colour", "batch", "lengths"), table())
def test_a_row_of_the_table(colour, batch, lengths):
    """Where the loss is smallest, by a global search."""
    for gamma, pair in lengths.items():
        expected = shgo(loss, [(0, 3)] * 2, (gamma, batch, colour)).x
        assert np.array(pair.split(","), float) == pytest.approx(expected, abs=0.00501), gamma
