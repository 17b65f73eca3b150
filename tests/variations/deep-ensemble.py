import contextlib

import pytest
import torch
from helpers import kept, read_rows

import uefl
from common import models

CUT = "--model resblocks --width 0.01 --rotate 0 90 --partition silos --silos 2 1 --silo-size 20 "
CUT += "--local-epochs 2 --batch-size 10 --lr 0.003 --codebook-size 4 --segments 1 --gamma 0 "
CUT += "--rounds 2 --later-rounds 1 --no-compare "


def test_the_uncertainty_is_the_entropy_of_the_members_mean():
    """Three members with tokens of 8 channels and 5 codewords of 4 channels."""
    torch.manual_seed(0)
    bases = [models.build("resblocks", (1, 8, 8), 3, 0.01) for _ in range(3)]
    members = [
        uefl.UEFL(base.features, uefl.ExtensibleCodebook(5, 8, 2), base.classifier, True).eval()
        for base in bases
    ]
    allowed = torch.tensor([True, True, False, True, True])
    batches = [(torch.randn(6, 1, 8, 8), torch.arange(6) % 3) for _ in range(4)]

    def evaluated(members):
        return uefl.client_evaluation(members, iter(batches), contextlib.nullcontext, allowed)

    found, alone = evaluated(members), [evaluated([member]) for member in members]
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    p = sum(member(x, allowed)[0].softmax(1) for member in members) / 3
    assert found[0].item() == pytest.approx(-(p * p.log()).sum(1).mean().item(), rel=1e-5)
    assert found[1].item() == pytest.approx(sum(a[1] for a in alone).item() / 3)
    assert found[2:].view(3, 3).trace().item() == (p.argmax(1) == y).sum()


def test_members_share_nothing_but_who_is_extended(start):
    """Member 0 ends the first iteration with the weights that it has alone."""
    one, two = (
        kept(start(uefl, CUT + f"--iterations 1 --members {n} --out {n}"))["theta"] for n in (1, 2)
    )
    assert torch.equal(one[0], two[0]) and not torch.allclose(two[0], two[1], atol=1e-2)


def test_a_run_extends(start):
    rows = read_rows(start(uefl, CUT + "--members 2 --iterations 2"))
    assert [row["iteration"] for row in rows] == ["1", "1", "2"]
    assert {int(v) for row in rows for v in row["codewords"].split()} == {4, 8}
