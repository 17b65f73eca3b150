"""What a reader relies on: the lines of the papers stand in the code, and docs/reading.md shows code that works."""

import ast
import re
import sys
import types
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import make_tiny

import common.data
from common import random_at
from common.splits import deal
from common.train import get_weights, set_weights

ROOT = Path(__file__).parent.parent
METHODS = ["fedavg", "entropy_weighting", "minimax_select", "convex_hull_select", "fediir", "uefl"]
READING = (ROOT / "docs/reading.md").read_text()


def numbers(text):
    """The numbers in "4", "5, 13" or "8-10"."""
    spans = (part.split("-") for part in re.findall(r"\d+(?:-\d+)?", text))
    return {n for first, *last in spans for n in range(int(first), int((last or [first])[0]) + 1)}


def lines_of_the_listing(source):
    """The line numbers in the table of the docstring, and those in the comments of the code behind it."""
    table = {int(n) for n in re.findall(r"^ {4} ?(\d+) {2,}\S", ast.get_docstring(ast.parse(source)), re.M)}
    code = source.split('"""', 2)[2]
    return table, set().union(*(numbers(found) for found in re.findall(r"# lines? (\d[\d, -]*)", code)))


@pytest.mark.parametrize("method", METHODS)
def test_every_line_of_the_papers_listing_has_its_place_in_the_code(method):
    table, marked = lines_of_the_listing((ROOT / f"{method}.py").read_text())
    assert len(table) >= 6 and table <= marked, f"no comment for line {sorted(table - marked)}"


def test_a_missing_line_is_found():
    source = (ROOT / "fedavg.py").read_text().replace("  # line 11", "")
    table, marked = lines_of_the_listing(source)
    assert table - marked == {11}


def test_the_code_in_the_guide_stands_in_the_files():
    blocks = re.findall(r"```python\n# (\S+)\n(.*?)```", READING, re.S)
    assert {file for file, _ in blocks} == {f"{method}.py" for method in METHODS}
    for file, block in blocks:
        code = (ROOT / file).read_text().splitlines()
        for line in block.splitlines():
            assert line in code, f"{file} has no line {line!r}"


def apply(diff, source):
    """A diff without line numbers, applied to a source: each part must fit in one place."""
    for part in diff.split("@@\n"):
        lines = part.splitlines()
        old = "".join(f"{line[1:]}\n" for line in lines if line[0] in " -")
        assert source.count(old) == 1, f"the diff does not fit:\n{old}"
        source = source.replace(old, "".join(f"{line[1:]}\n" for line in lines if line[0] in " +"))
    return source


def changed_fedavg(number):
    """fedavg.py as a module, after the guide's diff of this number."""
    module = types.ModuleType("changed")
    exec(
        compile(apply(re.findall(r"```diff\n(.*?)```", READING, re.S)[number], SOURCE), "changed", "exec"), vars(module)
    )
    return module


SOURCE = (ROOT / "fedavg.py").read_text()
CUT = (
    "--model cnn --width 0.125 --partition iid --clients 3 --participating 3 --selection full --weighting equal "
    "--rounds 2 --local-epochs 2 --batch-size 16 --lr 0.1 --device cpu --precision float32 --out run"
)


@pytest.fixture
def run(monkeypatch, tmp_path):
    """run(module) trains on the tiny data set. Returns the checkpoint's state, the model before training, and batches:
    batches(round, client) gives the client's batches in the order of training."""

    def run_module(module):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(common.data, "load", lambda name, *args: make_tiny())
        monkeypatch.setattr(sys, "argv", ["changed.py"])
        data = make_tiny()
        samples = deal(data, 0, "iid", clients=3, participating=3).train

        def batches(t, k):
            rng = random_at(0, "batches", t, k)
            for _ in range(2):
                order = samples[k][torch.from_numpy(rng.permutation(len(samples[k])))]
                yield from ((data.x[b].float() / 127.5 - 1, data.y[b]) for b in order.split(16))

        args = module.flags.parse(module.__doc__, module.SETTINGS, module.own_flags, CUT.split())
        model = module.flags.prepare(args)[2]
        module.main(CUT.split())
        return torch.load(tmp_path / "run/checkpoint.pt")["state"], model, batches

    return run_module


def by_hand(model, w, batches, correction, mu):
    """SGD from w on cross-entropy + mu/2 ||theta - w||^2, with `correction` added to the gradient: w_k, steps."""
    set_weights(model, w)
    steps = 0
    for x, y in batches:
        gradients = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
        theta = get_weights(model)
        gradient = torch.cat([g.flatten() for g in gradients]) + mu * (theta - w) + correction
        set_weights(model, theta - 0.1 * gradient)
        steps += 1
    return get_weights(model), steps


def test_fedprox_in_the_guide_is_fedprox(run):
    state, model, batches = run(changed_fedavg(1))
    w = start = get_weights(model)
    for t in (1, 2):
        w = sum(by_hand(model, w, batches(t, k), 0, mu=0.1)[0] for k in range(3)) / 3
    assert torch.allclose(state["w"], w, atol=1e-5)
    plain = start
    for t in (1, 2):
        plain = sum(by_hand(model, plain, batches(t, k), 0, mu=0.0)[0] for k in range(3)) / 3
    assert (state["w"] - plain).abs().max() > 1e-4, "the penalty does something"


def test_scaffold_in_the_guide_is_scaffold(run):
    """Karimireddy et al., Algorithm 1 with option II, all clients selected, server step size 1."""
    state, model, batches = run(changed_fedavg(2))
    w = get_weights(model)
    c, c_k = 0 * w, [0 * w] * 3
    for t in (1, 2):
        ends = [by_hand(model, w, batches(t, k), c - c_k[k], mu=0) for k in range(3)]
        new = [c_k[k] - c + (w - end) / (steps * 0.1) for k, (end, steps) in enumerate(ends)]
        c = c + sum(new[k] - c_k[k] for k in range(3)) / 3
        w, c_k = sum(end for end, _ in ends) / 3, new
    assert torch.allclose(state["w"], w, atol=1e-5) and torch.allclose(state["c"], c, atol=1e-4)
    assert torch.allclose(state["c_k"], torch.stack(c_k), atol=1e-4) and c.abs().max() > 1e-2


def test_the_new_selection_in_the_guide_takes_the_largest_clients(run):
    module = changed_fedavg(0)
    assert "topk" in Path(ROOT / "docs/reading.md").read_text()
    sizes, sample = torch.tensor([5.0, 9, 1, 7]), 2
    clients = types.SimpleNamespace(sizes=sizes, ids=torch.arange(3))
    line = next(line for line in READING.splitlines() if "topk" in line).split("=", 1)[1].strip()
    assert eval(line, {"clients": clients, "args": types.SimpleNamespace(sample=sample)}).tolist() == [0, 1]
    assert module.main
