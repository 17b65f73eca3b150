"""Draws clients.png, all N clients, the M that participate and the K of a round.

python -m docs.pictures.clients
"""

from pathlib import Path

import numpy as np

from common.runner import plots

N, M, K = 100, 40, 10


def draw(file: Path) -> None:
    x, y = np.arange(N) // 5, np.arange(N) % 5
    selected = np.random.default_rng(1).choice(M, K, replace=False)
    with plots.picture(file, 7.6, 1.9) as figure:
        axes = figure.subplots()
        axes.scatter(x, y, s=60, color="0.85")
        axes.scatter(x[:M], y[:M], s=60, color=plots.COLOURS[5])
        axes.scatter(x[selected], y[selected], s=60, color=plots.COLOURS[5], ec="black", lw=2)
        axes.text(
            3.5, 4.7, f"M = {M} clients participate; ringed: K = {K} train in a round", ha="center"
        )
        axes.text(13.5, 4.7, f"N - M = {N - M} never train", ha="center")
        axes.set(aspect="equal", ylim=(-0.6, 5.4))
        axes.axis("off")


if __name__ == "__main__":
    draw(Path(__file__).with_suffix(".png"))
