import csv
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import helpers
import numpy as np
import pytest
import torch
from ranks import CALLS, child, kill_rank_1_in_round_2

import common.data
import convex_hull_select
import entropy_weighting
import fedavg
import fediir
import minimax_select
import uefl
from common import ranks

HERE = Path(__file__).parent


def call(method, more=""):
    return f"{CALLS[method]} --out {method.__name__} {more}"


def outcome(folder):
    """What a run leaves: model.pt, metrics.csv without the seconds, and the names of its files."""
    return *helpers.outcome(folder), {file.name for file in folder.iterdir()}


def ended(method, flags, folder, first=lambda: None):
    """The exit code of a program in this folder."""
    folder.mkdir(exist_ok=True)
    process = child(method, flags, folder, first)
    process.join()
    return process.exitcode


def said(folder):
    """The lines on stderr that are not a bar's."""
    return helpers.lines_of((folder / "err").read_text())


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """All methods in 1 and 9 processes, and in two that torchrun starts, in three folders."""
    top = tmp_path_factory.mktemp("ranks")
    (top / "torchrun").mkdir()
    program = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    env = {**os.environ, "PYTHONPATH": f"{HERE.parent}:{HERE}", "OMP_NUM_THREADS": "1"}
    with (top / "torchrun/out").open("w") as out, (top / "torchrun/err").open("w") as err:
        torchrun = subprocess.Popen(
            [sys.executable, *program, HERE / "ranks.py", top / "torchrun"],
            stdout=out, stderr=err, env=env,
        )  # fmt: skip
    for count in ("1", "9"):
        for method in CALLS:
            flags = call(method, f"--processes {count}")
            assert ended(method, flags, top / count) == 0, said(top / count)
    assert torchrun.wait() == 0, said(top / "torchrun")
    return top


@pytest.mark.parametrize("method", CALLS)
@pytest.mark.parametrize("started", ["9", "torchrun"])
def test_any_number_of_processes_gives_the_same_bytes(folders, started, method):
    assert outcome(folders / started / method.__name__) == outcome(folders / "1" / method.__name__)
    printed = (folders / started / "out").read_text()
    assert printed.count(f"are in {method.__name__}\n") == 1  # by the first process alone


@pytest.mark.parametrize("method", [minimax_select, uefl])
def test_a_rank_that_is_killed_ends_the_run_in_one_line(folders, method, tmp_path):
    name = method.__name__
    process = child(method, call(method, "--processes 3"), tmp_path, kill_rank_1_in_round_2)
    process.join(30)
    assert time.time() - (tmp_path / "killed").stat().st_mtime < 5
    (line,) = said(tmp_path)
    assert process.exitcode == 1 and line.startswith(f"{name}.py: a process was ended by SIGKILL")
    assert line.endswith(f"continue with --resume {name}")
    assert ended(method, f"--resume {name} --processes 2", tmp_path) == 0, said(tmp_path)
    assert outcome(tmp_path / name) == outcome(folders / "1" / name)


def signal_in_round_2(kind):
    """The first rank sends this signal to the program, as Ctrl-C does, or a cluster's software."""
    program = os.getpid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs ignore Ctrl-C

    def stop(run, t):
        if t == 2 and ranks.RANK == 0:
            os.kill(program, kind)
            time.sleep(0.1)

    helpers.in_each_round(stop)


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("processes", [1, 3])
def test_after_a_signal_the_run_goes_on_to_the_same_bytes(folders, tmp_path, kind, processes):
    flags, first = call(fedavg, f"--processes {processes}"), partial(signal_in_round_2, kind)
    assert ended(fedavg, flags, tmp_path, first) == 130
    assert said(tmp_path) == ["fedavg.py: stopped; continue with --resume fedavg"]
    assert ended(fedavg, "--resume fedavg", tmp_path) == 0, said(tmp_path)
    assert outcome(tmp_path / "fedavg") == outcome(folders / "1/fedavg")


