"""What docs/copying.md promises: the import lines are right, and the four examples run in another project.

The Flower examples need `pip install "flwr[simulation]"`. Without it, their tests are skipped.
"""

import ast
import dis
import itertools
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from types import CodeType, SimpleNamespace

import numpy as np
import pytest
import scipy.stats
import torch
import torch.nn.functional as F
from scipy.spatial import ConvexHull

ROOT = Path(__file__).parent.parent
DOC = (ROOT / "docs/copying.md").read_text()
README = (ROOT / "README.md").read_text().split("## Copy")[1].split("\n## ")[0]
PLAIN, ENTROPY, SELECTION, FEDIIR = re.findall(r"```python\n(.*?)```", DOC, re.S)
FILES = [*(f"{m}.py" for m in ("entropy_weighting", "minimax_select", "convex_hull_select", "fediir", "uefl"))]
FILES += ["common/server.py"]


def piece(file, name):
    """The source of one function or class, with its decorators."""
    source = (ROOT / file).read_text()
    node = next(n for n in ast.parse(source).body if getattr(n, "name", None) == name)
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    return "\n".join(source.splitlines()[first - 1 : node.end_lineno]) + "\n\n\n"


def rows(text):
    """Piece -> (names to copy, import lines) from each row of a table with these columns."""
    header, *lines = [re.split(r" *\| *", line)[1:-1] for line in text.splitlines() if line.startswith("|")]
    copy_with, imports = header.index("copy with it"), header.index("import lines")
    found = {}
    for cells in lines[1:]:
        names, needs = (re.findall(r"`(\w+)`", cells[i].split(" in ")[0]) for i in (0, copy_with))
        found[names[0]] = [*names, *needs], re.findall(r"`([^`]+)`", cells[imports])
    return found


PIECES = rows(DOC)
FILE_OF = {
    name: file for file in FILES for name in re.findall(r"^(?:def|class) (\w+)", (ROOT / file).read_text(), re.M)
}


def imports_of(name):
    """The import lines in the row of this piece, or in the row of the piece that needs it."""
    return PIECES.get(name, next(row for row in PIECES.values() if name in row[0]))[1]


def with_pieces(block):
    """The block as a whole file: the import lines of the table, the pieces that its first lines name, the block."""
    needed = re.findall(r"^# copy from (\S+): (.+)$", block, re.M)
    assert block.startswith("# copy from")
    names = [(file, name) for file, names in needed for name in names.split(", ")]
    imports = set().union(*(imports_of(name) for _, name in names))
    return "\n".join(sorted(imports)) + "\n\n\n" + "".join(piece(*name) for name in names) + block


def executed(block):
    space = {"__name__": "elsewhere"}
    exec(compile(with_pieces(block), "example.py", "exec"), space)
    return SimpleNamespace(**space), space


def defined_in(file):
    """The names that a file imports or defines."""
    nodes = ast.parse((ROOT / file).read_text()).body
    aliases = [a for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) for a in node.names]
    return {a.asname or a.name.split(".")[0] for a in aliases} | {getattr(node, "name", None) for node in nodes}


def globals_of(code):
    """The global names that a code object and those inside of it look up."""
    names = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return names.union(*(globals_of(inner) for inner in code.co_consts if isinstance(inner, CodeType)))


def test_the_readme_names_pieces_of_the_page():
    names = {name for cell in re.findall(r"^\| (`.+?) \|", README, re.M) for name in re.findall(r"`(\w+)`", cell)}
    assert len(names) >= 9
    assert names <= PIECES.keys()


def test_the_import_lines_are_what_the_pieces_need():
    for names, imports in PIECES.values():
        sources = [piece(FILE_OF[name], name) for name in names]
        space = {"__name__": "elsewhere"}
        exec("\n".join(imports) + "\n\n\n" + "".join(sources), space)  # looks up annotations and decorators
        used = set().union(*(globals_of(compile(source, "piece", "exec")) for source in sources))
        missing = {name for name in used if name in defined_in(FILE_OF[names[0]]) and name not in space}
        assert not missing, f"{names}: {missing} must be copied or imported"
        for line in imports:
            bound = line.split()[-1]
            assert re.search(rf"\b{bound}\b", "".join(sources)), f"{names} do not need {line!r}"


