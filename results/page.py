"""Rebuilds results/README.md, README.md's table, the tables in docs/, and the pictures of results.

The words of README's table come from the intervals.
"""

from pathlib import Path

import numpy as np
from scipy.stats import ttest_1samp

from common import plots
from common.compare import interval
from results import tables
from results.tables import RESULTS, Comparison, around, first_half, pm, show, spread, with_interval

WORDS = {"mE": ("fall", "rise", "lower", "higher")}


def holm(p: list[float]) -> np.ndarray:
    """Holm's correction: the smallest p times their number, the next times one less, and so on."""
    order = np.argsort(p)
    corrected = np.sort(p) * np.arange(len(p), 0, -1)
    return np.maximum.accumulate(corrected).clip(max=1)[order.argsort()]


def size(value: float, column: str) -> str:
    """Without its sign, and with two digits if it would be zero."""
    short = show(abs(value), column)
    return f"{abs(value):.2f}" if short == "0.0" else short


def bounds(c: Comparison, difference: np.ndarray) -> str:
    """An interval in words: where the difference is, or how large a gain or a loss can be."""
    _, low, high = interval(-difference if c.column == "mE" else difference)
    gain, loss, better, worse = WORDS.get(c.column, ("gain", "loss", "better", "worse"))
    least, most = size(low, c.column), size(high, c.column)
    if low > 0:
        return f"{least} to {most} {better}"
    if high < 0:
        return f"{most} to {least} {worse}"
    return f"no {gain} above {most} and no {loss} above {least}"


def against_paper(c: Comparison, difference: np.ndarray) -> str:
    """Whether these differences can be those of the paper, whose own spread counts, too."""
    _, low, high = interval(difference)
    if c.welch(difference) < 0.05:
        return "the paper's is excluded"
    return (
        "the paper's fits"
        if low < c.effect < high
        else "the paper's is outside, but its spread allows it"
    )


def ruled_out(c: Comparison) -> str:
    """The answer of a row in words."""
    end, early = c.difference(), c.difference(first_half)
    words = f"At the end {bounds(c, end)}"
    if early.mean() > end.mean() and interval(early)[1] > 0 and c.column != "mE":
        words += f", but {bounds(c, early)} in the first half of the rounds"
    if c.paper:
        no_room = c.column != "mE" and c.sides()[1].mean() + c.effect > 100
        words += "; " + ("the paper's would be above 100 %" if no_room else against_paper(c, end))
    if level := c.level():
        there = c.difference(around(level))
        words += f". In round {level}, when the baseline first has the paper's"
        words += f" {spread(c.paper_baseline)[0]:g}: {bounds(c, there)}; {against_paper(c, there)}"
    return words + "."


def effect(c: Comparison) -> str:
    return show(c.effect, c.column, "+") if c.paper else ""


def at_level(c: Comparison) -> str:
    """The second measure, p of the paper's effect, and the round."""
    if not (level := c.level()):
        return ""
    there = c.difference(around(level))
    return f"{with_interval(there, c.column)}, p {c.welch(there):.3f}, round {level}"


def tests(rows: list[Comparison]) -> list[list[str]]:
    """What the answers of the eight rows rest on."""
    zero = [ttest_1samp(c.difference(), 0).pvalue for c in rows]
    paper = [c.welch(c.difference()) if c.paper else 1 for c in rows]
    lines = [
        ["", "p of zero, with Holm's correction", "p of the paper's effect, with it", "we expected"]
    ]
    for c, *p in zip(rows, zero, holm(zero), paper, holm(paper), strict=True):
        texts = ["{:.3f}, {:.3f}".format(*two) for two in (p[:2], p[2:])]
        lines.append([c.label, texts[0], texts[1] if c.paper else "", c.expected])
    return lines


def table(rows: list[Comparison]) -> list[list[str]]:
    """Method and baseline, seed by seed. A column without any text is left out."""
    lines = [["", "method", "baseline", "difference", "seeds", "the paper", "at the paper's level"]]
    for c in rows:
        both = [pm(side, c.column) for side in c.sides()]
        difference = with_interval(c.difference(), c.column)
        if c.measure == "ratio":
            both = ["", ""]
            difference = "{:.2f} ({:.2f} to {:.2f}) times".format(*np.exp(interval(c.difference())))
        seeds = f"{len(c.common)}" + f": {c.seeds}" * bool(c.seeds)
        lines.append([c.label, *both, difference, seeds, effect(c), at_level(c)])
    kept = [column for column in zip(*lines, strict=True) if any(column[1:])]
    return [list(line) for line in zip(*kept, strict=True)]


def draw(file: Path, rows: list[Comparison], columns: int) -> None:
    """A panel for each comparison: both sides over the rounds, and what the paper reports."""
    height = -(-len(rows) // columns)
    with plots.drawn(file, 3.4 * columns, 2.9 * height) as figure:
        for i, c in enumerate(rows, start=1):
            axes = figure.add_subplot(height, columns, i)
            names, _, title = c.label.partition(": ")
            rounds, values = c.curves()
            papers = (c.paper, c.paper_baseline)
            for k, name in enumerate(names.split(", not ")):
                mean, deviation = values[:, k].mean(1), values[:, k].std(1, ddof=1)
                colour = plots.COLOURS[k]
                axes.plot(rounds, mean, plots.LINES[k], color=colour, label=name)
                axes.fill_between(
                    rounds, mean - deviation, mean + deviation, color=colour, alpha=0.18, lw=0
                )
                if c.paper:
                    axes.axhline(spread(papers[k])[0], color=colour, ls=":", lw=1)
            percent = c.column.startswith(tables.IN_PERCENT)
            axes.set(title=title, xlabel="round", ylabel="percent" if percent else "")
            axes.legend(loc="best", fontsize=8)


def main() -> None:
    runs = {}
    for name in ("wu", "fediir", "uefl", "examples"):
        runs |= tables.read(RESULTS / f"{name}.csv")
    blocks = tables.comparisons("results", runs)
    rows = blocks["main"]
    of_page = {name: table(of_block) for name, of_block in blocks.items()}
    tables.build(RESULTS / "README.md", of_page | {"tests": tests(rows)})
    words = [[c.label, effect(c), ruled_out(c)] for c in rows]
    header = ["", "the paper", "our runs, with 95 % confidence"]
    tables.build(RESULTS / "../README.md", {"eight-rows": [header, *words]})
    draw(RESULTS / "uefl.png", rows[:2], 2)
    spreads = [c for c in blocks["fediir"] if c.measure]
    draw(RESULTS / "fediir.png", [rows[2], *spreads], 2)
    on_cifar10 = [c for c in blocks["wu"] if c.paper]
    draw(RESULTS / "wu.png", rows[3:] + on_cifar10[:1], 3)
    for file in sorted((RESULTS / "../docs").glob("*.md")):
        of_file = tables.comparisons(f"docs/{file.stem}", runs)
        tables.build(file, {name: table(of_block) for name, of_block in of_file.items()})
