"""Minimax or hull selection in Flower: train the nodes for whom no other can stand in.

    pip install "flwr[simulation]" torch scipy       (written for Flower 1.41)
    flwr run . --stream --federation-config num-supernodes=6

The second command simulates six nodes. It runs the app that pyproject.toml names, so write
"flower_selection:server_app" and "flower_selection:client_app" there.

The server keeps the latest update of each node: w before training minus w after it, of the
parameters only. A node without one trains once to enter the table, so round 1 trains everybody and
leaves the model as it is. Afterwards the selected nodes train, and the server averages their models
with equal weights, batch norm's running statistics included. A node that fails or sends NaN keeps
its earlier update. UpdateSelection(names, k=2) selects two nodes per round by minimax, and
UpdateSelection(names, hull_dim=2) the nodes on the hull in two dimensions; fraction_train and
min_train_nodes have no effect. Replace `samples_of` and `new_model` by your own.
"""

import logging

import torch
import torch.nn as nn
import torch.nn.functional as F
from flwr.app import ArrayRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.serverapp.strategy.strategy_utils import sample_nodes
from scipy.linalg import eigh
from scipy.spatial import ConvexHull
from torch import Tensor

# -------------------------------------------------------------------- copied from minimax_select.py


def inner_products(g: Tensor) -> Tensor:
    """<g_i, g_j> of the rows of g [M, P]: float64 [M, M].

    Raises ValueError if a row is zero or not finite.
    """
    blocks = (block.double() for block in g.detach().split(2**11, dim=1))  # a copy would be large
    inner = sum(block @ block.T for block in blocks)
    squares = inner.diagonal()
    if not ((squares > 0) & (squares < torch.inf)).all():
        raise ValueError("an update is zero or not finite")
    return inner


def cosines(g: Tensor) -> Tensor:
    """The cosines S_ij of the rows of g [M, P], float64 [M, M] (Algorithm 1)."""
    inner = inner_products(g)
    length = inner.diagonal().sqrt()
    inner = (inner + inner.T) / 2  # symmetric, so that ties are ties in spite of rounding
    return inner / (length * length[:, None])  # lines 1.2, 1.3, 1.4, 1.5: row i, without i, is S_i


def largest_similarity(similarity: Tensor) -> Tensor:
    """S*_i = max over j != i of similarity [M, M]: [M] (Algorithm 1)."""
    itself = torch.eye(len(similarity), dtype=torch.bool, device=similarity.device)
    return similarity.masked_fill(itself, -torch.inf).amax(1)  # line 1.7


def minimax_clients(g: Tensor, k: int, largest: bool = False) -> Tensor:
    """The k clients with the smallest S*_i (equation 16): int64 [k], ascending.

    g        the clients' updates [M, P]: weights before training minus weights after it, so do not
             pass weights, and leave out the statistics of batch norm, which would outweigh the rest
    largest  takes the largest S*_i instead, our reading of MaxSim ("most similar local gradients")

    Algorithm 1 differs in two ways. Its loop, line 1.10, ends with K + 1 clients. And line 1.14
    takes a value out of a set, in which two clients that share it, being each other's most similar
    one, count once. We follow equation 16. Ties go to the smaller index.

    Raises ValueError if g is not a matrix, if an update is zero or not finite, or if k is not in
    1 .. M.
    """
    g = torch.as_tensor(g)
    if g.dim() != 2 or not 1 <= k <= len(g):
        raise ValueError(f"k = {k} of g {[*g.shape]}: g must be [M, parameters], and k in 1 .. M")
    score = largest_similarity(cosines(g))
    # Lines 1.10, 1.11, 1.13 and 1.14
    return score.sort(stable=True, descending=largest).indices[:k].sort().values


# ---------------------------------------------------------------- copied from convex_hull_select.py


def principal_components(g: Tensor, dim: int, scale: bool = False) -> Tensor:
    """The rows of g [M, P] along their first principal components: float64 [M, up to dim], CPU.

    scale  first scales the rows to unit length; else the unit is the length of the longest row

    In M - 1 or more dimensions normally all M points are vertices, and quickhull cannot run in a
    million dimensions anyway. So we project, which decides who is a vertex. Section IV-B2 speaks of
    the stored gradients, section V of "cosine similarity to construct the convex hull" (NICO).

    Fewer columns are returned if the rows span fewer dimensions. Components with very small
    variance count as rounding errors.
    """
    inner, m = inner_products(g).cpu(), len(g)
    length = inner.diagonal().sqrt()
    unit = length if scale else length.max().expand(m)
    inner = inner / unit / unit[:, None]
    # <g_i - m, g_j - m> = <g_i, g_j> - <g_i, m> - <m, g_j> + <m, m>, where m is the mean row
    inner = inner - inner.mean(0) - inner.mean(1, keepdim=True) + inner.mean()
    values, vectors = eigh(inner, subset_by_index=[max(0, m - dim), m - 1])
    kept = values > 1e-12 * m  # smaller variances may come from the rounding of g to float32
    return torch.from_numpy(vectors[:, kept] * values[kept] ** 0.5).flip(1)  # the largest first


def vertices_of(points: Tensor) -> Tensor:
    """Which points [M, dim] are vertices of their convex hull, by quickhull: int64, ascending."""
    if points.shape[1] == 0:
        return torch.arange(len(points))[:1]
    if points.shape[1] == 1:
        return torch.stack([points[:, 0].argmin(), points[:, 0].argmax()]).sort().values
    return torch.from_numpy(ConvexHull(points.numpy()).vertices.astype("int64")).sort().values


