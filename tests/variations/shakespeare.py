import json

import torch
from helpers import read_rows

import common.data
import minimax_select
from common.chance import random_at
from common.models import build

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
    assert data.domains == list(says)  # a speaker with too little text is left out
    codes = torch.cat([data.x, data.y[:, None]], 1).tolist()
    windows = ["".join(data.classes[c] for c in row) for row in codes]
    for s, text in enumerate(says.values()):
        places = {i: text.index(windows[i]) for i in range(len(windows)) if data.domain[i] == s}
        train = [places[i] for i in data.train.tolist() if i in places]
        test = [places[i] for i in data.test.tolist() if i in places]
        assert train == list(range(0, 10 * len(train), 10)) and len(train) >= 10 and test
        assert train[-1] + 81 <= test[0] and test[-1] + 81 > len(text) - 10  # the last tenth


def test_leafs_json(tmp_path):
    samples = {"x": ["abcdefgh" * 10] * 200, "y": list("ab" * 100)}
    (tmp_path / "all.json").write_text(json.dumps({"user_data": {"HAMLET": samples}}))
    data = load(str(tmp_path / "all.json"))
    assert [data.classes[c] for c in data.y] == samples["y"]
    assert len(data.test) == 20 and len(data.train) == 180 - 80
    assert "".join(data.classes[c] for c in data.x[0]) == samples["x"][0]


def test_id_is_ood_if_all_roles_participate(start, monkeypatch, tmp_path):
    monkeypatch.setattr(common.data, "load", lambda *args: play(tmp_path, 4)[0])
    words = "--dataset shakespeare --small --participating 4 --width 0.1 --rounds 2 --no-compare"
    for row in read_rows(start(minimax_select, words)):
        assert row["id_accuracy"] == row["ood_accuracy"]


def test_leafs_character_model_has_its_size_and_reads_the_last_character():
    model = build("charrnn", (80,), 64)
    of_lstm = 4 * 256 * (8 + 256 + 2 + 256 + 256 + 2)
    assert sum(p.numel() for p in model.parameters()) == 64 * 8 + of_lstm + 256 * 64 + 64
    x = torch.randint(0, 64, (3, 80), generator=torch.Generator().manual_seed(0))
    hidden, _ = model.features.lstm(model.features.embedding(x))[1]
    assert torch.allclose(model.features(x), hidden[-1], atol=1e-6)  # the last state of layer 2
