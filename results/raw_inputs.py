"""uefl.py on images as numbers from 0 to 255, as they enter the authors' model. Here they are in -1..1.

python results/raw_inputs.py FLAGS OF uefl.py
"""

import sys
from pathlib import Path

from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

import uefl
from common import run
from common.train import Trainer

scaled = Trainer.batch


def raw(trainer: Trainer, positions: Tensor) -> tuple[Tensor, Tensor]:
    """What Trainer.batch returns, without its scaling."""
    x, y = scaled(trainer, positions)
    return (x + 1) * 127.5, y


if __name__ == "__main__":
    Trainer.batch = raw
    run.launch(uefl.main)
