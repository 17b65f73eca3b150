import pytest
import torch
from helpers import kept, prepared, read_rows, selections

import convex_hull_select
import minimax_select
from common import train

CUT = "--model cnn --width 0.125 --local-epochs 1 --lr 0.1 --partition dirichlet --dirichlet 0.5 "
CUT += "--clients 8 --participating 6 --sample 3 --rounds 5 --no-compare "


@pytest.mark.parametrize(
    ("method", "threshold", "fewest", "most"),
    [
        (minimax_select, 0.3, 1, 14),
        (convex_hull_select, 0.3, 1, 14),
        (convex_hull_select, 1e9, 0, 0),
    ],
)
def test_the_old_update_stands_for_a_client_that_hardly_moved(
    start, method, threshold, fewest, most
):
    """By hand, for the selected clients: the table is a dict, and clients train one at a time."""
    folder = start(method, f"{CUT} --event-threshold {threshold}")
    _, _, model, trainer, w = prepared(method, CUT)

    def train_alone(k, t):
        return w - trainer.train(train.local_solver, model, w, torch.tensor([k]), t)[1][0]

    table, uploads, rows = {k: train_alone(k, 0) for k in range(6)}, [], read_rows(folder)
    for t, selected in enumerate(selections(rows), 1):
        new = {k: train_alone(k, t) for k in selected}
        far = [k for k in new if (new[k] - table[k]).norm() >= threshold * table[k].norm()]
        table |= {k: new[k] for k in far}
        w = w - sum(table[k] for k in selected) / len(selected)
        uploads.append(len(far))
    assert [int(row["uploads"]) for row in rows] == uploads and fewest <= sum(uploads) <= most
    assert torch.allclose(kept(folder)["w"], w, atol=1e-5)
    assert torch.allclose(kept(folder)["table"], torch.stack([*table.values()]), atol=1e-5)