def hull_vertices(g: Tensor, dim: int, scale: bool = False) -> Tensor:
    """Line 3: the clients on the hull, int64, ascending.

    g      the clients' updates [M, P]: weights before training minus weights after it, so do not
           pass weights, and leave out the statistics of batch norm, which would outweigh the rest
    dim    principal components in which the hull is built, 1 to 8
    scale  first scales the updates to unit length

    If the points span fewer dimensions, the hull is built in the dimensions that they span. Of
    several clients at one point, one is selected, and the first client if all share one point.
    Raises ValueError if g is not a matrix, if an update is zero or not finite, or if dim is not in
    1 .. 8.
    """
    g = torch.as_tensor(g)
    if g.dim() != 2 or not len(g) or not 1 <= dim <= 8:
        raise ValueError(f"g must be [clients, parameters], not {[*g.shape]}; dim 1 to 8: {dim}")
    return vertices_of(principal_components(g, dim, scale))


# ------------------------------------------------------------------------------------- your project


def finite(replies):
    """Leaves out the replies with a NaN or infinite number, and says so in Flower's log."""
    kept = []
    for reply in replies:
        content = reply.content if reply.has_content() else RecordDict()  # errors stay
        arrays = [a for record in content.array_records.values() for a in record.values()]
        metrics = [m for record in content.metric_records.values() for m in record.values()]
        numbers = [torch.tensor(a.numpy()) for a in arrays] + [torch.tensor(m) for m in metrics]
        if all(n.isfinite().all() for n in numbers):
            kept.append(reply)
        else:
            node = reply.metadata.src_node_id
            logging.getLogger("flwr").warning("node %d sent NaN and is left out", node)
    return kept


class UpdateSelection(FedAvg):
    """Each round trains the k nodes that minimax selects, or with hull_dim the nodes on the hull.

    names  of the model's parameters: an update holds these, and not batch norm's running statistics
    """

    def __init__(self, names, k=None, hull_dim=None, **settings):
        super().__init__(**settings)
        if (k is None) == (hull_dim is None):
            raise ValueError("give either k or hull_dim")
        self.names, self.k, self.hull_dim = names, k, hull_dim
        self.updates = {}  # the latest usable update of each node id
        self.selected = []

    def flat(self, record):
        """The parameters of a model as one vector, float32 [P]."""
        parts = [torch.tensor(record[name].numpy()).float() for name in self.names]
        return torch.cat([part.flatten() for part in parts])

    def select(self, nodes):
        """The selected ones among the nodes with an update."""
        known = [node for node in nodes if node in self.updates]
        if not known:
            return []
        updates = torch.stack([self.updates[node] for node in known])  # [M, P]
        if self.k:
            rows = minimax_clients(updates, min(self.k, len(known)))
        else:
            rows = hull_vertices(updates, self.hull_dim)
        return [known[row] for row in rows.tolist()]

    def configure_train(self, server_round, arrays, config, grid):
        # Draws none, but waits for enough nodes and says so in Flower's log
        _, connected = sample_nodes(grid, self.min_available_nodes, 0)
        nodes = sorted(connected)
        self.w, self.selected = self.flat(arrays), self.select(nodes)
        config["server-round"] = server_round
        content = RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: config})
        chosen = [node for node in nodes if node in self.selected or node not in self.updates]
        return [Message(content, node, MessageType.TRAIN) for node in chosen]

    def aggregate_train(self, server_round, replies):
        replies = finite(replies)
        answers = [reply for reply in replies if reply.has_content()]
        trained = {reply.metadata.src_node_id: reply.content for reply in answers}
        moves = any(node in self.selected for node in trained)
        for node, content in trained.items():
            update = self.w - self.flat(next(iter(content.array_records.values())))
            if update.any():  # an update of zeros has no direction
                self.updates[node] = update
            metrics = next(iter(content.metric_records.values()))
            # equal weights, and 0 for newcomers
            metrics[self.weighted_by_key] = float(node in self.selected or not moves)
        # counts the failures, averages the models
        arrays, metrics = super().aggregate_train(server_round, replies)
        return arrays if moves else None, metrics  # with None, the model stays as it is


def new_model():
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


def received_model(message):
    model = new_model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    return model


def samples_of(client):
    """Random data: client 0 has one class, client 1 two, client 2 three, client 3 one, ..."""
    rng = torch.Generator().manual_seed(client)
    y = torch.randint(1 + client % 3, (40,), generator=rng)
    return torch.randn(40, 8, generator=rng) + 2 * F.one_hot(y, 8), y


client_app = ClientApp()


@client_app.train()
def train(message, context):
    model = received_model(message)
    x, y = samples_of(context.node_config["partition-id"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    metrics = MetricRecord({"train_loss": loss.item(), "num-examples": len(y)})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content, reply_to=message)


@client_app.evaluate()
@torch.no_grad()
def evaluate(message, context):
    model = received_model(message).eval()
    x, y = samples_of(context.node_config["partition-id"])
    loss = F.cross_entropy(model(x), y).item()
    accuracy = (model(x).argmax(1) == y).float().mean().item()
    metrics = MetricRecord({"loss": loss, "accuracy": accuracy, "num-examples": len(y)})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


server_app = ServerApp()


@server_app.main()
def main(grid, context):
    model = new_model()
    names = [name for name, _ in model.named_parameters()]
    strategy = UpdateSelection(names, k=2, min_available_nodes=6)
    strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=5)
