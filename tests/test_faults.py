"""A client that diverges ends the run, and what has been computed stays."""

import pytest
from helpers import kept, outcome, poison, read_rows, selections
from ranks import CALLS


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("method", CALLS)
def test_a_client_that_diverges_in_round_2(start, launched, monkeypatch, method, processes):
    words = f"{CALLS[method]} --evaluate-every 1 --no-compare"
    healthy = start(method, f"{words} --out healthy")
    client = selections(read_rows(healthy))[1][-1]
    poison(client, 2, monkeypatch.setattr)
    line = f"{method.__name__}.py: client {client} diverged in round 2: lower --lr"
    for flags in (f"{words} --out run", "--resume run"):
        assert launched(method, f"{flags} --processes {processes}", start) == (2, [line])
        folder = healthy.with_name("run")
        assert outcome(folder) == ([], outcome(healthy)[1][:1]) and kept(folder)["t"] == 1
        files = {file.name for file in folder.iterdir()}
        assert files >= {"args.json", "partition.png"} and "model.pt" not in files
