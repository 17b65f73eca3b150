import os
import re
import runpy
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

# With a GPU in sight, a process cannot fork once it has computed gradients, so only test_gpu.py,
# when it is named on the command line, may see one.
if not any("test_gpu" in word for word in sys.argv):
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

import pytest
import torch
from helpers import (
    drawn,
    in_each_round,
    lines_of,
    make_tiny,
    prepared,
    read_rows,
    save_each_round,
    selections,
)
from matplotlib.figure import Figure

import common.data
from common import ranks
from common.chance import random_at
from common.models import build
from common.runner import launch
from common.runner.runs import Run
from common.splits import Clients
from common.train import LocalTraining, Trainer

torch.set_num_threads(1)  # the models here are too small to share between cores


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """Draws glyphs once, never forks pytest, and lets the folders of two tests have one path."""
    monkeypatch.setitem(common.data.OFFLINE, "glyphs", drawn)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0}, raising=False)


@pytest.fixture
def tiny():
    return make_tiny()


@pytest.fixture
def rng():
    return random_at(0, "test")


@pytest.fixture
def trainer(tiny):
    """A trainer of three clients with 40 training and 20 test samples each."""
    clients = Clients([*tiny.train.split(40)], [*tiny.test.split(20)], 3, 2, [""] * 3, {})
    torch.manual_seed(0)
    model = build("cnn", (1, 8, 8), 3, width=0.125)
    return Trainer(tiny, clients, model, local=LocalTraining(epochs=2, batch_size=16, lr=0.1))


@pytest.fixture
def start(monkeypatch, tmp_path):
    """start(method, "--flag value ...") runs a method on the tiny data. Returns its folder.

    Its pictures stay empty, because most of the time would go into them.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(common.data, "load", lambda name, *args: make_tiny())
    monkeypatch.setattr(common.data, "rotated", lambda data, *args: data)
    monkeypatch.setattr(Figure, "savefig", lambda self, file, **options: Path(file).touch())

    def run_method(method, flags):
        words = "" if "--resume" in flags else "--precision float32 --out run "
        words += flags if "--device" in flags else f"--device cpu {flags}"
        method.main(words.split())
        return tmp_path / re.findall(r"--(?:out|resume) (\S+)", words)[-1]

    return run_method


@pytest.fixture
def finished(start, monkeypatch):
    """finished(method, "--flag value ...") is a run: what it begins with, and what it leaves.

    It has the flags, data, clients and trainer of helpers.prepared, the rows of
    metrics.csv, the clients selected in each round, and the last state.
    """

    def run_method(method, flags):
        args, data, clients, trainer = prepared(method, flags)
        state, record = {}, Run.record
        keep = lambda run, yielded, row: state.update(yielded) or record(run, yielded, row)  # noqa: E731
        with monkeypatch.context() as patch:
            patch.setattr(Run, "record", keep)
            rows = read_rows(start(method, flags))
        return SimpleNamespace(
            args=args, data=data, clients=clients, trainer=trainer,
            rows=rows, selected=selections(rows), state=state,
        )  # fmt: skip

    return run_method


@pytest.fixture
def start_and_stop(start, monkeypatch):
    """start_and_stop(method, "--flag value ...", round, folder) starts a run that Ctrl-C ends.

    Ctrl-C comes in the middle of this round of the run in this folder. The checkpoint is that of
    two rounds before.
    """

    def run_method(method, flags, round, folder):
        def stop(run, t):
            if t == round and run.folder == Path(folder):
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            save_each_round(patch.setattr)
            in_each_round(stop, patch.setattr)
            with pytest.raises(KeyboardInterrupt):
                start(method, flags)

    return run_method


@pytest.fixture
def launched(capsys, monkeypatch, tmp_path):
    """launched(method, "--flag value ...") is the exit code of a program, and its lines on stderr.

    What it has printed is in launched.out. With the fixture `start` as the third argument,
    it has the tiny data.
    """
    monkeypatch.chdir(tmp_path)

    def end_of(method, flags, run=None):
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", [method.__file__, *shlex.split(flags)])
        code = 0
        try:
            if run:
                launch(lambda: run(method, flags))
            else:
                runpy.run_path(method.__file__, run_name="__main__")
        except SystemExit as end:
            code = end.code
        ranks.may_fork = False
        end_of.out, err = capsys.readouterr()
        return code, lines_of(err)

    return end_of
