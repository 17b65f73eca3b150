"""The numbers that the toys in docs/ print, computed again without the methods' functions."""

import math
import re

import numpy as np
import pytest
from test_docs import toy


def printed(page):
    """For each printed example of a page's toy, the numbers in its output."""
    numbers = [re.findall(r"-?\d+\.?\d*", example.want) for example in toy(page).examples if example.want]
    return [pytest.approx([float(number) for number in found], abs=6e-4) for found in numbers]


def fedavg(shares, sizes, steps, rounds):
    """The difference of the two logits: each of the `steps` moves it by 2 (share of class 0 - predicted share)."""
    logit, sizes = 0.0, np.array(sizes) / sum(sizes)
    for _ in range(rounds):
        ends = np.full(2, logit)
        for _ in range(steps):
            ends = ends + 2 * (np.array(shares) - 1 / (1 + np.exp(-ends)))
        logit = sizes @ ends
    return logit


def test_fedavg():
    """One round by hand. One step ends at the share of class 0, and so do more steps if the clients agree."""
    first, skewed, mixed = printed("fedavg")
    assert first == [3 / 4 * 1 / 2 - 1 / 4 * 1 / 2, -3 / 4 * 1 / 2 + 1 / 4 * 1 / 2]
    assert fedavg([1, 0], [3, 1], 1, 1) == first.expected[0] - first.expected[1]
    assert skewed == [1 / (1 + math.exp(-fedavg([1, 0], [3, 1], steps, 1000))) for steps in (1, 5, 10)]
    assert mixed == [3 / 4] * 3 and skewed.expected[0] == 3 / 4


def test_entropy_weighting():
    """exp(H) is the product of p^-p: 1, 2 and 0.9^-0.9 0.1^-0.1."""
    classes, alpha, objectives, rare = printed("entropy_weighting")
    by_hand = np.array([1, 2, 0.9**-0.9 * 0.1**-0.1])
    assert classes == by_hand and alpha == by_hand / by_hand.sum()
    assert objectives == [by_hand @ np.log(by_hand) / by_hand.sum(), np.log(by_hand).mean()]
    assert rare == [2 / 7, 2 / 7, 2 / 7, 1 / 7]


def test_minimax_select():
    """Cosines from angles: each arrow's nearest neighbour in angle is its most similar client."""
    similarity, selected, with_twin = printed("minimax_select")
    angles = np.array([math.atan2(y, x) for x, y in [(5, 0), (4, 3), (3, 4), (0, 2), (-4, 3), (0, -1)]])
    between = np.abs(angles[:, None] - angles)
    between = np.minimum(between, 2 * math.pi - between) + 10 * np.eye(6)
    assert similarity == np.cos(between.min(1)) and similarity == [0.8, 0.96, 0.96, 0.8, 0.6, 0]
    assert selected == sorted(np.argsort(between.min(1))[-2:].tolist())
    assert with_twin == [0, 4], "f and its twin have the largest cosine, 1; then e, and of a and d the first"


def corners(points):
    """The points that are farthest in some direction, among many directions."""
    turn = np.linspace(0, 2 * math.pi, 100_000)
    return sorted(set(np.argmax(np.array(points) @ [np.cos(turn), np.sin(turn)], axis=0).tolist()))


def test_convex_hull_select():
    hull, with_twin, longer = printed("convex_hull_select")
    a, b, c, d, e, f = arrows = [(5, 0), (4, 3), (3, 4), (0, 2), (-4, 3), (0, -1)]
    assert hull == corners(arrows) == [0, 1, 2, 4, 5]
    assert d == tuple(3 / 8 * x + 3 / 8 * y + 1 / 4 * z for x, y, z in zip(b, e, f, strict=True))
    assert with_twin == corners([*arrows, (0, -1.5)])
    assert longer == corners([a, b, c, (0, 4), e, f]) == [0, 1, 2, 3, 4, 5]
    assert corners([(x / math.hypot(x, y), y / math.hypot(x, y)) for x, y in arrows]) == [0, 1, 2, 3, 4, 5], "a circle"
