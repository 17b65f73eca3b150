"""Compares your own runs over seeds and test domains: prints a table.

    python -m results.report runs/*      a folder stands for all runs in it
    python -m results.report runs/* --minus FedAvg

It is the table that a run prints at its end (common/runner/table.py): runs that differ in seed and
test domain alone are one row, and a number is a mean over the seeds, ± their standard deviation.
Differences are paired, seed by seed and domain by domain. Accuracies are in percent. A run that has
not finished is left out.
"""

import argparse
import sys
from pathlib import Path

from common import UserError, ranks
from common.runner import table


def folders_of(words):
    """The folders of finished runs in the folders that these words name, each once."""
    found = []
    for word in words:
        files = sorted(Path(word).resolve().rglob("metrics.csv"))
        if not files and not Path(word).is_file():  # runs/* may hold the user's notes, too
            raise UserError(f"no runs in {word}: give folders with metrics.csv")
        found += [file.parent for file in files]
    finished = []
    for folder in dict.fromkeys(found):
        if (folder / "model.pt").exists():
            finished.append(folder)
        else:
            print(f"left out {folder}: not finished", file=sys.stderr)
    if not finished:
        raise UserError("no finished runs: give folders in which runs have left model.pt")
    return finished


def main():
    parser = argparse.ArgumentParser(prog="results.report", description=__doc__.split("\n")[0])
    parser.add_argument("folders", nargs="*", metavar="FOLDER")
    parser.add_argument("--minus", metavar="ROW", help="the row that all others are compared with")
    args = parser.parse_args()
    table.report(map(table.read, folders_of(args.folders)), args.minus)


if __name__ == "__main__":
    ranks.launch(main)
