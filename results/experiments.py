"""Runs experiments of the result pages: one thread each, two at a time. It skips what has finished on this machine.

    python -m results.experiments                  all of them (many hours on two cores)
    python -m results.experiments uefl/glyphs      those with this beginning

The runs are under runs/experiments. When one has finished, its args.json and metrics.csv are copied to results/. An
interrupted run continues.
"""

import os
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

WORK, RESULTS = Path("runs/experiments"), Path("results")

UEFL = "uefl.py --no-compare"
PLAIN = "uefl.py --codebook-size 0"
MNIST = "--dataset mnist --width 0.0625 --local-epochs 4 --batch-size 32 --lr 1e-3"
CODEBOOK = "--segments 8 --commitment 0.1 --gamma 0.05 --codebook-size 64"
WU = "--dataset cifar10 --width 0.5 --rounds 50 --precision bfloat16 --lr 0.1"

EXPERIMENTS = {  # folder in results/ -> command without the seed
    "uefl/glyphs/uefl": UEFL,
    "uefl/glyphs/uefl-no-norm": f"{UEFL} --no-token-norm",
    "uefl/glyphs/static-codebook": f"{UEFL} --iterations 1 --rounds 7",
    "uefl/glyphs/fedavg": f"{PLAIN} --rounds 7",
    "uefl/glyphs/fedavg-no-norm": f"{PLAIN} --rounds 7 --no-token-norm",
    "wu/hull-animation": f"convex_hull_select.py {WU}",
    "wu/cifar10/hull": f"convex_hull_select.py {WU}",
    "uefl/mnist/uefl": f"{UEFL} {MNIST} {CODEBOOK} --rounds 3 --later-rounds 2 --iterations 5",
    "uefl/mnist/fedavg": f"{PLAIN} {MNIST} --rounds 11",
    "uefl/mnist/static-codebook": f"{UEFL} {MNIST} {CODEBOOK} --iterations 1 --rounds 11",
    "uefl/mnist/uefl-no-norm": f"{UEFL} {MNIST} {CODEBOOK} --rounds 3 --later-rounds 2 --iterations 5 --no-token-norm",
    "uefl/mnist/fedavg-no-norm": f"{PLAIN} {MNIST} --rounds 11 --no-token-norm",
    "wu/cifar10/random": f"fedavg.py {WU} --weighting equal",
    "wu/cifar10/minimax": f"minimax_select.py {WU}",
    "wu/cifar10/maxsim": f"minimax_select.py {WU} --selection maxsim",
    "wu/cifar10/interior": f"convex_hull_select.py {WU} --selection interior",
    "wu/cifar10/power-of-choice": f"fedavg.py {WU} --weighting equal --selection power_of_choice",
    "wu/cifar10/full": f"fedavg.py {WU} --weighting equal --selection full",
    "wu/cifar10-weighting/entropy": f"entropy_weighting.py {WU}",
    "wu/cifar10-weighting/size": f"entropy_weighting.py {WU} --weighting size",
    "wu/cifar10-weighting/equal": f"entropy_weighting.py {WU} --weighting equal",
}
SEEDS = range(3)


def finish(name: str, seed: int) -> None:
    """Runs one experiment, or continues it, and copies its result."""
    folder, result = WORK / name / str(seed), RESULTS / name / str(seed)
    command = EXPERIMENTS[name].split()
    flags = ["--resume", folder] if (folder / "args.json").exists() else [*command[1:], "--seed", seed, "--out", folder]
    with open(WORK / "log.txt", "a") as log:
        words = [sys.executable, command[0], *map(str, flags)]
        print(shlex.join(words), file=log, flush=True)
        subprocess.run(words, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=log, stdout=log)
    if (folder / "model.pt").exists():
        result.mkdir(parents=True, exist_ok=True)
        for file in ("args.json", "metrics.csv"):
            shutil.copy(folder / file, result / file)
        print(f"{name} {seed}: done")
    else:
        print(f"{name} {seed}: did not finish; see {WORK / 'log.txt'}")


def main() -> None:
    os.chdir(Path(__file__).parents[1])
    WORK.mkdir(parents=True, exist_ok=True)
    begin = sys.argv[1] if len(sys.argv) > 1 else ""
    names = [name for name in EXPERIMENTS if name.startswith(begin)]
    todo = [(name, seed) for seed in SEEDS for name in names if not (WORK / name / str(seed) / "model.pt").exists()]
    with ThreadPoolExecutor(2) as two:
        list(two.map(lambda one: finish(*one), todo))


if __name__ == "__main__":
    main()
