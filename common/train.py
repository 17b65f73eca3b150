"""Trains the clients of a round, and evaluates models.

A method says what a client does, in a function such as `client_update`. The trainer says where, in
which order and in which precision it runs. A model travels as one vector theta [P]: its parameters
in their order, then its floating-point buffers (the statistics of batch norm).
"""

from dataclasses import dataclass
from functools import cached_property
from math import ceil

import torch
import torch.nn.functional as F

from common import RunError, UserError, check_tensor, one_of, ranks
from common.chance import random_at, seeded, shuffled

ADVICE = "lower --lr, or the weight of the method's penalty if it has one"


def local_solver(model, batches, optimizer):
    """Plain local training of one client, for papers that leave it open. Returns the mean loss."""
    losses = []
    for x, y in batches:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).mean()


def averaging_weights(by, sizes):
    """alpha_k of clients with these numbers of samples [K]: n_k / n by "size", or 1 / K: [K]."""
    n = sizes if one_of(by, ["size", "equal"]) == "size" else torch.ones_like(sizes)
    return n / n.sum()


def weights_of(model):
    """The tensors that theta consists of, in their order."""
    statistics = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    return [*model.parameters(), *statistics]


@torch.no_grad()
def get_weights(model):
    """A copy of the model's weights as theta [P], float32."""
    return torch.cat([t.reshape(-1) for t in weights_of(model)])


@torch.no_grad()
def set_weights(model, theta):
    """Writes theta [P] into the model."""
    for name, buffer in model.named_buffers():
        if name.endswith("num_batches_tracked"):  # of batch norm: unused, and not in theta
            buffer.zero_()
    for t, part in zip(weights_of(model), unflatten(model, theta)):
        t.copy_(part)


def unflatten(model, theta):
    """Views of theta [P] in the shapes of the model's parameters, then of its buffers."""
    tensors = weights_of(model)
    parts = theta.split([t.numel() for t in tensors])
    return [part.view_as(t) for t, part in zip(tensors, parts)]


@dataclass
class LocalTraining:
    """How a client trains: passes over its data, samples in a step, and the optimizer.

    The optimizer ("sgd" or "adam") is new for each client in each round, so momentum starts from
    zero.

    steps     so many steps take the place of the epochs
    lr_decay  each round's lr is that of the round before times this number
    """

    epochs: int = 5
    batch_size: int = 32
    lr: float = 0.05
    optimizer: str = "sgd"
    momentum: float = 0.0
    weight_decay: float = 0.0
    lr_decay: float = 1.0
    steps: int | None = None


class Passes:
    """Counts the samples that go through a module, as a hook of it."""

    samples = 0

    def __call__(self, module, inputs):
        self.samples += len(inputs[0])


