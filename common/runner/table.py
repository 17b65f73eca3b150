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
from common.runner.measures import in_percent, measure_of, shown, span

LAST = 5  # so many evaluations of a run make one number
NOT_COMPARED = [
    "seed", "test_domain", "out", "resume", "device", "data_dir", "processes", "compare",
    "is_example",
]  # fmt: skip
SHOULD_AGREE = [
    "dataset", "image_size", "rotate", "partition", "dirichlet", "silos", "silo_size", "clients",
    "participating", "sample", "held_out", "model", "width", "pretrained", "rounds",
    "evaluate_every", "local_epochs", "batch_size", "lr", "lr_decay", "optimizer", "momentum",
    "weight_decay", "precision", "code_of_common",
]  # fmt: skip
Row = Mapping[tuple, object]  # (seed, test domain) -> run


def read(folder: Path) -> Namespace:
    """The run in this folder. Raises UserError if there is none, or if it is damaged."""
    try:
        about = json.loads((folder / "args.json").read_text())
        args = Namespace(**about["flags"])
        args.name, args.method, args.seed = str(args.name), str(args.method), int(args.seed)
        with open(folder / "metrics.csv", newline="", encoding="utf-8") as file:
            rows = [
                {"round": int(line["round"])}
                | {column: float(line[column]) for column in shown("table") if line.get(column)}
                for line in csv.DictReader(file)
            ]
        rows[0]  # a table needs a round at least
    except Exception as e:  # a damaged file can raise any type
        raise UserError(f"{folder} is not the folder of a run ({first_line(e)})") from e
    return Namespace(args=args, rows=rows, folder=folder, images=about.get("data"))


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
    labels = {key: dict(key)["name"] for key in rows}
    others = {flag for key in rows for flag, _ in key} - {"method", "code"}
    for flag in ["method", *sorted(others), "code"]:
        values, found = {key: dict(key).get(flag, "none") for key in rows}, {}
        for key, label in labels.items():
            found.setdefault(label, set()).add(values[key])
        for key, label in labels.items():
            if len(found[label]) > 1:
                labels[key] += f" {flag}={values[key][:7] if flag == 'code' else values[key]}"
    return {labels[key]: row for key, row in rows.items()}, repeated


def pairs(rows: Mapping[str, Row], minus: str | None = None) -> list[tuple[str, str]]:
    """Which rows are compared, as (label, label): the first one minus the second.

    It is each row minus the row `minus`, if it is named. Else a single method is compared with each
    of its baselines, the first of two rows with the second, and more rows with FedAvg.
    """
    args = {label: next(iter(row.values())).args for label, row in rows.items()}
    methods = [label for label in rows if not hasattr(args[label], "method_rounds")]
    if minus is None and len(methods) == 1:
        return [(methods[0], label) for label in rows if label not in methods]
    if minus is None and len(rows) == 2:
        return [tuple(rows)]
    among, name = (methods, "FedAvg") if minus is None else (rows, minus)
    found = [label for label in among if name in (label, args[label].name)]
    if len(found) == 1:
        return [(label, found[0]) for label in rows if label != found[0]]
    if minus is None:
        return []
    raise UserError(f"--minus {minus}: name one of the rows {', '.join(map(repr, rows))}")


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


def lines_of(label: str, scores: Mapping, rounds: str, show_all: Callable) -> list[list[str]]:
    """The line of a row: means over the test domains. If there are several, each has a line, too.

    scores    (seed, test domain) -> a number for each column; a seed counts if it has all domains
    show_all  makes one text of the numbers of all seeds
    """
    domains, lines = [*dict.fromkeys(domain for _, domain in scores)], []
    parts = {label: domains}
    if len(domains) > 1:
        parts |= {f"{label}, {domain}": [domain] for domain in domains}
    for name, of_part in parts.items():
        found = {}  # seed -> means [columns]
        for seed in dict.fromkeys(seed for seed, _ in scores):
            if all((seed, domain) in scores for domain in of_part):
                found[seed] = np.mean([scores[seed, domain] for domain in of_part], axis=0)
        lines.append([name, " ".join(map(str, found)) or "none in common", rounds])
        for i, column in enumerate(shown("table")):
            values = np.array([means[i] for means in found.values()])
            lines[-1].append(show_all(values[~np.isnan(values)], column))
    return lines


def table(rows: Mapping[str, Row], compared: Sequence[tuple], last: int) -> list[tuple[str, ...]]:
    """A line for each row, and one for each two that are compared, by test domain if need be."""
    columns, scores, header = shown("table"), {}, ["", "seeds", "rounds"]
    for column in columns:
        header.append(column + ", all evaluations" * (measure_of(column).rounds == "all"))
    lines = [header]
    for label, row in rows.items():
        scores[label] = {at: [score(run, c, last) for c in columns] for at, run in row.items()}
        rounds = span(t for run in row.values() for t in covered(run, last))
        lines += lines_of(label, scores[label], rounds, pm)
    for a, b in compared:
        both = [at for at in scores[a] if at in scores[b]]
        differences = {at: np.subtract(scores[a][at], scores[b][at]) for at in both}
        lines += lines_of(f"{a} - {b}", differences, "", with_interval)
    return without_empty_columns(lines)


def unlike(rows: Mapping[str, Row]) -> str:
    """One line that names the settings in which rows differ that a comparison should share."""
    found = []
    for flag in SHOULD_AGREE:
        labels = {}  # value of the flag -> the rows that have it
        for label, row in rows.items():
            run, *_ = row.values()
            text = str(getattr(run.args, flag, None)).replace("None", "default")
            if flag == "rounds":  # as they came out
                text = span(run.rows[-1]["round"] for run in row.values())
            labels.setdefault(text, []).append(label)
        if len(labels) > 1:
            texts = [f"{text} ({', '.join(of_text)})" for text, of_text in labels.items()]
            found.append(f"{flag} {', '.join(texts)}")
    for at in set.intersection(*map(set, rows.values())):
        if len({getattr(row[at], "images", None) for row in rows.values()}) > 1:
            found.append(f"the images (seed {at[0]}), which have changed")
    return "; ".join(found)


def write(lines: Sequence[Sequence[str]]) -> None:
    """Prints a table, whose columns are lists of texts, in columns."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(map(str.ljust, line, widths)).rstrip())


def report(runs, minus: str | None = None) -> None:
    """Prints the means of these runs, their paired differences, and what they do not share."""
    rows, repeated = group(r for of in runs.values() for r in of)
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
