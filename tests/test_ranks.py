import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import make_tiny
from ranks import CALLS, call

import common.data
from common import run
from common.ranks import share_out

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """The folder in which all methods ran on two ranks."""
    folder = tmp_path_factory.mktemp("two")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    env = {"PYTHONPATH": f"{HERE.parent}:{HERE}", "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*torchrun, HERE / "ranks.py", folder], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return folder, done


@pytest.mark.parametrize("method", CALLS)
def test_two_ranks_end_where_one_does(two_ranks, method, tmp_path, monkeypatch):
    monkeypatch.setattr(common.data, "load", lambda name, *args: make_tiny())
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.chdir(tmp_path)
    call(method)
    alone, together = (folder / method.__name__ for folder in (tmp_path, two_ranks[0]))
    assert {f.name for f in alone.iterdir()} == {f.name for f in together.iterdir()}
    one, two = (torch.load(folder / "model.pt") for folder in (alone, together))
    for name, tensor in one.items():
        assert torch.allclose(tensor.float(), two[name].float(), rtol=1e-4, atol=1e-5), name
    rows, others = (run.read_metrics(folder / "metrics.csv") for folder in (alone, together))
    assert [row["selected"] for row in rows] == [row["selected"] for row in others]


def test_only_one_rank_prints(two_ranks):
    assert two_ranks[1].stdout.count("pictures are in") == len(CALLS)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_clients_are_shared_out_longest_first(ranks):
    sizes = [7, 1, 5, 3, 3, 9]
    pieces = share_out(sizes, ranks)
    assert sorted(i for of_rank in pieces for i in of_rank) == [0, 1, 2, 3, 4, 5] and len(pieces) == ranks
    assert max(sum(sizes[i] for i in of_rank) for of_rank in pieces) == {1: 28, 2: 15, 3: 10, 8: 9}[ranks]
