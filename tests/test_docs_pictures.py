"""The pictures in docs/ that are computed: their numbers by another way."""

import numpy as np
import pytest
import torch
from helpers import ROOT

import convex_hull_select
from docs.pictures import drift, entropy, participating, selections, uefl_words
from results.tables import recorded_runs


@pytest.mark.parametrize("steps", [1, 10])
def test_the_rounds_settle_where_the_clients_paths_average_to_their_beginning(steps):
    """By linear algebra: n steps bring client k from w to goal + (1 - lr curve)^n (w - goal)."""
    shrink = [np.linalg.matrix_power(np.eye(2) - drift.LR * c, steps) for c in drift.CURVES]
    moved = [(np.eye(2) - s) @ goal for s, goal in zip(shrink, drift.GOALS)]
    settled = np.linalg.solve(np.eye(2) - np.mean(shrink, 0), np.mean(moved, 0))
    assert drift.rounds(steps, 200)[-1] == pytest.approx(settled)
    assert np.allclose(settled, drift.optimum()) == (steps == 1)


def test_the_effective_number_of_classes():
    """By hand: 2^1.5 for 1/2, 1/4, 1/4, and 1 for one class."""
    share = torch.tensor([0.5, 1.0], dtype=torch.float64)
    assert entropy.effective(share, 3).tolist() == pytest.approx([2**1.5, 1])


def test_the_picture_of_the_hull_sees_the_tables_that_decide(monkeypatch):
    seen = [*selections.example(convex_hull_select, 2)]
    monkeypatch.setattr(selections, "example", lambda *given: seen)
    count, rare = selections.corners(2)
    trained = [(len(selected), is_rare[selected].sum()) for _, selected, is_rare in seen]
    assert (count[3], rare[3]) == pytest.approx(np.mean(trained, 0))  # in four dimensions
    assert count[0] == 2  # on a line


def test_the_page_on_uefls_paper_counts_the_runs_with_few_words():
    runs = uefl_words.runs()
    dead = [run for run in runs if uefl_words.is_dead(run)]
    # Each segment has one word, and no image is told from another
    assert all(float(run["mP"]) <= int(run["segments"]) for run in dead)
    assert all(float(run["all"]) < 15 for run in dead)
    page = (ROOT / "docs/uefl_paper.md").read_text()
    assert f"Of these {len(runs)} runs {len(dead)} died" in page
    assert {run["words"] for run in dead} == {"2", "3"}


def test_the_ends_with_so_many_participants_repeat_from_the_csv():
    runs = recorded_runs()
    found = participating.ends(runs, "glyphs", "hull", "unseen_worst")
    lines = runs["unseen/glyphs-40/hull"][850]
    numbers = [100 * float(line["unseen_worst"]) for line in lines if line["unseen_worst"]]
    assert found[2][0] == pytest.approx(sum(numbers[-5:]) / 5)
