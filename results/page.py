"""Rebuilds results/README.md, README.md's table, the tables in docs/, and the pictures of results.

A `c` is a Comparison of tables.py.
"""

from itertools import chain

import numpy as np
from scipy.stats import gmean, ttest_1samp

from common.runner import plots
from common.runner.measures import in_percent, span
from common.runner.table import interval, pm, show, with_interval, without_empty_columns
from results.tables import RESULTS, around, build, comparisons, read, series

NONE = "\N{EN DASH}"


def correct(family):
    """Sets c.p: of the paired t-test that there is no difference, with Holm's correction."""
    by_p = [(ttest_1samp(c.difference(), 0).pvalue, c) for c in family]
    largest = 0
    for i, (p, c) in enumerate(sorted(by_p, key=lambda pair: pair[0])):
        largest = c.p = max(largest, min(1, p * (len(family) - i)))


def show_p(p):
    return f"{p:.3f}" if p >= 0.001 else "< 0.001"


def gain(c, measure=None):
    """The difference in points with its 95 % interval: "+2.5 (1.4 to 3.5)"."""
    mean, low, high = interval(c.difference(measure))
    return f"{mean:+.1f} ({low:.1f} to {high:.1f})"


def worth(rows):
    """README's table: what the papers gain over their baselines, and what we see."""
    ours = ["ours, when the baseline is as accurate as the paper's", "ours, at the end"]
    lines = [["on the papers' kind of data, points of accuracy", "the paper", *ours]]
    for c in rows:
        name, baseline, data = c.names()
        there = gain(c, around(level)) if (level := c.level()) else NONE
        lines.append([f"{name}, over {baseline} ({data})", f"{c.effect:+.1f}", there, gain(c)])
    return lines


def of_equal(c, differences):
    """p of the paper's effect, if the paper says how much its numbers scatter."""
    return f", {show_p(c.welch(differences))}" if c.paper_deviations.any() else ""


def at_level(c):
    """The second measure, p of the paper's effect, and the round."""
    if not (level := c.level()):
        return ""
    there = c.difference(around(level))
    return f"{with_interval(there, c.column)}{of_equal(c, there)}, round {level}"


def difference(c):
    """Method minus baseline or, for a ratio, method divided by baseline, with its interval."""
    if not c.is_ratio:
        return with_interval(c.difference(), c.column)
    mean, low, high = np.exp(interval(c.difference()))
    return f"{mean:.2f} ({low:.2f} to {high:.2f})"


def table(rows):
    """Method and baseline, seed by seed."""
    header = ["", "method", "baseline", "difference", "p of zero", "seeds"]
    lines = [[*header, "the paper, p of equal", "ours at its level, p of equal"]]
    for c in rows:
        method, baseline = (pm(side, c.column) for side in c.sides())
        paper = ""
        if c.paper:
            paper = show(c.effect, c.column, "+") + of_equal(c, c.difference())
        p = show_p(c.p) if c.p is not None else ""
        by = difference(c) + " times" * c.is_ratio
        lines.append([c.label, method, baseline, by, p, seeds(c), paper, at_level(c)])
    return without_empty_columns(lines)


def seeds(c):
    """Which they are if the line of comparisons.csv says so, and else how many."""
    return span(c.common).replace(" to ", "-") if c.seeds else f"{len(c.common)}"


def full(rows):
    """The runs at the papers' own size, as far as they are recorded."""
    papers = ["method, not baseline", "the paper", "its difference"]
    ours = ["ours", "our difference, p of equal", "at its level, p of equal"]
    lines = [[*papers, *ours, "seeds", "what it took"]]
    for c in rows:
        label, _, took = c.label.partition(": ")
        paper = [NONE, NONE]
        if c.paper:
            paper = [f"{c.paper}, {c.paper_baseline}", show(c.effect, c.column, "+")]
        ours = ["not run yet", "", "", ""]
        if c.common:
            both = ", ".join(pm(side, c.column) for side in c.sides())
            by, there = difference(c), ""
            if len(c.common) > 1:
                by, there = by + of_equal(c, c.difference()), at_level(c)
            ours = [both, by, there, seeds(c)]
        lines.append([label, *paper, *ours, took])
    return lines


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
    """A panel for each comparison: both sides over the rounds, with a thin line for each seed.

    Its title says what is compared, of what, and the difference as in the table. Dotted is what the
    paper reports, and the vertical line is the round in which the baseline is as accurate.
    """
    height = len(rows) // 2
    with plots.drawn(file, 7.2, 2.9 * height) as figure:
        for axes, c in zip(figure.subplots(height, 2).flat, rows, strict=True):
            *names, what = c.names()
            by = f"{'ratio' if c.is_ratio else 'at the end'} {difference(c)}"
            title = f"{' against '.join(names)}\n{what}\n{by}"
            for k, of_seeds in enumerate(c.over_experiments(c.values)):
                plots.mean_and_runs(axes, k, c.rounds, of_seeds, names[k])
                if c.paper:
                    axes.axhline(c.paper_means[k], color=plots.COLOURS[k], ls=":", lw=1)
            if c.paper and (level := c.level()):
                axes.axvline(level, color="0.5", lw=0.8)
            unit = "accuracy in percent" * in_percent(c.column)
            axes.set(title=title, xlabel="round", ylabel=unit)
            axes.legend(fontsize=8, frameon=True, framealpha=1, edgecolor="none")


