"""Runs the experiments of experiments.csv, two at a time with one process each, and records them.

    python -m results.experiments uefl/mnist wu/cifar10    those that begin like this, seed by seed
    python -m results.experiments uefl/mnist/uefl/3 --check  runs recorded ones again, and compares

A run is in runs/experiments/NAME/SEED, and those of its baselines are in SEED-BASELINE. A run that
was stopped continues. To repeat one, remove its lines from the CSV, which the first word of NAME
names, and its folder. All run in copies of the code, with the variations that they have.
"""

import argparse
import json
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

from common import UserError
from common.runner import launch
from common.runner.runs import machine_in
from results.tables import RESULTS, csv_of, read, read_csv

ROOT = RESULTS.parent
EXPERIMENTS = {row["experiment"]: row for row in read_csv(RESULTS / "experiments.csv")}


def recorded(name, seed):
    """The lines of a run in its CSV, or []."""
    return read(csv_of(name)).get(name, {}).get(int(seed), [])


def run(folder, job):
    """Runs an experiment with a seed in a copy of the code. Returns both, or None if it fails."""
    name, seed = job
    out, experiment = folder / name / seed, EXPERIMENTS[name]
    out.mkdir(parents=True, exist_ok=True)
    words = [*experiment["command"].split(), "--seed", seed, "--out", out]
    if (out / "args.json").exists():
        words = [words[0], "--resume", out]
    words = [sys.executable, *words, "--processes", "1", "--data-dir", ROOT / "data"]
    with TemporaryDirectory() as code, Path(f"{out}.log").open("a") as log:
        not_code = shutil.ignore_patterns(".*", "runs", "data", "results")
        shutil.copytree(ROOT, code, ignore=not_code, dirs_exist_ok=True)
        for variation in experiment["variation"].split():  # docs/variations/, results/controls/
            (diff,) = ROOT.glob(f"*/*/{variation}.diff")
            for git in (["init", "--quiet"], ["apply", diff]):
                subprocess.run(["git", *git], cwd=code, check=True)
        if subprocess.run(words, cwd=code, stdout=log, stderr=log).returncode == 0:
            return job
    print(f"{name}, seed {seed}: failed, see {out}.log", flush=True)


def lines(out, label, seed, columns):
    """The lines of the run in a folder for its CSV: of each round that has some of its columns."""
    about, so_far, found = json.loads((out / "args.json").read_text()), set(), []
    for row in read_csv(out / "metrics.csv"):
        selected = row["selected"].split()
        so_far.update(selected)
        if any(row.get(column) for column in columns[5:]):  # beside the round
            counts = {"clients": str(len(selected)), "clients_so_far": str(len(so_far))}
            found.append(row | counts)
    flags, machine = about["flags"], machine_in(about)
    found[0] |= {
        "experiment": label, "seed": seed, "code": flags["code"].get(f"{flags['method']}.py", ""),
        "torch": machine["torch"], "device": machine["device"], "precision": flags["precision"],
    }  # fmt: skip
    return [{column: row.get(column, "") for column in columns} for row in found]


def record(folder, name, seed):
    """Adds what is new of a finished experiment and its baselines to their CSV: all or nothing.

    What was recorded before is compared, in the columns that existed then. Returns whether all of
    it repeats.
    """
    file, words = csv_of(name), []
    text = file.read_text()
    columns = text.split("\n")[0].split(",")
    for out in [folder / name / seed, *sorted((folder / name).glob(f"{seed}-*"))]:
        label = name + out.name.removeprefix(seed)
        now = lines(out, label, seed, columns)
        if then := recorded(label, seed):
            filled = {c for line in then for c in line if line[c]} - {"code", "torch", "device"}
            old, new = ([{c: line[c] for c in filled} for line in of] for of in (then, now))
            words.append("repeats" if old == new else "differs")
        else:
            words.append("recorded")
            text += "".join(",".join(line.values()) + "\n" for line in now)
        print(f"{label}, seed {seed}: {words[-1]}", flush=True)
    file.write_text(text)
    return "differs" not in words


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="BEGINNING", default=[""])
    parser.add_argument("--check", action="store_true", help="run recorded ones again")
    args = parser.parse_args()
    jobs = [(name, seed) for name, row in EXPERIMENTS.items() for seed in row["seeds"].split()]
    jobs = [job for job in jobs if "/".join(job).startswith(tuple(args.names))]
    jobs = [job for job in jobs if bool(recorded(*job)) == args.check]
    if not jobs:
        raise UserError("no such experiment: new ones run without --check, recorded ones with it")
    jobs.sort(key=lambda job: int(job[1]))  # seed by seed
    with TemporaryDirectory() as again, ThreadPoolExecutor(2) as two:
        folder = Path(again) if args.check else ROOT / "runs/experiments"
        same = [job and record(folder, *job) for job in two.map(lambda job: run(folder, job), jobs)]
    sys.exit(not all(same))


if __name__ == "__main__":
    launch(main)