# ---------------------------------------------------------------------------------------------- without any framework


def smallest_sum_of_largest_cosines(updates, k):
    """Equation 16 of Wu et al. by trying all subsets: the k rows of [M, P] with the smallest sum of S*_i."""
    unit = updates / np.linalg.norm(updates, axis=1, keepdims=True)
    similarity = unit @ unit.T - 9 * np.eye(len(unit))
    return list(min(itertools.combinations(range(len(unit)), k), key=lambda i: similarity[list(i)].max(1).sum()))


def softmax_regression(w, x, y, steps, lr):
    """w [C, d + 1] after gradient descent on the mean cross-entropy, with the gradient written out."""
    x = np.hstack([x, np.ones((len(x), 1))])
    for _ in range(steps):
        p = np.exp(x @ w.T)
        p /= p.sum(1, keepdims=True)
        w = w - lr * (p - np.eye(len(w))[y]).T @ x / len(x)
    return w


def test_the_example_without_a_framework_selects_as_equation_16_says(capsys):
    assert len(PLAIN.splitlines()) <= 40
    example, _ = executed(PLAIN)
    assert len(ast.literal_eval(capsys.readouterr().out)) == 5, "it prints the clients of five rounds"

    rng = np.random.default_rng(5)
    clients = [(rng.normal(size=(20, 4)), rng.integers(3, size=20)) for _ in range(8)]
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    w = np.hstack([model.weight.detach().double(), model.bias.detach().double()[:, None]])
    table = np.stack([(w - softmax_regression(w, x, y, 3, 0.5)).ravel() for x, y in clients])
    expected = []
    for _ in range(8):
        expected.append(smallest_sum_of_largest_cosines(table, 3))
        for i in expected[-1]:
            table[i] = (w - softmax_regression(w, *clients[i], 3, 0.5)).ravel()
        w = w - table[expected[-1]].mean(0).reshape(w.shape)

    tensors = [(torch.tensor(x, dtype=torch.float32), torch.tensor(y)) for x, y in clients]
    assert example.federate(model, tensors, 3, 8) == expected and len(set(map(tuple, expected))) > 1
    after = torch.cat([model.weight, model.bias[:, None]], 1).detach().numpy()
    assert np.allclose(after, w, atol=1e-4)


# --------------------------------------------------------------------------------------------------------- with Flower


class LocalGrid:
    """Stands in for Flower's Grid, without processes: node 10 + i is partition i. Keeps what was sent and answered.

    fails  (node, message type, how many exchanges came before) -> true if this node fails
    """

    def __init__(self, client_app, nodes, fails=lambda node, kind, before: False):
        self.client_app, self.nodes, self.fails, self.exchanges = client_app, nodes, fails, []

    def get_node_ids(self):
        return self.nodes if not callable(self.nodes) else self.nodes(len(self.exchanges))

    def send_and_receive(self, messages, timeout=None):
        messages, replies = list(messages), []
        for message in messages:
            node = message.metadata.dst_node_id
            if self.fails(node, message.metadata.message_type, len(self.exchanges)):
                replies.append(app.Message(app.Error(0, "this client is broken"), reply_to=message))
                continue
            torch.manual_seed(node)
            config = app.UserConfig({"partition-id": node - 10})
            context = app.Context(1, node, config, app.RecordDict(), app.UserConfig())
            replies.append(self.client_app(message, context))
        kind = messages[0].metadata.message_type if messages else "nothing"
        before = messages[0].content if messages else None
        answers = {r.metadata.src_node_id: r.content for r in replies if r.has_content()}
        sent = [message.metadata.dst_node_id for message in messages]
        self.exchanges.append(SimpleNamespace(kind=kind, sent=sent, content=before, answers=answers))
        return replies


@pytest.fixture
def flower(caplog):
    """Flower, ready to make messages in this process. Returns its log."""
    global app
    app = pytest.importorskip("flwr.app", exc_type=ImportError)
    identity = pytest.importorskip("flwr.supercore.task_identity").TaskIdentity
    identity.task_id, identity.run_id, identity.node_id = 1, 1, 1
    caplog.set_level(logging.INFO, "flwr")
    return caplog


NODES = [10, 11, 12, 13, 14]


