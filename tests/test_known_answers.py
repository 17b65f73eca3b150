"""The known answers, against tests/known.py and the six files; their mistakes, page and command."""

import ast
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import known
import numpy as np
import pytest
import scipy.stats
import torch
from helpers import ROOT

import fedavg
import fediir
from common.train import averaging_weights
from docs import known_answers
from docs.known_answers import ANSWERS, array

PAGE = (ROOT / "docs/known_answers.md").read_text()
SOURCE = Path(known.__file__).read_text()


def recomputed(name, old="", new=""):
    """What tests/known.py says of this entry, after one change of its lines."""
    assert old in SOURCE, f"tests/known.py has no {old}"
    names, given = {}, ANSWERS[name]["given"]
    exec(SOURCE.replace(old, new) if old else SOURCE, names)
    arrays = "clients", "selected", "y"  # which stay lists, as clients differ in length
    made = {
        k: np.array(v) if isinstance(v, list) and k not in arrays else v for k, v in given.items()
    }
    with np.errstate(all="ignore"):
        return names[name](**made)


@pytest.mark.parametrize("name", ANSWERS)
def test_the_answers_are_those_of_another_implementation(name):
    found, entry = recomputed(name), ANSWERS[name]
    expected = entry["steps"] | entry["answers"]
    assert found.keys() == expected.keys()
    for asked, right in expected.items():
        assert known_answers.equal(found[asked], right, 1e-7), asked


# ---------------------------------------------------------------- the six files


def averages(w, clients, selected, lr, epochs, momentum):
    """FedAvg of a linear model by the pieces of fedavg.py."""
    found = []
    for ids in selected:
        ends, sizes = [], torch.tensor([len(clients[k][1]) for k in ids])
        for k in ids:
            model = known_answers.linear(w.tolist())
            optimizer = torch.optim.SGD(model.parameters(), lr, momentum)
            fedavg.client_update(model, [clients[k]] * epochs, optimizer)
            ends.append(model.weight.detach())
        alpha = averaging_weights("size", sizes).double()
        w = torch.tensordot(alpha, torch.stack(ends), 1)
        found.append(w)
    return found


def moving_average(gradients, ema):
    """g~ of fediir.federate(), whose clients have these gradients and do not train."""
    clients = SimpleNamespace(ids=torch.arange(2), per_round=2, participating=2, train=None)
    trainer = SimpleNamespace(
        initial=torch.zeros(1), map=lambda *where: [gradients[where[-1] - 1]], clients=clients,
        count=lambda *cost: None, cost=dict, is_due=lambda t: False,
        train=lambda *where, **more: (torch.zeros(2, 1), torch.zeros(2)),
    )  # fmt: skip
    args = SimpleNamespace(rounds=len(gradients), seed=0, ema=ema, gamma=1, server_lr=1)
    return [state["global_gradient"] for state, _ in fediir.federate(args, clients, trainer)]


PIECES = {
    "fedavg": "test_known_answers:averages",
    "entropy": "entropy_weighting:entropy_weights",
    "minimax": "minimax_select:minimax_clients",
    "hull": "convex_hull_select:hull_vertices",
    "fediir": "fediir:fediir_loss",
    "fediir_gradient": "fediir:risk_and_gradient",
    "fediir_average": "test_known_answers:moving_average",
    "uefl": "uefl:ExtensibleCodebook",
    "uefl_entropy": "uefl:predictive_entropy",
    "uefl_extended": "uefl:uncertain",
    "uefl_average": "uefl:average",
}


@pytest.mark.parametrize("name", ANSWERS)
def test_the_six_files_are_right(name):
    lines = known_answers.check(name, PIECES[name])
    assert lines == [f"{asked}: right" for asked in ANSWERS[name]["answers"]]


# ---------------------------------------------------------------- the mistakes

