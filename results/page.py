"""Rebuilds README's table, the tables in results/ and docs/, and the pictures of results.

A `c` is a Comparison of tables.py.
"""

from itertools import chain, groupby

import numpy as np
from scipy.stats import ttest_1samp

from common.runner import plots
from common.runner.measures import in_percent, measure_of
from common.runner.table import interval, pm, show, with_interval, without_empty_columns
from results import tables
from results.tables import RESULTS, around, read_csv, series

DASH = "\N{EN DASH}"


def correct(family):
    """Sets c.p: of the paired t-test that there is no difference, with Holm's correction."""
    by_p = [(ttest_1samp(c.difference(), 0).pvalue, c) for c in family]
    largest = 0
    for i, (p, c) in enumerate(sorted(by_p, key=lambda pair: pair[0])):
        largest = c.p = max(largest, min(1, p * (len(family) - i)))


def show_p(p):
    return f"{p:.3f}" if p >= 0.001 else "< 0.001"


def of_equal(c, measure=None):
    """p of the paper's effect, if the paper says how much its numbers scatter."""
    known = c.paper_deviations.any() and len(c.common) > 1
    return f", {show_p(c.welch(c.difference(measure)))}" if known else ""


def difference(c, measure=None):
    """Method minus baseline or, for a ratio, method divided by baseline, with its interval."""
    if not c.is_ratio:
        return with_interval(c.difference(measure), c.column)
    mean, low, high = np.exp(interval(c.difference()))
    return f"{mean:.2f} ({low:.2f} to {high:.2f})"


def worth(rows):
    """README's table: what the papers gain over their baselines, and what we see."""
    ours = ["ours, when the baseline is as accurate as the paper's", "ours, at the end", "seeds"]
    lines = [["points of accuracy", "the paper", *ours]]
    for c in rows:
        name, baseline, data = c.names()
        there = difference(c, around(level)) if (level := c.level()) else DASH
        by = [f"{c.effect:+.1f}" if c.paper else DASH, there, difference(c), f"{len(c.common)}"]
        lines.append([f"{name}, over {baseline} ({data})", *by])
    return lines


def also(rows):
    """What else was run: only differences. A label that begins with ; continues the row above."""
    lines = [["", "difference", "seeds"]]
    for c in rows:
        if c.label.startswith(";"):
            assert lines[-1][2] == seeds(c), f"{c.label} has other seeds than the row above"
            lines[-1][0] += c.label
            lines[-1][1] += f"; {difference(c)}"
        else:
            lines.append([c.label, difference(c), seeds(c)])
    return lines


def reached(rows):
    """What FedAvg reaches: mean, smallest and largest of the evaluations around these rounds."""
    at = [10, 20, 50]
    lines = [["", *(f"round {t}" for t in at), "seeds"]]
    for c in rows:
        cells = []
        for t in at:
            v = c.values[0][..., around(t)(c.rounds)]
            text = f"{v.mean():.1f} ({v.min():.1f} to {v.max():.1f})"
            cells.append(text if t in c.rounds else DASH)
        lines.append([c.label, *cells, f"{len(c.common)}"])
    return lines


def causes(rows):
    """What a change brings: both sides, and the difference of each seed."""
    lines = [["", "accuracy", "instead of", "difference, by seed"]]
    for c in rows:
        by_seed = ", ".join(f"{d:+.1f}" for d in c.difference())
        lines.append([c.label, *(f"{side.mean():.1f}" for side in c.sides()), by_seed])
    return lines


def table(rows):
    """Method and baseline, with the paper's effect, and ours at its level with p and the round."""
    header = ["", "method", "baseline", "difference", "p of zero", "seeds"]
    lines = [[*header, "the paper, p of equal", "ours at its level, p of equal"]]
    for c in rows:
        method, baseline = (pm(side, c.column) for side in c.sides())
        by, p = difference(c) + " times" * c.is_ratio, show_p(c.p) if c.p is not None else ""
        paper = at_level = ""
        if c.paper:
            paper = show(c.effect, c.column, "+") + of_equal(c)
        if level := c.level():
            there = around(level)
            at_level = f"{difference(c, there)}{of_equal(c, there)}, round {level}"
        lines.append([c.label, method, baseline, by, p, seeds(c), paper, at_level])
    return without_empty_columns(lines)


def seeds(c):
    """Which they are if the line of comparisons.csv says so, and else how many."""
    if not c.seeds:
        return f"{len(c.common)}"
    of_both = sorted({min(c.common, key=int), max(c.common, key=int)}, key=int)
    return "-".join(map(str, of_both))


def picture(file, rows):
    """A panel for each comparison: both sides over the rounds, with a thin line for each seed.

    Its title says what is compared, of what, and the difference as in the table. Dotted is what the
    paper reports, and the vertical line is the round in which the baseline is as accurate.
    """
    height = len(rows) // 2
    with plots.picture(file, 7.2, 2.9 * height) as figure:
        for axes, c in zip(figure.subplots(height, 2).flat, rows, strict=True):
            *names, what = c.names()
            by = f"{'ratio' if c.is_ratio else 'at the end'} {difference(c)}"
            title = f"{' against '.join(names)}\n{what}\n{by}"
            for k, of_seeds in enumerate(c.over_experiments(c.values)):
                plots.mean_and_runs(axes, k, c.rounds, of_seeds, names[k])
                if c.paper:
                    axes.axhline(c.paper_means[k], color=plots.COLOURS[k], ls=":", lw=1)
            if level := c.level():
                axes.axvline(level, color="0.5", lw=0.8)
            unit = "accuracy in percent" * in_percent(c.column)
            axes.set(title=title, xlabel="round", ylabel=unit)
            axes.legend(fontsize=8, frameon=True, framealpha=1, edgecolor="none")


def curves(file, lines, runs):
    """The curves on a method's page, from runs: experiment -> seed -> run.

    lines  those of curves.csv: each names a label, its experiment, and the columns of its panels;
           lines with the same panel share them, and its name is their title if it is not empty
    """
    found = []
    for panel, of_panel in groupby(lines, lambda line: line["panel"]):
        of_panel = [*of_panel]
        for column in of_panel[0]["columns"].split():
            of_labels = {}
            for line in of_panel:
                of_runs = [series(run, column) for run in runs[line["experiment"]].values()]
                values = np.array([[*of_run.values()] for of_run in of_runs])
                of_labels[line["label"]] = ([*of_runs[0]], values)
            title = "accuracy, turned silos" if "[" in column else measure_of(column).title
            found.append((column, panel or title, of_labels))
    classes = 2 if file.stem == "fediir" else 10
    plots.panels(file, found, classes, [6, 12] if "uefl" in file.stem else [])


def main():
    runs = tables.recorded_runs()
    blocks = tables.comparisons(runs)
    rows = [*chain(*blocks.values())]
    for family in {c.family for c in rows} - {""}:
        correct([c for c in rows if c.family == family])
    special = {"worth": worth, "also": also, "reached": reached, "lower": causes, "higher": causes}
    for (page, name), of_table in blocks.items():
        tables.build(RESULTS / f"../{page}.md", name, special.get(name, table)(of_table))
    for name in {c.picture for c in rows} - {""}:
        picture(RESULTS / f"{name}.png", [c for c in rows if c.picture == name])
    for name, lines in groupby(read_csv(RESULTS / "curves.csv"), lambda line: line["picture"]):
        curves(RESULTS / f"../docs/pictures/{name}.png", [*lines], runs)
