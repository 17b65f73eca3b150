import torch

import uefl

CUT = "--model resblocks --width 0.01 --rotate 0 90 --partition silos --silos 2 1 --silo-size 20 "
CUT += "--local-epochs 2 --batch-size 10 --lr 0.003 --codebook-size 4 --segments 1 --gamma 0 "
CUT += "--rounds 2 --later-rounds 1 --no-compare "


def test_the_newest_codewords_of_a_client_replace_its_earlier_ones(finished):
    run = finished(uefl, CUT + "--iterations 3")
    held = [row["codewords"] for row in run.rows]
    assert held == ["4 4 4"] * 2 + ["8 8 8"] * 2  # certain ones, too
    own = torch.eye(3).bool().repeat_interleave(4, 1)  # nobody else may use or change them
    assert run.state["may_use"].equal(torch.cat([own, torch.zeros_like(own), own], 1))


def test_each_client_trains_its_own_copy_of_the_first_codebook(finished):
    """The first round by hand: a client's codewords are those that it has trained alone."""
    run = finished(uefl, CUT + "--iterations 1 --rounds 1")
    trainer, found = run.trainer, run.state["theta"]
    every = {"may_use": torch.ones(3, 4, dtype=torch.bool)}
    ends, _ = trainer.train(uefl.client_update, trainer.initial, run.clients.ids, 1, every)
    own = ends[:, : 4 * 8]
    assert torch.allclose(found, torch.cat([own.flatten(), ends[:, 32:].mean(0)]), atol=1e-5)
    assert not torch.allclose(own[0], own[1], atol=1e-3)  # the copies go different ways
