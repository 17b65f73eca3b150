"""Draws uefl_words.png, how many of few codewords are in use, from the runs in uefl_words.csv.

python uefl.py --no-compare --codebook-size 3 --segments 2 --seed 736    (a run of each line there)
python -m docs.pictures.uefl_words
"""

import csv
from pathlib import Path

from common.runner import plots

HERE = Path(__file__).parent


def runs() -> list[dict[str, float]]:
    """Each run, with its last round, mP in round 6, and means of its last five evaluations."""
    with open(HERE / "uefl_words.csv") as file:
        return [{name: float(x) for name, x in run.items()} for run in csv.DictReader(file)]


def draw(file: Path) -> None:
    with plots.picture(file, 7.2, 3.0) as figure:
        used, turned = figure.subplots(1, 2, sharex=True)
        for i, segments in enumerate((1, 2)):
            of_segments = [run for run in runs() if run["segments"] == segments]
            at = [run["words"] + 0.2 * (i - 0.5) for run in of_segments]
            name = f"{segments} segment{'s' * i}"
            style = dict(ls="none", marker="os"[i], color=plots.COLOURS[i], mfc="none", label=name)
            used.plot(at, [run["mP_6"] for run in of_segments], **style)
            turned.plot(at, [run["turned"] for run in of_segments], **style)
        used.plot((2, 6), (2, 6), color="0.5", ls=":", lw=0.9)
        turned.axhline(10, color="0.5", ls=":", lw=0.9)
        used.set(title="words in use after six rounds (mP)\ndotted: all", ylim=(0, 6.5))
        turned.set(title="accuracy of the turned silos (percent)\ndotted: chance", ylim=(0, 80))
        for axes in (used, turned):
            axes.set(xlabel="codewords at the start", xticks=(2, 3, 4, 6))
        figure.legend(*used.get_legend_handles_labels(), loc=plots.BELOW, ncols=2)


if __name__ == "__main__":
    draw(HERE / "uefl_words.png")
