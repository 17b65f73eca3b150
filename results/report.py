"""Compares your own runs over seeds: prints a table and draws the curves.

    python -m results.report runs/*      runs that differ only in the seed are one row; a folder stands for all in it

A number is the mean of a run's last five evaluations, and then the mean over seeds ± their standard deviation.
Accuracies are in percent. A run without model.pt has not finished, and its row says so.
"""

import csv
import json
import sys
from pathlib import Path

from common import UserError, first_line, runs
from results.tables import Rows, Run, curves, numbers, table, value

COLUMNS = ["id_accuracy", "ood_accuracy", "rare_accuracy", "mA", "mE", "mP", "train_loss"]
NOT_COMPARED = ("seed", "out", "resume", "device", "data_dir", "processes", "compare", "method", "name")


def read(folder: Path) -> tuple[str, dict, Run]:
    """What the run in this folder is called, the flags that it shares with the same run of other seeds, and the run."""
    try:
        about = json.loads((folder / "args.json").read_text())
        name, method, flags = about["name"], about["method"], dict(about["flags"])
        run = Run(int(flags["seed"]))
        for line in csv.DictReader((folder / "metrics.csv").read_text().splitlines()):
            of_round = {column: value(line[column]) for column in COLUMNS if column in line}
            run.rows.append({"round": int(line["round"]), **of_round})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise UserError(f"{folder} is not the folder of a run ({first_line(e)})") from e
    if not (folder / "model.pt").exists():
        run.label = f"seed {run.seed} unfinished: {len(run.rows)} rounds so far"
    baseline = name.lower() != method  # its rounds may depend on the seed
    shared = {flag: flags[flag] for flag in sorted(flags) if flag not in NOT_COMPARED + ("rounds",) * baseline}
    return f"{name} beside {method}" if baseline else method, shared, run


def compare(folders: list[Path]) -> Rows:
    """Groups runs that differ only in the seed. A group's name has the flags in which it differs from the others."""
    groups: dict[str, tuple[str, dict, list[Run]]] = {}
    for folder in dict.fromkeys(folder.resolve() for folder in folders):
        name, flags, run = read(folder)
        of_group = groups.setdefault(f"{name} {json.dumps(flags)}", (name, flags, []))[2]
        if run.seed in [other.seed for other in of_group]:
            print(f"left out {folder}: another of these runs has the same flags and seed", file=sys.stderr)
        else:
            of_group.append(run)
    rows = {}
    for name, flags, of_group in groups.values():
        others = [other for also, other, _ in groups.values() if also == name]
        words = {flag: {repr(other.get(flag)) for other in others} for flag in sorted(set().union(*others))}
        differ = [f"{flag}={flags.get(flag)!r}" for flag, values in words.items() if len(values) > 1]
        rows[" ".join([name, *differ])] = sorted(of_group, key=lambda run: run.seed)
    return rows


def main() -> None:
    if {"-h", "--help"} & set(sys.argv):
        return print(__doc__)
    below = {word: sorted(file.parent for file in Path(word).rglob("metrics.csv")) for word in sys.argv[1:]}
    if not below or not all(below.values()):
        raise UserError("no runs in one of these folders: give folders with metrics.csv")
    rows = compare([folder for folders in below.values() for folder in folders])
    columns = [column for column in COLUMNS if any(len(numbers(of_row, column)) for of_row in rows.values())]
    if not columns:
        raise UserError("these runs have no round yet: wait for the first")
    cells = table(rows, columns)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    curves(Path("report.png"), rows, columns)
    print("the mean of the last evaluations (up to 5), over seeds; accuracies in percent; curves are in report.png")


if __name__ == "__main__":
    runs.launch("report", main)
