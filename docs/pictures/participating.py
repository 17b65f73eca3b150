"""Draws participating.png: how many clients must take part, so that the others are served?

python -m docs.pictures.participating
"""

from pathlib import Path

import numpy as np

from common.runner import plots
from results.tables import recorded_runs, series

PARTICIPATING = (10, 20, 40, 80)
COLUMNS = {"ood_accuracy": "OOD", "unseen_worst": "worst tenth of those who never train"}


def ends(runs, method: str, column: str) -> np.ndarray:
    """The mean of the last five evaluations, in percent: [numbers of participants, seeds]."""
    of_all = [runs[f"unseen/glyphs-{m}/{method}"] for m in PARTICIPATING]
    common = set.intersection(*map(set, of_all))  # the seeds that each has
    curves = [[series(of_seeds[seed], column) for seed in sorted(common)] for of_seeds in of_all]
    return np.array([[np.mean([*curve.values()][-5:]) for curve in of_m] for of_m in curves])


def draw(file: Path) -> None:
    runs = recorded_runs()
    with plots.picture(file, 7.2, 2.9) as figure:
        for axes, (column, title) in zip(figure.subplots(1, 2, sharey=True), COLUMNS.items()):
            for i, (method, label) in enumerate({"fedavg": "FedAvg", "hull": "hull"}.items()):
                values = ends(runs, method, column)
                plots.mean_and_runs(axes, i, [*map(str, PARTICIPATING)], values.T, label)
            axes.axhline(10, color="0.5", ls=":", lw=0.9, label="chance")
            axes.set(title=title, xlabel="clients that participate, of 100", ylim=(0, 101))
        figure.axes[0].set(ylabel="accuracy (percent)")
        if values.shape[1] > 1:
            figure.axes[0].plot([], color="0.6", lw=0.6, label="each seed")
        labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(*labels, loc=plots.BELOW, ncols=4)


if __name__ == "__main__":
    draw(Path(__file__).with_suffix(".png"))
