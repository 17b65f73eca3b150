import fedavg

CUT = "--model cnn --width 0.125 --local-epochs 1 --clients 9 --participating 7 --sample 3 "
CUT += "--dirichlet 0.5 --rounds 2 --selection largest --no-compare "


def test_nobody_left_out_has_more_samples_than_a_selected_client(finished):
    run = finished(fedavg, CUT)
    sizes = [len(samples) for samples in run.clients.train]
    assert len(set(sizes[:7])) > 1
    for selected in run.selected:
        assert selected == sorted(set(selected)) and len(selected) == 3
        left_out = set(range(7)) - set(selected)
        assert min(sizes[k] for k in selected) >= max(sizes[k] for k in left_out)
