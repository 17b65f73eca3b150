"""Draws uefl_words.png: how many of few codewords are used, and how well the turned silos do.

python uefl.py --no-compare --iterations 1 --codebook-size 3 --segments 2 --seed 300 301 736
python -m docs.pictures.uefl_words

The first line makes the runs of one case. uefl_words.csv has all runs after the six rounds before
words are added, and the ends of those that went on (means of the last five evaluations). Two runs
with six words and one segment are from results/silos.csv.
"""

import csv
from itertools import product
from pathlib import Path

from common.runner import plots

HERE = Path(__file__).parent
SEEDS = ("300", "301", "736")


def runs() -> list[dict[str, str]]:
    """Of each run: words, segments and seed; mP; accuracies of the turned and of all silos (%)."""
    with open(HERE / "uefl_words.csv") as file:
        return list(csv.DictReader(file))


def draw(file: Path) -> None:
    with plots.picture(file, 7.2, 3.0) as figure:
        used, turned = figure.subplots(1, 2, sharex=True)
        for (i, name), dead in product(enumerate(("1 segment", "2 segments")), (False, True)):
            shown = [run for run in runs() if run["segments"] == name[0] and is_dead(run) == dead]
            style = dict(ls="none", marker="os"[i], color=plots.COLOURS[i])
            style |= dict(label=f"{name}, dead") if dead else dict(label=name, mfc="none")
            for axes, column in ((used, "mP"), (turned, "turned")):
                axes.plot([*map(place, shown)], [float(run[column]) for run in shown], **style)
        used.plot((2, 6), (2, 6), color="0.5", ls=":", lw=0.9)
        turned.axhline(10, color="0.5", ls=":", lw=0.9)
        used.set(title="words in use (mP)\ndotted: all", ylim=(0, 6.5))
        turned.set(title="accuracy of the turned silos (percent)\ndotted: chance", ylim=(0, 50))
        for axes in (used, turned):
            axes.set(xlabel="codewords", xticks=(2, 3, 4, 6))
        figure.legend(*used.get_legend_handles_labels(), loc=plots.BELOW, ncols=4)


def is_dead(run: dict[str, str]) -> bool:
    """Whether the codebook is: the turned silos are then near chance."""
    return float(run["turned"]) < 15


def place(run: dict[str, str]) -> float:
    """Where a run stands: beside its number of words, by segments and seed."""
    return int(run["words"]) + 0.3 * (int(run["segments"]) - 1.5) + 0.08 * SEEDS.index(run["seed"])


if __name__ == "__main__":
    draw(HERE / "uefl_words.png")
