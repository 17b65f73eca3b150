import math

import pytest
import torch
from by_hand import kept, prepared, selections
from conftest import read_rows

import entropy_weighting
from common import UserError
from common.splits import label_counts

CUT = "--model cnn --width 0.125 --local-epochs 1 --clients 8 --participating 6 "
CUT += "--partition dirichlet --dirichlet 0.5 --rounds 3 --lr 0.1 --no-compare "


def test_cosine_weights_on_a_worked_example():
    """[2, 2] has cosine 1 with [1, 1], [3, 4] has 7 / (5 sqrt 2), and [5, 0] has 1 / sqrt 2."""
    powers = [math.exp(cosine) for cosine in (1, 7 / (5 * math.sqrt(2)), 1 / math.sqrt(2))]
    found = entropy_weighting.cosine_weights(torch.tensor([[2.0, 2], [3, 4], [5, 0]]))
    assert found.tolist() == pytest.approx([power / sum(powers) for power in powers])


def test_the_cosine_weighs_the_updates(start):
    ends = []
    for kind in ("cosine", "entropy"):
        folder = start(entropy_weighting, CUT + f"--weighting {kind} --out {kind}")
        ends.append(kept(folder / kind)["w"])
    assert not torch.allclose(*ends, atol=1e-4)


@pytest.mark.parametrize(("share", "left"), [(0.5, 3), (0.6, 3), (0.2, 5), (0.0, 6)])
def test_clients_with_the_largest_entropy_never_train(start, share, left):
    more = f"--expel {share} --sample {left} --out run"
    rows = read_rows(start(entropy_weighting, CUT + more) / "run")
    data, clients, *_ = prepared(entropy_weighting, CUT)
    p = label_counts(data, clients.train)[:6] / clients.sizes[:6, None]
    entropies = [-sum(q * math.log(q) for q in of_client if q) for of_client in p.tolist()]
    expected = sorted(sorted(range(6), key=entropies.__getitem__)[:left])
    assert selections(rows) == [expected] * 3


@pytest.mark.parametrize(
    ("words", "says"),
    [("--expel 0.1", "is less than one"), ("--expel 0.5 --sample 4", "only 3 clients are left")],
)
def test_shares_that_make_no_sense_are_refused(start, words, says):
    with pytest.raises(UserError, match=says):
        start(entropy_weighting, CUT + words)
