import torch
from helpers import largest_by_scipy, sgd_by_hand

import minimax_select
from common.chance import random_at

CUT = "--model cnn --width 0.125 --local-epochs 1 --lr 0.1 --partition dirichlet --dirichlet 0.5 "
CUT += "--clients 8 --participating 6 --sample 2 --rounds 5 --churn 0.4 --no-compare "


def test_newcomers_enter_the_table_and_only_present_clients_are_compared(finished):
    """The same by hand: the table is a dict, and clients train one at a time."""
    run = finished(minimax_select, CUT)
    w, table, expected, entered = run.trainer.initial, {}, [], []

    def update(k, t):
        return w - sgd_by_hand(run, w, t, k)[0]

    for t in range(1, 6):
        numbers = random_at(0, "churn", t).random(6)
        here = [k for k in range(6) if numbers[k] >= 0.4]
        new = [k for k in here if k not in table]
        table |= {k: update(k, 0) for k in new}
        worst = largest_by_scipy(torch.stack([table[k] for k in here])).round(6)
        selected = sorted(here[i] for i in worst.argsort(kind="stable")[:2])
        table |= {k: update(k, t) for k in selected}
        w = w - sum(table[k] for k in selected) / 2
        expected.append(selected)
        entered.append(len(new))
    assert sum(n > 0 for n in entered) > 1  # somebody came later
    assert run.selected == expected
    assert torch.allclose(run.state["w"], w, atol=1e-5)
