import csv
import functools
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

import common.data
import common.ranks
import common.runs
from common.data import Dataset
from common.train import Trainer

torch.set_num_threads(1)  # the models here are too small to share, and tests often run beside other work


def make_tiny(n_train=120, n_test=60, size=8) -> Dataset:
    """Noisy 8x8 images of three classes. The class is the quarter that is bright. The second domain is darker."""
    rng = np.random.default_rng(0)
    n = n_train + n_test
    y, domain = rng.integers(0, 3, n), np.arange(n) % 2
    x = rng.integers(0, 60, (n, 1, size, size))
    half = size // 2
    for i in range(n):
        top, left = divmod(int(y[i]), 2)
        x[i, 0, top * half : (top + 1) * half, left * half : (left + 1) * half] += 180 - 100 * domain[i]
    return Dataset(
        "tiny", torch.from_numpy(x).to(torch.uint8), torch.from_numpy(y), torch.arange(n_train),
        torch.arange(n_train, n), ["a", "b", "c"], torch.from_numpy(domain), ["light", "dark"],
    )  # fmt: skip


def read_rows(folder) -> list[dict[str, str]]:
    """The rows of metrics.csv in this folder. All values are strings."""
    with open(folder / "metrics.csv", newline="") as f:
        return list(csv.DictReader(f))


drawn = functools.cache(common.data.glyphs)


@pytest.fixture(autouse=True)
def glyphs_are_drawn_once(monkeypatch):
    monkeypatch.setattr(common.data, "glyphs", drawn)
    monkeypatch.setattr(common.ranks, "cores", lambda: 1)  # or a test of launch() would fork pytest
    common.data.load.cache_clear()  # the folders of two tests may have one path


@pytest.fixture
def tiny():
    return make_tiny()


@pytest.fixture
def trainer(tiny):
    return Trainer(tiny, torch.device("cpu"), seed=0, epochs=2, batch_size=16, lr=0.1)


DRAWN = set()
savefig = Figure.savefig


@pytest.fixture
def start(monkeypatch, tmp_path):
    """start(method, "--flag value ...") runs a method on the tiny data set in a temporary folder, which it returns."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(common.data, "load", lambda name, *args: make_tiny())

    def run_method(method, flags):
        def draw_once(self, file, **options):
            """Draws each picture of each method the first time only: most of a tiny run's time would go into them."""
            picture = method, Path(file).name if isinstance(file, Path) else None
            if picture in DRAWN and isinstance(file, Path):
                file.write_bytes(b"drawn before")
            else:
                savefig(self, file, **options)
            DRAWN.add(picture)

        usual = [] if "--resume" in flags else ["--precision", "float32"]  # the same on every machine
        usual += [] if "--device" in flags else ["--device", "cpu"]
        with monkeypatch.context() as patch:
            patch.setattr(Figure, "savefig", draw_once)
            method.main([*usual, *flags.split()])
        return tmp_path

    return run_method


@pytest.fixture
def start_and_stop(start, monkeypatch):
    """start_and_stop(method, "--flag value ...", round, folder) starts a run that Ctrl-C ends.

    Ctrl-C comes in this round of the run in this folder, before the round's checkpoint. All earlier rounds have one.
    """

    def run_method(method, flags, round, folder):
        record, save = common.runs.Run.record, common.runs.Run.save

        def record_and_stop(self, *args, **values):
            record(self, *args, **values)
            if self.t == round and self.folder.name == folder:
                saved = self.folder / "checkpoint.pt"
                assert round == 1 or torch.load(saved)["state"]["round"] == round - 1
                raise KeyboardInterrupt

        def save_in_no_time(self, state):
            save(self, state)
            self.save_took = 0.0  # the clock below is too fast for the rule about slow checkpoints

        with monkeypatch.context() as patch:
            patch.setattr(common.runs.Run, "record", record_and_stop)
            patch.setattr(common.runs.Run, "save", save_in_no_time)
            patch.setattr(common.runs.time, "monotonic", iter(range(0, 10**6, 20)).__next__)
            with pytest.raises(KeyboardInterrupt):
                start(method, flags)
        assert common.runs.Run.record is record and common.runs.Run.save is save

    return run_method
