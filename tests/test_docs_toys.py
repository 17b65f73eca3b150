"""The table of lengths in docs/, for two features under FedIIR's penalty, by comparing all points.

Nothing in the code computes these numbers, so nothing else would notice a wrong one.
"""

import re
from itertools import product

import numpy as np
import pytest
from helpers import ROOT

MARK = "<!-- lengths -->\n"
(PAGE,) = [text for page in ROOT.glob("docs/*.md") if MARK in (text := page.read_text())]


def loss(a, gamma, batch, colour, shape=0.75):
    """The expected loss for lengths a [..., 2], from all four cases."""
    risks, means, variances = [], [], []
    for right in colour:
        risk, mean, square = 0, 0, 0
        for i, j in product((1, -1), repeat=2):  # 1: the shape, the colour is right
            share = (shape if i == 1 else 1 - shape) * (right if j == 1 else 1 - right)
            margin = (a * [i, j]).sum(-1)
            gradient = -a * [i, j] / (1 + np.exp(margin))[..., None]
            risk = risk + share * np.log1p(np.exp(-margin))
            mean, square = mean + share * gradient, square + share * (gradient**2).sum(-1)
        risks.append(risk)
        means.append(mean)
        variances.append(square - (mean**2).sum(-1))
    distances = ((np.array(means) - np.mean(means, 0)) ** 2).sum(-1)
    return np.mean(risks + gamma / 2 * (distances + np.array(variances) / batch), 0)


def smallest(gamma, batch, colour):
    """Where the loss is smallest, among all points of grids that become finer."""
    low, high = np.zeros(2), np.full(2, 3.0)
    for _ in range(6):
        points = np.stack(np.meshgrid(*np.linspace(low, high, 41).T, indexing="ij"), -1)
        found = points.reshape(-1, 2)[loss(points, gamma, batch, colour).argmin()]
        step = (high - low) / 40
        low, high = np.maximum(found - 3 * step, 0), found + 3 * step
    return found


def table():
    """The rows of the table: (agreements, batch size) -> gamma -> (shape, colour)."""
    rows, colour = {}, None
    lines = PAGE.split(MARK)[1].split("\n\n")[0].split("\n")
    cells = [[cell.strip() for cell in line[1:-1].split("|")] for line in lines]
    gammas = [float(cell.removeprefix("gamma ")) for cell in cells[0][2:]]
    for name, batch, *pairs in cells[2:]:
        colour = tuple(int(share) / 100 for share in re.findall(r"(\d+) %", name)) or colour
        lengths = [np.array(pair.split(", "), float) for pair in pairs]
        rows[colour, float(batch.replace("all", "inf"))] = dict(zip(gammas, lengths, strict=True))
    return rows


@pytest.mark.parametrize(("colour", "batch"), table())
def test_a_row_of_the_table(colour, batch):
    for gamma, lengths in table()[colour, batch].items():
        assert lengths == pytest.approx(smallest(gamma, batch, colour), abs=0.00501), gamma
