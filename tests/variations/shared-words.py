from helpers import kept, read_rows

import uefl

CUT = "--model cnn --width 0.125 --rotate 0 90 --silos 1 1 --silo-size 20 --local-epochs 1 "
CUT += "--codebook-size 4 --segments 1 --gamma 0 --rounds 1 --later-rounds 1 --iterations 2 "


def test_every_client_may_use_the_words_that_were_added_for_one(start):
    folder = start(uefl, CUT + "--partition silos --passes 2 --no-compare")
    assert kept(folder)["allowed"].tolist() == [[True] * 8] * 2
    assert [row["codewords"] for row in read_rows(folder)] == ["4 4", "8 8"]
