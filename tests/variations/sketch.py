import torch
from common.sketch import sketch

import minimax_select


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
