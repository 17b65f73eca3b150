"""What users do to terminals and folders. It may neither lose data nor give a wrong result."""

import re
import sys

from helpers import sort_images

import fedavg

TINY = "--model cnn --width 0.125 --rounds 3 --local-epochs 1 --clients 2 --participating 2 "
TINY += "--sample 1 --partition iid --no-compare "


def test_a_single_class_is_refused(launched, tmp_path):
    sort_images(tmp_path / "pets", "train/cat, test/cat")
    code, (*_, line) = launched(fedavg, f"{TINY} --dataset pets --device cpu --out r")
    assert code == 2 and "has only one class, cat" in line


def test_a_redirected_stderr_is_short(launched, start, tmp_path, monkeypatch):
    with open(tmp_path / "log.txt", "w") as file:
        monkeypatch.setattr(sys, "stderr", file)
        assert launched(fedavg, f"{TINY} --rounds 9 --out file", start)[0] == 0
    bars = re.findall(r"\d+%\|", (tmp_path / "log.txt").read_text())
    assert len(bars) <= 3  # a file gets a line per minute, not per round
