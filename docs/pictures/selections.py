"""Draws minimax_rounds.png and hull_dims.png, from a run of each selection's example.

python -m docs.pictures.selections (half a minute a picture on two cores)
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import convex_hull_select
import minimax_select
from common import data, splits
from common.models import build
from common.runner import flags, plots
from common.train import LocalTraining, Trainer

HERE = Path(__file__).parent
GREY, ORANGE = "0.6", plots.COLOURS[1]
DIMS = range(1, 9)


def example(method, rounds: int, seed: int = 0) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Before each round: all updates [M, P], who then trains, and who holds a rare class [M]."""
    glyphs = data.load("glyphs")
    clients = splits.make_clients(glyphs, seed, partition="rare", clients=80, per_round=10)
    is_rare = (clients.label_counts > 0).sum(1) == 1
    torch.manual_seed(seed)
    model = build("cnn", shape=(1, 28, 28), classes=10, width=0.25)
    local = LocalTraining(epochs=2, batch_size=30, lr=0.2)
    trainer = Trainer(glyphs, clients, model, local=local, evaluate_every=rounds)
    args = flags.defaults(method, f"--rounds {rounds} --seed {seed}")
    table = method.first_uploads(trainer, trainer.initial, clients.ids)
    for state, row in method.federate(args, clients, trainer):
        yield table, row["selected"], is_rare
        table = state["table"].clone()


def corners(rounds: int = 100) -> np.ndarray:
    """How many clients are corners in 1 to 8 dimensions, and how many of them are rare.

    The means over the rounds, [2, dimensions]. Who trains is decided in four dimensions.
    """
    found = []
    for table, _, is_rare in example(convex_hull_select, rounds):
        vertices = [convex_hull_select.hull_vertices(table, dim) for dim in DIMS]
        found.append([[len(v), is_rare[v].sum()] for v in vertices])
    return np.mean(found, 0).T


def draw_minimax(file: Path, shown=(1, 30, 100)) -> None:
    """Each client's largest cosine to another one, before three rounds."""
    with plots.picture(file, 7.6, 2.9) as figure:
        panels = dict(zip(shown, figure.subplots(1, 3, sharex=True, sharey=True), strict=True))
        for t, (table, selected, is_rare) in enumerate(example(minimax_select, max(shown)), 1):
            if t not in panels:
                continue
            score = minimax_select.largest_similarity(minimax_select.cosines(table))
            colours = np.where(is_rare, ORANGE, GREY)
            panels[t].scatter(score, range(len(score)), s=14, color=colours)
            panels[t].scatter(score[selected], selected, s=50, fc="none", ec="black", lw=0.8)
            panels[t].set(title=f"before round {t}", xlabel="largest cosine to another client")
        panels[shown[0]].set(ylabel="client")
        for colour, label in ((GREY, "common classes"), (ORANGE, "a class of its own")):
            panels[t].scatter([], [], s=14, color=colour, label=label)
        panels[t].scatter([], [], s=50, fc="none", ec="black", lw=0.8, label="trains in the round")
        figure.legend(loc=plots.BELOW, ncols=3)


def draw_hull(file: Path) -> None:
    """The corners of the hull, and the rare clients among them, against its dimension."""
    count, rare = corners()
    share = "rare ones among the corners\n(percent; dotted: chance)"
    with plots.picture(file, 7.6, 2.7) as figure:
        panels = figure.subplots(1, 3, sharex=True)
        for axes, numbers, title, top in zip(
            panels,
            (count, rare, 100 * rare / count),
            ("corners, of all 80 clients", "corners, of the 3 rare clients", share),
            (80, 3.2, None),
        ):
            axes.plot(DIMS, numbers, "o", color=GREY, mfc="none", label="would be corners")
            axes.plot(4, numbers[3], "o", color=ORANGE, label="train")
            axes.set(title=title, ylim=(0, top), xlabel="dimension of the hull", xticks=DIMS)
        axes.axhline(100 * 3 / 80, color="0.5", ls=":", lw=0.9)
        figure.legend(*axes.get_legend_handles_labels(), loc=plots.BELOW, ncols=2)


if __name__ == "__main__":
    draw_minimax(HERE / "minimax_rounds.png")
    draw_hull(HERE / "hull_dims.png")
