import torch
from helpers import largest_by_numpy, sgd_by_hand

import convex_hull_select
import minimax_select
from common.chance import present, random_at

CUT = "--model cnn --width 0.125 --local-epochs 1 --lr 0.1 --partition dirichlet --dirichlet 0.5 "
CUT += "--clients 8 --participating 6 --rounds 5 --no-compare "


def test_somebody_stays_and_without_churn_everybody():
    """The probability to be away is checked below, by hand."""
    ids = torch.arange(5, 7)
    assert present(ids, 0.0, random_at(0, "churn")).tolist() == [5, 6]
    for i in range(50):
        here = present(ids, 0.99, random_at(i, "churn"))
        assert len(here) and torch.isin(here, ids).all()


def present_in(t, churn):
    """Who is present in round t: those whose random number is at least `churn`."""
    return [k for k, number in enumerate(random_at(0, "churn", t).random(6)) if number >= churn]


def test_newcomers_enter_the_table_and_only_present_clients_are_compared(finished):
    """The same by hand: the table is a dict, and clients train one at a time."""
    run = finished(minimax_select, CUT + "--sample 2 --churn 0.4")
    w, table, expected, entered = run.trainer.initial, {}, [], []

    def update(k, t):
        return w - sgd_by_hand(run, w, t, k)[0]

    for t in range(1, 6):
        here = present_in(t, 0.4)
        new = [k for k in here if k not in table]
        table |= {k: update(k, 0) for k in new}
        worst = largest_by_numpy(torch.stack([table[k] for k in here])).round(6)
        selected = sorted(here[i] for i in worst.argsort(kind="stable")[:2])
        table |= {k: update(k, t) for k in selected}
        w = w - sum(table[k] for k in selected) / 2
        expected.append(selected)
        entered.append(len(new))
    assert sum(n > 0 for n in entered) > 1  # somebody came later
    assert run.selected == expected
    assert torch.allclose(run.state["w"], w, atol=1e-5)


def test_the_hull_is_that_of_present_clients(finished):
    run = finished(convex_hull_select, CUT + "--churn 0.4 --hull-dim 1 --sample 6")
    for t, selected in enumerate(run.selected, 1):
        assert selected and {*selected} <= {*present_in(t, 0.4)}
