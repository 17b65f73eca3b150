"""Draws entropy.png, how many kinds of labels a mixture is worth, and entropy_weighting.png.

python -m docs.pictures.entropy
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from common import data, splits
from common.runner import plots
from entropy_weighting import aggregation_weights, label_entropy

HERE = Path(__file__).parent


def effective(share: Tensor, classes: int) -> Tensor:
    """exp(H) if one class has this share [n], and the other classes have equal parts: [n]."""
    rest = ((1 - share) / (classes - 1)).expand(classes - 1, -1)
    return label_entropy(torch.cat([share[None], rest]).T).exp()


def draw_mixtures(file: Path) -> None:
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


def draw_example(file: Path) -> None:
    """The clients of the example, ordered by entropy: their labels and aggregation weights."""
    glyphs = data.load("glyphs")
    counts = splits.make_clients(glyphs, 0, "specialists", clients=40).label_counts
    order = np.lexsort((counts.argmax(1), label_entropy(counts)))  # if equal, by the class
    held = (counts / counts.sum(1, keepdim=True))[order].cumsum(1)
    heights = torch.linspace(0.005, 0.995, 100).repeat(len(order), 1)
    with plots.picture(file, 7.0, 4.2) as figure:
        labels, weight = figure.subplots(2, 1, sharex=True)
        labels.imshow(torch.searchsorted(held, heights).T.numpy(), "turbo")
        labels.set(title="what a client holds: a colour is a class", yticks=[])
        edges = np.arange(len(order) + 1) - 0.5
        for i, by in enumerate(("entropy", "equal", "size")):
            alpha = 100 * aggregation_weights(by, counts)[order].numpy()
            only_the_top = dict(fill=i == 0, baseline=None if i else 0)
            style = dict(color=plots.COLOURS[i], ls=plots.LINES[i], lw=1.5)
            weight.stairs(alpha, edges, label=by, **style, **only_the_top)
        weight.set(title="how much it counts in the average (percent)")
        weight.set(xlabel="client, from the lowest entropy of labels to the highest")
        figure.legend(loc=plots.BELOW, ncols=4)


if __name__ == "__main__":
    draw_mixtures(HERE / "entropy.png")
    draw_example(HERE / "entropy_weighting.png")
