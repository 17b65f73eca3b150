"""Compares your own runs over seeds: prints a table.

    python -m results.report runs/*      a folder stands for all runs in it

Runs that differ in the seed alone are one row. A number is the mean of a run's last five
evaluations, and then the mean over the seeds ± their standard deviation. Below, each row is
compared with the first one, seed by seed. Accuracies are in percent. A run that has not finished
is left out.
"""

import json
import sys
from pathlib import Path

import numpy as np

from common import UserError, first_line, ranks
from results.tables import pm, read_csv, series, with_interval, without_empty_columns

ACCURACIES = "id_accuracy ood_accuracy rare_accuracy neutral_accuracy turned_accuracy"
COLUMNS = [*ACCURACIES.split(), "mA", "mE", "train_loss"]
NOT_COMPARED = [
    "seed", "out", "resume", "device", "data_dir", "processes", "compare", "name", "is_example",
]  # fmt: skip


def read(folder):
    """The run in this folder: its name, seed, flags that its other seeds share, and numbers.

    A number is the mean of the last five evaluations of a column, or nan.
    """
    try:
        flags = json.loads((folder / "args.json").read_text())["flags"]
        name, seed = flags["name"], int(flags["seed"])
        rows = read_csv(folder / "metrics.csv")
        found = [series(rows, column) for column in COLUMNS]
    except Exception as e:  # a damaged file can raise any type
        raise UserError(f"{folder} is not the folder of a run ({first_line(e)})") from e
    if folder.name.endswith("-" + name.lower().replace(" ", "-")):
        flags.pop("rounds")  # a baseline has those of its method, which can depend on the seed
    shared = [(flag, str(flags[flag])) for flag in sorted(flags) if flag not in NOT_COMPARED]
    ends = [np.mean([*values.values()][-5:]) if values else np.nan for values in found]
    return f"{name} ({flags['method']})", seed, shared, np.array(ends)


def group(folders):
    """The numbers of the finished runs: label -> seed -> [columns].

    A label is the runs' name and those flags in which runs of that name differ.
    """
    found = {}  # (name, *flags) -> seed -> [columns]
    for folder in dict.fromkeys(folders):
        name, seed, flags, ends = read(folder)
        if not (folder / "model.pt").exists():
            print(f"left out {folder}: not finished", file=sys.stderr)
            continue
        runs = found.setdefault((name, *flags), {})
        if seed in runs:
            print(f"left out {folder}: another run has the same flags and seed", file=sys.stderr)
        runs.setdefault(seed, ends)
    named = {}
    for (name, *flags), runs in found.items():
        label = name
        for flag, value in flags:
            if any(name in other and (flag, value) not in other for other in found):
                label += f" {flag}={value[:7] if flag == 'code' else value}"
        named[label] = runs
    return named


def cells(show, runs):
    """What `show` makes of the numbers of these runs, column by column."""
    values = np.reshape(runs, (-1, len(COLUMNS))).T
    return [show(of[~np.isnan(of)], column) for of, column in zip(values, COLUMNS, strict=True)]


def table(named):
    """Means over the seeds, and the paired differences of the first row and each other one."""
    means, differences = [["", "seeds", *COLUMNS]], []
    first, ours = next(iter(named.items()))
    for name, theirs in named.items():
        seeds = sorted(theirs)
        means.append([name, " ".join(map(str, seeds)), *cells(pm, [theirs[s] for s in seeds])])
        both = [ours[s] - theirs[s] for s in seeds if s in ours]
        differences.append([f"{first} minus {name}", "", *cells(with_interval, both)])
    return without_empty_columns(means + differences[1:])


def main():
    folders = []
    for word in sys.argv[1:]:
        files = sorted(Path(word).resolve().rglob("metrics.csv"))
        if not files and not Path(word).is_file():  # runs/* may hold the user's notes, too
            raise UserError(f"no runs in {word}: give folders with metrics.csv")
        folders += [file.parent for file in files]
    named = group(folders)
    if not named:
        raise UserError("no finished runs: give folders in which runs have left model.pt")
    lines = table(named)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(map(str.ljust, line, widths)).rstrip())
    print("±: standard deviation over the seeds; brackets: 95 % interval of paired differences")


if __name__ == "__main__":
    ranks.launch(main)
