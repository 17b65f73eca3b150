"""Runs the experiments of experiments.csv, two at a time with one process each, and records them.

    python -m results.experiments uefl/mnist wu/cifar10  those that begin like this, seed by seed
    python -m results.experiments uefl --runs FOLDER     records what has finished in this folder
    python -m results.experiments --check NAME SEED      runs a recorded one again, and compares

A run is in runs/experiments/NAME/SEED, and those of its baselines are in SEED-BASELINE. It has
ended when its folder has a file `exit`, with its exit code; a run that was stopped continues. To
repeat one, remove its lines from the CSV, which the first word of NAME names, and its folder. If it
needs a variation, it runs in a copy of the code with docs/variations/NAME.diff.
"""

import argparse
import csv
import json
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common import UserError, ranks
from results.tables import RESULTS, read

ROOT = RESULTS.parent


def code_of(variation: str, folder: Path) -> Path:
    """The folder of the code: this one, or a copy with this variation."""
    if not variation:
        return ROOT
    copy = folder / f"code-{variation}"
    if not copy.exists():
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "runs", "data", "results"))
        diff = ROOT / f"docs/variations/{variation}.diff"
        alone = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder)}  # not in this repository
        subprocess.run(["git", "apply", diff], cwd=copy, env=alone, check=True)
    return copy


def run(folder: Path, name: str, seed: str, variation: str, command: str) -> None:
    """Runs an experiment with this seed, or continues it."""
    out = folder / name / seed
    out.mkdir(parents=True, exist_ok=True)
    words = [*command.split(), "--seed", seed, "--out", out]
    if (out / "args.json").exists():
        words = [words[0], "--resume", out]
    words = [sys.executable, *words, "--processes", "1", "--data-dir", ROOT / "data"]
    with (out.parent / f"{seed}.log").open("a") as log:
        where = code_of(variation, folder)
        code = subprocess.run(words, cwd=where, stdout=log, stderr=log).returncode
    (out / "exit").write_text(str(code))
    if code:
        print(f"{name}, seed {seed}: failed, see {out}.log", flush=True)


def lines(name: str, seed: str, out: Path, columns: list[str]) -> list[list[str]]:
    """The lines of a run in a CSV with these columns. A round that has none of them has no line."""
    about = json.loads((out / "args.json").read_text())
    first = [name, seed, about["flags"]["code"][:7], about["torch"]]
    found, so_far = [], set()
    with (out / "metrics.csv").open() as f:
        for row in csv.DictReader(f):
            selected = row["selected"].split()
            so_far.update(selected)
            row |= {"clients": len(selected), "clients_so_far": len(so_far)}
            cells = [str(row.get(column, "")) for column in columns[5:]]
            if any(cells):
                found.append([*first, row["round"], *cells])
                first = [""] * 4
    return found


def compare(folder: Path, name: str, seed: str) -> dict[str, tuple[list, list]]:
    """The lines of an experiment and its baselines, if all have finished: name -> recorded, new."""
    file = RESULTS / f"{name.split('/')[0]}.csv"
    recorded, out = read(file), folder / name / seed
    columns = file.read_text().split("\n")[0].split(",")
    found = {}
    if (out / "exit").exists() and int((out / "exit").read_text()) == 0:
        for one in [out, *sorted(out.parent.glob(f"{seed}-*"))]:
            label = name + one.name.removeprefix(seed)
            then = recorded.get(label, {}).get(int(seed), [])
            found[label] = [list(row.values()) for row in then], lines(label, seed, one, columns)
    return found


def record(folder: Path, name: str, seed: str) -> None:
    """Adds the finished runs of an experiment to their CSV: all that are new, or none."""
    file = RESULTS / f"{name.split('/')[0]}.csv"
    text = file.read_text()
    for label, (then, now) in compare(folder, name, seed).items():
        if not then:
            text += "".join(",".join(line) + "\n" for line in now)
            print(f"{label}, seed {seed}: recorded", flush=True)
    part = file.with_suffix(".part")
    part.write_text(text)
    part.replace(file)


def check(name: str, seed: str, variation: str, command: str) -> bool:
    """Runs an experiment again, and prints whether it and its baselines repeat."""
    with tempfile.TemporaryDirectory() as folder:
        run(Path(folder), name, seed, variation, command)
        found = compare(Path(folder), name, seed)
    if not found:
        raise UserError(f"{name} did not finish: try {command} --seed {seed}")
    same = True
    for label, (then, now) in found.items():
        repeats = [line[4:] for line in then] == [line[4:] for line in now]
        print(f"{label}, seed {seed}: {'repeats' if repeats else 'differs' if then else 'is new'}")
        same &= repeats
    return same


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="BEGINNING", default=[""])
    parser.add_argument("--runs", type=Path, help="only record what has finished in this folder")
    parser.add_argument("--check", nargs=2, metavar=("NAME", "SEED"), help="run it again")
    args = parser.parse_args()
    with (RESULTS / "experiments.csv").open() as f:
        rows = {row["experiment"]: row for row in csv.DictReader(f)}
    if args.check:
        name, seed = args.check
        if name not in rows or not seed.isdigit():
            raise UserError(f"no experiment {name} with seed {seed}: see results/experiments.csv")
        sys.exit(not check(name, seed, rows[name]["variation"], rows[name]["command"]))
    for begin in args.names:
        if not any(name.startswith(begin) for name in rows):
            raise UserError(f"no experiment begins with {begin}: see results/experiments.csv")
    folder = (args.runs or ROOT / "runs/experiments").resolve()
    names = [name for name in rows if name.startswith(tuple(args.names))]
    jobs = sorted((int(seed), name) for name in names for seed in rows[name]["seeds"].split())

    def work(job: tuple[int, str]) -> None:
        seed, name = job
        recorded = read(RESULTS / f"{name.split('/')[0]}.csv")
        if not args.runs and seed not in recorded.get(name, {}):
            run(folder, name, str(seed), rows[name]["variation"], rows[name]["command"])

    with ThreadPoolExecutor(2) as two:
        for (seed, name), _ in zip(jobs, two.map(work, jobs), strict=True):
            record(folder, name, str(seed))


if __name__ == "__main__":
    ranks.launch(main)
