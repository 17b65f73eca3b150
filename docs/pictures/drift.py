"""Draws drift.png, where FedAvg ends if two clients have different goals.

python -m docs.pictures.drift
"""

from pathlib import Path

import numpy as np

from common.runner import plots

# Client k's loss is (w - GOALS[k]) @ CURVES[k] @ (w - GOALS[k]) / 2, and both count the same
GOALS = np.array([[-2.0, 0.0], [2.0, 0.0]])
CURVES = np.array([[[0.4, 0.0], [0.0, 1.6]], [[1.6, 0.6], [0.6, 0.8]]])
LR = 0.25
START = np.array([-0.5, 2.2])


def optimum() -> np.ndarray:
    """The minimum of the sum of both losses, [2]."""
    return np.linalg.solve(CURVES.sum(0), np.einsum("kij,kj->i", CURVES, GOALS))


def paths(w: np.ndarray, steps: int) -> np.ndarray:
    """The clients' weights in a round from w [2] on: [clients, steps + 1, 2]."""
    found = [np.array([w, w])]
    for _ in range(steps):
        gradients = np.einsum("kij,kj->ki", CURVES, found[-1] - GOALS)
        found.append(found[-1] - LR * gradients)
    return np.stack(found, 1)


def rounds(steps: int, count: int) -> np.ndarray:
    """The server's weights before the first round and after each: [count + 1, 2]."""
    found = [START]
    for _ in range(count):
        found.append(paths(found[-1], steps)[:, -1].mean(0))
    return np.array(found)


def draw(file: Path) -> None:
    with plots.picture(file, 7.6, 3.1) as figure:
        for axes, steps in zip(figure.subplots(1, 2, sharey=True), (1, 10), strict=True):
            server = rounds(steps, 40)
            axes.plot(*optimum(), "*", color=plots.COLOURS[2], ms=15, label="best for both")
            axes.plot(*server.T, "o-", color="0.6", lw=0.8, ms=3, label="server, round by round")
            last = paths(server[-1], steps)
            for k, colour in enumerate(plots.COLOURS[:2]):
                axes.plot(
                    *last[k].T, ".-", color=colour, lw=1, ms=4, label=f"client {k}, last round"
                )
                axes.plot(*GOALS[k], "s", color=colour, ms=8, label=f"best for client {k}")
            axes.plot(*server[-1], "o", color="black", ms=6, label="where the rounds settle")
            axes.set(title=f"{steps} local step{'s' * (steps > 1)} a round", xticks=[], yticks=[])
            axes.set_xlabel("first weight of the model")
        figure.axes[0].set_ylabel("second weight")
        figure.legend(*axes.get_legend_handles_labels(), loc=plots.BELOW, ncols=4)


if __name__ == "__main__":
    draw(Path(__file__).with_suffix(".png"))
