"""Draws round.png, a round of FedAvg and the step that each method changes.

python docs/pictures/round.py
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

# The centre of a step's box, what happens there, where the files that change it are named, and how
STEPS = [
    ((0, 1.7), "1  The server selects\nsome of the clients", (0, 1.15),
     "minimax_select.py, convex_hull_select.py:\nthose that are unlike the others"),
    ((3.9, 0), "2  They get the model", (0, 0), ""),
    ((0, -1.7), "3  Each trains it\non its own data", (0, -1.15),
     "fediir.py: and learns only\nwhat the clients agree about"),
    ((-3.9, 0), "4  The server averages\nwhat they have learned", (0, 1.1),
     "entropy_weighting.py: those with\nmany classes count more"),
]  # fmt: skip
ARROWS = [((2.2, 1.6), (3.7, 0.65)), ((3.7, -0.65), (2.2, -1.6)),
          ((-2.2, -1.6), (-3.7, -0.65)), ((-3.7, 0.65), (-2.2, 1.6))]  # fmt: skip
WIDTH, HEIGHT = 3.9, 0.95
COLOUR = "#d55e00"  # of what the methods change


def draw(file: Path) -> None:
    figure, axes = plt.subplots(figsize=(9.4, 4.4))
    for (x, y), step, (dx, dy), change in STEPS:
        corner = (x - WIDTH / 2, y - HEIGHT / 2)
        axes.add_patch(FancyBboxPatch(corner, WIDTH, HEIGHT, "round,pad=0.08", fc="0.94", ec="0.6"))
        axes.text(x, y, step, ha="center", va="center", fontsize=9)
        side = 0 if x == 0 else 1.0 if x > 0 else -1.0  # outwards, away from the arrows
        place = {"ha": "center", "va": "center", "fontsize": 9, "color": COLOUR}
        axes.text(x + dx + 2.2 * side, y + dy, change, **place)
    for start, end in ARROWS:
        bent = {"connectionstyle": "arc3,rad=-0.2", "arrowstyle": "-|>"}
        axes.add_patch(FancyArrowPatch(start, end, mutation_scale=16, color="0.5", **bent))
    axes.text(0, 0.5, "fedavg.py\nthe plain round", ha="center", va="center", fontsize=12)
    between = "uefl.py, between rounds:\nnew words for clients\nwith odd data"
    axes.text(0, -0.5, between, ha="center", va="center", fontsize=9, color=COLOUR)
    axes.set(xlim=(-7.8, 7.8), ylim=(-3.3, 3.3), aspect="equal")
    axes.axis("off")
    figure.savefig(file, dpi=150, bbox_inches="tight", metadata={"Software": None})


if __name__ == "__main__":
    draw(Path(__file__).with_suffix(".png"))