@pytest.mark.parametrize("method", CALLS)
@pytest.mark.usefixtures("start")
def test_the_model_answers_as_the_table_says_by_hand(folders, method):
    """To those that never train, whose other columns follow, and are by hand in test_train.py.

    After a kill, other tests see the same metrics.csv.
    """
    _, data, clients, trainer = helpers.prepared(method, CALLS[method])
    folder, model = folders / "9" / method.__name__, trainer.model.eval()
    weights = torch.load(folder / "model.pt")
    if method is uefl:
        model.codebook.codewords.data = weights["codebook.codewords"]
    model.load_state_dict(weights)

    def answers(samples):
        found = model(data.x[samples] / 127.5 - 1)
        return (found[0] if method is uefl else found).argmax(1)

    row = helpers.read_rows(folder)[-1]
    silent = clients.test[clients.participating :]
    right = [(answers(samples) == data.y[samples]).numpy().mean() for samples in silent]
    assert [*map(float, row["unseen_accuracies"].split())] == pytest.approx(right, rel=1e-5)
    assert ("unseen_worst" in row) == any(len(samples) >= 10 for samples in silent)
    ood = clients.tests["ood"]
    cells = np.zeros((3, 3), int)
    np.add.at(cells, (data.y[ood], answers(ood)), 1)
    _, *lines = csv.reader((folder / "confusion.csv").open())
    assert lines == [["abc"[c], *map(str, cells[c])] for c in range(3)]
    assert row["hits"] == " ".join(map(str, cells.diagonal()))


@pytest.mark.parametrize("method", CALLS)
@pytest.mark.usefixtures("start")
def test_the_cost_is_what_was_sent_and_trained_on_by_count(folders, method):
    """Also with 9 processes, and after a resume, because these have the same metrics.csv."""
    args, _, clients, trainer = helpers.prepared(method, CALLS[method])
    n, p = [len(samples) for samples in clients.train], len(trainer.initial)
    m, of_all = clients.participating, sum(n[: clients.participating])
    samples, numbers, words = 0, 0, [4] * m
    if method in (minimax_select, convex_hull_select):  # the first uploads
        samples += args.local_epochs * of_all
        numbers += 2 * p * m
    elif method is entropy_weighting:  # one entropy each
        numbers += m
    rows = helpers.read_rows(folders / "9" / method.__name__)
    for row, selected in zip(rows, helpers.selections(rows)):
        of_selected = sum(n[k] for k in selected)
        samples += args.local_epochs * of_selected
        numbers += 2 * p * len(selected)
        if method is fedavg:  # power of choice: the model goes to all, and a loss comes back
            samples += of_all
            numbers += m + p * (m - len(selected))
        elif method is fediir:  # a gradient of the classifier comes, and their mean goes
            samples += of_selected
            q = sum(weights.numel() for weights in trainer.model.classifier.parameters())
            numbers += 2 * q * len(selected)
        elif method is uefl:  # also e_k, the codewords that a client has, and once its new ones
            numbers, width = numbers + m, trainer.model.codebook.codewords.shape[1]
            for k, count in enumerate(map(int, row["codewords"].split())):
                numbers += 2 * width * (count - 4)
                if count > words[k]:
                    samples, numbers, words[k] = samples + n[k], numbers + 4 * width, count
        assert int(row["samples"]) == samples
        assert float(row["megabytes"]) == pytest.approx(4 * numbers / 10**6, rel=1e-5)


# -------------------------------------------------------------- two machines that torchrun connects


def nothing():
    pass


def two_nodes(tmp_path, calls, firsts=(nothing, nothing)):
    """Runs FedAvg on two machines with a folder each. Returns what each says, and its exit code."""
    meeting = tempfile.mktemp(dir=tmp_path)
    nodes = []
    for rank in (0, 1):

        def first(rank=rank):
            ranks.RANK, ranks.COUNT, ranks.MEETING = rank, 2, str(meeting)
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
            firsts[rank]()

        folder = tmp_path / str(rank)
        folder.mkdir(exist_ok=True)
        (folder / "err").unlink(missing_ok=True)
        nodes.append(child(fedavg, calls[rank], folder, first))
    for process in nodes:
        process.join(20)
        process.kill()
    return [(said(tmp_path / str(rank)), nodes[rank].exitcode) for rank in (0, 1)]


