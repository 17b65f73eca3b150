"""Rebuilds README's table, the tables in results/ and docs/, and the pictures of results.

A `c` is a Comparison of tables.py.
"""

import re
from itertools import zip_longest

import numpy as np
from scipy.stats import ttest_1samp

from common import UserError
from common.runner import plots
from common.runner.measures import in_percent
from common.runner.table import interval, pm, show, with_interval
from results.tables import RESULTS, Comparison, around, read_csv, recorded_runs, series

DASH = "\N{EN DASH}"


def correct(family):
    """Sets c.p: of the paired t-test that there is no difference, with Holm's correction."""
    by_p = [(ttest_1samp(c.difference(), 0).pvalue, c) for c in family]
    largest = 0
    for i, (p, c) in enumerate(sorted(by_p, key=lambda pair: pair[0])):
        largest = c.p = max(largest, min(1, p * (len(family) - i)))


def show_p(p):
    return f"{p:.3f}" if p >= 0.001 else "< 0.001"


def of_equal(c):
    """p of the paper's effect, if the paper says how much its numbers scatter."""
    known = c.paper and c.paper_deviations.any() and len(c.common) > 1
    return f", {show_p(c.welch(c.difference()))}" if known else ""


def times(logs):
    """A ratio from its logarithms [n], with its interval if there are several."""
    mean, *ends = (f"{x:.2f}" for x in np.exp(interval(logs) if len(logs) > 1 else logs))
    return f"{mean} ({' to '.join(ends)})" if ends else mean


def difference(c):
    """Method minus baseline or, for a ratio, method divided by baseline, with its interval."""
    return times(c.difference()) if c.is_ratio else with_interval(c.difference(), c.column)


def to_level(found):
    """The method's number divided by the baseline's, and how many runs of each were never there.

    found  [2, seeds], with nan for never
    """
    method, baseline = found[:, np.isfinite(found).all(0)]
    never = "never {} and {} of {}".format(*np.isnan(found).sum(1), found.shape[1])
    if not len(method):
        return never
    ratio = times(np.log(method / baseline))
    return f"{ratio}; {never}" if np.isnan(found).any() else ratio


def cells(c):
    """All that a table can say about a comparison: the header of a column -> text."""
    method, baseline = c.sides()
    seeds = "-".join(map(str, sorted({c.common[0], c.common[-1]})))
    paper = show(c.effect, c.column, "+") if c.paper else ""
    levels = ", ".join(show(mean, c.column) for mean in c.paper_means)
    p_of_zero = "" if c.p is None else f", p {show_p(c.p)}"
    found = {
        "method": pm(method, c.column),
        "baseline": pm(baseline, c.column),
        "difference": difference(c) + (" times" if c.is_ratio else "") + p_of_zero,
        # README only says how many, and so does a row that takes all
        "seeds": seeds if c.seeds and c.page != "README" else f"{len(c.common)}",
        "the paper, p of equal": f"{paper} ({levels}){of_equal(c)}" if c.paper else "",
        "the paper": paper or DASH,
        "accuracy": f"{method.mean():.1f}",
        "instead of": f"{baseline.mean():.1f}",
        "difference, by seed": ", ".join(f"{d:+.1f}" for d in c.difference()),
    }
    texts = [to_level(numbers) for numbers in c.reached]
    found |= zip_longest(["rounds, ratio", "samples, ratio"], texts, fillvalue=DASH)
    for t in (10, 20, 50, 100):  # mean, smallest and largest of the evaluations around these rounds
        v = c.values[0][..., around(t)(c.rounds)]
        text = f"{v.mean():.1f} ({v.min():.1f} to {v.max():.1f})"
        found[f"round {t}"] = text if t in c.rounds else DASH
    return found


def build(file, name, rows):
    """Writes a table into a page, below its line <!-- NAME --> and a header.

    The header says which cells a row has after its label.
    """
    text, table = file.read_text(), ""
    # Group 1 is the mark and the header, group 2 the columns after the label; old lines follow
    found = re.search(rf"(<!-- {name} -->\n\|.*? \| (.*) \|\n.*\n)(\|.*\n)*", text)
    if not found:
        raise UserError(f"{file} has no line <!-- {name} --> with the header of a table below")
    for c in rows:
        of_c = cells(c)
        line = [c.label, *(of_c[column] for column in found[2].split(" | "))]
        table += f"| {' | '.join(line)} |\n"
    file.write_text(text[: found.end(1)] + table + text[found.end() :])


def picture(file, rows):
    """A panel for each comparison: both sides over the rounds, with a thin line for each seed.

    Its title says what is compared, of what, and the difference as in the table. Dotted is what the
    paper reports.
    """
    with plots.picture(file, 7.2, 1.45 * len(rows)) as figure:
        for axes, c in zip(figure.subplots(len(rows) // 2, 2).flat, rows, strict=True):
            *names, what = re.split(", not |, over |: | \\(", c.label.removesuffix(")"))
            by = f"{'ratio' if c.is_ratio else 'at the end'} {difference(c)}"
            title = f"{' against '.join(names)}\n{what}\n{by}"
            for k, of_seeds in enumerate(c.over_experiments(c.values)):
                plots.mean_and_runs(axes, k, c.rounds, of_seeds, names[k])
                if c.paper:
                    axes.axhline(c.paper_means[k], color=plots.COLOURS[k], ls=":", lw=1)
            unit = "accuracy in percent" * in_percent(c.column)
            axes.set(title=title, xlabel="round", ylabel=unit)
            axes.legend(fontsize=8, frameon=True, framealpha=1, edgecolor="none")


def curves(file, lines, runs):
    """The curves on a method's page, from runs: experiment -> seed -> run.

    lines  those of curves.csv: each names a curve's panel, by title and column, and its label and
           experiment. In all panels of a picture are the chance of so many classes, and vertical
           lines at the ends of UEFL's iterations
    """
    panels = {}
    for line in lines:
        of_runs = [series(run, line["column"]) for run in runs[line["experiment"]].values()]
        values = np.array([[*of_run.values()] for of_run in of_runs])
        of_labels = panels.setdefault((line["column"], line["title"]), {})
        of_labels[line["label"]] = ([*of_runs[0]], values)
    found = [(*panel, of_labels) for panel, of_labels in panels.items()]
    plots.panels(file, found, int(line["classes"]), [*map(int, line["ends"].split())])


def main():
    runs = recorded_runs()
    rows = [Comparison(runs, **line) for line in read_csv(RESULTS / "comparisons.csv")]
    for family in {c.family for c in rows} - {""}:
        correct([c for c in rows if c.family == family])
    for page, block in {(c.page, c.block) for c in rows}:
        of_block = [c for c in rows if (c.page, c.block) == (page, block)]
        build(RESULTS / f"../{page}.md", block, of_block)
    for name in {c.picture for c in rows} - {""}:
        picture(RESULTS / f"{name}.png", [c for c in rows if c.picture == name])
    lines = read_csv(RESULTS / "curves.csv")
    for name in {line["picture"] for line in lines}:
        of_name = [line for line in lines if line["picture"] == name]
        curves(RESULTS / f"../docs/pictures/{name}.png", of_name, runs)
