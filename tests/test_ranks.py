import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import read_rows
from ranks import CALLS, child

import fedavg
from common import ranks
from common.ranks import cores

HERE = Path(__file__).parent


def run(folder, method, *flags, kill_in_round=0):
    """A method's run in this folder. Returns its exit code, and the last line on stderr."""
    folder.mkdir(exist_ok=True)
    words = [*flags] if "--resume" in flags else [*CALLS[method].split(), "--out", method.__name__, *flags]
    process = child(method, words, folder, kill_in_round)
    process.join()
    return process.exitcode, (folder / "err").read_text().replace("\r", "\n").rstrip().splitlines()[-1]


def outcome(folder):
    """What a run leaves, without the seconds that it took: model.pt, metrics.csv and the names of its files."""
    rows = [{column: cell for column, cell in row.items() if column != "seconds"} for row in read_rows(folder)]
    return (folder / "model.pt").read_bytes(), rows, {file.name for file in folder.iterdir()}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """All methods in 1, 2 and 9 processes, and in two that torchrun starts: a folder for each of the four."""
    top = tmp_path_factory.mktemp("ranks")
    for count in ("1", "2", "9"):
        for method in CALLS:
            assert run(top / count, method, "--processes", count)[0] == 0, (top / count / "err").read_text()
    (top / "torchrun").mkdir()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    env = {"PYTHONPATH": f"{HERE.parent}:{HERE}", "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*torchrun, HERE / "ranks.py", top / "torchrun"], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    (top / "torchrun/out").write_text(done.stdout)
    return top


@pytest.mark.parametrize("method", CALLS)
@pytest.mark.parametrize("started", ["2", "9", "torchrun"])
def test_any_number_of_processes_gives_the_same_bytes(folders, started, method):
    assert outcome(folders / started / method.__name__) == outcome(folders / "1" / method.__name__)


@pytest.mark.parametrize(("started", "count"), [("1", 1), ("2", 2), ("9", 3), ("torchrun", 2)])
def test_no_more_processes_than_clients_in_a_round_and_only_one_prints(folders, started, count):
    assert json.loads((folders / started / "fedavg/args.json").read_text())["processes"] == count
    assert (folders / started / "out").read_text().count("pictures are in") == len(CALLS)


@pytest.mark.parametrize("method", CALLS)
def test_a_run_whose_helper_dies_ends_in_one_line_and_resumes_with_another_number(folders, method, tmp_path):
    name = method.__name__
    code, said = run(tmp_path, method, "--processes", "3", kill_in_round=2)
    assert code == 1 and "Traceback" not in (tmp_path / "err").read_text()
    assert said.startswith(f"{name}.py: a helper process was killed by signal 9") and said.endswith(f"--resume {name}")
    assert run(tmp_path, method, "--resume", name, "--processes", "1")[0] == 0
    assert outcome(tmp_path / name) == outcome(folders / "1" / name)


@pytest.mark.parametrize("count", ["1", "3"])
def test_a_users_mistake_is_one_line_from_any_number_of_processes(tmp_path, count):
    code, _ = run(tmp_path, fedavg, "--lr", "1e8", "--processes", count)
    said = [line for line in (tmp_path / "err").read_text().replace("\r", "\n").splitlines() if "fedavg.py" in line]
    assert code == 2 and len(said) == 1 and "lower --lr" in said[0], said


@pytest.mark.parametrize(("set_by", "expected"), [("torchrun", (1, 2)), ("somebody else", (0, 1))])
def test_only_torchrun_sets_the_rank(monkeypatch, set_by, expected):
    """Cluster software sets RANK, too. A lone process that took itself for rank 1 would write nothing."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if set_by == "torchrun":
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    started = runpy.run_path(ranks.__file__)
    assert (started["RANK"], started["COUNT"]) == expected


@pytest.mark.parametrize(("limit", "expected"), [("max 100000", 8), ("250000 100000", 2), ("10000 100000", 1)])
def test_cores_are_those_that_the_container_may_use(monkeypatch, limit, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(Path, "read_text", lambda self: limit)
    assert cores() == expected


@pytest.mark.parametrize(("count", "most_work"), [(1, 28), (2, 15), (3, 10), (8, 9)])
def test_work_is_shared_out_largest_first(monkeypatch, count, most_work):
    sizes, pieces = [7, 1, 5, 3, 3, 9], []
    monkeypatch.setattr(ranks, "COUNT", count)
    for rank in range(count):
        monkeypatch.setattr(ranks, "RANK", rank)
        pieces.append(ranks.share_out(sizes))
    assert sorted(i for mine in pieces for i in mine) == [0, 1, 2, 3, 4, 5], "each piece belongs to one rank"
    assert max(sum(sizes[i] for i in mine) for mine in pieces) == most_work
    assert all([sizes[i] for i in mine] == sorted((sizes[i] for i in mine), reverse=True) for mine in pieces)


def test_work_is_shared_out_as_in_a_worked_example(monkeypatch):
    monkeypatch.setattr(ranks, "COUNT", 2)
    # rank 0 gets 9, rank 1 gets 7 and 5, rank 0 gets 3; both have 12, so rank 0 gets the next 3, and rank 1 gets 1
    for rank, mine in ((0, [5, 3, 4]), (1, [0, 2, 1])):
        monkeypatch.setattr(ranks, "RANK", rank)
        assert ranks.share_out([7, 1, 5, 3, 3, 9]) == mine
