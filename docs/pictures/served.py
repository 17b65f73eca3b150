"""Draws served.png: how FedAvg's example serves the 40 clients and the 60 that never train.

python -m docs.pictures.served
"""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

import fedavg
from common.runner import plots

SEED = 860  # one of the seeds of section 6's row


def sorted_accuracies(alpha: float, rounds: int) -> tuple[np.ndarray, np.ndarray]:
    """After the last round, in percent: the M participating clients', and the N - M others'."""
    words = f"--dirichlet {alpha} --rounds {rounds} --seed {SEED} --no-compare"
    with TemporaryDirectory() as folder:
        [[run]] = fedavg.main([*words.split(), "--out", f"{folder}/run"]).values()
    last = run.rows[-1]
    return tuple(100 * np.sort(last[name]) for name in ("accuracies", "unseen_accuracies"))


def draw(file: Path) -> None:
    with plots.picture(file, 7.2, 2.9) as figure:
        for axes, alpha in zip(figure.subplots(1, 2, sharey=True), (0.1, 1)):
            for i, (label, values) in enumerate(
                zip(("40 participate", "60 never train"), sorted_accuracies(alpha, 20))
            ):
                share = 100 * (np.arange(len(values)) + 0.5) / len(values)
                axes.plot(share, values, plots.LINES[i], color=plots.COLOURS[i], label=label)
            axes.axhline(10, color="0.5", ls=":", lw=0.9, label="chance")
            axes.set(title=f"alpha {alpha:g}", xlabel="clients, the worst first (percent)")
            axes.set(ylim=(0, 101), xlim=(0, 100))
        figure.axes[0].set(ylabel="accuracy (percent)")
        labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(*labels, loc=plots.BELOW, ncols=3)


if __name__ == "__main__":
    draw(Path(__file__).with_suffix(".png"))
