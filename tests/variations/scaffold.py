"""Karimireddy et al. 2020, Algorithm 1 with option II: client k adds c - c_k to its gradients."""

import torch
from helpers import loss_and_gradient, sgd_by_hand

import fedavg

CUT = "--model cnn --width 0.125 --batch-size 16 --lr 0.1 --partition dirichlet --dirichlet 0.5 "
CUT += "--clients 5 --participating 4 --sample 2 --weighting size --rounds 2 --no-compare "


def test_two_rounds_are_algorithm_1_by_hand(finished):
    run = finished(fedavg, CUT + "--local-epochs 2 --lr-decay 0.5")
    w, samples, found = run.trainer.initial, run.clients.train, run.state
    c, c_k, steps = 0 * w, [0 * w] * 4, [0] * 4

    def corrected(*where):
        steps[k] += 1
        loss, gradient = loss_and_gradient(*where)
        return loss, gradient - c_k[k] + c

    for t, selected in enumerate(run.selected, 1):
        ends, change, steps, lr = {}, {}, [0] * 4, 0.1 / t
        for k in selected:
            ends[k], _ = sgd_by_hand(run, w, t, k, corrected)
            change[k] = (w - ends[k]) / (steps[k] * lr) - c
        n = sum(len(samples[k]) for k in selected)
        w = sum(len(samples[k]) / n * ends[k] for k in selected)
        c = c + sum(change.values()) / 4
        c_k = [old + change.get(k, 0) for k, old in enumerate(c_k)]
    assert t == 2 and steps[selected[0]] != steps[selected[1]]
    assert torch.allclose(found["w"], w, atol=1e-5)
    assert torch.allclose(found["c"], c, atol=1e-4)
    assert torch.allclose(found["c_k"], torch.stack(c_k), atol=1e-4)


def test_a_client_with_as_many_steps_as_batches_moves_as_in_an_epoch(finished):
    """Each has 19 training samples, so two batches."""
    iid = CUT.replace("dirichlet --dirichlet 0.5", "iid")
    of_epoch = finished(fedavg, iid + "--local-epochs 1 --out epoch").state
    of_steps = finished(fedavg, iid + "--local-steps 2 --out steps").state
    assert all(torch.equal(of_epoch[name], of_steps[name]) for name in ("w", "c", "c_k"))
