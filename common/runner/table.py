"""One comparison of runs: for the end of a run, and for `python -m results.report`.

Its runs have .args, .rows and .folder: they are a Run, or what read() finds in a run's folder. Runs
that differ in seed and test domain alone are one row. Two rows are compared pair by pair, with the
same seed and test domain in each pair.
"""

import csv
import json
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from scipy.special import stdtrit  # scipy.stats would take half a second to import

from common import UserError, first_line
from common.runner.measures import in_percent, measure_of, shown

LAST = 5  # so many evaluations of a run make one number
NOT_COMPARED = [
    "seed", "test_domain", "out", "resume", "device", "data_dir", "processes", "compare",
    "is_example",
]  # fmt: skip
SHOULD_AGREE = [
    "dataset", "image_size", "partition", "clients", "model", "width", "pretrained", "rounds",
    "local_epochs", "batch_size", "lr", "optimizer", "momentum",
]  # fmt: skip
Row = Mapping[tuple, object]  # (seed, test domain) -> run


def read(folder: Path) -> Namespace:
    """The run in this folder. Raises UserError if there is none, or if it is damaged."""
    try:
        args = Namespace(**json.loads((folder / "args.json").read_text())["flags"])
        args.name, args.method, args.seed = str(args.name), str(args.method), int(args.seed)
        with open(folder / "metrics.csv", newline="", encoding="utf-8") as file:
            rows = [
                {"round": int(line["round"])}
                | {column: float(line[column]) for column in shown("table") if line.get(column)}
                for line in csv.DictReader(file)
            ]
    except Exception as e:  # a damaged file can raise any type
        raise UserError(f"{folder} is not the folder of a run ({first_line(e)})") from e
    return Namespace(args=args, rows=rows, folder=folder)


def group(runs: Iterable) -> tuple[dict[str, Row], list[Path]]:
    """The rows of the table, by label, and the folders that repeat a run of another one.

    A label is the runs' name and, if other rows have the same, some flags that tell them apart.
    """
    rows, repeated = {}, []
    for run in runs:
        flags = {f: str(v) for f, v in vars(run.args).items() if f not in NOT_COMPARED}
        if "method_rounds" in flags:  # of a baseline: its own rounds can depend on the seed
            del flags["rounds"]
        row = rows.setdefault(tuple(sorted(flags.items())), {})
        where = run.args.seed, getattr(run.args, "test_domain", None)
        if where in row:
            repeated.append(run.folder)
        else:
            row[where] = run
    flags = {key: dict(key) for key in rows}
    labels = {key: flags[key]["name"] for key in rows}
    others = {flag for key in rows for flag in flags[key]} - {"method", "code"}
    for flag in ["method", *sorted(others), "code"]:
        for label in set(labels.values()):
            alike = [key for key in rows if labels[key] == label]
            values = [flags[key].get(flag, "none") for key in alike]
            if len(set(values)) > 1:
                for key, value in zip(alike, values, strict=True):
                    labels[key] += f" {flag}={value[:7] if flag == 'code' else value}"
    return {labels[key]: row for key, row in rows.items()}, repeated


def pairs(rows: Mapping[str, Row], minus: str | None = None) -> list[tuple[str, str]]:
    """Which rows are compared, as (label, label): the first one minus the second.

    It is each row minus the row `minus`, if it is named. Else a single method is compared with each
    of its baselines, the first of two rows with the second, and more rows with FedAvg.
    """
    args = {label: next(iter(row.values())).args for label, row in rows.items()}
    methods = [label for label in rows if not hasattr(args[label], "method_rounds")]
    if minus is not None:
        same_name = [label for label in rows if args[label].name == minus]
        found = [minus] if minus in rows else same_name
        if len(found) != 1:
            raise UserError(f"--minus {minus}: name one of the rows {', '.join(map(repr, rows))}")
    elif len(methods) == 1:
        return [(methods[0], label) for label in rows if label not in methods]
    elif len(rows) == 2:
        return [tuple(rows)]
    else:
        found = [label for label in methods if args[label].name == "FedAvg"]
    if len(found) != 1:
        return []
    return [(label, found[0]) for label in rows if label != found[0]]


def covered(run, last: int) -> list[int]:
    """The rounds whose evaluations are this run's number."""
    return [row["round"] for row in run.rows if any(c in row for c in shown("table"))][-last:]


def covers_much(run) -> bool:
    """Whether the evaluations of this run's number are from more than a quarter of its rounds."""
    at = covered(run, LAST)
    return len(at) > 1 and at[-1] - at[0] + 1 > run.rows[-1]["round"] / 4


def score(run, column: str, last: int = LAST) -> float:
    """The mean of a column over the last evaluations of a run, or nan; shares are in percent."""
    found = [row[column] for row in run.rows if row.get(column) is not None]
    found = found if measure_of(column).rounds == "all" else found[-last:]
    return (100 if in_percent(column) else 1) * float(np.mean(found)) if found else np.nan


def by_seed(row: Row, domains: Sequence, last: int) -> dict[int, np.ndarray]:
    """Seed -> the means over these test domains [columns], for the seeds that have all of them."""
    found = {}
    for seed in dict.fromkeys(seed for seed, _ in row):
        runs = [row.get((seed, domain)) for domain in domains]
        if runs and None not in runs:
            scores = [[score(run, column, last) for column in shown("table")] for run in runs]
            found[seed] = np.mean(scores, axis=0)
    return found


