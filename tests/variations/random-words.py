import torch

import uefl
from common.chance import random_at

CUT = "--model cnn --width 0.125 --rotate 0 90 --partition silos --silos 2 1 --silo-size 20 "
CUT += "--codebook-size 400 --segments 1 --rounds 1 --later-rounds 1 --iterations 2 --gamma 0 "


def test_new_codewords_are_gaussian_draws_of_their_own_and_the_old_ones_stay(finished):
    """With steps too small to move a codeword, so that those of line 9 are found at the end."""
    run = finished(uefl, CUT + "--words random --lr 1e-12 --no-compare")
    state = run.state
    old, *new = state["theta"][: 8 * state["may_use"].shape[1]].view(-1, 400, 8)
    assert torch.allclose(old.flatten(), run.trainer.initial[:3200])
    growing = state["may_use"][:, 400:].T.float().argmax(1)[::400].tolist()
    assert len(new) == len(growing) == 2  # all but the most certain one
    for k, of_client in zip(growing, new):
        draws = random_at(0, "codewords", 1, k).standard_normal((400, 8))
        assert torch.allclose(of_client, torch.from_numpy(draws).float())
    assert abs(new[0].std() - old.std()) < 0.05  # as the first ones: 3,200 draws
