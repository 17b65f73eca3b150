"""Draws uefl_words.png, and writes its table into docs/uefl.md: how many of few codewords are used.

python uefl.py --no-compare --iterations 1 --codebook-size 3 --segments 2 --seed 300 301 736
python -m docs.pictures.uefl_words

The first line is a row of the table. uefl_words.csv has all runs after the six rounds before words
are added, and the ends of those that went on (means of the last five evaluations). Those with six
words and one segment are from results/silos.csv.
"""

import csv
import re
from pathlib import Path

from common.runner import plots

HERE = Path(__file__).parent
SEEDS = ("300", "301", "736")


def runs() -> dict[tuple[str, str, str], dict[str, str]]:
    """(words, segments, seed) -> mP, and accuracies of the turned and of all silos in percent."""
    with open(HERE / "uefl_words.csv") as file:
        return {(r["words"], r["segments"], r["seed"]): r for r in csv.DictReader(file)}


def table() -> str:
    """Rows of the page's table, with the seeds in order, and "-" for a run that is missing."""
    found, rows = runs(), ""
    for words, segments in sorted({key[:2] for key in found}):
        cells = [
            ", ".join(found.get((words, segments, seed), {column: "-"})[column] for seed in SEEDS)
            for column in ("mP", "turned")
        ]
        rows += f"| {words} | {segments} | {' | '.join(cells)} |\n"
    return rows


def draw(file: Path) -> None:
    with plots.picture(file, 7.2, 3.0) as figure:
        used, turned = figure.subplots(1, 2, sharex=True)
        for i, segments in enumerate("12"):
            of_segments = [run for key, run in runs().items() if key[1] == segments]
            at = [int(run["words"]) + 0.2 * (i - 0.5) for run in of_segments]
            name = f"{segments} segment{'s' * i}"
            style = dict(ls="none", marker="os"[i], color=plots.COLOURS[i], mfc="none", label=name)
            for axes, column in ((used, "mP"), (turned, "turned")):
                axes.plot(at, [float(run[column]) for run in of_segments], **style)
        used.plot((2, 6), (2, 6), color="0.5", ls=":", lw=0.9)
        turned.axhline(10, color="0.5", ls=":", lw=0.9)
        used.set(title="words in use (mP)\ndotted: all", ylim=(0, 6.5))
        turned.set(title="accuracy of the turned silos (percent)\ndotted: chance", ylim=(0, 50))
        for axes in (used, turned):
            axes.set(xlabel="codewords", xticks=(2, 3, 4, 6))
        figure.legend(*used.get_legend_handles_labels(), loc=plots.BELOW, ncols=2)


if __name__ == "__main__":
    draw(HERE / "uefl_words.png")
    page = HERE.parent / "uefl.md"
    text = re.sub(r"(<!-- words -->\n.*\n.*\n)(?:\|.*\n)*", rf"\g<1>{table()}", page.read_text())
    page.write_text(text)