GRADIENT = "gradient = risk_and_gradient(z, y, weight, bias)\n        distance"
TABLE = 'np.array(table["g"], float)'
# What is said of a number, and the line of tests/known.py that changes for it, before and after
CHANGES = {
    "fedavg": {
        "of an unweighted mean": ("np.array(sizes) / sum(sizes)", "np.ones(len(ids)) / len(ids)"),
        "with n_k / n over all clients": ("/ sum(sizes)", "/ sum(len(y) for x, y in clients)"),
        "of one model, handed from client to client": (
            "velocity = server, 0",
            "velocity = ends[-1] if ends else server, 0",
        ),
        "of one optimizer for all clients": ("end, velocity = server, 0", "end = server"),
        "of losses summed over samples": ("@ x / len(x)", "@ x"),
        "of one epoch": ("range(epochs)", "range(1)"),
    },
    "entropy": {
        "of H in bits": ("np.log(share)", "np.log2(share)"),
        "of H / sum of H": ("np.exp(h) / np.exp(h).sum()", "h / h.sum()"),
        "of a softmax of -H": ("np.exp(h) / np.exp(h)", "np.exp(-h) / np.exp(-h)"),
        "of H divided by log C": ("row.sum()) for", "row.sum()) / np.log(len(row)) for"),
        "of n_i exp(H_i)": ("np.exp(h) / np.exp(h)", "(e := counts.sum(1) * np.exp(h)) / e"),
        "of 0 log 0": (" if share > 0", ""),
        "not divided by the selected's sum": (" / alpha[selected].sum()", ""),
    },
    "minimax": {
        "of clients compared with themselves": (" if j != i", ""),
        "of `<= K`": ("range(len(g)), k)", "range(len(g)), k + 1)"),
        "of the largest S*": ("= min(subsets", "= max(subsets"),
        "of inner products": (" / length / length[:, None]", ""),
        "of mean cosines": (
            "max(s[i, j] for j in range(len(g)) if j != i)",
            "s[i].sum() - s[i, i]",
        ),
        "of weights, 9 before training": (TABLE, f"9 - {TABLE}"),
        "of S* as a set": (
            "= np.round(worst, 9)",
            "= np.round(worst, 9); worst[[w in worst[:i] for i, w in enumerate(worst)]] = 9",
        ),
    },
    "hull": {
        "of rows not centred": ("g = g - g.mean(0)", "pass"),
        "of the first coordinates": ("np.linalg.svd(g)[2]", "np.eye(g.shape[1])"),
        "without a projection": ('[2][: table["dim"]]', "[2]"),
        "with points on edges and faces": ("[*points[i], 1]", "[*(1.000001 * points[i]), 1]"),
        "without points that have a copy": (
            "(points != points[i]).any(1)",
            "np.arange(len(points)) != i",
        ),
        "of weights, 0 before training, or 9 from client 4 on": (
            TABLE,
            f"9 * (np.arange(len(table['g'])) > 3)[:, None] - {TABLE}",
        ),
        "rows of unit length": (
            "g = g - g.mean(0)",
            "g = g / np.linalg.norm(g, axis=1)[:, None]; g = g - g.mean(0)",
        ),
    },
    "fediir": {
        "without 1/2": ("gamma / 2 *", "gamma *"),
        "of the norm, not its square": (
            "global_gradient) ** 2).sum()",
            "global_gradient) ** 2).sum() ** 0.5",
        ),
        "of the mean over Q": ("global_gradient) ** 2).sum()", "global_gradient) ** 2).mean()"),
        "of a penalty without a gradient": (
            GRADIENT,
            GRADIENT.replace("z, y, weight, bias", "z.real, y, weight.real, bias.real"),
        ),
        "of a penalty that stops at the features": (GRADIENT, GRADIENT.replace("z,", "z.real,")),
        "without the bias in the penalty": (
            "((gradient - ",
            "((gradient - global_gradient)[:-2] ** 2).sum() #",
        ),
    },
    "fediir_gradient": {"of losses summed over samples": ("share = 1 / len(y)", "share = 1")},
    "fediir_average": {
        "of an average never stored": ("average = ema * average", "average = ema * 0"),
        "with v and 1 - v exchanged": (
            "ema * average + (1 - ema) * mean",
            "(1 - ema) * average + ema * mean",
        ),
        "of a mean over all batches": ("np.mean(gradients, 0)", "np.mean(batches, 0)"),
        "of means over a client's batches": (
            "np.mean(gradients, 0)",
            "(batches[0] + np.mean(batches[1:], 0)) / 2",
        ),
        "of a mean over all samples": ("(gradients, 0)", "(gradients[[0] * 4 + [1] * 6], 0)"),
        "a start at the first mean": ("np.zeros(len(gradients[0]))", "np.mean(gradients, 0)"),
    },
    "uefl": {
        "of sums": ("** 2).mean()", "** 2).sum()"),
        "a token's squared norm": ("** 2).mean()", "** 2).sum(-1).mean()"),
        "with the weights exchanged": (
            "0.25 * ((c.real - z) ** 2).mean() + 1 *",
            "1 * ((c.real - z) ** 2).mean() + 0.25 *",
        ),
        "without sg": (
            "c.real - z) ** 2).mean() + 1 * ((c - z.real",
            "c - z) ** 2).mean() + 1 * ((c - z",
        ),
        "with words of others": ("np.where(may_use, distances, np.inf)", "distances"),
        "of a task that trains words": ("z + (c - z).real", "c"),
    },
    "uefl_entropy": {
        "of single passes": (
            "[entropy_of(p) for p in mean]",
            "np.mean([[entropy_of(p) for p in one] for one in softmax(passes)], 0)",
        ),
        "of passes without dropout": ("softmax(passes)", "softmax(without_dropout[None])"),
        "of mean logits": ("softmax(passes).mean(0)", "softmax(passes.mean(0))"),
        "in bits": ("np.log(share)", "np.log2(share)"),
    },
    "uefl_extended": {
        "of >=": ("e > threshold", "e >= threshold"),
        "of the mean in place of the smallest": ("min(entropies)", "np.mean(entropies)"),
    },
    "uefl_average": {
        "with clients that may not use a word": ("* uses", "* np.ones_like(uses)"),
        "divided by all clients' samples": ("np.maximum(n.sum(0), 1)", "sum(sizes)"),
        "of an unweighted mean": ("sizes[:, None] *", "1 *"),
    },
}

