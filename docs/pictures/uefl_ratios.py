"""Draws uefl_ratios.png, how uncertain the silos are, from the run of UEFL's example.

python uefl.py --no-compare --out runs/uefl
python -m docs.pictures.uefl_ratios runs/uefl/metrics.csv
"""

import csv
import sys
from pathlib import Path

import numpy as np

from common.runner import plots

SILOS = ["upright", "upright", "upright", "turned by -50 degrees", "turned by 120 degrees"]


def draw(file: Path, rows: list[dict[str, str]]) -> None:
    """rows  of metrics.csv, one per round"""
    rounds = [int(row["round"]) for row in rows]
    *ends, _ = {row["iteration"]: int(row["round"]) for row in rows}.values()
    e = np.array([row["uncertainties"].split() for row in rows], float)
    ratios = e / e.min(1, keepdims=True)
    with plots.picture(file, 7.2, 3.3) as figure:
        axes = figure.subplots()
        for k, name in enumerate(SILOS):
            i = len({*SILOS[: k + 1]}) - 1
            label = name if name not in SILOS[:k] else None
            axes.plot(rounds, ratios[:, k], plots.LINES[i], color=plots.COLOURS[i], label=label)
        for gamma in (0.05, 0.3, 3):
            axes.hlines(1 + gamma, 0.5, rounds[-1], color="0.5", ls=":", lw=0.9)
            axes.text(
                rounds[-1] + 0.3, 1 + gamma, f"limit, gamma {gamma}", va="center", color="0.35"
            )
        for end in ends:
            label = "words are added" if end == ends[0] else None
            axes.axvline(end, color="0.7", lw=0.8, label=label)
        axes.set(title="uncertainty, as a multiple of that of the most certain silo")
        axes.set(xlabel="round", xlim=(0.5, rounds[-1] + 3.5), ylim=(0.9, 4.2))
        axes.set_xticks(range(0, rounds[-1] + 1, 3))
        figure.legend(loc=plots.BELOW, ncols=4, columnspacing=1)


if __name__ == "__main__":
    with open(sys.argv[1]) as metrics:
        draw(Path(__file__).with_suffix(".png"), [*csv.DictReader(metrics)])
