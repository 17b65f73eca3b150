import pytest
import torch
from helpers import prepared

import uefl
from common.evaluation import of_words

CUT = "--model resblocks --width 0.01 --rotate 0 90 --partition silos --silos 2 1 --silo-size 20 "
CUT += "--local-epochs 2 --batch-size 10 --lr 0.003 --codebook-size 4 --segments 1 --gamma 0 "
CUT += "--rounds 2 --later-rounds 1 --no-compare "


@pytest.mark.usefixtures("start")
def test_the_uncertainty_is_the_entropy_of_the_members_mean():
    model = prepared(uefl, CUT + "--members 3")[-1].model.eval()
    may_use = torch.tensor([True, True, False, True])
    batches = [(torch.randn(6, 1, 8, 8), torch.arange(6) % 3) for _ in range(4)]
    confusion, e, *_ = of_words(model, iter(batches), may_use)
    assert e == uefl.client_uncertainty(model, iter(batches), may_use)
    x, y = (torch.cat(parts) for parts in zip(*batches))
    p = sum(member(x, may_use)[0].softmax(1) for member in model.members) / 3
    assert e.item() == pytest.approx(-(p * p.log()).sum(1).mean().item(), rel=1e-5)
    assert confusion.trace() == (p.argmax(1) == y).sum()


def test_members_share_nothing_but_who_is_extended(finished):
    """Each ends the first iteration with the weights that it has alone, in a run of two rounds."""
    found = []
    for n in (1, 2):
        run = finished(uefl, f"{CUT} --iterations 1 --members {n} --out {n}")
        uefl.train.set_weights(run.trainer.model, run.state["theta"])
        found.append([uefl.train.get_weights(member) for member in run.trainer.model.members])
    (alone,), (same, other) = found
    assert torch.allclose(same, alone, atol=1e-6)
    assert not torch.allclose(same, other, atol=1e-2)
