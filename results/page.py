"""Rebuilds results/README.md, README.md's table, the tables in docs/, and the pictures of results.

The words of README's table come from the intervals. A `c` is a Comparison of tables.py.
"""

import numpy as np

from common.runner import plots
from common.runner.measures import in_percent
from common.runner.table import interval, pm, show, with_interval, without_empty_columns
from results.tables import (
    RESULTS,
    around,
    build,
    comparisons,
    first_half,
)


def size(value, column):
    """Without its sign, and with two digits if it would be zero."""
    short = show(abs(value), column)
    return f"{abs(value):.2f}" if short == "0.0" else short


def bounds(c, difference):
    """The 95 % interval of these differences in words."""
    better, worse = ("lower", "higher") if c.sign < 0 else ("better", "worse")
    _, low, high = interval(c.sign * difference)
    least, most = size(low, c.column), size(high, c.column)
    if low > 0:
        return f"{least} to {most} {better}"
    if high < 0:
        return f"{most} to {least} {worse}"
    return f"{least} {worse} to {most} {better}"


def against_paper(c, measure=None):
    """Whether these differences can be those of the paper, whose own spread counts, too."""
    difference = c.difference(measure)
    _, low, high = interval(difference)
    if c.sides(measure)[1].mean() + c.effect > 100:
        return "the paper's would be above 100 %"
    if c.welch(difference) < 0.05:
        return "the paper's is excluded"
    return "both none and the paper's are possible" if low < 0 < high else "the paper's is possible"


def answers(c):
    """A row of README's table: early, at the end, and at the paper's level."""
    cells = [bounds(c, c.difference(first_half)), bounds(c, c.difference()), ""]
    if c.paper:
        cells[1] += f"; {against_paper(c)}"
    if level := c.level():
        there = around(level)
        cells[2] = f"round {level}: {bounds(c, c.difference(there))}; {against_paper(c, there)}"
    return [c.label, effect(c), *cells]


def effect(c):
    return show(c.effect, c.column, "+") if c.paper else ""


def at_level(c):
    """The second measure, p of the paper's effect, the round, and the baseline there."""
    if not (level := c.level()):
        return ""
    there = c.difference(around(level))
    baseline = show(c.sides(around(level))[1].mean(), c.column)
    return f"{with_interval(there, c.column)}, p {c.welch(there):.3f}, round {level} ({baseline})"


def table(rows):
    """Method and baseline, seed by seed."""
    lines = [["", "method", "baseline", "difference", "seeds", "the paper", "at the paper's level"]]
    for c in rows:
        method, baseline = (pm(side, c.column) for side in c.sides())
        difference = with_interval(c.difference(), c.column)
        if c.measure == "ratio":
            mean, low, high = np.exp(interval(c.difference()))
            method = baseline = ""
            difference = f"{mean:.2f} ({low:.2f} to {high:.2f}) times"
        seeds = f"{len(c.common)}" + f": {c.common[0]}-{c.common[-1]}" * bool(c.seeds)
        paper = f"{effect(c)}, p {c.welch(c.difference()):.3f}" if c.paper else ""
        lines.append([c.label, method, baseline, difference, seeds, paper, at_level(c)])
    return without_empty_columns(lines)


def draw(file, rows):
    """A panel for each comparison: both sides over the rounds, and what the paper reports."""
    width = min(len(rows), 3)
    height = len(rows) // width
    with plots.drawn(file, 3.4 * width, 2.9 * height) as figure:
        for axes, c in zip(figure.subplots(height, width).flat, rows, strict=True):
            names, _, title = c.label.partition(": ")
            for k, name in enumerate(names.split(", not ")):
                values = c.over_experiments(c.values)[k]
                mean, deviation = values.mean(0), values.std(0, ddof=1)
                colour, band = plots.COLOURS[k], (mean - deviation, mean + deviation)
                axes.plot(c.rounds, mean, plots.LINES[k], color=colour, label=name)
                axes.fill_between(c.rounds, *band, color=colour, alpha=0.18, lw=0)
                if c.paper:
                    axes.axhline(c.paper_means[k], color=colour, ls=":", lw=1)
            axes.set(title=title, xlabel="round", ylabel="percent" * in_percent(c.column))
            axes.legend(fontsize=8)


def main():
    blocks = comparisons()
    for (page, name), rows in blocks.items():
        build(RESULTS / f"../{page}.md", {name: table(rows)})
    rows = blocks["results/README", "main"]
    header = ["", "the paper", "first half of the rounds", "the end", "at the paper's level"]
    build(RESULTS / "../README.md", {"eight-rows": [header, *map(answers, rows)]})
    draw(RESULTS / "uefl.png", rows[:2])
    spread_of_gradients = [c for c in blocks["results/README", "fediir"] if c.measure]
    draw(RESULTS / "fediir.png", [rows[2], *spread_of_gradients])
    cifar10_weights = [c for c in blocks["results/README", "wu"] if c.paper]
    draw(RESULTS / "wu.png", rows[3:] + cifar10_weights[:1])
