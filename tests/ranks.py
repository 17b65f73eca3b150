"""The methods on the tiny data set, in several processes: child() forks them, or torchrun starts this program.

ranks.py FOLDER [METHOD --flag value ...]
"""

import multiprocessing
import os
import signal
import sys

import torch
import torch._dynamo  # or every child would import it
from conftest import make_tiny

import common.data
import convex_hull_select
import entropy_weighting
import fedavg
import fediir
import minimax_select
import uefl
from common import ranks, runs

SMALL = "--width 0.125 --local-epochs 2 --batch-size 8 --device cpu --precision float32 "
SKEWED = SMALL + "--model cnn --clients 8 --participating 6 --partition dirichlet --dirichlet 1 --rounds 3 --lr 0.1 "
TURNED = SMALL + "--rotate 0 90 180 "
CALLS = {
    fedavg: SKEWED + "--selection power_of_choice --sample 3 --no-compare",
    entropy_weighting: SKEWED + "--sample 3",
    minimax_select: SKEWED + "--sample 3",
    convex_hull_select: SKEWED + "--sample 6 --no-compare",
    fediir: TURNED
    + "--dataset mnist --model convnet --test-domain dark --clients 5 --sample 3 --rounds 3 --no-compare",
    uefl: TURNED + "--model resblocks --partition domain --lr 0.003 --gamma 0 --codebook-size 4 --segments 1 "
    "--rounds 2 --later-rounds 1 --iterations 2 --no-compare",
}


def prepare(folder) -> None:
    os.chdir(folder)
    torch.set_num_threads(1)
    common.data.load = lambda name, *args: make_tiny()
    runs.SAVE_EVERY = 0


def child(method, flags: list[str], folder, kill_in_round: int = 0) -> multiprocessing.Process:
    """A process that runs a method in this folder as a shell would; what it says goes to `out` and `err` there.

    It starts with everything imported. If kill_in_round is given, rank 1 dies in this round.
    """

    def main():
        prepare(folder)
        record = runs.Run.record

        def record_or_die(self, *args, **values):
            if self.t == kill_in_round and ranks.RANK == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            record(self, *args, **values)

        runs.Run.record = record_or_die
        with open("out", "a") as sys.stdout, open("err", "a") as sys.stderr:
            runs.launch(f"{method.__name__}.py", lambda: method.main(flags))

    process = multiprocessing.get_context("fork").Process(target=main)
    process.start()
    return process


if __name__ == "__main__":
    _, folder, *more = sys.argv
    prepare(folder)
    calls = {m: flags.split() for m, flags in CALLS.items() if not more or m.__name__ == more[0]}
    runs.launch("ranks.py", lambda: [m.main([*f, "--out", m.__name__, *more[1:]]) for m, f in calls.items()])
