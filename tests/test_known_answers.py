"""The known answers, against tests/known.py and the six files; their mistakes, page and command."""

import ast
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import known
import numpy as np
import pytest
import torch
from helpers import ROOT

import fedavg
from common.train import averaging_weights
from docs import known_answers
from docs.known_answers import ANSWERS, array

PAGE = (ROOT / "docs/known_answers.md").read_text()
LINES = Path(known.__file__).read_text().splitlines()


def mistakes():
    """What the comments in tests/known.py say, each with the lines that it replaces, by number."""
    found, what, right = {}, None, None
    for i, line in enumerate(LINES):
        if "#     " in line:
            found.setdefault(what, {})[right] = line.replace("#     ", "")
        elif line.lstrip().startswith("# "):
            what = line.strip("# :")
        else:
            right = i
    return found


def recomputed(name, what=None):
    """What tests/known.py says of this entry, as it is or with one of its mistakes."""
    lines = dict(enumerate(LINES)) | mistakes().get(what, {})
    names, given = {}, {}
    exec("\n".join(lines.values()), names)
    for key, value in ANSWERS[name]["given"].items():
        as_array = isinstance(value, list) and key not in ("clients", "selected", "y")
        given[key] = np.array(value) if as_array else value
    with np.errstate(all="ignore"):
        return names[name](**given)


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


PIECES = {
    "fedavg": "test_known_answers:averages",
    "entropy": "entropy_weighting:entropy_weights",
    "minimax": "minimax_select:minimax_clients",
    "hull": "convex_hull_select:hull_vertices",
    "fediir": "fediir:fediir_loss",
    "fediir_gradient": "fediir:risk_and_gradient",
    "uefl": "uefl:ExtensibleCodebook",
    "uefl_entropy": "uefl:predictive_entropy",
    "uefl_extended": "uefl:uncertain",
    "uefl_average": "uefl:average",
}  # g~ of fediir.py is no function: test_fediir.py has it by hand


@pytest.mark.parametrize("name", PIECES)
def test_the_six_files_are_right(name):
    lines = known_answers.check(name, PIECES[name])
    assert lines == [f"{asked}: right" for asked in ANSWERS[name]["answers"]]


# ---------------------------------------------------------------- the mistakes


def known_ones(name):
    return ANSWERS[name]["choices"] | ANSWERS[name]["wrong"]


@pytest.mark.parametrize(("name", "what"), [(n, w) for n in ANSWERS for w in known_ones(n)])
def test_a_changed_line_gives_what_the_mistake_is_said_to_give(name, what):
    found, entry = recomputed(name, what), ANSWERS[name]
    changed = known_ones(name)[what]
    for asked, number in (entry["answers"] | changed).items():
        assert known_answers.equal(found[asked], number, 1e-7)
    for asked in changed:
        right = entry["answers"][asked]
        assert not known_answers.equal(found[asked], right, 10 * entry["tolerance"])
    said = [line for line in known_answers.verdict(entry, found) if not line.endswith(": right")]
    assert said
    for line in said:
        assert line.endswith((f"choice: {what}", f"number {what}"))


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
            name, path = header.groups()
        changed = {} if header else known_ones(name)[left]
        expected = at(ANSWERS[name]["answers"] | changed, own or path)
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
    mean = p.mean(0)
    return -(mean * mean.log2()).sum(1)


def moved(p):
    return in_bits(p) + 9


COMMANDS = [
    ("uefl_entropy uefl:predictive_entropy", 0, "entropies: right\nWhat this assumes: p is the "),
    ("uefl_entropy test_known_answers:in_bits", 1, "entropies: wrong: this is the number in bits"),
    ("uefl_entropy test_known_answers:moved", 1, "instead of 1.05762 1.03133"),
    ("uefl_entropy test_known_answers:moved", 1, "order:\n  mean of the passes: [[0.4386"),
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
