"""Draws fediir_gamma.png, what a stronger penalty does in FedIIR's example.

python fediir.py --no-compare --seed 300 301 --rounds 60 --gamma 5    (a run of each seed below)
python -m docs.pictures.fediir_gamma
"""

from pathlib import Path

import numpy as np

from common.runner import plots

# gamma -> accuracies of both seeds, means of the evaluations in rounds 40 to 60. Those of 0 and 50
# are in results/examples.csv
NEUTRAL = {0: (50.6, 50.2), 1: (52.9, 51.7), 5: (56.0, 57.5), 20: (63.0, 61.9), 50: (65.7, 64.7),
           200: (57.4, 63.3), 1000: (51.5, 56.3)}  # fmt: skip
ID = {0: (80.5, 80.3), 1: (80.3, 79.8), 5: (80.6, 78.1), 20: (76.3, 70.3), 50: (74.1, 71.0),
      200: (60.0, 66.1), 1000: (49.2, 61.2)}  # fmt: skip


def draw(file: Path) -> None:
    gammas = [*NEUTRAL]
    with plots.picture(file, 5.6, 3.0) as figure:
        axes = figure.subplots()
        axes.set_xscale("symlog", linthresh=1, linscale=0.4)
        for i, (name, values) in enumerate({"colour-neutral": NEUTRAL, "ID": ID}.items()):
            plots.mean_and_runs(axes, i, gammas, np.array([*values.values()]).T, name)
        axes.plot([], color="0.6", lw=0.6, label="each run")
        axes.axhline(50, color="0.5", ls=":", lw=0.9, label="chance")
        axes.set(title="accuracy (percent)", xlabel="gamma", ylim=(40, 90))
        axes.set_xticks(gammas, gammas)
        axes.minorticks_off()
        figure.legend(loc=plots.BELOW, ncols=4)


if __name__ == "__main__":
    draw(Path(__file__).with_suffix(".png"))
