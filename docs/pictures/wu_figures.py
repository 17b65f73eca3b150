"""Draws wu_figures.png, OOD on CIFAR-10 as in figures 3b, 4b, 5b and 5e of Wu et al.

python -m docs.pictures.wu_figures
"""

from pathlib import Path

import numpy as np

from common.runner import plots
from results.tables import recorded_runs, series

SEEDS = (3, 4, 5)
LABELS = {
    "hull": "hull",
    "minimax": "minimax",
    "random": "ten random",
    "power-of-choice": "Power-of-Choice",
    "full": "Full (all 40)",
    "maxsim": "MaxSim",
    "interior": "Interior",
}  # experiment -> label, in the order of the colours
PANELS = {
    "as figure 3b: other selections": "hull minimax random power-of-choice",
    "as figure 4b: all clients": "hull minimax full",
    "as figure 5b or 5e: minimax and MaxSim": "minimax maxsim",
    "as figure 5b or 5e: hull and Interior": "hull interior",
}


def draw(file: Path) -> None:
    runs = recorded_runs()
    with plots.picture(file, 7.2, 5.4) as figure:
        panels = figure.subplots(2, 2, sharey=True).flat
        for axes, (title, names) in zip(panels, PANELS.items()):
            for name in names.split():
                of_seeds = runs[f"wu/cifar10/{name}"]
                curves = [series(of_seeds[seed], "ood_accuracy") for seed in SEEDS]
                values = np.array([[*curve.values()] for curve in curves])
                i = [*LABELS].index(name)
                plots.mean_and_runs(axes, i, [*curves[0]], values, LABELS[name])
            axes.plot([], color="0.6", lw=0.6, label="each seed")
            axes.set(title=title, xlabel="round", ylabel="accuracy in percent")
            axes.legend(fontsize=8, loc="lower right")


if __name__ == "__main__":
    draw(Path(__file__).with_suffix(".png"))
