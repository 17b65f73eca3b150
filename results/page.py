"""Rebuilds results/README.md, README.md's table, the tables in docs/, and the pictures of results.

The words of README's table come from the intervals. A `c` is a Comparison of tables.py.
"""

import numpy as np
from scipy.stats import gmean, ttest_1samp

from common.runner import plots
from common.runner.measures import in_percent
from common.runner.table import interval, pm, show, with_interval, without_empty_columns
from results.tables import (
    RESULTS,
    around,
    build,
    comparisons,
)

FAMILIES = ["main", "equal"]  # blocks of results/README.md whose p are corrected for their number


def correct(family):
    """Sets c.p: of the paired t-test that there is no difference, with Holm's correction."""
    by_p = [(ttest_1samp(c.difference(), 0).pvalue, c) for c in family]
    largest = 0
    for i, (p, c) in enumerate(sorted(by_p, key=lambda pair: pair[0])):
        largest = c.p = max(largest, min(1, p * (len(family) - i)))


def show_p(p):
    return f"{p:.3f}" if p >= 0.001 else "< 0.001"


def bounds(c):
    """The 95 % interval in words; a bound has two digits if it would be zero."""
    _, low, high = interval(c.difference())
    least, most = (f"{abs(x):.1f}" if abs(x) >= 0.05 else f"{abs(x):.2f}" for x in (low, high))
    if low > 0:
        return f"{least} to {most} better than"
    if high < 0:
        return f"{most} to {least} worse than"
    return f"{least} worse to {most} better than"


def word(rows, p):
    """Whether to use a method, by the rule in predictions.md.

    rows  against the paper's baseline first, and last against the simplest one with as many samples
    p     that of the last row if it belongs to a family, or 1
    """
    first, last = (interval(c.difference())[1] > 0 for c in (rows[0], rows[-1]))
    if not first:
        return "no sign"
    if not last:
        return "not needed"
    return "yes" if p < 0.05 else "perhaps"


def worth(rows, p):
    """README's table: a line for each method. p: (method, baseline, column) -> p"""
    methods = {}
    for c in rows:
        name, baseline = c.label.split(", not ")
        saw = f"{bounds(c)} {baseline}"
        if c.paper:
            possible = "possible" if c.welch(c.difference()) >= 0.05 else "excluded"
            saw += f" [paper: {c.effect:.1f} better, {possible}]"
        methods.setdefault(name, []).append((c, saw))
    lines = [["method", "worth using?", "what we saw at the end, in points of accuracy (95 %)"]]
    for name, found in methods.items():
        of_method, saw = zip(*found, strict=True)
        last = of_method[-1]
        answer = word(of_method, p.get((last.method, last.baseline, last.column), 1))
        lines.append([name, answer, "<br>".join(saw)])
    return lines


def at_level(c):
    """The second measure, p of the paper's effect, the round, and the baseline there."""
    if not (level := c.level()):
        return ""
    there = c.difference(around(level))
    baseline = show(c.sides(around(level))[1].mean(), c.column)
    p = show_p(c.welch(there))
    return f"{with_interval(there, c.column)}, p {p}, round {level} ({baseline})"


def difference(c):
    """Method minus baseline or, for a ratio, method divided by baseline, with its interval."""
    if not c.is_ratio:
        return with_interval(c.difference(), c.column)
    mean, low, high = np.exp(interval(c.difference()))
    return f"{mean:.2f} ({low:.2f} to {high:.2f})"


def table(rows):
    """Method and baseline, seed by seed."""
    header = ["", "method", "baseline", "difference", "p", "seeds", "the paper"]
    lines = [[*header, "at the paper's level"]]
    for c in rows:
        method, baseline = (pm(side, c.column) for side in c.sides())
        seeds = f"{len(c.common)}" + f": {c.common[0]}-{c.common[-1]}" * bool(c.seeds)
        paper = ""
        if c.paper:
            paper = f"{show(c.effect, c.column, '+')}, p {show_p(c.welch(c.difference()))}"
        p = show_p(c.p) if c.p is not None else ""
        by = difference(c) + " times" * c.is_ratio
        lines.append([c.label, method, baseline, by, p, seeds, paper, at_level(c)])
    return without_empty_columns(lines)


def rounds(rows):
    """As McMahan et al.'s table 2: the rounds to a target, seed by seed, and their mean."""
    lines = [["", "rounds of each seed", "geometric mean", "the paper"]]
    for c in rows:
        found = c.sides()[0]
        mean = f"{gmean(found):.1f}"
        if len(found) > 1:
            _, low, high = np.exp(interval(np.log(found)))
            mean += f" ({low:.1f} to {high:.1f})"
        lines.append([c.label, ", ".join(f"{t:.1f}" for t in found), mean, c.paper])
    return lines


def draw(file, rows):
    """A panel for each comparison: both sides over the rounds, and what the paper reports.

    Its title says what is compared, of what, and the difference as in the table.
    """
    width = min(len(rows), 3)
    height = len(rows) // width
    with plots.drawn(file, 3.4 * width, 3.2 * height) as figure:
        for axes, c in zip(figure.subplots(height, width).flat, rows, strict=True):
            names, _, what = c.label.partition(": ")
            names = names.split(", not ")
            by = f"{'ratio' if c.is_ratio else 'last five'} {difference(c)}"
            title = f"{' against '.join(names)}\n{what}\n{by}"
            for k, name in enumerate(names):
                values = c.over_experiments(c.values)[k]
                mean, deviation = values.mean(0), values.std(0, ddof=1)
                colour, band = plots.COLOURS[k], (mean - deviation, mean + deviation)
                axes.plot(c.rounds, mean, plots.LINES[k], color=colour, label=name)
                axes.fill_between(c.rounds, *band, color=colour, alpha=0.18, lw=0)
                if c.paper:
                    label = f"{name}, the paper"
                    axes.axhline(c.paper_means[k], color=colour, ls=":", lw=1, label=label)
            axes.set(title=title, xlabel="round", ylabel="percent" * in_percent(c.column))
            axes.legend(fontsize=8)


def main():
    blocks = comparisons()
    readme = blocks.pop(("README", "worth"))
    for name in FAMILIES:
        correct(blocks["results/README", name])
    for (page, name), rows in blocks.items():
        make = rounds if name == "mcmahan" else table
        build(RESULTS / f"../{page}.md", {name: make(rows)})
    rows = blocks["results/README", "main"]
    families = [c for name in FAMILIES for c in blocks["results/README", name]]
    p = {(c.method, c.baseline, c.column): c.p for c in families}
    build(RESULTS / "../README.md", {"worth": worth(readme, p)})
    draw(RESULTS / "uefl.png", rows[:2])
    spread_of_gradients = [c for c in blocks["results/README", "fediir"] if c.measure]
    draw(RESULTS / "fediir.png", [rows[2], *spread_of_gradients])
    cifar10_weights = [c for c in blocks["results/README", "wu"] if c.paper and c.level()]
    draw(RESULTS / "wu.png", rows[3:] + cifar10_weights[:1])
