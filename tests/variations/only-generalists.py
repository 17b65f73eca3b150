import pytest
from helpers import prepared, read_rows, selections

import entropy_weighting
from common import UserError

CUT = "--partition specialists --clients 4 --rounds 3 --model cnn --width 0.125 --local-epochs 1 "
CUT += "--no-compare "


def test_no_client_with_a_single_class_trains(start):
    rows = read_rows(start(entropy_weighting, CUT + "--sample 2"))
    data, clients, *_ = prepared(entropy_weighting, CUT)
    several = [k for k in range(4) if len(data.y[clients.train[k]].unique()) > 1]
    assert len(several) == 1
    assert selections(rows) == [several] * 3


def test_without_a_generalist_there_is_one_line(start):
    with pytest.raises(UserError, match="every participating client has one class"):
        start(entropy_weighting, CUT + "--participating 1 --sample 1")
