"""One of Wu et al.'s selections, or FedAvg, with the same number of local steps for each client.

    python results/equal_steps.py METHOD FLAGS OF METHOD

Normally a client with more samples takes more steps. Here each client trains on the same number of samples: the median
over all clients. It repeats its own samples, or leaves some out. metrics.csv still gives its true number of samples.
"""

import importlib
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from common import UserError, run
from common.train import Trainer

METHODS = ["fedavg", "minimax_select", "convex_hull_select"]
as_usual = Trainer.local_updates


def with_equal_steps(trainer, client_update, model, w, clients, samples, round, **options):
    """What Trainer.local_updates returns, after training on equal numbers of samples."""
    size = int(np.median([len(of_client) for of_client in samples]))
    samples = [of_client.repeat(-(-size // len(of_client)))[:size] for of_client in samples]
    return as_usual(trainer, client_update, model, w, clients, samples, round, **options)


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] not in METHODS:
        raise UserError(f"the first word must be one of {', '.join(METHODS)}")
    Trainer.local_updates = with_equal_steps
    importlib.import_module(sys.argv[1]).main(sys.argv[2:])


if __name__ == "__main__":
    run.launch(main)
