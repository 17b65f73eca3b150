"""The toy of fediir.md, section 8: python -m docs.pictures"""

import numpy as np
from scipy.optimize import minimize

# Shape and colour agree with the label (1), or do not (-1).
RIGHT = np.array([[1, 1], [1, -1], [-1, 1], [-1, -1]])


def best_weights(
    gamma: float, batch: float = np.inf, colour: tuple[float, ...] = (0.9, 0.8), shape: float = 0.75
) -> np.ndarray:
    """The weights a [2] of shape and colour in the logit, where FedIIR's expected loss is smallest.

    colour  how often the colour is right, for each client; `shape` is the same for all clients
    batch   samples in a batch, drawn independently
    """
    c = np.array(colour)
    p = np.stack([shape * c, shape * (1 - c), (1 - shape) * c, (1 - shape) * (1 - c)], 1)  # [C, 4]

    def objective(a: np.ndarray) -> float:
        # The gradient for the classifier [4, 2].
        of_sample = -RIGHT * a / (1 + np.exp(RIGHT @ a))[:, None]
        of_client = p @ of_sample
        distance = ((of_client - of_client.mean(0)) ** 2).sum(1).mean()
        variance = (p @ of_sample**2 - of_client**2).sum(1).mean()
        return (p @ np.log1p(np.exp(-RIGHT @ a))).mean() + gamma / 2 * (distance + variance / batch)

    tight = {"xatol": 1e-6, "fatol": 1e-12}
    return minimize(objective, [1, 1], method="Nelder-Mead", options=tight).x


def main() -> None:
    for colour in ((0.9, 0.8), (1.0, 0.6), (0.8, 0.8)):
        for batch in (np.inf, 450, 32):
            found = [best_weights(gamma, batch, colour) for gamma in (0, 30, 100, 300, 1000)]
            row = " | ".join("{:.2f}, {:.2f}".format(*both) for both in found)
            print(f"colour right in {colour}, batches of {batch}: (shape, colour) = {row}")


if __name__ == "__main__":
    main()
