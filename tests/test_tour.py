"""The notebook docs/tour.ipynb runs from top to bottom, and does what the methods' files do."""

import json
import sys
from importlib import import_module
from types import SimpleNamespace

import matplotlib.pyplot as plt
import pytest
import torch
from helpers import ROOT

from common.runner import flags

CELLS = json.loads((ROOT / "docs/tour.ipynb").read_text())["cells"]
CODE = [cell for cell in CELLS if cell["cell_type"] == "code"]
FEWER = {  # so that it takes seconds; with gamma = 0 some silo gets words after one round, too
    "ROUNDS = 30": "ROUNDS = 3",
    "--rounds 6 --later-rounds 4": "--rounds 1 --later-rounds 1",
    "--gamma 0.3": "--gamma 0",
}


@pytest.fixture(scope="module")
def tour():
    """What the cells have defined, in order and without Jupyter, and the number of pictures."""
    code, names, pictures = "\n".join("".join(cell["source"]) for cell in CODE), {}, []
    for words, fewer in FEWER.items():
        assert code.count(words) == 1
        code = code.replace(words, fewer)

    def show():
        plt.gcf().canvas.draw()
        pictures.append(plt.gcf())
        plt.close("all")

    with pytest.MonkeyPatch.context() as patch, plt.rc_context():
        patch.chdir(ROOT / "docs")
        patch.setattr(sys, "path", [*sys.path])
        plt.switch_backend("Agg")
        patch.setattr(plt, "show", show)
        exec(compile(code, "docs/tour.ipynb", "exec"), names)
    return SimpleNamespace(**names, pictures=len(pictures))


CHANGED = """
fedavg fedavg --rounds 3
minimax minimax_select --rounds 3
hull convex_hull_select --rounds 3 --hull-dim 2
entropy entropy_weighting --rounds 1
"""


@pytest.mark.parametrize("changed", CHANGED.strip().split("\n"))
def test_with_one_line_changed_it_is_another_file(tour, changed):
    """The files of Wu et al. subtract the mean update, so the weights differ by rounding."""
    name, file, words = changed.split(" ", 2)
    method, clients = import_module(file), tour.mixed if name == "entropy" else tour.clients
    trainer, args = tour.trainer_for(clients, 3), flags.defaults(method, words)
    state = {}
    if name in ("minimax", "hull"):
        state = {"w": trainer.initial, "table": tour.first.clone()}
    *_, (state, _) = rounds = [*method.federate(args, clients, trainer, **state)]
    selected = [row["selected"].tolist() for row in getattr(tour, name)]
    assert [row["selected"].tolist() for _, row in rounds] == selected
    w = getattr(tour, f"w_{name}")
    assert (state["w"] - w).norm() < 0.05 * (w - trainer.initial).norm()


def test_the_arrows_are_the_clients_gradients(tour):
    """With weights of zero both probabilities are 1/2: the gradient for class 1 is (1/2 - y) x."""
    for wish, (x, y) in zip(tour.wish, tour.batches, strict=True):
        by_hand = ((y - 0.5)[:, None] * x).mean(0)
        torch.testing.assert_close(wish, by_hand)
    plain, penalised = tour.train_together(0)[-1], tour.train_together(50)[-1]
    assert plain[0] > 1 and abs(penalised[0]) < 0.1  # the penalty takes out the colour
    assert penalised[1] > 0.5  # and leaves the shape


def test_new_words_miss_by_less(tour):
    assert tour.many < tour.few


def test_the_committed_notebook_ran_from_top_to_bottom(tour):
    assert [cell["execution_count"] for cell in CODE] == [*range(1, len(CODE) + 1)]
    outputs = [output for cell in CODE for output in cell["outputs"]]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == tour.pictures
    assert not any(output["output_type"] == "error" for output in outputs)