MISTAKES = [(name, what) for name, changes in CHANGES.items() for what in changes]


@pytest.mark.parametrize(("name", "what"), MISTAKES)
def test_a_changed_line_gives_what_the_mistake_is_said_to_give(name, what):
    found, entry = recomputed(name, *CHANGES[name][what]), ANSWERS[name]
    known_ones = entry["choices"] | entry["wrong"]
    assert known_ones.keys() == CHANGES[name].keys()
    for asked, number in (entry["answers"] | known_ones[what]).items():
        assert known_answers.equal(found[asked], number, 1e-7)
    for asked in known_ones[what]:
        right = entry["answers"][asked]
        assert not known_answers.equal(found[asked], right, 10 * entry["tolerance"])
    said = [line for line in known_answers.verdict(entry, found) if not line.endswith(": right")]
    assert said and all(line.endswith((f"choice: {what}", f"number {what}")) for line in said)


@pytest.mark.parametrize(("name", "new"), [("minimax", "-"), ("hull", "-"), ("hull", "9 - ")])
def test_selections_do_not_see_the_sign_and_the_hull_not_a_shift(name, new):
    found = recomputed(name, TABLE, new + TABLE)
    assert {*known_answers.verdict(ANSWERS[name], found)} == {
        f"{a}: right" for a in ANSWERS[name]["answers"]
    }


# ---------------------------------------------------------------- the page and the command


def at(numbers, path):
    """numbers["averages"][1][0] for the path averages[1][0]."""
    asked, *index = path.replace("]", "").split("[")
    return array(numbers[asked])[tuple(map(int, index))]


def test_the_numbers_on_the_page():
    tables = PAGE.split("## Who is right")[0].replace("| --- | --- |\n", "")
    rows = re.findall(r"^\| (.+?) \| (?:`(.+)` )?(.+?) \|$", tables, re.M)
    for left, own, value in rows:
        if header := re.fullmatch(r"`(\w+)`: `(.+)`", left):
            entry, path = ANSWERS[header[1]], header[2]
        changed = {} if header else (entry["choices"] | entry["wrong"])[left]
        expected = at(entry["answers"] | changed, own or path)
        assert np.allclose([*map(float, value.split())], expected, atol=6e-5, equal_nan=True), left
    by_hand = re.findall(r"  # `(\w+)`: (.+)\n(.+)\n", PAGE)
    for name, path, value in by_hand:
        expected = at(ANSWERS[name]["steps"] | ANSWERS[name]["answers"], path)
        assert np.allclose(ast.literal_eval(value), expected, atol=6e-5), path
    assert len(rows) > 40 and len(by_hand) == 6


def test_the_function_around_a_server_on_the_page(monkeypatch):
    class Server:
        def __init__(self, ema):
            self.ema, self.old = ema, 0

        def average(self, gradients):
            self.old = self.ema * self.old + (1 - self.ema) * gradients.mean(0)
            return self.old

    for name in ("my_project", "mine"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(Server=Server))
    [block] = re.findall(r"```python\n(from my_project .*?)```", PAGE, re.S)
    exec(block, vars(sys.modules["mine"]))
    assert known_answers.check("fediir_average", "mine:averages") == ["g~: right"]


def in_bits(p):
    return scipy.stats.entropy(p.mean(0), axis=1, base=2)


def moved_to(p):
    return in_bits(p) + 9


COMMANDS = [
    ("uefl_entropy uefl:predictive_entropy", 0, "entropies: right"),
    ("uefl_entropy test_known_answers:in_bits", 1, "entropies: wrong: this is the number in bits"),
    ("uefl_entropy test_known_answers:moved_to", 1, "instead of 1.05762 1.03133"),
    ("fedprox uefl:average", 2, "give one of fedavg, "),
    ("uefl_entropy uefl.average", 2, "give one of fedavg, "),
    ("uefl_average uefl:averages", 2, "has no attribute 'averages'"),
    ("uefl_average math:sqrt", 2, "it is called as f(theta [P], "),
]


@pytest.mark.parametrize(("words", "code", "says"), COMMANDS)
def test_the_command(words, code, says, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["known_answers.py", *words.split()])
    with pytest.raises(SystemExit) as end:
        known_answers.main()
    out, err = capsys.readouterr()
    assert end.value.code == code and says in (err if code == 2 else out)
    assert err.count("\n") == (code == 2) and bool(out) == (code != 2)
