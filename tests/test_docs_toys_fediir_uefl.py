"""The numbers of the toys in docs/fediir.md, docs/fediir_limits.md and docs/uefl.md, by hand."""

import doctest
import re
from itertools import combinations, product
from pathlib import Path

import numpy as np
import pytest
import torch

from fediir import fediir_loss

PAGES = ("fediir", "fediir_limits", "uefl")
DOCS = Path(__file__).parent.parent / "docs"
FEDIIR, LIMITS, UEFL = ((DOCS / f"{page}.md").read_text() for page in PAGES)


def shown(page):
    """What the examples of a page print: code -> numbers."""
    examples = doctest.DocTestParser().get_examples(page.replace("\n```\n", "\n\n"))
    numbers = [np.array(re.findall(r"-?\d+\.\d+", example.want), float) for example in examples]
    codes = [example.source.split("  #")[0].strip() for example in examples]
    return dict(zip(codes, numbers, strict=True))


# ------------------------------------------------------------------------------------ fediir.md

Y = np.array([1, 1, 0, 0])
A = np.array([[1, 1], [1, 1], [-1, -1], [1, -1]])  # shape, colour
B = np.array([[1, 1], [1, -1], [-1, -1], [1, 1]])


def of_images(z):
    """The gradient of each image's cross-entropy at weights 0: (p - one-hot) z^T, flat [4, 4]."""
    return ((0.5 - np.eye(2)[Y])[:, :, None] * z[:, None, :]).reshape(4, 4)


G = np.mean([of_images(z).mean(0) for z in (A, B)], 0)


def test_the_clients_gradients_differ_in_the_colour_alone():
    """Minus half of the mean of +1 (right) and -1 (wrong), for class 1."""
    right = [((2 * Y - 1)[:, None] * z == 1).mean(0) for z in (A, B)]
    assert np.array_equal(right, [[0.75, 1], [0.75, 0.5]]), "the page describes these features"
    of_class_1 = -(2 * np.array(right) - 1) / 2
    expected = np.hstack([-of_class_1, of_class_1])
    assert np.allclose(shown(FEDIIR)["gradients(4)"].reshape(2, 4), expected)


@pytest.mark.parametrize("size", [4, 1])
def test_all_data_charge_the_colour_alone_and_single_images_charge_both(size):
    batches = np.concatenate([of_images(z).reshape(4 // size, size, 4).mean(1) for z in (A, B)])
    of_feature = ((batches - G) ** 2).mean(0).reshape(2, 2).sum(0)
    assert of_feature == pytest.approx({4: [0, 1 / 8], 1: [3 / 8, 3 / 8]}[size])
    code = f"(gradients({size}) - g).square().mean(0).view(2, 2).sum(0)"
    assert shown(FEDIIR)[code] == pytest.approx(of_feature)


@pytest.mark.parametrize("z", [A, B])
def test_a_small_batch_adds_its_variance_to_the_penalty(z):
    """E||g_b - g||^2 = ||grad R_c - g||^2 + V_c / b (n - b) / (n - 1), with b = 2."""
    classifier = torch.nn.Linear(2, 2, bias=False)
    torch.nn.init.zeros_(classifier.weight)
    x, y, g = torch.tensor(z).float(), torch.tensor(Y), torch.tensor(G).float()
    penalties = []
    for batch in map(list, combinations(range(4), 2)):
        loss = fediir_loss(torch.nn.Identity(), classifier, x[batch], y[batch], g, gamma=2)
        penalties.append(loss.item() - np.log(2))
    v = {True: 3 / 8 + 0, False: 3 / 8 + 1 / 2}[z is A]  # of the shape and of the colour
    distance = ((of_images(z).mean(0) - G) ** 2).sum()
    assert np.mean(penalties) == pytest.approx(distance + v / 2 * (4 - 2) / (4 - 1), abs=1e-6)


def loss(a, gamma, batch, colour, shape=0.75):
    """The expected loss for lengths a [..., 2] in docs/fediir_limits.md, from all four cases."""
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
    """The rows of the table there: (agreements, batch size) -> gamma -> (shape, colour)."""
    rows, colour = {}, None
    lines = LIMITS.split("<!-- lengths -->\n")[1].split("\n\n")[0].split("\n")
    cells = [[cell.strip() for cell in line[1:-1].split("|")] for line in lines]
    gammas = [float(cell.removeprefix("gamma ")) for cell in cells[0][2:]]
    for name, batch, *pairs in cells[2:]:
        colour = tuple(int(share) / 100 for share in re.findall(r"(\d+) %", name)) or colour
        lengths = [np.array(pair.split(", "), float) for pair in pairs]
        rows[colour, float(batch.replace("all", "inf"))] = dict(zip(gammas, lengths, strict=True))
    return rows


@pytest.mark.parametrize(("colour", "batch"), table())
def test_a_row_of_the_table_of_lengths(colour, batch):
    for gamma, lengths in table()[colour, batch].items():
        assert lengths == pytest.approx(smallest(gamma, batch, colour), abs=0.00501), gamma


# -------------------------------------------------------------------------------------- uefl.md

WORDS, TOKENS = np.array([-3.0, 0, 3]), {"A": [-3.0, 3], "B": [-1.0, 1], "C": [-3.0, 3]}


def uncertainty(tokens, words):
    """The mean entropy of tokens on a line, each replaced by the nearest of these words."""
    nearest = [min(words, key=lambda c: abs(c - z)) for z in tokens]
    p = np.array([1 / (1 + np.exp(-c)) for c in nearest])
    return np.mean(-p * np.log(p) - (1 - p) * np.log(1 - p))


def test_a_silo_gains_words_and_its_uncertainty_falls():
    before = np.array([uncertainty(z, WORDS) for z in TOKENS.values()])
    own = {"A": WORDS, "B": [*WORDS, -1, 1], "C": WORDS}
    after = np.array([uncertainty(z, own[silo]) for silo, z in TOKENS.items()])
    assert before[1] == pytest.approx(np.log(2)), "both tokens of B become the word 0"
    printed = re.findall(r"^>>> uncertainties\(.*\ntensor\(\[(.*)\]\)", UEFL, re.M)
    first, second = (np.array(numbers.split(","), float) for numbers in printed)
    assert first == pytest.approx(before, abs=5e-5) and second == pytest.approx(after, abs=5e-5)
    assert (before > 1.1 * before.min()).tolist() == [False, True, False], "the rule picks B"
    assert (after > 1.1 * after.min()).tolist() == [False, True, False], "and would do so again"
    for number in (1 / (1 + np.exp(-3)), before[0], 1 / (1 + np.exp(-1)), np.log(2)):
        assert f"{number:.3f}" in UEFL
