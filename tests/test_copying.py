"""What docs/copying.md and docs/examples/ promise: the pieces run elsewhere, the loops are right.

This copies the pieces into the examples again, after they have changed:

    PYTHONPATH=. python tests/test_copying.py --write
"""

import ast
import copy
import re
import runpy
import sys
from types import SimpleNamespace

import pytest
import scipy.stats
import torch
from helpers import ROOT
from torch.nn.utils import parameters_to_vector, vector_to_parameters

PAGE = (ROOT / "docs/copying.md").read_text()
EXAMPLES = sorted((ROOT / "docs/examples").glob("*.py"))


def definitions(text):
    """The functions and classes of a program: name -> their lines, as a slice."""
    nodes = [node for node in ast.parse(text).body if hasattr(node, "name")]
    first = [min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1 for node in nodes]
    return {n.name: slice(i, n.end_lineno) for n, i in zip(nodes, first, strict=True)}


def piece(file, name):
    """The lines of one function or class in a method's file."""
    text = (ROOT / file).read_text()
    return text.splitlines()[definitions(text)[name]]


def with_todays_pieces(text):
    """The text of an example, with each piece in it as the method's file has it now."""
    lines, names = text.splitlines(), definitions(text)
    for name, at in reversed(names.items()):
        above = re.findall(r"^# -+ (?:copied from )?(\S+)", "\n".join(lines[: at.start]), re.M)
        if above and above[-1].endswith(".py"):
            lines[at] = piece(above[-1], name)
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_holds_the_pieces_of_today_and_imports_nothing_of_this_project(path):
    text = path.read_text()
    assert text == with_todays_pieces(text), "run the command at the top of this file"
    modules = re.findall(r"^(?:import|from) (\w+)", text, re.M)
    assert {*modules} - sys.stdlib_module_names <= {"torch", "numpy", "scipy", "flwr"}


IMPORTS, *SNIPPETS = re.findall(r"\n\n((?:.+\n)+)\n```python\n((?s:.*?))```", PAGE)


@pytest.mark.parametrize(("text", "snippet"), SNIPPETS, ids=[text[:12] for text, _ in SNIPPETS])
def test_a_snippet_runs_with_its_pieces_alone_and_has_these_shapes(text, snippet):
    torch.manual_seed(0)
    (file,) = re.findall(r"\(\.\./(\S+\.py)\)", text)
    names = {*re.findall(r"`(\w+)`", text)} & {*definitions((ROOT / file).read_text())}
    space = {"__name__": "elsewhere"}
    exec(IMPORTS[1], space)
    for name in names:
        exec("\n".join(piece(file, name)), space)
    stated = 0
    for line in snippet.splitlines():
        exec(line, space)
        code, _, comment = line.partition("  # ")
        left = code.split(" = ")[0].replace("_, ", "").split(", ") if " = " in code else []
        for name, shape in zip(left, re.findall(r"\[(.*?)\]", comment), strict=False):
            sizes = tuple(int(part.split()[0]) for part in shape.split(",") if part)
            assert space[name].shape == sizes, line
            stated += 1
    assert stated
    if "codebook" in space:  # it learns on after new codewords have come
        space["loss"].backward()
        space["optimizer"].step()


# ---------------------------------------------------------------- without any framework


def test_the_plain_examples_learn(capsys):
    for name in ("without_a_framework", "uefl_codebook"):
        runpy.run_path(f"{ROOT}/docs/examples/{name}.py", run_name="__main__")
    printed = capsys.readouterr().out
    accuracies = [int(number) for number in re.findall(r"knows (\d+) %", printed)]
    assert len(accuracies) == 2 and min(accuracies) > 60
    first = ast.literal_eval(re.search(r"uncertainties (.*)", printed)[1])
    assert first[2] > 1.3 * min(first)  # the client with other inputs is the uncertain one
    assert "codewords of each client: [4, 4, 12]" in printed


def test_the_plain_loop_by_hand():
    """Around the piece that selects. With this seed not all rounds have the same clients."""
    torch.manual_seed(1)
    loop = SimpleNamespace(**runpy.run_path(f"{ROOT}/docs/examples/without_a_framework.py"))
    clients = [(torch.randn(20, 8), torch.randint(3, (20,))) for _ in range(8)]
    weights = torch.tensor([scipy.stats.entropy(y.bincount()) for _, y in clients]).exp().float()
    model = loop.new_model()
    by_hand, expected = copy.deepcopy(model), []
    table = torch.stack([loop.local_update(model, *client)[0] for client in clients])
    for _ in range(8):
        selected = loop.minimax_clients(table, 2).tolist()
        found = [loop.local_update(by_hand, *clients[i]) for i in selected]
        table[selected] = torch.stack([update for update, _ in found])
        alpha = weights[selected] / weights[selected].sum()
        w = parameters_to_vector(by_hand.parameters()).detach() - alpha @ table[selected]
        vector_to_parameters(w, by_hand.parameters())
        by_hand[1].running_mean.copy_(sum(a * own[0] for a, (_, own) in zip(alpha, found)))
        expected.append(selected)
    assert expected[0] != expected[-1]
    assert loop.federate(model, clients, lambda g: loop.minimax_clients(g, 2), 8) == expected
    assert torch.allclose(parameters_to_vector(model.parameters()), w, atol=1e-5)
    assert torch.allclose(model[1].running_mean, by_hand[1].running_mean, atol=1e-5)


if __name__ == "__main__" and sys.argv[1:] == ["--write"]:
    for path in EXAMPLES:
        path.write_text(with_todays_pieces(path.read_text()))
