import torch
from helpers import prepared

import uefl
from common import random_at

CUT = "--model cnn --width 0.125 --rotate 0 90 --partition silos --silos 2 1 --silo-size 20 "
CUT += "--codebook-size 400 --segments 1 "


def test_new_codewords_are_gaussian_draws_of_their_own_and_the_old_ones_stay(start):
    found = {}
    for words in ("random", "kmeans"):
        args, _, clients, trainer = prepared(uefl, CUT + f"--words {words}")
        theta, may_use = uefl.initialise(args, clients, trainer, {})
        theta, may_use = uefl.extend(args, clients, trainer, theta, may_use, clients.ids[1:], 3)
        found[words] = theta[: 1200 * 8].view(3, 400, 8)
        assert may_use.sum(1).tolist() == [400, 800, 800]
    old, *new = found["random"]
    assert torch.equal(old, found["kmeans"][0]) and not torch.equal(new[0], found["kmeans"][1])
    for k, of_client in enumerate(new, 1):
        draws = random_at(0, "codewords", 3, k).standard_normal((400, 8))
        assert torch.equal(of_client, torch.from_numpy(draws).float())
    assert abs(new[0].std() - old.std()) < 0.05, "as the first ones: 3,200 draws"
