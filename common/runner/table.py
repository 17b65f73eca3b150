"""The table of a comparison: at the end of a run, and in `python -m results.report`.

A row is a label with a list of runs, which differ in seed and test domain alone. Each row is
compared with the last one, run by run with the same seed and test domain. A run has .args, .rows,
.images, .machine and .classes.
"""

import numpy as np
from scipy.special import stdtrit  # scipy.stats would take half a second to import

from common.runner.flags import OF_A_MACHINE
from common.runner.measures import DECIMALS, MEASURES, in_percent, measure_of

LAST = 5  # so many evaluations of a run make one number
COLUMNS = [column for column, measure in MEASURES.items() if measure.table]
OF_A_RUN = {"last": "", "all": ", all evaluations", "end": ", in all"}
# Flags that say which run of its row this is, or that move no number
MAY_DIFFER = {*OF_A_MACHINE, "seed", "seeds", "test_domain", "is_example", "small", "name", "stop"}


def which(run):
    """Which run of its row this is: its seed and its test domain."""
    return run.args.seed, run.args.test_domain


def end(run):
    """The round in which a run has ended, and the norm of its model."""
    return run.rows[-1]["round"], run.rows[-1]["norm"]


def settings(run):
    """What all runs of a row share: flags, code, images."""
    found = {flag: value for flag, value in vars(run.args).items() if flag not in MAY_DIFFER}
    found |= {f"code of {file}": code for file, code in found.pop("code").items()}
    return found | {"images": run.images}  # and not where they lie


def differing(of_names):
    """Which settings differ, and who has which: "lr 0.1 (a, b), 0.5 (c); momentum ...", or "".

    of_names  name -> settings; who lacks a setting has nothing to differ in
    """
    who = {}  # setting -> value, as text -> the names that have it
    for name, of_name in of_names.items():
        for setting, value in of_name.items():
            who.setdefault(setting, {}).setdefault(str(value), []).append(name)
    texts = []
    for setting, by_value in who.items():
        if len(by_value) > 1:
            pairs = [f"{value} ({', '.join(names)})" for value, names in by_value.items()]
            texts.append(f"{setting} {', '.join(pairs)}")
    return "; ".join(texts)


def unlike(rows):
    """What rows do not share, by their first runs: settings, rounds, and what they ran on."""
    found = {}
    for label, (run, *_) in rows.items():
        found[label] = settings(run) | run.machine | {"rounds": run.rows[-1]["round"]}
        del found[label]["method"]
    return differing(found)


def score(run, column):
    """A run's number in the table: see measures.Measure. nan if nothing was measured."""
    found = [row[column] for row in run.rows if column in row]
    if not found:
        return np.nan
    how_many = {"all": len(found), "end": 1}.get(measure_of(column).table, LAST)
    mean = float(np.mean(found[-how_many:]))
    return 100 * mean if in_percent(column) else mean


def interval(differences):
    """The mean of paired differences [n], n > 1, and its 95 % interval by Student's t."""
    mean, n = differences.mean(), len(differences)
    half = stdtrit(n - 1, 0.975) * differences.std(ddof=1) / n**0.5
    return mean, mean - half, mean + half


def show(value, column, sign=""):
    """A number of this column as text; shares are in percent already."""
    digits = DECIMALS.get(measure_of(column).unit, 3)
    return f"{float(value):{sign}z,.{digits}f}"  # z: -0.0 becomes 0.0


def pm(values, column):
    """mean ± sample standard deviation of these numbers [n]."""
    if len(values) == 0:
        return ""
    if len(values) == 1:
        return show(values[0], column)
    return f"{show(values.mean(), column)} ± {show(values.std(ddof=1), column)}"


def with_interval(differences, column):
    """mean (low to high) of differences [n], which is the 95 % interval by Student's t.

    What adds up has none, because two rows show their costs better than a difference does.
    """
    if len(differences) == 0 or measure_of(column).table == "end":
        return ""
    if len(differences) == 1:
        return show(differences[0], column, "+")
    mean, low, high = (show(value, column, "+") for value in interval(differences))
    return f"{mean} ({low} to {high})"


def line(name, numbers, text):
    """A line of the table: means over the test domains. A seed counts if it has all of them.

    numbers  (seed, test domain) -> a number for each column
    text     makes one text of the numbers of all seeds
    """
    domains = [*dict.fromkeys(domain for _, domain in numbers)]
    means = {}  # seed -> means [columns]
    for seed in sorted({seed for seed, _ in numbers}):
        if all((seed, domain) in numbers for domain in domains):
            means[seed] = np.mean([numbers[seed, domain] for domain in domains], axis=0)
    cells = [name, " ".join(map(str, means)) or "none in common"]
    for i, column in enumerate(COLUMNS):
        values = np.array([of_seed[i] for of_seed in means.values()])
        cells.append("" if np.isnan(values).any() else text(values, column))
    return cells


def table(rows):
    """A header, a line for each row, and one for the difference of each from the last.

    A column that has only a header is left out.
    """
    header = [column + OF_A_RUN[measure_of(column).table] for column in COLUMNS]
    lines = [["", "seeds", *header]]
    numbers = {}
    for label, runs in rows.items():
        numbers[label] = {which(run): [score(run, column) for column in COLUMNS] for run in runs}
    *others, last = rows
    for label in others:
        ours = numbers[label]
        theirs = numbers[last]
        both = [at for at in ours if at in theirs]
        numbers[f"{label} - {last}"] = {at: np.subtract(ours[at], theirs[at]) for at in both}
    for label, of_row in numbers.items():
        lines.append(line(label, of_row, pm if label in rows else with_interval))
    columns = [column for column in zip(*lines) if any(column[1:])]
    return list(zip(*columns))


def report(rows):
    """Prints the means of these rows' runs, paired differences, and what the rows do not share."""
    print(f"\nMean of each run's last {LAST} evaluations, shares in percent (see docs/metrics.md):")
    lines = table(rows)
    widths = [max(map(len, column)) for column in zip(*lines)]
    for cells in lines:
        print("  ".join(map(str.ljust, cells, widths)).rstrip())
    for c in sorted({len(run.classes) for run, *_ in rows.values()}):
        print(f"chance is {100 / c:.1f} % with {c} classes")
    if "±" in str(lines):
        print("±: standard deviation over the seeds")
    if " to " in str(lines):
        print("brackets: 95 % interval of paired differences")
    *others, last = rows
    theirs = {which(run): end(run) for run in rows[last]}
    for label in others:
        same = [end(run) == theirs[which(run)] for run in rows[label] if which(run) in theirs]
        if same and all(same):
            print(
                f"{label} and {last} end with the same model, so what differs has had no effect: "
                "if it is the selection, raise --participating"
            )
    if different := unlike(rows):
        print(f"Not the same in all rows: {different}")