def parts(domains: Sequence[str]) -> dict[str, list[str]]:
    """The mean over the test domains, and if there are several, each of them."""
    each = {f", {domain}": [domain] for domain in domains}
    return {"": domains, **each} if len(domains) > 1 else {"": domains}


def interval(differences: np.ndarray) -> tuple[float, float, float]:
    """The mean of paired differences [n], n > 1, and its 95 % interval by Student's t."""
    mean, n = differences.mean(), len(differences)
    half = stdtrit(n - 1, 0.975) * differences.std(ddof=1) / n**0.5
    return mean, mean - half, mean + half


def show(value: float, column: str, sign: str = "") -> str:
    return f"{value:{sign}.1f}" if in_percent(column) else f"{value:{sign}.3f}"


def pm(values: np.ndarray, column: str) -> str:
    """mean ± sample standard deviation of these numbers [n]."""
    if len(values) < 2:
        return "".join(show(value, column) for value in values)
    return f"{show(values.mean(), column)} ± {show(values.std(ddof=1), column)}"


def with_interval(differences: np.ndarray, column: str) -> str:
    """mean (low to high) of differences [n], which is the 95 % interval by Student's t."""
    if len(differences) < 2:
        return "".join(show(value, column, "+") for value in differences)
    mean, low, high = (show(value, column, "+") for value in interval(differences))
    return f"{mean} ({low} to {high})"


def without_empty_columns(table: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    """The table without the columns that have only a header."""
    columns = [column for column in zip(*table, strict=True) if any(column[1:])]
    return list(zip(*columns, strict=True))


def cells(show_all: Callable, values: Iterable[np.ndarray]) -> list[str]:
    """What `show_all` makes of these numbers, column by column."""
    columns = shown("table")
    of_columns = np.reshape([*values], (-1, len(columns))).T
    return [show_all(v[~np.isnan(v)], c) for v, c in zip(of_columns, columns, strict=True)]


def table(rows: Mapping[str, Row], compared: Sequence[tuple], last: int) -> list[tuple[str, ...]]:
    """A line for each row, and one for each two that are compared, by test domain if need be."""
    header = ["", "seeds", "rounds"]
    for column in shown("table"):
        header.append(column + ", all evaluations" * (measure_of(column).rounds == "all"))
    lines = [header]
    domains = {label: [*dict.fromkeys(d for _, d in row)] for label, row in rows.items()}
    for label, row in rows.items():
        rounds = [t for run in row.values() for t in covered(run, last)]
        span = " to ".join(map(str, sorted({min(rounds), max(rounds)}))) if rounds else ""
        for part, of_part in parts(domains[label]).items():
            found = by_seed(row, of_part, last)
            seeds = " ".join(map(str, found))
            lines.append([label + part, seeds, span, *cells(pm, found.values())])
    for a, b in compared:
        for part, of_part in parts([d for d in domains[a] if d in domains[b]]).items():
            ours, theirs = by_seed(rows[a], of_part, last), by_seed(rows[b], of_part, last)
            differences = {s: ours[s] - theirs[s] for s in ours if s in theirs}
            seeds = " ".join(map(str, differences)) or "none in common"
            found = cells(with_interval, differences.values())
            lines.append([f"{a} - {b}{part}", seeds, "", *found])
    return without_empty_columns(lines)


def unlike(rows: Mapping[str, Row]) -> str:
    """One line that names the settings in which rows differ that a comparison should share."""
    found = []
    for flag in SHOULD_AGREE:
        labels = {}  # values of the flag -> the rows that have them
        for label, row in rows.items():
            values = {str(getattr(run.args, flag, None)) for run in row.values()}
            if flag == "rounds":  # as they came out
                values = {str(run.rows[-1]["round"]) for run in row.values()}
            text = " or ".join(sorted(values)).replace("None", "default")
            labels.setdefault(text, []).append(label)
        if len(labels) > 1:
            texts = [f"{text} ({', '.join(of_text)})" for text, of_text in labels.items()]
            found.append(f"{flag} {', '.join(texts)}")
    return "; ".join(found)


def write(lines: Sequence[Sequence[str]]) -> None:
    """Prints a table, whose columns are lists of texts, in columns."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(map(str.ljust, line, widths)).rstrip())


def report(runs: Iterable, minus: str | None = None) -> None:
    """Prints the means of these runs, their paired differences, and what they do not share."""
    rows, repeated = group(runs)
    for folder in repeated:
        print(f"left out {folder}: another run has the same flags and seed", file=sys.stderr)
    compared = pairs(rows, minus)
    print(f"\nMean of each run's last {LAST} evaluations, in these rounds; shares are in percent:")
    write(table(rows, compared, LAST))
    if any(covers_much(run) for row in rows.values() for run in row.values()):
        print(f"The last {LAST} are more than a quarter of a run, so here is the last one alone:")
        write(table(rows, compared, 1))
    if any(len({seed for seed, _ in row}) > 1 for row in rows.values()):
        print("±: standard deviation over the seeds; brackets: 95 % interval of paired differences")
    if len(rows) > 2 and not compared:
        print("For paired differences, add --minus and the name of a row")
    if different := unlike(rows):
        print(f"Not the same in all rows: {different}")