CALL = CALLS[fedavg] + " --out run "


def other_data():
    data = helpers.make_tiny()
    data.x[data.train[0]] += 1
    common.data.load = lambda name, *args: data


OTHERS = {"lr": ("--lr 0.2", nothing), "seeds": ("--seed 0 1", nothing), "data": ("", other_data)}


@pytest.mark.parametrize("what", OTHERS)
def test_two_machines_that_differ_stop_in_one_line(tmp_path, what):
    """Weights and clients that differ are in test_run.py."""
    more, first = OTHERS[what]
    found = two_nodes(tmp_path, [CALL, CALL + more], (nothing, first))
    for lines, code in found:
        assert code == 2 and len(lines) == 1 and f"differ in their {what}" in lines[0], found
    assert not list(tmp_path.glob("*/run"))


def stop_after(rounds):
    """Ctrl-C comes in the middle of the round after these."""

    def stop(run, t):
        if t > rounds:
            raise KeyboardInterrupt

    return partial(helpers.in_each_round, stop)


def test_a_machine_without_the_folder_does_not_leave_the_other_waiting(tmp_path):
    ended(fedavg, f"{CALL} --processes 1", tmp_path / "0", stop_after(1))
    (waits, first), (stops, second) = two_nodes(tmp_path, ["--resume run"] * 2)
    assert (first, second) == (1, 2) and "run/args.json cannot be read" in stops[0]
    assert waits == ["fedavg.py: another process has ended, so this one stops"]


def test_two_machines_resume_only_from_the_same_round(folders, tmp_path):
    """One has no checkpoint."""
    for rank, count in enumerate((2, 1)):
        ended(fedavg, f"{CALL} --processes 1", tmp_path / str(rank), stop_after(count))
    for lines, code in two_nodes(tmp_path, ["--resume run"] * 2):
        assert code == 2 and len(lines) == 1 and "differ in their round" in lines[0], lines
    assert not list(tmp_path.glob("*/run/model.pt"))
    shutil.copytree(tmp_path / "0/run", tmp_path / "1/run", dirs_exist_ok=True)
    assert two_nodes(tmp_path, ["--resume run"] * 2) == [([], 0)] * 2
    assert outcome(tmp_path / "0/run") == outcome(folders / "1/fedavg")


def test_a_machine_whose_partner_is_killed_stops_in_one_line(tmp_path):
    ((lines, code), (_, killed)) = two_nodes(tmp_path, [CALL] * 2, [kill_rank_1_in_round_2] * 2)
    assert killed == -signal.SIGKILL and code == 1 and len(lines) == 1, lines


def unplug():
    os.environ["GLOO_SOCKET_IFNAME"] = "nonexist0"


def wait_alone():
    """The other machine never starts, and a minute is over in a second."""
    ranks.timedelta = lambda minutes=0, days=0: timedelta(seconds=minutes, days=days)
    ranks.MEETING += str(ranks.RANK)


@pytest.mark.parametrize("first", [unplug, wait_alone])
def test_a_machine_that_finds_no_other_is_one_line_that_says_what_to_do(tmp_path, first):
    (lines, code), _ = two_nodes(tmp_path, [CALL] * 2, [first] * 2)
    assert code == 2 and len(lines) == 1, lines
    assert "cannot connect" in lines[0] and "GLOO_SOCKET_IFNAME" in lines[0], lines


# -------------------------------------------------------------------------------- who does what


def test_only_torchrun_sets_the_rank(monkeypatch):
    """Cluster software sets RANK, too. A lone process with rank 1 would write nothing."""
    monkeypatch.setattr(os, "environ", {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"})
    started = runpy.run_path(ranks.__file__)
    assert (started["RANK"], started["COUNT"]) == (0, 1)


def test_as_many_are_forked_as_there_are_clients_or_gpus(monkeypatch):
    """Several may share a GPU."""
    monkeypatch.setattr(ranks, "may_fork", True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    given = [(9, "cpu", 3), (None, "auto", 9), (None, "cuda:0", 9), (4, "cuda", 9)]
    assert [ranks.how_many(*of_run) for of_run in given] == [3, 2, 1, 4]