def uneven_samples(client):
    """The data of the tests: the clients differ in their number of samples and in their classes."""
    rng = np.random.default_rng(client)
    y = rng.integers(1 + client % 3, size=20 + 10 * client)
    x = rng.normal(size=(len(y), 8)) + 2 * np.eye(8)[y]
    return torch.tensor(x, dtype=torch.float32), torch.tensor(y)


def numpy_of(record):
    return np.concatenate([array.numpy().ravel() for array in record.values()]).astype(np.float64)


def start(space, strategy, grid, rounds):
    """Runs a strategy of an example on the data above. Returns Flower's result and the initial weights."""
    space["samples_of"] = uneven_samples
    torch.manual_seed(0)
    model = space["new_model"]() if "new_model" in space else torch.nn.Linear(8, 3)
    initial = app.ArrayRecord(model.state_dict())
    return strategy.start(grid, initial, num_rounds=rounds), initial


def test_entropy_weighting_in_flower_is_the_weighted_mean_by_hand(flower):
    example, space = executed(ENTROPY)
    grid = LocalGrid(example.client_app, NODES, lambda node, kind, before: (node, kind) == (13, "train"))
    result, _ = start(space, example.EntropyWeighting(), grid, rounds=3)
    labels = [uneven_samples(i)[1].numpy() for i in range(5)]
    entropies = np.array([scipy.stats.entropy(np.bincount(y)) for y in labels])
    trained = [exchange for exchange in grid.exchanges if exchange.kind == "train"]
    for exchange in trained:
        assert sorted(exchange.answers) == [10, 11, 12, 14]
        for node, content in exchange.answers.items():
            assert content["metrics"]["entropy"] == pytest.approx(entropies[node - 10])
            sent = {"train_loss", "entropy", "num-examples", "alpha"}
            assert set(content["metrics"]) == sent, "no label counts; the server adds alpha"
    weights = [numpy_of(trained[-1].answers[node]["arrays"]) for node in (10, 11, 12, 14)]
    by_hand = np.average(weights, axis=0, weights=np.exp(entropies[[0, 1, 2, 4]]))
    assert np.allclose(numpy_of(result.arrays), by_hand, atol=1e-6)
    assert not np.allclose(by_hand, np.average(weights, axis=0, weights=[20, 30, 40, 60]), atol=1e-4)

    evaluated = [exchange for exchange in grid.exchanges if exchange.kind == "evaluate"]
    losses = [evaluated[-1].answers[node]["metrics"]["loss"] for node in NODES]
    by_hand = np.average(losses, weights=[20, 30, 40, 50, 60])
    assert result.evaluate_metrics_clientapp[3]["loss"] == pytest.approx(by_hand), "by num-examples"
    assert flower.text.count("aggregate_train: Received 4 results and 1 failures") == 3
    assert flower.text.count("aggregate_evaluate: Received 5 results and 0 failures") == 3


def hull_by_hand(updates, dim):
    """The rows of [M, P] on the hull in their first principal components."""
    centred = updates - updates.mean(0)
    return sorted(ConvexHull(centred @ np.linalg.svd(centred)[2][:dim].T).vertices)


