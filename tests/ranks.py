"""The methods on the tiny data, in several processes: child() forks one, or torchrun starts this.

ranks.py FOLDER
"""

import multiprocessing
import os
import signal
import sys
from pathlib import Path

import torch
import torch._dynamo  # or every child would import it
from helpers import in_each_round, make_tiny, save_each_round
from matplotlib.figure import Figure

import common.data
import convex_hull_select
import entropy_weighting
import fedavg
import fediir
import minimax_select
import uefl
from common import ranks
from common.runner import launch

SMALL = "--width 0.125 --local-epochs 1 --batch-size 8 --device cpu --precision float32 "
SKEWED = f"{SMALL} --model cnn --clients 8 --participating 6 --partition dirichlet --dirichlet 1 "
SKEWED += "--rounds 3 --lr 0.1 "
TURNED = SMALL + "--rotate 0 90 180 --no-compare "
CALLS = {
    fedavg: SKEWED + "--selection power_of_choice --sample 3 --no-compare",
    entropy_weighting: SKEWED + "--sample 3",
    minimax_select: SKEWED + "--sample 3",
    convex_hull_select: SKEWED + "--sample 6 --no-compare",
    fediir: TURNED + "--dataset mnist --model convnet --test-domain dark --clients 6 "
    "--participating 5 --sample 3 --rounds 3",
    uefl: TURNED + "--model resblocks --partition domain --clients 4 --participating 3 --lr 0.003 "
    "--gamma 0 --codebook-size 4 --dropout 0 --segments 1 --rounds 2 --later-rounds 1 "
    "--iterations 2",
}  # fmt: skip


def on_tiny_data(folder):
    """From now on, this process works in this folder, saves each round, and draws no picture."""
    os.chdir(folder)
    torch.set_num_threads(1)
    common.data.load = lambda name, *args: make_tiny()
    common.data.rotated = lambda data, *args: data
    save_each_round()
    Figure.savefig = lambda self, file, **options: Path(file).touch()


def child(method, flags, folder, first=lambda: None):
    """A process that calls first() and runs method "--flag value ..." in this folder, as a shell.

    What it says goes to the files `out` and `err` there. It starts with everything imported.
    """

    def main():
        on_tiny_data(folder)
        sys.argv = [f"{method.__name__}.py"]
        first()
        with open("out", "a") as sys.stdout, open("err", "a") as sys.stderr:
            launch(lambda: method.main(flags.split()))

    process = multiprocessing.get_context("fork").Process(target=main)
    process.start()
    return process


def kill_rank_1_in_round_2():
    def die(run, t):
        if t == 2 and ranks.RANK == 1:
            Path("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    in_each_round(die)


if __name__ == "__main__":
    on_tiny_data(sys.argv[1])
    launch(lambda: [m.main([*flags.split(), "--out", m.__name__]) for m, flags in CALLS.items()])
