import json

import numpy as np
import pytest
import torch
from helpers import make_tiny

import common.data
from common import UserError, random_at
from common.models import build
from common.splits import make_clients

load = common.data.load


def play(folder, speakers):
    """A play with this many speakers, who speak random letters in turn, and what each one says."""
    rng = random_at(0, "play")
    says = {
        f"SPEAKER {s}": ["".join(rng.choice(list("abcde"), 90)) for _ in range(10)]
        for s in range(speakers)
    }
    turns = "".join(f"{name}:\n{says[name][i]}\n \n" for i in range(10) for name in says)
    file = folder / "play.txt"
    file.write_text(f"\ufeff{turns}SERVANT:\nAy.\n", encoding="utf-8")
    return load(str(file)), {name: "\n".join(speeches) for name, speeches in says.items()}


def test_windows_are_a_speakers_own_and_those_for_training_and_testing_do_not_overlap(tmp_path):
    data, says = play(tmp_path, 2)
    assert data.domains == list(says), "a speaker with too little text is left out"
    codes = torch.cat([data.x, data.y[:, None]], 1).tolist()
    windows = ["".join(data.classes[c] for c in row) for row in codes]
    for s, text in enumerate(says.values()):
        places = {i: text.index(windows[i]) for i in range(len(windows)) if data.domain[i] == s}
        train = [places[i] for i in data.train.tolist() if i in places]
        test = [places[i] for i in data.test.tolist() if i in places]
        assert train == list(range(0, 10 * len(train), 10)) and len(train) >= 10 and test
        assert train[-1] + 81 <= test[0] and test[-1] + 81 > len(text) - 10, "the last tenth"


def test_leafs_json(tmp_path):
    samples = {"x": ["abcdefgh" * 10] * 200, "y": list("ab" * 100)}
    (tmp_path / "all.json").write_text(json.dumps({"user_data": {"HAMLET": samples}}))
    data = load(str(tmp_path / "all.json"))
    assert [data.classes[c] for c in data.y] == samples["y"]
    assert len(data.test) == 20 and len(data.train) == 180 - 80
    assert "".join(data.classes[c] for c in data.x[0]) == samples["x"][0]


def test_each_speaker_is_a_client(tmp_path):
    data, _ = play(tmp_path, 5)
    clients = make_clients(data, partition="speaker")
    assert len(clients.train) == 5 and clients.participating == 2
    speakers = [data.domain[train[0]].item() for train in clients.train]
    assert sorted(speakers) == [0, 1, 2, 3, 4]
    for s, train, test in zip(speakers, clients.train, clients.test, strict=True):
        assert train.tolist() == [i for i in data.train.tolist() if data.domain[i] == s]
        assert test.tolist() == [i for i in data.test.tolist() if data.domain[i] == s]
    assert torch.equal(clients.tests["ood"], data.test)


def test_leafs_character_model_has_its_size_and_formula():
    model = build("charrnn", (80,), 64)
    lstm = [4 * 256 * (inputs + 256 + 2) for inputs in (8, 256)]
    assert sum(p.numel() for p in model.parameters()) == 64 * 8 + sum(lstm) + 256 * 64 + 64
    small = build("charrnn", (80,), 5, width=1 / 32).double().features
    x = torch.randint(0, 5, (3, 80), generator=torch.Generator().manual_seed(0))
    weights = {name: value.detach().numpy() for name, value in small.lstm.named_parameters()}
    inputs = small.embedding.weight.detach().numpy()[x]
    for layer in "01":
        h, c, outputs = np.zeros((3, 8)), np.zeros((3, 8)), []
        for t in range(80):
            gates = inputs[:, t] @ weights[f"weight_ih_l{layer}"].T
            gates = gates + h @ weights[f"weight_hh_l{layer}"].T
            gates = gates + weights[f"bias_ih_l{layer}"] + weights[f"bias_hh_l{layer}"]
            i, f, g, o = np.split(gates, 4, axis=1)
            c = c / (1 + np.exp(-f)) + np.tanh(g) / (1 + np.exp(-i))
            h = np.tanh(c) / (1 + np.exp(-o))
            outputs.append(h)
        inputs = np.stack(outputs, 1)
    assert np.allclose(small(x).detach().numpy(), h), "the output after the last character"


def test_what_does_not_fit_is_refused(tmp_path):
    (tmp_path / "novel.txt").write_text("Call me Ishmael. " * 100)
    with pytest.raises(UserError, match="Speaker"):
        load(str(tmp_path / "novel.txt"))
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(UserError, match="LEAF"):
        load(str(tmp_path / "bad.json"))
    for data, partition in ((play(tmp_path, 2)[0], "dirichlet"), (make_tiny(), "speaker")):
        with pytest.raises(UserError, match="--partition speaker is for text"):
            make_clients(data, partition=partition)
    with pytest.raises(UserError, match="choose charrnn for text"):
        build("cnn", (80,), 5)
