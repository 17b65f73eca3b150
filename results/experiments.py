"""Runs the experiments of experiments.csv, two at a time with one process each, and records them.

    python -m results.experiments uefl/mnist wu/cifar10  those that begin like this, seed by seed
    python -m results.experiments uefl --runs FOLDER     records what has finished in this folder
    python -m results.experiments --check NAME SEED      runs a recorded one again, and compares

A run is in runs/experiments/NAME/SEED, and those of its baselines are in SEED-BASELINE. It has
ended when its folder has a file `exit`, with its exit code; a run that was stopped continues. To
repeat one, remove its lines from the CSV, which the first word of NAME names, and its folder. All
run in copies of the code, to which an experiment's variation is applied: see diff_of().
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from common import UserError, ranks
from results.tables import RESULTS, read, read_csv

ROOT = RESULTS.parent
EXPERIMENTS = {
    (row["experiment"], seed): row
    for row in read_csv(RESULTS / "experiments.csv")
    for seed in row["seeds"].split()
}


def csv_of(name):
    """The CSV of an experiment, which the first word of its name names."""
    return RESULTS / f"{name.split('/')[0]}.csv"


def diff_of(variation):
    """The diff of this name in docs/variations/, or else in results/controls/."""
    diff = ROOT / f"docs/variations/{variation}.diff"
    return diff if diff.exists() else RESULTS / f"controls/{variation}.diff"


def recorded(name, seed):
    """The lines of a run in its CSV, without what its first line says about it, or []."""
    lines = read(csv_of(name)).get(name, {}).get(int(seed), [])
    return [[*line.values()][4:] for line in lines]


def run(folder, job):
    """Runs an experiment with a seed in a copy of the code, or continues it. Returns the two."""
    name, seed = job
    _, _, variation, command = EXPERIMENTS[job].values()
    out = folder / name / seed
    out.mkdir(parents=True, exist_ok=True)
    words = [*command.split(), "--seed", seed, "--out", out]
    if (out / "args.json").exists():
        words = [words[0], "--resume", out]
    words = [sys.executable, *words, "--processes", "1", "--data-dir", ROOT / "data"]
    with TemporaryDirectory() as code, Path(f"{out}.log").open("a") as log:
        not_code = shutil.ignore_patterns(".*", "runs", "data", "results")
        shutil.copytree(ROOT, code, ignore=not_code, dirs_exist_ok=True)
        if variation:
            alone = {**os.environ, "GIT_CEILING_DIRECTORIES": str(Path(code).parent)}
            # inside another repository, git would apply nothing, and say nothing
            subprocess.run(["git", "apply", diff_of(variation)], cwd=code, env=alone, check=True)
        exit_code = subprocess.run(words, cwd=code, stdout=log, stderr=log).returncode
    (out / "exit").write_text(str(exit_code))
    if exit_code:
        words = f"{name}, seed {seed}: failed, see {out}.log, or try {command} --seed {seed}"
        print(words, flush=True)
    return job


def lines(label, seed, out, columns):
    """The lines of the run in the folder `out`: a list of cells for each round that has some."""
    about = json.loads((out / "args.json").read_text())
    first = [label, seed, about["flags"]["code"][:7], about["torch"]]
    found, so_far = [], set()
    for row in read_csv(out / "metrics.csv"):
        selected = row["selected"].split()
        so_far.update(selected)
        row |= {"clients": str(len(selected)), "clients_so_far": str(len(so_far))}
        cells = [row.get(column, "") for column in columns[4:]]
        if any(cells[1:]):  # the first one is the round
            found.append([*first, *cells])
            first = [""] * 4
    return found


def repeats(then, now):
    """Whether these lines agree, but for columns that did not exist then."""
    filled = sorted({i for line in then for i, cell in enumerate(line) if cell})
    old, new = ([[line[i] for i in filled] for line in lines] for lines in (then, now))
    return old == new


def record(folder, name, seed):
    """Adds what is new of a finished experiment and its baselines to their CSV: all or nothing.

    What was recorded before is compared. Returns whether all of it repeats.
    """
    file, out = csv_of(name), folder / name / seed
    if not (out / "exit").exists() or (out / "exit").read_text() != "0":
        return False
    text, words = file.read_text(), []
    columns = text.split("\n")[0].split(",")
    for one in [out, *sorted(out.parent.glob(f"{seed}-*"))]:
        label = name + one.name.removeprefix(seed)
        then, now = recorded(label, seed), lines(label, seed, one, columns)
        if then:
            words.append("repeats" if repeats(then, [line[4:] for line in now]) else "differs")
        else:
            words.append("recorded")
            text += "".join(",".join(line) + "\n" for line in now)
        print(f"{label}, seed {seed}: {words[-1]}", flush=True)
    part = file.with_suffix(".part")
    part.write_text(text)
    part.replace(file)
    return "differs" not in words


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="BEGINNING", default=[""])
    parser.add_argument("--runs", type=Path, help="only record what has finished in this folder")
    parser.add_argument("--check", nargs=2, metavar=("NAME", "SEED"), help="run it again")
    args = parser.parse_args()
    if args.check:
        jobs = [job for job in EXPERIMENTS if [*job] == args.check and recorded(*job)]
    else:
        chosen = [job for job in EXPERIMENTS if job[0].startswith(tuple(args.names))]
        jobs = [job for job in chosen if not recorded(*job)]
    if not jobs:
        what = "recorded experiment" if args.check else "experiment that is not recorded yet"
        raise UserError(f"there is no such {what}: see experiments.csv")
    jobs.sort(key=lambda job: int(job[1]))  # seed by seed
    with TemporaryDirectory() as again, ThreadPoolExecutor(2) as two:
        folder = Path(again) if args.check else args.runs or ROOT / "runs/experiments"
        finished = jobs if args.runs else two.map(partial(run, folder), jobs)
        same = [record(folder, *job) for job in finished]
    sys.exit(args.check and not all(same))


if __name__ == "__main__":
    ranks.launch(main)
