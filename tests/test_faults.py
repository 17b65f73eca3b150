"""Clients with unusable uploads, and a server that survives them."""

import pytest
import torch
from helpers import poison, read_rows, selections

import convex_hull_select
import entropy_weighting
import fedavg
import fediir
import minimax_select
import uefl
from common import UserError

EQUAL = (
    "--model cnn --width 0.25 --clients 10 --participating 10 --partition iid --local-epochs 3 "
    "--batch-size 32 --lr 0.3 --rounds 10 --no-compare "
)
LEARN = {
    **dict.fromkeys([fedavg, entropy_weighting, minimax_select], EQUAL + "--sample 5"),
    convex_hull_select: EQUAL + "--sample 10 --hull-dim 2",
    fediir: "--dataset glyphs --width 0.125 --clients 9 --local-epochs 3 --test-domain dark "
    "--gamma 0.01 --sample 5 --rounds 9 --evaluate-every 1 --no-compare",
    uefl: "--width 0.125 --clients 10 --local-epochs 3 --model resblocks --partition domain "
    "--lr 0.01 --codebook-size 8 --segments 1 --rounds 5 --sample 5 --later-rounds 2 "
    "--iterations 2 --no-compare",
}


@pytest.mark.parametrize("method", LEARN)
def test_one_client_in_ten_that_returns_nan_costs_little(start, method, monkeypatch, capsys):
    poison(monkeypatch, 3)
    rows = read_rows(start(method, LEARN[method]))
    assert "1 of " in "".join(capsys.readouterr()).split("uploads were not finite: left out")[0]
    assert float(rows[-1]["id_accuracy"]) > 0.9
    assert all(3 not in selected for selected in selections(rows))


@pytest.mark.parametrize("method", LEARN)
def test_nobodys_upload_can_be_used(start, monkeypatch, method):
    poison(monkeypatch, *range(10))
    with pytest.raises(UserError, match=r"(lower|change) --lr"):
        start(method, LEARN[method])


def test_a_classifier_gradient_that_is_nan_is_one_line(start, monkeypatch):
    """FedIIR's line 4 starts from the server's model, so no client but the model is to blame."""
    gradient = fediir.client_gradient
    monkeypatch.setattr(fediir, "client_gradient", lambda *args: gradient(*args) * torch.nan)
    with pytest.raises(UserError, match="not finite: lower --lr"):
        start(fediir, LEARN[fediir])
