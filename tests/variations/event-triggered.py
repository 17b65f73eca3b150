import pytest
import torch
import torch.nn.functional as F

import convex_hull_select
import minimax_select
from common import train

CUT = "--width 0.01 --local-epochs 1 --lr 0.1 --partition dirichlet --dirichlet 0.5 "
CUT += "--clients 8 --participating 6 --sample 3 --rounds 5 --no-compare "


@pytest.mark.parametrize("words", ["resblocks --event-threshold 0.8", "cnn --event-threshold 0.3"])
def test_the_old_update_stands_for_a_client_that_hardly_moved(finished, words):
    """By hand, for the selected clients. Batch norm's statistics are those of the uploads alone."""
    method = minimax_select if "resblocks" in words else convex_hull_select
    run = finished(method, CUT + "--model " + words)
    trainer = run.trainer
    threshold, w, n = float(words.split()[-1]), trainer.initial, trainer.parameters

    def train_alone(k, t):
        return w - trainer.train(train.local_solver, w, torch.tensor([k]), t)[0][0]

    table, uploads = {k: train_alone(k, 0)[:n] for k in range(6)}, []
    for t, selected in enumerate(run.selected, 1):
        new = {k: train_alone(k, t) for k in selected}
        far = [k for k in new if (new[k][:n] - table[k]).norm() >= threshold * table[k].norm()]
        table |= {k: new[k][:n] for k in far}
        new |= {k: F.pad(table[k], (0, len(w) - n)) for k in selected if k not in far}
        w = w - sum(new.values()) / len(selected)
        uploads.append(len(far))
    assert 0 < sum(uploads) < 15
    models = 2 * 6 + sum(3 + n for n in uploads)  # 6 clients before round 1, and 3 in each round
    assert float(run.rows[-1]["megabytes"]) == pytest.approx(4e-6 * len(w) * models, rel=1e-5)
    assert torch.allclose(run.state["w"], w, atol=1e-5)
    assert torch.allclose(run.state["table"], torch.stack([*table.values()]), atol=1e-5)
