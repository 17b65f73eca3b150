"""The numbers that the toys in docs/ print, computed again without the methods' functions."""

import math
import re

import numpy as np
import pytest
from test_docs import toy

ARROWS = [(5, 0), (4, 3), (3, 4), (0, 2), (-4, 3), (0, -1)]


def printed(page):
    """For each printed example of a page's toy, the numbers in its output."""
    numbers = [re.findall(r"-?\d+\.?\d*", e.want) for e in toy(page).examples if e.want]
    return [pytest.approx([*map(float, found)], abs=6e-4) for found in numbers]


def fedavg(shares, sizes, steps, rounds):
    """The difference of the two logits: a step moves it by 2 (share of class 0 - predicted)."""
    logit, alpha = 0.0, np.array(sizes) / sum(sizes)
    for _ in range(rounds):
        ends = np.full(2, logit)
        for _ in range(steps):
            ends = ends + 2 * (np.array(shares) - 1 / (1 + np.exp(-ends)))
        logit = alpha @ ends
    return logit


def test_fedavg():
    """One round by hand. One step ends at the share of class 0, and so do more on mixed data."""
    first, skewed, mixed = printed("fedavg")
    assert first == [3 / 4 * 1 / 2 - 1 / 4 * 1 / 2, -3 / 4 * 1 / 2 + 1 / 4 * 1 / 2]
    assert fedavg([1, 0], [3, 1], 1, 1) == first.expected[0] - first.expected[1]
    ends = [fedavg([1, 0], [3, 1], steps, 1000) for steps in (1, 5, 10)]
    assert skewed == [1 / (1 + math.exp(-end)) for end in ends]
    assert mixed == [3 / 4] * 3
    assert skewed.expected[0] == 3 / 4


def test_entropy_weighting():
    """exp(H) is the product of p^-p: 1, 2 and 0.9^-0.9 0.1^-0.1."""
    classes, alpha, objectives, rare = printed("entropy_weighting")
    by_hand = np.array([1, 2, 0.9**-0.9 * 0.1**-0.1])
    assert classes == by_hand
    assert alpha == by_hand / by_hand.sum()
    assert objectives == [by_hand @ np.log(by_hand) / by_hand.sum(), np.log(by_hand).mean()]
    assert rare == [2 / 7, 2 / 7, 2 / 7, 1 / 7]


def test_minimax_select():
    """Cosines from angles: the nearest in angle is the most similar client."""
    similarity, selected, with_twin = printed("minimax_select")
    angles = np.array([math.atan2(y, x) for x, y in ARROWS])
    between = np.abs(angles[:, None] - angles)
    nearest = (np.minimum(between, 2 * math.pi - between) + 10 * np.eye(6)).min(1)
    assert similarity == np.cos(nearest)
    assert selected == sorted(np.argsort(nearest)[-2:].tolist())
    assert with_twin == [0, 4], "f and its twin have the cosine 1; then e, and of a and d the first"


def corners(points):
    """The points that are farthest in some direction, among many directions."""
    turn = np.linspace(0, 2 * math.pi, 100_000)
    return sorted({*np.argmax(np.array(points) @ [np.cos(turn), np.sin(turn)], axis=0).tolist()})


def test_convex_hull_select():
    """Also that d is the mixture on the page, and that points of length 1 are all corners."""
    hull, with_twin, longer = printed("convex_hull_select")
    assert hull == corners(ARROWS)
    assert np.allclose([3 / 8, 3 / 8, 1 / 4] @ np.array(ARROWS)[[1, 4, 5]], ARROWS[3])
    assert with_twin == corners([*ARROWS, (0, -1.5)])
    assert longer == corners([*ARROWS[:3], (0, 4), *ARROWS[4:]])
    assert len(corners([np.array(arrow) / math.hypot(*arrow) for arrow in ARROWS])) == 6
