from helpers import prepared, read_rows, selections

import fedavg

CUT = "--model cnn --width 0.125 --local-epochs 1 --clients 9 --participating 7 --sample 3 "
CUT += "--dirichlet 0.5 --rounds 2 --selection largest --no-compare "


def test_nobody_left_out_has_more_samples_than_a_selected_client(start):
    rows = read_rows(start(fedavg, CUT))
    _, _, clients, _ = prepared(fedavg, CUT)
    sizes = [len(samples) for samples in clients.train]
    assert len(set(sizes[:7])) > 1
    for selected in selections(rows):
        assert selected == sorted(set(selected)) and len(selected) == 3
        left_out = set(range(7)) - set(selected)
        assert min(sizes[k] for k in selected) >= max(sizes[k] for k in left_out)
