from helpers import prepared, read_rows

import uefl

CUT = "--model cnn --width 0.125 --rotate 0 90 --silos 1 1 --silo-size 20 --local-epochs 2 "
CUT += "--codebook-size 4 --segments 1 --rounds 2 --passes 2 --dropout 0 --no-compare "
CUT += "--partition silos "


def test_noise_changes_the_accuracies_and_nothing_else(start, monkeypatch):
    # "noise" of -x makes all images equal, so each silo's images all get the same answer
    monkeypatch.setattr(uefl.torch, "randn_like", lambda x: -x)
    clean = read_rows(start(uefl, CUT))
    noisy = read_rows(start(uefl, CUT + "--test-noise 1 --out noisy"))
    for a, b in zip(clean, noisy, strict=True):
        may_differ = ("mA", "seconds", "predicted", "hits")
        same = [name for name in a if "accurac" not in name and name not in may_differ]
        assert {name: a[name] for name in same} == {name: b[name] for name in same}
    data, clients, *_ = prepared(uefl, CUT, dropout=0.0)
    for k, accuracy in enumerate(noisy[-1]["accuracies"].split()):
        labels = data.y[clients.test[k]]
        assert round(float(accuracy) * len(labels)) in labels.bincount().tolist()
