"""The numbers of the toys in docs/fediir.md and docs/uefl.md, by hand: without the functions of the two methods."""

import doctest
import re
from pathlib import Path

import numpy as np
import pytest

DOCS = Path(__file__).parent.parent / "docs"


def shown(page):
    """What the examples of a page print: code -> numbers."""
    examples = doctest.DocTestParser().get_examples(
        (DOCS / f"{page}.md").read_text().replace("\n```\n", "\n\n")
    )
    return {
        e.source.split("  #")[0].strip(): np.array(re.findall(r"-?\d+\.\d+", e.want), float)
        for e in examples
    }


def softmax(logits):
    return np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)


# ---------------------------------------------------------------------------------------------------------- fediir.md

Y = np.array([1, 1, 0, 0])
A = np.array([[1, 1], [1, 1], [-1, -1], [1, -1]])  # shape, colour
B = np.array([[1, 1], [1, -1], [-1, -1], [1, 1]])
RIGHT = {  # how often shape and colour agree with the label, counted in the images
    name: ((2 * Y - 1)[:, None] * z == 1).mean(0) for name, z in (("A", A), ("B", B))
}


def of_images(z, keep=(1, 1), omega=((0, 0), (0, 0))):
    """The gradient of each image's cross-entropy for a linear classifier: (p - one-hot) z^T, flat [4, 4]."""
    z = z * np.array(keep)
    return ((softmax(z @ np.transpose(omega)) - np.eye(2)[Y])[:, :, None] * z[:, None, :]).reshape(
        4, 4
    )


def test_the_toy_has_the_features_that_the_page_describes():
    assert RIGHT["A"].tolist() == [0.75, 1.0] and RIGHT["B"].tolist() == [0.75, 0.5]


def test_the_clients_gradients_differ_in_the_colour_alone():
    gradients = np.array([of_images(z).mean(0) for z in (A, B)])
    of_class_1 = (
        -(2 * np.array([RIGHT["A"], RIGHT["B"]]) - 1) / 2
    )  # minus half the mean of +1 (right) and -1 (wrong)
    assert np.allclose(gradients, np.hstack([-of_class_1, of_class_1]))
    assert np.allclose(shown("fediir")["gradients(4)"].reshape(2, 4), gradients)


def test_the_loss_is_log_2_and_the_penalty():
    """Client A is 1/4 from the mean in the colour, for both classes."""
    value = shown("fediir")["fediir_loss(torch.nn.Identity(), classifier, A, y, g, gamma=2).item()"]
    assert value == pytest.approx(np.log(2) + 2 / 2 * 2 * (1 / 4) ** 2, abs=1e-6)


