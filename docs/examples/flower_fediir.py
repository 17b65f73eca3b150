"""FedIIR in Flower: before training, the server asks for the gradients of the classifiers.

    pip install "flwr[simulation]" torch       (written for Flower 1.41)
    flwr run . --stream --federation-config num-supernodes=6

The second command simulates six nodes. It runs the app that pyproject.toml names, so write
"flower_fediir:server_app" and "flower_fediir:client_app" there.

Each round has two exchanges. The server first averages the classifiers' gradients into the global
gradient, and then sends it with the weights, so that the nodes train with fediir_loss. A node that
fails or sends NaN in the first exchange does not train in this round. All nodes have equal weights,
as in the paper. Replace `samples_of` and `new_model` by your own; the comments give the lines of
the paper's Algorithm 1.
"""

import logging
from collections import OrderedDict

import torch
import torch.nn as nn
import torch.nn.functional as F
from flwr.app import Array, ArrayRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from torch import Tensor

# ---------------------------------------------------------------------------- copied from fediir.py


def risk_and_gradient(
    classifier: nn.Module, z: Tensor, y: Tensor, graph: bool = False
) -> tuple[Tensor, Tensor]:
    """The risk R (mean cross-entropy) of features z [N, d], and grad_omega R, [Q].

    omega consists of the classifier's Q weights that are not frozen. Raises ValueError if all are.

    graph  if true, the gradient can be differentiated again
    """
    omega = [p for p in classifier.parameters() if p.requires_grad]
    if not omega:
        raise ValueError("all weights of the classifier are frozen, so it has no gradient")
    with torch.autocast(z.device.type, enabled=False):  # gradients are compared in full precision
        risk = F.cross_entropy(classifier(z.to(omega[0].dtype)), y)
        gradient = torch.autograd.grad(  # lines 4 and 10; of a weight that is not used it is zero
            risk, omega, create_graph=graph, allow_unused=True, materialize_grads=True
        )
    return risk, torch.cat([part.flatten() for part in gradient])


def fediir_loss(
    features,
    classifier: nn.Module,
    x: Tensor,
    y: Tensor,
    global_gradient: Tensor,
    gamma: float,
) -> Tensor:
    """R + gamma/2 ||grad_omega R - global_gradient||^2 (line 10) of classifier(features(x)).

    Its gradient needs second derivatives, because the penalty contains grad_omega R. Frozen
    parameters of the classifier are no part of omega. Raises ValueError if global_gradient is not
    [Q], one number per weight in omega.
    """
    risk, gradient = risk_and_gradient(classifier, features(x), y, graph=True)
    if global_gradient.shape != gradient.shape:
        raise ValueError(
            f"global_gradient has shape {tuple(global_gradient.shape)}, not {tuple(gradient.shape)}"
        )
    penalty = (gradient - global_gradient).square().sum()  # line 10
    return risk + gamma / 2 * penalty  # line 10; the authors' code has no 1/2: double its gamma


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


class FedIIR(FedAvg):
    """FedAvg with equal weights, and before training a query for the classifiers' gradients."""

    def __init__(self, gamma, ema, timeout=3600, **settings):
        super().__init__(**settings)
        self.gamma, self.ema, self.timeout = gamma, ema, timeout
        self.global_gradient = 0.0  # for the moving average

    def configure_train(self, server_round, arrays, config, grid):
        config["gamma"] = self.gamma
        messages = super().configure_train(server_round, arrays, config, grid)  # line 3
        nodes = [message.metadata.dst_node_id for message in messages]
        records = {self.arrayrecord_key: arrays, self.configrecord_key: config}
        queries = [Message(RecordDict(records), node, MessageType.QUERY) for node in nodes]
        gradients = {}
        for reply in finite(grid.send_and_receive(queries, timeout=self.timeout)):
            node = reply.metadata.src_node_id
            if reply.has_content():
                gradients[node] = torch.tensor(reply.content["gradient"]["g"].numpy())
            else:
                reason = reply.error.reason
                logging.getLogger("flwr").warning("query: node %d is left out: %s", node, reason)
        if not gradients:
            return []
        g = torch.stack(list(gradients.values())).mean(0)  # line 4
        self.global_gradient = self.ema * self.global_gradient + (1 - self.ema) * g  # line 4
        gradient = ArrayRecord({"g": Array(self.global_gradient.numpy())})
        content = RecordDict({**records, "gradient": gradient})
        return [Message(content, node, MessageType.TRAIN) for node in gradients]  # line 5

    def aggregate_train(self, server_round, replies):
        replies = finite(replies)
        for reply in replies:
            if reply.has_content():
                metrics = next(iter(reply.content.metric_records.values()))
                metrics[self.weighted_by_key] = 1.0  # line 15: equal weights
        # None, None if nobody is left: then the model stays
        return super().aggregate_train(server_round, replies)


def new_model():
    """Without dropout and batch norm, so that the query and the loss take the same gradients."""
    features = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
    return nn.Sequential(OrderedDict(features=features, classifier=nn.Linear(16, 3)))


def received_model(message):
    model = new_model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    return model


def samples_of(client):
    """Random data of three classes. Each client is a domain of its own: it scales the inputs."""
    rng = torch.Generator().manual_seed(client)
    y = torch.randint(3, (40,), generator=rng)
    return (0.5 + 0.2 * client) * (torch.randn(40, 8, generator=rng) + 2 * F.one_hot(y, 8)), y


client_app = ClientApp()


@client_app.query()
def classifier_gradient(message, context):
    model = received_model(message).eval()
    x, y = samples_of(context.node_config["partition-id"])
    with torch.no_grad():
        z = model.features(x)
    _, g = risk_and_gradient(model.classifier, z, y)  # line 4
    return Message(RecordDict({"gradient": ArrayRecord({"g": Array(g.numpy())})}), reply_to=message)


@client_app.train()
def train(message, context):
    model = received_model(message).train()  # line 6
    x, y = samples_of(context.node_config["partition-id"])
    g = torch.tensor(message.content["gradient"]["g"].numpy())
    gamma = message.content["config"]["gamma"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in torch.randperm(len(y)).split(10):  # lines 7, 8
        # line 10
        loss = fediir_loss(model.features, model.classifier, x[batch], y[batch], g, gamma)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()  # line 11
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
    strategy = FedIIR(gamma=0.01, ema=0.95, min_train_nodes=6)
    strategy.start(grid, ArrayRecord(new_model().state_dict()), num_rounds=5)
