import pytest
import torch
from common.sketch import sketch

import convex_hull_select
import minimax_select
from common.train import local_solver

CUT = "--model resblocks --width 0.01 --local-epochs 1 --clients 8 --participating 6 --sample 6 "
CUT += "--partition dirichlet --dirichlet 0.5 "


def test_each_coordinate_is_added_to_one_sum_with_a_random_sign():
    sketches = sketch(torch.eye(3000), 50)
    assert (sketches.abs().sum(1) == 1).all() and (sketches.abs().amax(1) == 1).all()
    assert abs(sketches.sum()) < 4 * 3000**0.5  # within four standard deviations
    assert (sketches.abs().sum(0) - 60).abs().max() < 5 * 60**0.5  # 60 coordinates in each sum
    x = torch.randn(2, 3000, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(sketch(x, 50), x @ sketches, atol=1e-4)  # a sketch is linear


@pytest.mark.parametrize("method", [minimax_select, convex_hull_select])
def test_the_table_holds_sketches_of_the_parameters_alone(finished, method):
    words = CUT + ("--hull-dim 5 " if method is convex_hull_select else "")  # selects all
    run = finished(method, f"{words} --rounds 1 --sketch 50 --no-compare")
    trainer = run.trainer
    g = trainer.initial - trainer.train(local_solver, trainer.initial, run.clients.ids, 1)[0]
    assert torch.allclose(run.state["w"], trainer.initial - g.mean(0), atol=1e-6)
    expected = sketch(g[:, : trainer.parameters], 50)
    assert torch.allclose(run.state["table"], expected, atol=1e-6)