@pytest.mark.parametrize("settings", [{"k": 2}, {"hull_dim": 2}], ids=["minimax", "hull"])
def test_the_selection_in_flower_selects_and_averages_as_by_hand(flower, settings):
    """Node 15 joins in round 3. Node 13 fails in round 1, and the first selected node fails in round 4."""
    example, space = executed(SELECTION)
    failing = []

    def fails(node, kind, before):
        if kind == "train" and before == 6 and not failing:
            failing.append(node)
        return kind == "train" and (node, before) in [(13, 0), *((n, 6) for n in failing)]

    grid = LocalGrid(example.client_app, lambda before: NODES if before < 4 else [*NODES, 15], fails)
    strategy = example.UpdateSelection(**settings)
    result, initial = start(space, strategy, grid, rounds=6)
    trained = [exchange for exchange in grid.exchanges if exchange.kind == "train"]
    assert len(trained) == 6 and trained[0].sent == NODES, "in round 1 all train"
    assert np.array_equal(numpy_of(trained[1].content["arrays"]), numpy_of(initial)), "which only fills the table"
    w, table = numpy_of(initial), {}
    for t, exchange in enumerate(trained, 1):
        assert np.allclose(numpy_of(exchange.content["arrays"]), w, atol=1e-6), f"the model of round {t}"
        nodes, known = NODES if t < 3 else [*NODES, 15], sorted(table)
        select, number = (
            (smallest_sum_of_largest_cosines, 2) if "k" in settings else (hull_by_hand, settings["hull_dim"])
        )
        selected = [known[i] for i in select(np.stack([table[n] for n in known]), number)] if known else []
        newcomers = [node for node in nodes if node not in table]
        assert exchange.sent == sorted([*selected, *newcomers]), f"the nodes of round {t}"
        assert newcomers == {1: NODES, 2: [13], 3: [15]}.get(t, [])
        updates = {n: w - numpy_of(content["arrays"]) for n, content in exchange.answers.items()}
        table |= updates
        if any(node in updates for node in selected):
            w = w - np.mean([updates[node] for node in selected if node in updates], axis=0)
        if t == 4:
            assert failing == selected[:1] and set(updates) == set(selected[1:])
    assert np.allclose(numpy_of(result.arrays), w, atol=1e-6)
    kept = strategy.table.updates[[strategy.row_of[node] for node in sorted(table)]]
    assert np.allclose(kept.numpy(), np.stack([table[node] for node in sorted(table)]), atol=1e-6)
    assert flower.text.count("and 1 failures") == 2


def test_the_selection_in_flower_leaves_out_what_is_not_finite(flower):
    """One of the two selected nodes sends NaN in round 3, and both do in round 4."""
    example, space = executed(SELECTION)
    grid = LocalGrid(example.client_app, NODES)
    strategy, answer, rows = example.UpdateSelection(k=2), grid.send_and_receive, []

    def answer_with_nan(messages, timeout=None):
        replies, t = answer(messages), len(grid.exchanges) // 2 + 1
        if grid.exchanges[-1].kind == "train":
            rows.append(strategy.table.updates.clone())
            for reply in replies[: max(0, t - 2)]:
                weights = {name: array.numpy() * np.nan for name, array in reply.content["arrays"].items()}
                reply.content["arrays"] = app.ArrayRecord({n: app.Array(values) for n, values in weights.items()})
        return replies

    grid.send_and_receive = answer_with_nan
    start(space, strategy, grid, rounds=5)
    trained = [exchange for exchange in grid.exchanges if exchange.kind == "train"]
    models = [numpy_of(exchange.content["arrays"]) for exchange in trained]
    first, second = trained[2].sent
    assert trained[3].sent == [first, second]
    assert np.allclose(models[3], numpy_of(trained[2].answers[second]["arrays"])), "only the finite one counts"
    changed = (rows[3] != rows[2]).any(1)
    assert changed.nonzero().flatten().tolist() == [strategy.row_of[second]], "the first one keeps its old row"
    assert np.array_equal(models[4], models[3]) and torch.equal(rows[4], rows[3]), "nothing finite, nothing changes"


