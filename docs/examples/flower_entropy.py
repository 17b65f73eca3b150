"""Entropy weighting in Flower: clients with many kinds of labels count more in the server's mean.

    pip install "flwr[simulation]" torch       (written for Flower 1.41)
    flwr run . --stream --federation-config num-supernodes=6

The second command simulates six nodes. It runs the app that pyproject.toml names, so write
"flower_entropy:server_app" and "flower_entropy:client_app" there.

Each client sends its label entropy H_i with its weights, and never its label counts. The server
weights each client that answered by exp(H_i), divided by the sum over these clients, while the
evaluation still weights by `num-examples`. Replace `samples_of` and `new_model` by your own. The
server believes the entropies that the clients send.
"""

import logging
import math

import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from torch import Tensor

# ----------------------------------------------------------------- copied from entropy_weighting.py


def label_entropy(label_counts: Tensor) -> Tensor:
    """Counts of labels [M, C] -> the entropy of each row's distribution in nats, float64 [M].

    Raises ValueError if a row is empty, or a number is negative or not finite.
    """
    counts = torch.as_tensor(label_counts).double()
    total = counts.sum(1, keepdim=True)
    if not ((counts >= 0) & (total > 0) & (total < torch.inf)).all():
        raise ValueError("label_counts must be finite and not negative, with no empty row")
    return torch.special.entr(counts / total).sum(1)  # line 1


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


class EntropyWeighting(FedAvg):
    """FedAvg with the weights of equation 14. A training reply has `entropy` among its metrics."""

    def aggregate_train(self, server_round, replies):
        replies = finite(replies)
        for reply in replies:
            if reply.has_content():
                metrics = next(iter(reply.content.metric_records.values()))
                metrics[self.weighted_by_key] = math.exp(metrics["entropy"])  # super() normalises
        # None, None if nobody is left: then the model stays
        return super().aggregate_train(server_round, replies)


def new_model():
    return torch.nn.Linear(8, 3)


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
    entropy = label_entropy(torch.bincount(y, minlength=3)[None]).item()
    metrics = MetricRecord({"train_loss": loss.item(), "entropy": entropy, "num-examples": len(y)})
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
    strategy = EntropyWeighting(min_train_nodes=6)
    strategy.start(grid, ArrayRecord(new_model().state_dict()), num_rounds=5)
