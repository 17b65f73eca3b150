import torch
from helpers import loss_and_gradient

import fedavg

CUT = "--model cnn --width 0.125 --partition iid --clients 3 --participating 3 --sample 2 "
CUT += "--local-epochs 1 --batch-size 99 --lr 0.1 --momentum 0.9 --rounds 2 --no-compare "


def test_momentum_goes_from_client_to_client_and_from_round_to_round(finished):
    """By hand, for one step of each client."""
    run = finished(fedavg, CUT + "--weighting equal")
    w, velocity = run.trainer.initial, 0
    for selected in run.selected:
        ends = []
        for k in selected:
            _, gradient = loss_and_gradient(run.trainer, w, run.clients.train[k])
            velocity = 0.9 * velocity + gradient
            ends.append(w - 0.1 * velocity)
        w = sum(ends) / 2
    assert torch.allclose(run.state["w"], w, atol=1e-6)
