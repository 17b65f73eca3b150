"""What docs/copying.md and docs/examples/ promise: pieces run elsewhere, and mistakes are real.

    PYTHONPATH=. python tests/test_copying.py --write    copies the pieces into the examples again

The Flower examples need `pip install "flwr[simulation]"`. Without it, their tests are skipped.
"""

import ast
import copy
import importlib.util
import itertools
import logging
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.stats
import torch
import torch.nn.functional as F
from helpers import ROOT
from scipy.spatial import ConvexHull
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from convex_hull_select import hull_vertices
from fediir import fediir_loss
from minimax_select import minimax_clients

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


def example(name):
    """One of the examples as a new module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"docs/examples/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_holds_the_pieces_of_today_and_imports_nothing_of_this_project(path):
    text = path.read_text()
    assert text == with_todays_pieces(text), "run the command at the top of this file"
    modules = {
        line.split()[1].split(".")[0] for line in re.findall(r"^(?:import|from) .*", text, re.M)
    }
    assert modules - sys.stdlib_module_names <= {"torch", "numpy", "scipy", "flwr"}


IMPORTS, *SNIPPETS = re.findall(r"\n\n((?:.+\n)+)\n```python\n((?s:.*?))```", PAGE)
WRONG = {  # with the names of the snippet
    "entropy_weights": "entropy_weights(0 * counts)",
    "minimax_clients": "minimax_clients(g, k=21)",
    "hull_vertices": "hull_vertices(0 * g, dim=2)",
    "fediir_loss": "fediir_loss(features, classifier, x, y, g[1:], gamma=0.01)",
    "ExtensibleCodebook": "codebook(tokens, allowed=torch.arange(4) < 4)",
    "predictive_entropy": "predictive_entropy(probabilities[0])",
}


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
        for kind in re.findall(r"\b(int64|bool)\b", comment):
            assert space[left[0]].dtype == getattr(torch, kind), line
    assert stated
    for name in names & WRONG.keys():
        with pytest.raises(ValueError, match=r".{20}"):
            eval(WRONG[name], space)
    if "codebook" in space:
        space["loss"].backward()
        space["optimizer"].step()
        assert len(space["codebook"].codewords) == 8


# ---------------------------------------------------------------- without any framework


def test_the_examples_run_where_the_project_is_not(tmp_path):
    names = ["without_a_framework.py", "uefl_codebook.py"]
    for name in names:
        (tmp_path / name).write_text((ROOT / "docs/examples" / name).read_text())
    program = "import runpy, sys; [runpy.run_path(name, {}, '__main__') for name in sys.argv[1:]]"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    command = [sys.executable, "-c", program, *names]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    accuracies = [int(number) for number in re.findall(r"knows (\d+) %", done.stdout)]
    assert len(accuracies) == 2 and min(accuracies) > 60
    first = ast.literal_eval(re.search(r"uncertainties (.*)", done.stdout)[1])
    assert first[2] > 1.3 * min(first), "the client with other inputs is the uncertain one"
    assert "codewords of each client: [4, 4, 12]" in done.stdout


def smallest_sum_of_largest_cosines(updates, k):
    """Equation 16 of Wu et al. by trying all subsets: the k rows with the smallest sum of S*_i."""
    unit = updates / np.linalg.norm(updates, axis=1, keepdims=True)
    similarity = unit @ unit.T - 9 * np.eye(len(unit))
    largest = similarity.max(1).round(6)  # of two that are each other's nearest, the first wins
    subsets = itertools.combinations(range(len(unit)), k)
    return list(min(subsets, key=lambda i: largest[list(i)].sum().round(5)))


def some_clients():
    torch.manual_seed(0)
    labels = [torch.randint(1 + i % 3, (20 + 5 * i,)) for i in range(6)]
    return [(torch.randn(len(y), 8) + 2 * F.one_hot(y, 8), y) for y in labels]


def test_the_plain_loop_selects_as_equation_16_and_weights_as_equation_14():
    torch.manual_seed(0)
    loop = example("without_a_framework")
    clients = [(torch.randn(20, 8), torch.randint(2 + i % 2, (20,))) for i in range(8)]
    weights = np.exp([scipy.stats.entropy(np.bincount(y)) for _, y in clients])
    model = loop.new_model()
    by_hand, expected, tables = copy.deepcopy(model), [], []
    table = np.stack([loop.local_update(model, *client)[0].numpy() for client in clients])
    for _ in range(8):
        tables.append(table.copy())
        selected = smallest_sum_of_largest_cosines(table, 3)
        found = [loop.local_update(by_hand, *clients[i]) for i in selected]
        table[selected] = [update for update, _ in found]
        alpha = weights[selected] / weights[selected].sum()
        w = parameters_to_vector(by_hand.parameters()).detach()
        step = torch.from_numpy(alpha @ table[selected])
        mean = sum(a * buffers[0] for a, (_, buffers) in zip(alpha, found, strict=True))
        vector_to_parameters((w - step).float(), by_hand.parameters())
        by_hand[1].running_mean.copy_(mean)
        expected.append(selected)
    seen = []

    def select(rows):
        seen.append(rows.clone())
        return loop.minimax_clients(rows, 3)

    assert loop.federate(model, clients, select, 8) == expected
    assert np.allclose(torch.stack(seen), tables, atol=1e-5)
    for found, right in zip(model.parameters(), by_hand.parameters(), strict=True):
        assert torch.allclose(found, right, atol=1e-5)
    assert torch.allclose(model[1].running_mean, by_hand[1].running_mean, atol=1e-5)


def test_the_codebook_example_averages_as_by_hand():
    uefl, clients = example("uefl_codebook"), some_clients()[:3]
    model, first = uefl.Model(), torch.arange(6) < 4
    allowed = uefl.give_codewords(model, clients, torch.ones(3, 4, dtype=torch.bool), k=1, v=2)
    assert torch.equal(allowed, torch.stack([first, first | True, first]))
    weights = [uefl.local_training(model, x, y, allowed[k]) for k, (x, y) in enumerate(clients)]
    uefl.average(model, weights, torch.tensor([20.0, 25.0, 30.0]), allowed)
    for name, value in model.state_dict().items():
        stacked = np.stack([w[name].numpy() for w in weights])
        by_hand = np.average(stacked, axis=0, weights=[20, 25, 30])
        if name == "codebook.codewords":
            by_hand[4:] = stacked[1, 4:]  # those of client 1 alone
        assert np.allclose(value.numpy(), by_hand, atol=1e-6), name


def test_the_plain_loop_and_the_codebook_example_leave_out_a_client_that_returns_nan():
    loop, uefl, clients = example("without_a_framework"), example("uefl_codebook"), some_clients()
    clients[1][0].fill_(torch.nan)
    plain, book = loop.new_model(), uefl.Model()
    loop.federate(plain, clients, lambda table: torch.tensor([1, 4]), rounds=2)
    uefl.federate(book, clients[:3], iterations=2, rounds=1, gamma=0, v=2)
    for model in (plain, book):
        assert all(value.isfinite().all() for value in model.state_dict().values())


# ---------------------------------------------------------------- a common mistake


def test_weights_instead_of_updates_mislead_minimax_but_not_the_hull():
    torch.manual_seed(0)
    updates, w = torch.randn(12, 200) * torch.rand(12, 1), 3 * torch.randn(200)
    weights = w - updates
    assert minimax_clients(weights, 4).tolist() != minimax_clients(updates, 4).tolist()
    unit = F.normalize(weights)
    assert (unit @ unit.T).min() > 0.8, "all weights point in a similar direction"
    for dim in (1, 2, 3):
        assert hull_vertices(weights, dim).tolist() == hull_vertices(updates, dim).tolist()


# ---------------------------------------------------------------- with Flower

STRATEGIES = {
    "entropy": ("flower_entropy", lambda module: module.EntropyWeighting()),
    "minimax": ("flower_selection", lambda module: selection(module, k=2)),
    "hull": ("flower_selection", lambda module: selection(module, hull_dim=2)),
    "fediir": ("flower_fediir", lambda module: module.FedIIR(gamma=0.5, ema=0.9)),
}
NODES = [10, 11, 12, 13, 14]


def selection(module, **settings):
    names = [name for name, _ in module.new_model().named_parameters()]
    return module.UpdateSelection(names, **settings)


class LocalGrid:
    """Stands in for Flower's Grid, without processes: node 10 + i is partition i.

    fault      (node, message type, exchanges before) -> "error", "nan", or false if the node works
    exchanges  what was sent, and the answers that were neither errors nor NaN
    """

    def __init__(self, client_app, fault, nodes=lambda before: NODES):
        self.client_app, self.fault, self.nodes, self.exchanges = client_app, fault, nodes, []

    def get_node_ids(self):
        return self.nodes(len(self.exchanges))

    def send_and_receive(self, messages, timeout=None):
        messages, replies, answers = list(messages), [], {}
        for message in messages:
            node = message.metadata.dst_node_id
            fault = self.fault(node, message.metadata.message_type, len(self.exchanges))
            if fault == "error":
                replies.append(app.Message(app.Error(0, "this client is broken"), reply_to=message))
                continue
            torch.manual_seed(node)
            config = app.UserConfig({"partition-id": node - 10})
            context = app.Context(1, node, config, app.RecordDict(), app.UserConfig())
            replies.append(self.client_app(message, context))
            if fault == "nan":
                for record in replies[-1].content.array_records.values():
                    for name, array in record.items():
                        record[name] = app.Array(np.full_like(array.numpy(), np.nan, float))
            else:
                answers[node] = replies[-1].content
        exchange = SimpleNamespace(sent=[], kind="nothing", content=None, answers=answers)
        if messages:
            exchange.kind, exchange.content = messages[0].metadata.message_type, messages[0].content
            exchange.sent = [message.metadata.dst_node_id for message in messages]
        self.exchanges.append(exchange)
        return replies


def uneven_samples(client):
    """The data of the tests: the clients differ in their number of samples and in their classes."""
    rng = np.random.default_rng(client)
    y = rng.integers(1 + client % 3, size=20 + 10 * client)
    x = rng.normal(size=(len(y), 8)) + 2 * np.eye(8)[y]
    return torch.tensor(x, dtype=torch.float32), torch.tensor(y)


def vector(record, names=None):
    arrays = [record[name].numpy().ravel() for name in names or record]
    return np.concatenate(arrays).astype(np.float64)


@pytest.fixture
def simulate(caplog):
    """simulate(strategy, rounds, fault, nodes) -> the example, the grid, the result, the weights.

    Runs a strategy in this process, on the data above; the weights are those of the start.
    """
    global app
    app = pytest.importorskip("flwr.app", exc_type=ImportError)
    identity = pytest.importorskip("flwr.supercore.task_identity").TaskIdentity
    identity.task_id, identity.run_id, identity.node_id = 1, 1, 1
    caplog.set_level(logging.INFO, "flwr")

    def run(name, rounds, fault, **options):
        file, make = STRATEGIES[name]
        module = example(file)
        module.samples_of = uneven_samples
        torch.manual_seed(0)
        initial = app.ArrayRecord(module.new_model().state_dict())
        grid = LocalGrid(module.client_app, fault, **options)
        result = make(module).start(grid, initial, num_rounds=rounds)
        return module, grid.exchanges, result, initial

    return run


def test_entropy_weighting_in_flower_is_the_weighted_mean_by_hand(simulate, caplog):
    def fault(node, kind, before):
        return (node, kind) == (13, "train") and "error"

    _, exchanges, result, _ = simulate("entropy", 3, fault)
    labels = [uneven_samples(i)[1].numpy() for i in range(5)]
    entropies = np.array([scipy.stats.entropy(np.bincount(y)) for y in labels])
    answers = [exchange.answers for exchange in exchanges if exchange.kind == "train"][-1]
    assert sorted(answers) == [10, 11, 12, 14]
    for node, content in answers.items():
        assert content["metrics"]["entropy"] == pytest.approx(entropies[node - 10])
        assert {*content["metrics"]} == {"train_loss", "entropy", "num-examples"}, "no labels"
    ends = [vector(answers[node]["arrays"]) for node in (10, 11, 12, 14)]
    by_hand = np.average(ends, axis=0, weights=np.exp(entropies[[0, 1, 2, 4]]))
    assert np.allclose(vector(result.arrays), by_hand, atol=1e-6)
    losses = [exchanges[-1].answers[node]["metrics"]["loss"] for node in NODES]
    by_hand = np.average(losses, weights=[20, 30, 40, 50, 60])
    assert result.evaluate_metrics_clientapp[3]["loss"] == pytest.approx(by_hand)
    assert caplog.text.count("aggregate_train: Received 4 results and 1 failures") == 3


def hull_by_hand(updates, dim):
    """The rows of [M, P] on the hull in their first principal components."""
    centred = updates - updates.mean(0)
    return sorted(ConvexHull(centred @ np.linalg.svd(centred)[2][:dim].T).vertices)


@pytest.mark.parametrize("kind", ["error", "nan"])
@pytest.mark.parametrize("name", ["minimax", "hull"])
def test_the_selection_in_flower_selects_and_averages_as_by_hand(simulate, name, kind):
    """Node 15 joins in round 3. Node 13 fails in round 1, the first selected one in round 4."""
    failing = []

    def fault(node, what, before):
        if what == "train" and before == 6 and not failing:
            failing.append(node)
        return what == "train" and (before, node) in [(0, 13), *((6, n) for n in failing)] and kind

    nodes = lambda before: NODES if before < 4 else [*NODES, 15]  # noqa: E731
    module, exchanges, result, initial = simulate(name, 6, fault, nodes=nodes)
    trained = [exchange for exchange in exchanges if exchange.kind == "train"]
    names = [parameter for parameter, _ in module.new_model().named_parameters()]
    select = smallest_sum_of_largest_cosines if name == "minimax" else hull_by_hand
    model, table = vector(initial), {}
    for t, exchange in enumerate(trained, 1):
        arrays = exchange.content["arrays"]
        assert np.allclose(vector(arrays), model, atol=1e-6), f"the model of round {t}"
        known = sorted(table)
        updates = [table[node] for node in known]
        selected = [known[i] for i in select(np.stack(updates), 2)] if known else []
        newcomers = {1: NODES, 2: [13], 3: [15]}.get(t, [])  # they train, but do not move the model
        assert exchange.sent == sorted([*selected, *newcomers]), f"the nodes of round {t}"
        w = vector(arrays, names)
        table |= {n: w - vector(answer["arrays"], names) for n, answer in exchange.answers.items()}
        moving = [vector(exchange.answers[n]["arrays"]) for n in selected if n in exchange.answers]
        model = np.mean(moving, axis=0) if moving else model  # with the running statistics
        assert t != 4 or failing == selected[:1]
    assert t == 6 and np.allclose(vector(result.arrays), model, atol=1e-6)


def test_fediir_in_flower_is_algorithm_1_by_hand(simulate):
    """Node 12 fails in the query of round 2, and node 14 in the training of round 1."""
    faults = [(14, "train", 1), (12, "query", 3)]
    found = simulate("fediir", 2, lambda *which: which in faults and "error")
    module, exchanges, result, initial = found
    assert [exchange.kind for exchange in exchanges] == ["query", "train", "evaluate"] * 2

    w, g = {name: torch.tensor(array.numpy()) for name, array in initial.items()}, 0
    for t in range(2):
        train, answered = exchanges[3 * t + 1], [n for n in NODES if (t, n) != (1, 12)]
        gradients, ends = [], []
        for node in answered:
            torch.manual_seed(node)  # draws the same random numbers as the client
            model, (x, y) = module.new_model(), uneven_samples(node - 10)
            model.load_state_dict(w)
            z = model.features(x)
            error = (model.classifier(z).softmax(1) - F.one_hot(y, 3)) / len(y)
            gradients.append(torch.cat([(error.T @ z).flatten(), error.sum(0)]).detach())
            if (t, node) != (0, 14):
                ends.append((model, x, y, torch.randperm(len(y)).split(10)))
        g = 0.9 * g + 0.1 * torch.stack(gradients).mean(0)
        assert sorted(train.sent) == answered
        assert np.allclose(train.content["gradient"]["g"].numpy(), g, atol=1e-6)
        for model, x, y, batches in ends:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for batch in batches:
                optimizer.zero_grad()
                loss = fediir_loss(model.features, model.classifier, x[batch], y[batch], g, 0.5)
                loss.backward()
                optimizer.step()
        states = [model.state_dict() for model, *_ in ends]
        w = {name: torch.stack([state[name] for state in states]).mean(0) for name in w}
    for name, value in w.items():
        assert np.allclose(result.arrays[name].numpy(), value, atol=1e-5), name


if __name__ == "__main__" and sys.argv[1:] == ["--write"]:
    for path in EXAMPLES:
        path.write_text(with_todays_pieces(path.read_text()))
