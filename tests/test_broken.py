"""What users do to terminals and folders. It may neither lose data nor give a wrong result."""

import io
import os
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


def test_a_closed_or_redirected_stderr(launched, start, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)  # as Python has it after 2>&-
    assert launched(fedavg, f"{TINY} --out closed", start)[0] == 0
    assert (tmp_path / "closed/model.pt").exists()
    with open(tmp_path / "log.txt", "w") as file:
        monkeypatch.setattr(sys, "stderr", file)
        assert launched(fedavg, f"{TINY} --rounds 9 --out file", start)[0] == 0
    bars = re.findall(r"\d+%\|", (tmp_path / "log.txt").read_text())
    assert len(bars) <= 3, "a file gets a line per minute, not per round"


def test_a_terminal_without_a_sign_and_a_reader_who_leaves(launched, start, monkeypatch):
    plain, (end, into) = io.TextIOWrapper(io.BytesIO(), "ascii"), os.pipe()
    monkeypatch.setattr(sys, "stdout", plain)
    assert launched(fedavg, f"{TINY} --seed 1 2 --out run", start)[0] == 0
    plain.flush()
    assert "?: standard deviation" in plain.buffer.getvalue().decode()
    os.close(end)
    monkeypatch.setattr(sys, "stdout", os.fdopen(into, "w"))
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert launched(fedavg, "--resume run", start)[0] == 141
    assert "fedavg.py" not in sys.stderr.getvalue()