def test_fediir_in_flower_is_algorithm_1_by_hand(flower):
    """Node 12 fails in the query of round 2, and node 14 in the training of round 1."""
    example, space = executed(FEDIIR)
    grid = LocalGrid(example.client_app, NODES, lambda *which: which in [(14, "train", 1), (12, "query", 3)])
    result, initial = start(space, example.FedIIR(gamma=0.5, ema=0.9), grid, rounds=2)
    assert [exchange.kind for exchange in grid.exchanges] == ["query", "train", "evaluate"] * 2
    assert "query: node 12 is left out: this client is broken" in flower.text

    def forward(v, x):
        z = F.relu(x @ v["features.0.weight"].T + v["features.0.bias"])
        return z, z @ v["classifier.weight"].T + v["classifier.bias"]

    def classifier_gradient(v, x, y):
        """The gradient of the mean cross-entropy of a linear classifier, written out."""
        z, logits = forward(v, x)
        error = (logits.softmax(1) - F.one_hot(y, 3)) / len(y)
        return torch.cat([(error.T @ z).flatten(), error.sum(0)])

    w, g = {name: torch.tensor(array.numpy()) for name, array in initial.items()}, 0
    for t in range(2):
        query, train = grid.exchanges[3 * t], grid.exchanges[3 * t + 1]
        answered = [node for node in NODES if (t, node) != (1, 12)]
        assert sorted(query.sent) == NODES and sorted(train.sent) == answered
        mean = torch.stack([classifier_gradient(w, *uneven_samples(node - 10)) for node in answered]).mean(0)
        g = 0.9 * g + 0.1 * mean
        assert np.allclose(train.content["gradient"]["g"].numpy(), g, atol=1e-6)
        ends = []
        for node in (node for node in answered if (t, node) != (0, 14)):
            torch.manual_seed(node)
            example.new_model()  # draws the same random numbers as the client
            x, y = uneven_samples(node - 10)
            v = {name: value.clone().requires_grad_() for name, value in w.items()}
            for batch in torch.randperm(len(y)).split(10):
                penalty = (classifier_gradient(v, x[batch], y[batch]) - g).square().sum()
                loss = F.cross_entropy(forward(v, x[batch])[1], y[batch]) + 0.5 / 2 * penalty
                steps = torch.autograd.grad(loss, list(v.values()))
                pairs = zip(v.items(), steps, strict=True)
                v = {name: (value - 0.1 * step).detach().requires_grad_() for (name, value), step in pairs}
            ends.append(v)
        w = {name: torch.stack([v[name].detach() for v in ends]).mean(0) for name in w}
    for name, value in w.items():
        assert np.allclose(result.arrays[name].numpy(), value, atol=1e-5), name


@pytest.mark.parametrize(
    ("block", "strategy", "settings"),
    [
        (ENTROPY, "EntropyWeighting", {}),
        (SELECTION, "UpdateSelection", {"k": 2}),
        (SELECTION, "UpdateSelection", {"hull_dim": 2}),
        (FEDIIR, "FedIIR", {"gamma": 0.01, "ema": 0.95}),
    ],
    ids=["entropy", "minimax", "hull", "fediir"],
)
@pytest.mark.parametrize("when", [0, 1, 2])
def test_a_round_in_which_all_clients_fail_leaves_the_model_as_it_is(flower, block, strategy, settings, when):
    """when  the round, from 0, in which all clients fail"""
    example, space = executed(block)
    length = 3 if block == FEDIIR else 2
    grid = LocalGrid(example.client_app, NODES, lambda node, kind, before: before // length == when)
    result, _ = start(space, getattr(example, strategy)(**settings), grid, rounds=4)
    assert len(grid.exchanges) == 4 * length
    models = [numpy_of(e.content["arrays"]) for e in grid.exchanges if e.kind == "evaluate"]
    before = numpy_of(grid.exchanges[when * length].content["arrays"])
    assert np.array_equal(models[when], before) and not np.array_equal(models[3], before)
    assert result.train_metrics_clientapp.keys() == {1, 2, 3, 4} - {when + 1}
    assert np.isfinite(numpy_of(result.arrays)).all()


@pytest.mark.parametrize("block", [ENTROPY, SELECTION, FEDIIR], ids=["entropy", "selection", "fediir"])
def test_the_example_runs_in_flowers_simulation_with_a_broken_client(block, tmp_path):
    pytest.importorskip("flwr")
    pytest.importorskip("ray")
    head = "def train(message, context):\n"
    broken = '    if context.node_config["partition-id"] == 3:\n        raise RuntimeError("this client is broken")\n'
    assert block.count(head) == block.count("num_rounds=5") == 1
    source = with_pieces(block.replace(head, head + broken).replace("num_rounds=5", "num_rounds=2"))
    (tmp_path / "example.py").write_text(source)
    environment = {**os.environ, "FLWR_TELEMETRY_ENABLED": "0", "FLWR_HOME": str(tmp_path / "flwr")}
    command = [sys.executable, "example.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    log = done.stdout + done.stderr
    assert done.returncode == 0, log
    trained = re.findall(r"aggregate_train: Received (\d) results and (\d) failures", log)
    assert trained == ([("5", "1"), ("2", "1")] if block == SELECTION else [("5", "1")] * 2), log
    assert log.count("aggregate_evaluate: Received 6 results and 0 failures") == 2, log
    losses = [float(loss) for loss in re.findall(r"MetricRecord: \{'loss': ([\d.]+), 'accuracy'", log)]
    assert len(losses) == 2 and losses[1] < losses[0], log
