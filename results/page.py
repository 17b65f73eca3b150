"""Rebuilds results/README.md, README.md's table, the tables in docs/, and the pictures of results.

The words of README's table come from the intervals.
"""

from pathlib import Path

import numpy as np

from common import plots
from common.compare import interval
from results import tables
from results.tables import RESULTS, Comparison, around, first_half, pm, show, spread, with_interval


def size(value: float, column: str) -> str:
    """Without its sign, and with two digits if it would be zero."""
    short = show(abs(value), column)
    return f"{abs(value):.2f}" if short == "0.0" else short


def bounds(c: Comparison, difference: np.ndarray) -> str:
    """The 95 % interval of these differences in words."""
    better, worse = ("lower", "higher") if c.column == "mE" else ("better", "worse")
    _, low, high = interval(-difference if c.column == "mE" else difference)
    least, most = size(low, c.column), size(high, c.column)
    if low > 0:
        return f"{least} to {most} {better}"
    if high < 0:
        return f"{most} to {least} {worse}"
    return f"{least} {worse} to {most} {better}"


def against_paper(c: Comparison, difference: np.ndarray) -> str:
    """Whether these differences can be those of the paper, whose own spread counts, too."""
    _, low, high = interval(difference)
    if c.welch(difference) < 0.05:
        return "the paper's is excluded"
    return "both none and the paper's are possible" if low < 0 < high else "the paper's is possible"


def answers(c: Comparison) -> list[str]:
    """A row of README's table: early, at the end, and at the paper's level."""
    end = c.difference()
    cells = [bounds(c, c.difference(first_half)), bounds(c, end), ""]
    if c.paper:
        no_room = c.column != "mE" and c.sides()[1].mean() + c.effect > 100
        cells[1] += "; "
        cells[1] += "the paper's would be above 100 %" if no_room else against_paper(c, end)
    if level := c.level():
        there = c.difference(around(level))
        cells[2] = f"round {level}: {bounds(c, there)}; {against_paper(c, there)}"
    return [c.label, effect(c), *cells]


def effect(c: Comparison) -> str:
    return show(c.effect, c.column, "+") if c.paper else ""


def at_level(c: Comparison) -> str:
    """The second measure, p of the paper's effect, the round, and the baseline there."""
    if not (level := c.level()):
        return ""
    there = c.difference(around(level))
    baseline = show(c.sides(around(level))[1].mean(), c.column)
    return f"{with_interval(there, c.column)}, p {c.welch(there):.3f}, round {level} ({baseline})"


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
        paper = f"{effect(c)}, p {c.welch(c.difference()):.3f}" if c.paper else ""
        lines.append([c.label, *both, difference, seeds, paper, at_level(c)])
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
    tables.build(RESULTS / "README.md", of_page)
    header = ["", "the paper", "first half of the rounds", "the end", "at the paper's level"]
    of_readme = [header, *(answers(c) for c in rows)]
    tables.build(RESULTS / "../README.md", {"eight-rows": of_readme})
    draw(RESULTS / "uefl.png", rows[:2], 2)
    spreads = [c for c in blocks["fediir"] if c.measure]
    draw(RESULTS / "fediir.png", [rows[2], *spreads], 2)
    on_cifar10 = [c for c in blocks["wu"] if c.paper]
    draw(RESULTS / "wu.png", rows[3:] + on_cifar10[:1], 3)
    for file in sorted((RESULTS / "../docs").glob("*.md")):
        of_file = tables.comparisons(f"docs/{file.stem}", runs)
        tables.build(file, {name: table(of_block) for name, of_block in of_file.items()})
