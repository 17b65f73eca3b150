"""What users do to folders, files and terminals. None may lose data or give a wrong result."""

import io
import os
import re
import sys
from argparse import Namespace

from helpers import draw_images, make_tiny

import convex_hull_select
import fedavg
from common.data import Dataset
from common.runner import plots
from common.splits import make_clients

TINY = (
    "--model cnn --width 0.125 --rounds 3 --local-epochs 1 --clients 2 "
    "--participating 2 --sample 1 --partition iid --device cpu --precision float32 --no-compare "
)


def test_a_hull_of_diverged_clients_is_one_line(launched, start):
    more = "--clients 8 --participating 6 --sample 6 --local-epochs 2 --lr 1e8"
    code, lines = launched(convex_hull_select, f"{TINY} {more}", start)
    assert code == 2 and re.search("(lower|change) --lr$", lines[-1])


def test_a_single_class_is_refused(launched, tmp_path):
    draw_images(tmp_path / "pets", classes=("cat",), n=24)
    code, (*_, line) = launched(fedavg, f"{TINY} --dataset pets --out r")
    assert code == 2 and "has only one class, cat" in line


def test_a_class_may_have_any_name_in_pictures(tmp_path):
    tiny, names = make_tiny(), [r"$\frac$", "$", "c"]
    data = Dataset("x", tiny.x, tiny.y, tiny.train, tiny.test, names, tiny.domain, ["$x", "b"])
    clients = make_clients(data, partition="iid", clients=3)
    plots.partition(tmp_path / "partition.png", data, clients)
    assert (tmp_path / "partition.png").stat().st_size > 1000


def test_pictures_do_not_depend_on_a_users_matplotlibrc(tmp_path):
    plots.samples(tmp_path / "a.png", make_tiny(), "domain {}")
    with matplotlib.rc_context({"image.origin": "lower", "axes.grid": True, "font.family": "x"}):
        plots.samples(tmp_path / "b.png", make_tiny(), "domain {}")
        assert matplotlib.rcParams["image.origin"] == "lower", "it is the user's again"
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_groups_of_equal_size_have_the_same_colours_in_every_program():
    """The order of a set of names changes with PYTHONHASHSEED. The smallest group stands out."""
    names = [f"domain {i}" for i in range(9)]
    colours = plots.group_colours([*names, *names[1:]])
    assert [*colours] == [names[0], *names[:0:-1]] and colours[names[0]] == plots.COLOURS[1]


def test_a_closed_or_redirected_stderr(launched, tmp_path, monkeypatch):
    draw_images(tmp_path / "pets", n=12)
    monkeypatch.setattr(sys, "stderr", None)  # as Python has it after 2>&-
    assert launched(fedavg, f"{TINY} --dataset pets --out closed")[0] == 0
    assert (tmp_path / "closed/model.pt").exists()
    with open(tmp_path / "log.txt", "w") as file:
        monkeypatch.setattr(sys, "stderr", file)
        assert launched(fedavg, f"{TINY} --rounds 9 --dataset pets --out file")[0] == 0
    bars = re.findall(r"\d+%\|", (tmp_path / "log.txt").read_text())
    assert len(bars) <= 3, "a file gets a line per minute, not per round"


def test_a_terminal_without_a_sign_and_a_reader_who_leaves(launched, tmp_path, monkeypatch):
    draw_images(tmp_path / "pets", n=12)
    plain, (end, into) = io.TextIOWrapper(io.BytesIO(), "ascii"), os.pipe()
    monkeypatch.setattr(sys, "stdout", plain)
    assert launched(fedavg, f"{TINY} --dataset pets --seed 1 2 --out run")[0] == 0
    plain.flush()
    assert "?: standard deviation" in plain.buffer.getvalue().decode()
    os.close(end)
    monkeypatch.setattr(sys, "stdout", os.fdopen(into, "w"))
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert launched(fedavg, "--resume run")[0] == 141
    assert "fedavg.py" not in sys.stderr.getvalue()


def test_a_run_inside_a_folder_of_images_is_no_data(launched, tmp_path):
    draw_images(tmp_path / "pets", n=12)
    assert launched(fedavg, f"{TINY} --dataset pets --out pets/train/run")[0] == 0
    code, lines = launched(fedavg, f"{TINY} --dataset pets --out other")
    assert code == 2 and len(lines) == 1, lines
    assert not (tmp_path / "other").exists()
