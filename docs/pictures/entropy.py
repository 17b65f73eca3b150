"""Draws entropy.png, how many kinds of labels a mixture is worth.

python -m docs.pictures.entropy
"""

from pathlib import Path

import torch
from torch import Tensor

from common.runner import plots
from entropy_weighting import label_entropy


def effective(share: Tensor, classes: int) -> Tensor:
    """exp(H) if one class has this share [n], and the other classes have equal parts: [n]."""
    rest = ((1 - share) / (classes - 1)).expand(classes - 1, -1)
    return label_entropy(torch.cat([share[None], rest]).T).exp()


def draw(file: Path) -> None:
    with plots.picture(file, 6.0, 2.9) as figure:
        axes = figure.subplots()
        for i, classes in enumerate((10, 5, 2)):
            share = torch.linspace(1 / classes, 1, 200, dtype=torch.float64)
            label, style = f"{classes} classes", plots.LINES[i]
            axes.plot(
                100 * share, effective(share, classes), style, color=plots.COLOURS[i], label=label
            )
        toy = torch.tensor([1.0, 0.5, 0.9], dtype=torch.float64)
        axes.plot(
            100 * toy, effective(toy, 2), "o", color="black", label="clients of the toy below"
        )
        axes.set(xlabel="share of a client's largest class (percent); the others share the rest")
        axes.set(ylabel="effective number of classes, exp(H)", ylim=(0, 10.5), xlim=(8, 102))
        axes.legend()


if __name__ == "__main__":
    draw(Path(__file__).with_suffix(".png"))
