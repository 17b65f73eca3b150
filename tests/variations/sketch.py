import pytest
import torch
from common.sketch import sketch
from helpers import poison, read_rows, selections

import convex_hull_select
import minimax_select

CUT = "--model cnn --width 0.125 --local-epochs 1 --lr 0.1 --partition dirichlet --dirichlet 0.5 "
CUT += "--clients 8 --participating 6 --rounds 2 --no-compare --sketch 64 "


def test_each_coordinate_is_added_to_one_sum_with_a_random_sign():
    sketches = sketch(torch.eye(3000), 50)
    assert (sketches.abs().sum(1) == 1).all() and (sketches.abs().amax(1) == 1).all()
    assert abs(sketches.sum()) < 4 * 3000**0.5, "within four standard deviations"
    assert (sketches.abs().sum(0) - 60).abs().max() < 5 * 60**0.5, "60 coordinates in each sum"
    x = torch.randn(2, 3000, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(sketch(x, 50), x @ sketches, atol=1e-4), "a sketch is linear"


def test_a_sketch_keeps_the_cosines_up_to_its_error_bound():
    torch.manual_seed(0)
    size = 1024
    g = torch.randn(20_000) + torch.randn(6, 20_000)
    error = (minimax_select.cosines(sketch(g, size)) - minimax_select.cosines(g)).abs().max()
    assert 0 < error < 4 / size**0.5, "four standard deviations"


@pytest.mark.parametrize("method", [convex_hull_select, minimax_select])
def test_a_client_whose_uploads_are_never_finite_is_left_out(start, monkeypatch, method):
    """In line 1 the clients train five at a time, so client 5 trains alone."""
    poison(monkeypatch, client=5)
    rows = read_rows(start(method, CUT + "--sample 5 --out run") / "run")
    assert len(rows) == 2 and not any(5 in selected for selected in selections(rows))
