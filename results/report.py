"""Compares runs over seeds and test domains: prints a table, in which each folder is a row.

    python -m results.report runs/mymethod runs/fedavg

The runs in a folder may differ in seed and test domain alone. Each row is compared with the last
one, run by run with the same seed and test domain, and a number is a mean over the seeds. It is the
table that a run prints at its end. A run that is damaged or has not finished is left out.
"""

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from common import UserError, first_line
from common.runner import launch, table
from common.runner.flags import read_args
from common.runner.runs import machine_in, read_rows


def read(folder):
    """The run in this folder, as table.report() takes it. Raises any error if it is damaged."""
    about, rows = read_args(folder), read_rows(folder)
    assert about.get("finished") == rows[-1]["round"], "its last round is missing"
    args, machine = Namespace(**about["flags"]), machine_in(about)
    shared = {"images": about["images"], "classes": about["classes"]}
    return Namespace(args=args, rows=rows, machine=machine, **shared)


def row(folder):
    """The runs in a folder. Raises UserError if they differ in more than seed and test domain."""
    files = sorted(folder.rglob("metrics.csv"))
    if not files:
        print(f"left out {folder}: there is no run in it, so no metrics.csv", file=sys.stderr)
    runs, folders, settings, machines = [], {}, {}, {}
    for file in files:
        try:
            run = read(file.parent)
            name = str(file.parent.relative_to(folder))
            settings[name], machines[name] = table.settings(run), run.machine
            twin = folders.setdefault(table.which(run), file.parent)
        except Exception as e:  # of a damaged file it can be of any type
            why = f"not finished or damaged ({first_line(e)})"
            print(f"left out {file.parent}: {why}", file=sys.stderr)
            continue
        if twin != file.parent:
            raise UserError(f"{twin} and {file.parent} have the same seed: give each as a row")
        runs.append(run)
    if different := table.differing(settings):
        raise UserError(f"{folder} is no row, because its runs differ: {different}")
    if different := table.differing(machines):
        print(f"{folder}: its runs differ in {different}", file=sys.stderr)
    return runs


def main():
    parser = ArgumentParser(prog="results.report", description=__doc__.split("\n")[0])
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help="a row of the table")
    rows = {}
    for word in parser.parse_args().folders:
        folder = Path(word).resolve()
        if not folder.exists():
            raise UserError(f"{word}: no such folder")
        runs = rows.pop(folder, None) or row(folder)  # runs/* runs/fedavg names one twice
        if runs:
            rows[folder] = runs
    if not rows:
        raise UserError("no finished runs: give folders in which runs have left model.pt")
    depth = 1  # so many parts of a path tell the rows apart
    while len({folder.parts[-depth:] for folder in rows}) < len(rows):
        depth += 1
    table.report({"/".join(folder.parts[-depth:]): runs for folder, runs in rows.items()})


if __name__ == "__main__":
    launch(main)
