"""Compares your own runs over seeds: prints a table.

    python -m results.report runs/*      a folder stands for all runs in it

Runs that differ in the seed alone are one row. A number is the mean of a run's last five
evaluations, and then the mean over the seeds ± their standard deviation. Below, each row is
compared with the first one, seed by seed. Accuracies are in percent. A run that has not finished
is left out.
"""

import csv
import json
import sys
from pathlib import Path

import numpy as np

from common import UserError, first_line, ranks
from results.tables import last_five, pm, series, with_interval

COLUMNS = [
    "id_accuracy", "ood_accuracy", "rare_accuracy", "neutral_accuracy", "turned_accuracy",
    "mA", "mE", "train_loss",
]  # fmt: skip
NOT_COMPARED = ("seed", "out", "resume", "device", "data_dir", "processes", "compare", "name")
Runs = dict[int, list[dict]]  # seed -> rows of metrics.csv, with texts as cells


def read(folder: Path) -> tuple[str, int, dict, list[dict]]:
    """The run in this folder: its name, its seed, flags that its other seeds share, its rows."""
    try:
        flags = json.loads((folder / "args.json").read_text())["flags"]
        name, seed = flags["name"], int(flags["seed"])
        with (folder / "metrics.csv").open() as f:
            rows = list(csv.DictReader(f))
        for column in COLUMNS:
            series(rows, column)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise UserError(f"{folder} is not the folder of a run ({first_line(e)})") from e
    if folder.name.endswith("-" + name.lower().replace(" ", "-")):
        flags.pop("rounds")  # a baseline has those of its method, which can depend on the seed
    shared = {flag: flags[flag] for flag in sorted(flags) if flag not in NOT_COMPARED}
    return f"{name} ({flags['method']})", seed, shared, rows


def group(folders: list[Path]) -> dict[str, Runs]:
    """The finished runs, by their names and the flags in which runs of that name differ."""
    found = []
    for folder in dict.fromkeys(folder.resolve() for folder in folders):
        name, seed, flags, rows = read(folder)
        if any((name, seed, flags) == run[:3] for run in found):
            print(f"left out {folder}: another run has the same flags and seed", file=sys.stderr)
        elif not (folder / "model.pt").exists():
            print(f"left out {folder}: not finished, {len(rows)} rounds so far", file=sys.stderr)
        else:
            found.append((name, seed, flags, rows))
    named: dict[str, Runs] = {}
    for name, seed, flags, rows in found:
        others = [run[2] for run in found if run[0] == name]
        words = [name]
        for flag in flags:
            if any(other.get(flag) != flags[flag] for other in others):
                words.append(f"{flag}={str(flags[flag])[:12]}")
        named.setdefault(" ".join(words), {})[seed] = rows
    return named


def table(named: dict[str, Runs]) -> list[list[str]]:
    """Means over the seeds, and the paired differences of the first row and each other one."""
    ends = {}  # (name, column) -> seed -> number
    for name, runs in named.items():
        for column in COLUMNS:
            found = {seed: series(runs[seed], column) for seed in sorted(runs)}
            ends[name, column] = {
                seed: last_five(values) for seed, values in found.items() if values
            }
    columns = [column for column in COLUMNS if any(ends[name, column] for name in named)]
    means, differences = [["", "seeds", *columns]], []
    first = next(iter(named))
    for name, runs in named.items():
        means.append([name, " ".join(map(str, sorted(runs)))])
        differences.append([f"{first} minus {name}", ""])
        for column in columns:
            ours, theirs = ends[first, column], ends[name, column]
            both = np.array([ours[seed] - theirs[seed] for seed in ours if seed in theirs])
            means[-1].append(pm(np.array(list(theirs.values())), column))
            differences[-1].append(with_interval(both, column))
    return means + differences[1:]


def main() -> None:
    folders = []
    for word in sys.argv[1:]:
        below = sorted(file.parent for file in Path(word).rglob("metrics.csv"))
        if not below:
            raise UserError(f"no runs in {word}: give folders with metrics.csv")
        folders += below
    named = group(folders)
    if not named:
        raise UserError("no finished runs: give folders in which runs have left model.pt")
    lines = table(named)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        print("  ".join(cells).rstrip())
    print("±: standard deviation over the seeds; brackets: 95 % interval of paired differences")


if __name__ == "__main__":
    ranks.launch(main)