class Trainer:
    """Local training and evaluation of these clients, with one model for all of them.

    data            a Dataset, whose images and labels go to the device
    clients         see splits.Clients
    model           a module; it gets the weights of whoever trains or is evaluated
    local           a LocalTraining, which may be set anew in each round, from t
    seed            of all draws of batches
    precision       "bfloat16" or "float32", which a models.Classifier has for its forward pass;
                    weights, losses and the server stay in float32
    evaluate_every  is_due() says that every so many rounds are evaluated
    rounds          and also this one, the last
    progress        called with a round and the share of its training that has just been done

    x, y, labels    images and labels on the device, where labels are a copy, and labels on the CPU
    parameters      how many of theta's P numbers are parameters; they come before the statistics
    samples         how many training samples all clients have processed so far
    megabytes       how much has gone between the server and the clients so far, up and down
    t               the round in which clients trained last
    """

    def __init__(
        self,
        data,
        clients,
        model,
        device="cpu",
        local=None,
        seed=0,
        precision="float32",
        evaluate_every=1,
        rounds=None,
        progress=lambda t, share: None,
    ):
        self.x = data.x.to(device)
        self.y = data.y.to(device, copy=True)
        self.labels = data.y
        self.classes = len(data.classes)
        self.clients = clients
        self.device = torch.device(device)
        self.model = model.to(device, memory_format=torch.channels_last)
        self.model.precision = precision
        self.local = local or LocalTraining()
        self.seed = seed
        self.evaluate_every = evaluate_every
        self.rounds = rounds
        self.progress = progress
        self.parameters = sum(p.numel() for p in self.model.parameters())
        self.samples = 0
        self.megabytes = 0.0
        self.t = 0
        self.passes = Passes()  # through the features, so a batch counts as often as it is used
        getattr(model, "features", model).register_forward_pre_hook(self.passes)
        most = 5_000_000 // data.x[0, 0].numel()  # by pixels: 99 images of 224 x 224
        # The batch size of the evaluation
        self.chunk = max(1, min(most, 1000 if self.device.type == "cuda" else 250))

    @cached_property
    def initial(self):
        """The weights [P] that the model had before the trainer gave it others."""
        return get_weights(self.model)

    def _load(self, theta):
        self.initial  # noqa: B018  (read it before it is overwritten)
        set_weights(self.model, theta)

    def batch(self, positions):
        """The samples at these positions: images as float32 in -1..1, and their labels."""
        x = self.x[positions].to(memory_format=torch.channels_last)
        return x.float().div_(127.5).sub_(1), self.y[positions]

    def train(
        self,
        client_update,
        theta,
        selected,
        t,
        /,  # so that an option of client_update can have one of these names, such as theta
        per_client={},  # noqa: B006  (nobody changes it)
        sent=None,
        **options,
    ):
        """The selected clients, int64 [K], train from theta [P] in round t, on their own samples.

        client_update  called as client_update(model, batches, optimizer, ...), where the model has
                       the weights theta; trains it on the batches (x, y), and returns the mean loss
        per_client     name -> one value per client id, for client_update as a keyword argument
        sent           how many numbers of theta a client receives and returns, one or [K]: by
                       default all
        options        keyword arguments of client_update that are the same for all clients

        The batches are those of all epochs, and can be walked once, like any generator.

        Returns the clients' weights [K, P] and losses [K] on the device. Raises RunError if a
        client's weights or loss are not finite, and UserError if somebody is selected who does not
        participate, or if the processes do not agree on clients and weights.
        """
        self.t = t
        if t and not len(selected):  # an average of nobody; before round 1 nobody need train
            raise UserError(f"nobody was selected in round {t}: select one client at least")
        selected = self._ids(selected, self.clients.participating)
        mine = self._mine(theta, selected, [len(self.clients.train[k]) for k in selected])
        weights = theta.new_zeros(len(selected), len(theta))
        losses = theta.new_zeros(len(selected))
        self.passes.samples = 0
        for i in mine:
            k = int(selected[i])
            self._load(theta)
            self.model.train()
            own = {name: values[k] for name, values in per_client.items()}
            batches = self._batches(k, t)
            optimizer = self._optimizer(t)
            with seeded(self.device, self.seed, "dropout", t, k):  # the same on any process
                loss = client_update(self.model, batches, optimizer, **own, **options)
            weights[i] = get_weights(self.model)
            losses[i] = self._mean_loss(loss)
            self.progress(t, 1 / len(mine))
        samples = torch.tensor([self.passes.samples])
        for table in (weights, losses, samples):  # the other processes have trained the others
            ranks.add_up(table)
        self.count(selected, numbers=2 * (len(theta) if sent is None else sent))
        self.samples += int(samples)
        sums = weights.norm(dim=1) + losses  # a norm adds up squares, so it is infinite early
        diverged = selected[~sums.isfinite().cpu()]
        if len(diverged):
            raise RunError(f"client {diverged[0]} diverged in round {t}: {self._advice()}")
        return weights, losses

    def map(
        self,
        function,
        theta,
        ids,
        samples,
        t,
        /,
        per_client={},  # noqa: B006
        **options,
    ):
        """What `function` computes for each of these clients, int64 [K].

        samples   for each client id the positions of the samples that it computes on, int64
        function  called as function(model, batches, ...), where the model has the weights theta,
                  and the batches are all of samples[client], in order; returns a tensor or a tuple
                  of tensors
        per_client, options  as for train()
        t         a client's random draws depend on t and its id alone

        Returns for each of these tensors the results of the K clients, [K, ...]. Raises RunError if
        one is not finite.
        """
        results = {}
        ids = self._ids(ids, len(samples))
        for i in self._mine(theta, ids, [len(samples[k]) for k in ids]):
            k = int(ids[i])
            self._load(theta)
            self.model.eval()
            pieces = samples[k].to(self.device).split(self.chunk)
            batches = (self.batch(piece) for piece in pieces)
            own = {name: values[k] for name, values in per_client.items()}
            with seeded(self.device, self.seed, "evaluation", t, k):
                found = function(self.model, batches, **own, **options)
            results[i] = found if isinstance(found, tuple) else (found,)
        columns = zip(*ranks.gather(results), strict=True)
        return [self._finite(torch.stack(column).to(self.device)) for column in columns]

    @torch.no_grad()
    def predict(self, theta, samples):
        """The model with weights theta on these samples of the pool, int64 [n].

        Returns their cross-entropies [n] and the predicted classes, int64 [n], on the CPU. Raises
        RunError if a loss is not finite, because the largest of NaN logits would count as class 0,
        and UserError as for train().
        """
        self._load(theta)
        self.model.eval()
        batches = samples.to(self.device).split(self.chunk)  # all in one copy
        results = {}
        for i in self._mine(theta, range(len(batches)), [len(batch) for batch in batches]):
            x, y = self.batch(batches[i])
            with seeded(self.device, self.seed, "prediction", i):  # for dropout that is always on
                logits = self.model(x)
            results[i] = F.cross_entropy(logits, y, reduction="none"), logits.argmax(1)
        columns = zip(*ranks.gather(results))
        losses, predicted = (torch.cat(column).cpu() for column in columns)
        return self._finite(losses), predicted

    def count(self, ids, passes=0, numbers=0):
        """Adds to the cost what these clients did, int64 [K].

        passes   over a client's training samples
        numbers  of four bytes that a client has received and sent, one or [K]
        """
        self.samples += int(passes * self.clients.sizes[ids].sum())
        self.megabytes += 4e-6 * float(torch.as_tensor(numbers).expand(len(ids)).sum())

    def cost(self):
        """The two columns of metrics.csv that say what the run has cost so far."""
        return {"samples": self.samples, "megabytes": self.megabytes}

    def is_due(self, t):
        """Whether round t is evaluated."""
        return t % self.evaluate_every == 0 or t == self.rounds

    def _ids(self, ids, n):
        """These ids as int64 [K]. Raises UserError if they are no ids of the first n clients."""
        ids = torch.as_tensor(ids)
        check_tensor("clients", ids, torch.int64, 1)
        if ((ids < 0) | (ids >= n)).any():
            raise UserError(f"clients {ids.tolist()}: only 0 to {n - 1} can be selected here")
        return ids

    def _mine(self, theta, ids, sizes):
        """Which of these pieces of work this process does.

        Raises UserError if the others have other weights or clients, because then each would do a
        part of another work, and the sum would be nonsense.
        """
        if ranks.COUNT > 1:
            checksum = theta.contiguous().view(torch.int32).sum().item()
            facts = {"clients": [int(k) for k in ids], "weights": checksum}
            advice = "draw with random_at, read no clock, and train in each one"
            ranks.agree(facts, f"{advice} (in or after round {self.t})")
        return ranks.share_out(sizes)

    def _finite(self, results):
        """The same results. Raises RunError if one is not finite."""
        if not results.isfinite().all():
            raise RunError(f"a result is not finite: {self._advice()}")
        return results

    def _advice(self):
        for name, buffer in self.model.named_buffers():
            if name.endswith("running_var") and (buffer < 0).any():
                return f"{name} is negative, so let the server step on parameters alone"
        return ADVICE

    def _mean_loss(self, loss):
        try:
            return torch.as_tensor(loss).detach().view(())
        except Exception as e:  # of None, a tuple or a dict
            raise UserError("client_update returns no number: return the mean loss") from e

    def _optimizer(self, t):
        local = self.local
        parameters = self.model.parameters()
        shared = {
            "lr": local.lr * local.lr_decay ** max(0, t - 1),
            "weight_decay": local.weight_decay,
            "fused": True,
        }
        if one_of(local.optimizer, ["sgd", "adam"]) == "adam":
            return torch.optim.Adam(parameters, **shared)
        return torch.optim.SGD(parameters, momentum=local.momentum, **shared)

    def _batches(self, k, t):
        """A client's batches: in each epoch consecutive slices of a new random order.

        An epoch's last slice may be smaller.
        """
        samples = self.clients.train[k]
        local = self.local
        rng = random_at(self.seed, "batches", t, k)
        epochs = local.epochs
        if local.steps:
            epochs = ceil(local.steps / ceil(len(samples) / local.batch_size))
        orders = torch.stack([shuffled(samples, rng) for _ in range(epochs)])
        orders = orders.to(self.device)  # all epochs in one copy
        slices = [positions for order in orders for positions in order.split(local.batch_size)]
        for positions in slices[: local.steps]:
            yield self.batch(positions)
