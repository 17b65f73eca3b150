"""Draws codebook.png, how UEFL's model turns an image into words.

python docs/pictures/codebook.py
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

GREY, ORANGE = "0.45", "#d55e00"
WORDS = np.array([[-1.5, 1.1], [0.0, 1.1], [-1.2, -0.5], [0.4, -0.3]])  # of everybody
OWN = np.array([[1.8, -1.2], [2.7, -0.2]])  # of the odd client alone
BOXES = [(-7.2, "image"), (-4.7, "encoder\n$f_E$"), (5.6, "classifier\n$f_C$"), (8.1, "class")]


def plane(axes, words, spread, colour, rng) -> None:
    """Tokens around the words, each with a line to the nearest of them."""
    tokens = np.repeat(words, 5, 0) + rng.normal(0, spread, (5 * len(words), 2))
    for token in tokens:
        nearest = words[((words - token) ** 2).sum(1).argmin()]
        axes.plot(*zip(token, nearest, strict=True), color=colour, lw=0.7, zorder=1)
    axes.scatter(*tokens.T, s=14, color=colour, zorder=2)
    axes.scatter(*words.T, s=70, marker="s", color=colour, ec="black", zorder=3)


def draw(file: Path) -> None:
    rng = np.random.default_rng(1)
    figure, axes = plt.subplots(figsize=(9.4, 3.1))
    for x, name in BOXES:
        box = FancyBboxPatch((x - 0.85, -0.55), 1.7, 1.1, "round,pad=0.08", fc="0.94", ec="0.6")
        axes.add_patch(box)
        axes.text(x, 0, name, ha="center", va="center", fontsize=9)
    for start, end in ((-6.2, -5.7), (-3.7, -2.6), (3.8, 4.6), (6.6, 7.1)):
        arrow = FancyArrowPatch(
            (start, 0), (end, 0), arrowstyle="-|>", mutation_scale=14, color="0.5"
        )
        axes.add_patch(arrow)
    axes.add_patch(FancyBboxPatch((-2.3, -1.9), 5.8, 3.9, "round,pad=0.08", fc="none", ec="0.6"))
    plane(axes, WORDS, 0.33, GREY, rng)
    plane(axes, OWN, 0.3, ORANGE, rng)
    axes.text(-2.2, -1.85, "dots: tokens   squares: words", va="bottom", fontsize=8)
    axes.text(3.4, 1.9, "words of one\nclient alone", ha="right", va="top", fontsize=8,
              color=ORANGE)  # fmt: skip
    axes.text(0.6, 2.3, "codebook: each token becomes the nearest word", ha="center", fontsize=9)
    axes.set(xlim=(-8.3, 9.2), ylim=(-2.1, 2.8), aspect="equal")
    axes.axis("off")
    figure.savefig(file, dpi=150, bbox_inches="tight", metadata={"Software": None})


if __name__ == "__main__":
    draw(Path(__file__).with_suffix(".png"))