@pytest.mark.parametrize("size", [4, 1])
def test_the_penalty_charges_colour_alone_on_all_data_and_both_features_on_single_images(size):
    penalties = []
    for keep in ((1, 0), (0, 1)):
        batches = np.concatenate(
            [of_images(z, keep).reshape(4 // size, size, 4).mean(1) for z in (A, B)]
        )
        penalties.append(((batches - batches.mean(0)) ** 2).sum(1).mean())
    code = f"(gradients({size}) - g).square().mean(0).view(2, 2).sum(0)"
    assert penalties == pytest.approx({4: [0, 1 / 8], 1: [3 / 8, 3 / 8]}[size])
    assert shown("fediir")[code] == pytest.approx(penalties)


def test_the_variance_is_what_single_images_add():
    """Section 8: E||g_B - g||^2 = ||g_c - g||^2 + V_c / B, for all batches of two, with and without repetition."""
    g = np.mean([of_images(z).mean(0) for z in (A, B)], 0)
    variances = {}
    for name, z in (("A", A), ("B", B)):
        one = of_images(z)
        variance = ((one - one.mean(0)) ** 2).sum(1).mean()
        pairs = {(i, j): (one[i] + one[j]) / 2 for i in range(4) for j in range(4)}
        distances = {ij: ((mean - g) ** 2).sum() for ij, mean in pairs.items()}
        gap = ((one.mean(0) - g) ** 2).sum()
        assert np.mean(list(distances.values())) == pytest.approx(gap + variance / 2)
        without = [d for (i, j), d in distances.items() if i != j]
        assert np.mean(without) == pytest.approx(gap + variance / 2 * (4 - 2) / (4 - 1)), (
            "the page's factor"
        )
        for feature, keep in (("shape", (1, 0)), ("colour", (0, 1))):
            alone = of_images(z, keep)
            variances[name, feature] = ((alone - alone.mean(0)) ** 2).sum(1).mean()
    assert variances == {
        ("A", "shape"): 3 / 8,
        ("A", "colour"): 0,
        ("B", "shape"): 3 / 8,
        ("B", "colour"): 1 / 2,
    }


def test_smaller_features_and_larger_weights_lower_the_penalty_a_hundredfold_and_change_no_prediction():
    omega = np.array([[0.3, -0.2], [0.5, 1.1]])
    penalties = []
    for k in (1, 10):
        of_clients = np.array([of_images(z, (1 / k, 1 / k), k * omega).mean(0) for z in (A, B)])
        penalties.append(((of_clients - of_clients.mean(0)) ** 2).sum(1).mean())
    assert penalties[0] == pytest.approx(100 * penalties[1]) and penalties[0] > 1e-3
    assert np.allclose(softmax(A @ omega.T), softmax(A / 10 @ (10 * omega).T))


def loss(a, gamma, batch, colour, shape=0.75):
    """The expected loss of section 8's toy for lengths a [..., 2], written out for the four cases (right, wrong)."""
    terms = []
    for c in colour:
        cases = [
            (shape * c, 1, 1),
            (shape * (1 - c), 1, -1),
            ((1 - shape) * c, -1, 1),
            ((1 - shape) * (1 - c), -1, -1),
        ]
        risk, mean, square = 0, [0, 0], 0
        for share, first, second in cases:
            margin = first * a[..., 0] + second * a[..., 1]
            one = [
                -first * a[..., 0] / (1 + np.exp(margin)),
                -second * a[..., 1] / (1 + np.exp(margin)),
            ]
            risk = risk + share * np.log(1 + np.exp(-margin))
            mean = [mean[0] + share * one[0], mean[1] + share * one[1]]
            square = square + share * (one[0] ** 2 + one[1] ** 2)
        terms.append((risk, mean, square - mean[0] ** 2 - mean[1] ** 2))
    g = [np.mean([mean[j] for _, mean, _ in terms], 0) for j in (0, 1)]
    return sum(
        risk + gamma / 2 * ((mean[0] - g[0]) ** 2 + (mean[1] - g[1]) ** 2 + variance / batch)
        for risk, mean, variance in terms
    ) / len(colour)  # fmt: skip


def smallest(gamma, batch, colour):
    """Where the loss is smallest, by comparing all points of grids that become finer: no optimizer, no start."""
    low, high = np.zeros(2), np.full(2, 3.0)
    for _ in range(6):
        axes = [np.linspace(low[j], high[j], 61) for j in (0, 1)]
        points = np.stack(np.meshgrid(*axes, indexing="ij"), -1)
        found = points.reshape(-1, 2)[loss(points, gamma, batch, colour).argmin()]
        step = (high - low) / 60
        low, high = np.maximum(found - 3 * step, 0), found + 3 * step
    return found


def table():
    """The rows of section 8's table: (agreements, batch size) -> gamma -> (shape, colour)."""
    rows, colour = {}, None
    text = (DOCS / "fediir.md").read_text().split("<!-- lengths -->\n")[1].split("\n\n")[0]
    cells = [[cell.strip() for cell in line[1:-1].split("|")] for line in text.split("\n")]
    gammas = [float(cell.removeprefix("gamma ")) for cell in cells[0][2:]]
    for name, batch, *pairs in cells[2:]:
        colour = tuple(int(share) / 100 for share in re.findall(r"(\d+) %", name)) or colour
        lengths = [tuple(map(float, pair.split(", "))) for pair in pairs]
        batch = np.inf if batch == "all" else float(batch)
        rows[colour, batch] = dict(zip(gammas, lengths, strict=True))
    return rows


@pytest.mark.parametrize(("colour", "batch"), table())
def test_a_row_of_the_table_of_section_8(colour, batch):
    for gamma, lengths in table()[colour, batch].items():
        assert lengths == pytest.approx(smallest(gamma, batch, colour), abs=0.00501), gamma


def test_batches_of_32_leave_no_gamma_at_which_the_shape_is_the_larger_one_at_90_and_80_percent():
    pairs = [smallest(gamma, 32, (0.9, 0.8)) for gamma in np.geomspace(0.1, 1e5, 13)]
    assert all(colour > shape for shape, colour in pairs)


def test_the_penalty_is_the_disagreement_and_the_pull_of_an_old_mean():
    """Section 8: the mean of ||g_c - g||^2 is that of ||g_c - m||^2, plus ||m - g||^2."""
    clients = np.array([of_images(z, omega=((0.3, -0.2), (0.5, 1.1))).mean(0) for z in (A, B)])
    m, old = clients.mean(0), np.array([of_images(z).mean(0) for z in (A, B)]).mean(0)
    charged = ((clients - old) ** 2).sum(1).mean()
    disagreement, pull = ((clients - m) ** 2).sum(1).mean(), ((m - old) ** 2).sum()
    assert charged == pytest.approx(disagreement + pull) and min(disagreement, pull) > 1e-3


# ------------------------------------------------------------------------------------------------------------ uefl.md

WORDS, TOKENS = np.array([-3.0, 0, 3]), {"A": [-3.0, 3], "B": [-1.0, 1], "C": [-3.0, 3]}


def uncertainty(tokens, words):
    """The mean entropy of tokens on a line, each replaced by the nearest of these words."""
    nearest = [min(words, key=lambda c: abs(c - z)) for z in tokens]
    p = np.array([1 / (1 + np.exp(-c)) for c in nearest])
    return np.mean(-p * np.log(p) - (1 - p) * np.log(1 - p))


def test_a_silo_gains_words_and_its_uncertainty_falls():
    before = [uncertainty(z, WORDS) for z in TOKENS.values()]
    own = {"A": WORDS, "B": [*WORDS, -1, 1], "C": WORDS}
    after = [uncertainty(z, own[silo]) for silo, z in TOKENS.items()]
    assert before[1] == pytest.approx(np.log(2)), "both tokens of B become the word 0"
    printed = re.findall(
        r"^>>> uncertainties\(.*\ntensor\(\[(.*)\]\)", (DOCS / "uefl.md").read_text(), re.M
    )
    first, second = (np.array(numbers.split(","), float) for numbers in printed)
    assert first == pytest.approx(before, abs=5e-5) and second == pytest.approx(after, abs=5e-5)
    assert after[1] < before[1] and after[0] == before[0] == after[2]


def test_the_rule_picks_the_silo_in_between_and_never_the_one_with_exchanged_labels():
    before = np.array([uncertainty(z, WORDS) for z in TOKENS.values()])
    assert (before > 1.1 * before.min()).tolist() == [False, True, False]
    assert "tensor([False,  True, False])" in (DOCS / "uefl.md").read_text()
    assert uncertainty(TOKENS["B"], [*WORDS, -1, 1]) > 1.1 * before.min(), (
        "the page: it would be extended again"
    )
    text = (DOCS / "uefl.md").read_text()
    for number in (1 / (1 + np.exp(-3)), before[0], 1 / (1 + np.exp(-1)), np.log(2)):
        assert f"{number:.3f}" in text
    assert f"{1.1 * before.min():.4f}" in text