BOTH = {"id_accuracy": "ID accuracy", "ood_accuracy": "OOD accuracy"}
RARE = {"ood_accuracy": "OOD accuracy", "rare_accuracy": "accuracy, rare classes"}
TURNED = {"id_accuracy": "ID accuracy", "accuracies[3:5]": "accuracy, turned silos"}
# The curves on the methods' pages: file -> columns with their names, label -> recorded example
CURVES = {
    "fedavg": (
        BOTH,
        {
            "alpha 0.1": "examples/fedavg/skew",
            "alpha 1": "examples/fedavg/skew-alpha-1",
            "alpha 100": "examples/fedavg/skew-alpha-100",
        },
    ),
    "entropy_weighting_curves": (
        BOTH,
        {"entropy": "examples/entropy/specialists", "equal": "examples/entropy/specialists-equal"},
    ),
    "minimax_curves": (
        RARE,
        {"minimax": "examples/minimax/rare", "random": "examples/minimax/rare-random"},
    ),
    "hull_curves": (RARE, {"hull": "examples/hull/rare", "random": "examples/hull/rare-random"}),
    "fediir": (
        BOTH | {"neutral_accuracy": "colour-neutral accuracy"},
        {
            "FedIIR": "examples/fediir/colours",
            "FedAvg": "examples/fediir/colours-fedavg",
            "colour-blind FedAvg (grey images)": "examples/fediir/grey",
        },
    ),
    "uefl_curves": (
        TURNED,
        {
            "UEFL": "silos/turned",
            "static": "silos/turned-static",
            "FedAvg": "silos/turned-fedavg",
        },
    ),
}


def curves(name, runs):
    """Draws a picture of CURVES, from runs: experiment -> seed -> run."""
    columns, labels = CURVES[name]
    found = []
    for column, title in columns.items():
        of_labels = {}
        for label, experiment in labels.items():
            of_runs = [series(run, column) for run in runs[experiment].values()]
            values = np.array([[*of_run.values()] for of_run in of_runs])
            of_labels[label] = ([*of_runs[0]], values)
        found.append((column, title, of_labels))
    classes = 2 if name == "fediir" else 10
    ends = [6, 12] if name == "uefl_curves" else []
    plots.panels(RESULTS / f"../docs/pictures/{name}.png", found, classes, ends)


def main():
    blocks = comparisons()
    rows = [*chain(*blocks.values())]
    for family in {c.family for c in rows} - {""}:
        correct([c for c in rows if c.family == family])
    gains = blocks.pop(("README", "worth"))
    for page in ("", "results/"):
        build(RESULTS / f"../{page}README.md", {"worth": worth(gains)})
    special = {"mcmahan": rounds, "full": full}
    for (page, name), of_table in blocks.items():
        build(RESULTS / f"../{page}.md", {name: special.get(name, table)(of_table)})
    fediir, uefl = (blocks["results/README", name] for name in ("fediir", "uefl"))
    draw(RESULTS / "wu.png", gains[:4])
    draw(RESULTS / "fediir.png", [gains[4], *(c for c in fediir if c.is_ratio)])
    draw(RESULTS / "uefl.png", [gains[5], *(c for c in uefl if "without" in c.label)])
    runs = read(RESULTS / "examples.csv") | read(RESULTS / "silos.csv")
    for name in CURVES:
        curves(name, runs)
