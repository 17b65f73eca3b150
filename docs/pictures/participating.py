"""Draws participating.png: how many clients must take part, so that the others are served?

python -m docs.pictures.participating
"""

from pathlib import Path

import numpy as np

from common.runner import plots
from results.tables import recorded_runs, series

PARTICIPATING = (10, 20, 40, 80)
DATA = {"glyphs": "drawn digits", "cifar10": "CIFAR-10"}
COLUMNS = {"ood_accuracy": "OOD", "unseen_worst": "worst tenth of those who never train"}


def ends(runs, data: str, method: str, column: str) -> np.ndarray:
    """The mean of the last five evaluations, in percent: [numbers of participants, seeds]."""
    of_all = [runs[f"unseen/{data}-{m}/{method}"] for m in PARTICIPATING]
    common = set.intersection(*map(set, of_all))  # the seeds that each has
    curves = [[series(of_seeds[seed], column) for seed in sorted(common)] for of_seeds in of_all]
    return np.array([[np.mean([*curve.values()][-5:]) for curve in of_m] for of_m in curves])


def draw(file: Path) -> None:
    runs = recorded_runs()
    with plots.picture(file, 7.2, 5) as figure:
        for (data, name), row in zip(DATA.items(), figure.subplots(2, 2, sharey="row")):
            for axes, (column, title) in zip(row, COLUMNS.items()):
                for i, (method, label) in enumerate({"fedavg": "FedAvg", "hull": "hull"}.items()):
                    values = ends(runs, data, method, column)
                    plots.mean_and_runs(axes, i, [*map(str, PARTICIPATING)], values.T, label)
                axes.plot([], color="0.6", lw=0.6, label="each seed")
                axes.axhline(10, color="0.5", ls=":", lw=0.9, label="chance")
                axes.set(title=f"{name}: {title}", ylim=(0, 101 if data == "glyphs" else 61))
            row[0].set(ylabel="accuracy (percent)")
        for axes in row:
            axes.set(xlabel="clients that participate, of 100")
        figure.legend(*axes.get_legend_handles_labels(), loc=plots.BELOW, ncols=4)


if __name__ == "__main__":
    draw(Path(__file__).with_suffix(".png"))
