"""Runs the experiments of experiments.csv, one process each and two at a time, and records them in the pages' CSVs.

    python -m results.experiments                          all of them (many hours on two cores)
    python -m results.experiments uefl/glyphs wu/cifar10   those with one of these beginnings, seed by seed

A run that is in its page's CSV is skipped, and an interrupted one continues. To repeat a run, remove its rows and its
folder under runs/experiments. The CSV of wu/glyphs/hull is wu.csv: the first word names it. An experiment with a
variation runs only after `git apply docs/variations/NAME.diff`; undo this before others run.
"""

import csv
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

RUNS, RESULTS, LOCK = Path("runs/experiments"), Path("results"), Lock()


def git(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run(["git", *words], capture_output=True, text=True)


def recorded(experiment: str) -> tuple[Path, list[str], set[tuple[str, str]]]:
    """The CSV of this experiment, its columns, and the runs that it has: (experiment, seed)."""
    file = RESULTS / f"{experiment.split('/')[0]}.csv"
    header, *rows = file.read_text().splitlines()
    return file, header.split(","), {tuple(row.split(",")[:2]) for row in rows}


def record(folders: dict[str, Path], seed: int, commit: str) -> None:
    """Appends these finished runs of one page, experiment -> folder: all of their rows, or none if the disk is full."""
    with LOCK:
        file, columns, there = recorded(next(iter(folders)))
        text = file.read_text()
        for experiment, folder in folders.items():
            if (experiment, str(seed)) in there:
                continue
            about, so_far = json.loads((folder / "args.json").read_text()), set()
            for row in csv.DictReader((folder / "metrics.csv").read_text().splitlines()):
                clients = row["selected"].split()
                so_far |= set(clients)
                row |= {"experiment": experiment, "seed": seed}
                row |= {"commit": commit, "torch": about["torch"]} if row["round"] == "1" else {}  # once per run
                row |= {"clients": len(clients), "clients_so_far": len(so_far)}
                text += ",".join(str(row.get(column, "")) for column in columns) + "\n"
        part = file.with_suffix(".part")
        part.write_text(text)
        part.replace(file)


def finish(experiment: str, seed: int, command: str, commit: str) -> bool:
    """Runs an experiment, or continues it, and records it with its baselines, if any. Returns whether it finished."""
    folder, (program, *flags) = RUNS / experiment / str(seed), command.split()
    folder.parent.mkdir(parents=True, exist_ok=True)
    flags = ["--resume", folder] if (folder / "args.json").exists() else [*flags, "--seed", seed, "--out", folder]
    with (RUNS / "log.txt").open("a") as log:
        words = [sys.executable, program, *flags, "--processes", "1"]
        code = subprocess.run([*map(str, words)], stdout=log, stderr=log).returncode
    folders = [folder, *folder.parent.glob(f"{seed}-*")]
    finished = code == 0 and all((of_run / "model.pt").exists() for of_run in folders)
    if finished:
        record({experiment + f.name.removeprefix(str(seed)): f for f in folders}, seed, commit)
    print(f"{experiment} {seed}: {'done' if finished else f'did not finish; see {RUNS}/log.txt'}", flush=True)
    return finished


def main() -> None:
    os.chdir(Path(__file__).parents[1])
    commit, todo = git("rev-parse", "--short", "HEAD").stdout.strip(), []
    rows = list(csv.DictReader((RESULTS / "experiments.csv").read_text().splitlines()))
    rows = [row for begin in sys.argv[1:] or [""] for row in rows if row["experiment"].startswith(begin)]
    for i, row in enumerate(rows):
        name, diff, version = row["experiment"], f"docs/variations/{row['variation']}.diff", commit
        if row["variation"]:
            if git("apply", "--reverse", "--check", diff).returncode:
                print(f"{name}: left out, as it needs git apply {diff}")
                continue
            version += f"+{row['variation']}"
        seeds = [int(seed) for seed in row["seeds"].split() if (name, seed) not in recorded(name)[2]]
        todo += [(seed, i, (name, seed, row["command"], version)) for seed in seeds]
    with ThreadPoolExecutor(2) as two:
        runs = [two.submit(finish, *run) for _, _, run in sorted(todo)]
    sys.exit(not all(run.result() for run in runs))


if __name__ == "__main__":
    main()
