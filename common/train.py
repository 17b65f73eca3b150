"""Trains the clients of a round, and evaluates models.

A method says what a client does, in a function such as `client_update`. The trainer says where, in
which order and in which precision it runs. A model travels as one vector theta [P]: its parameters
in their order, then its floating-point buffers (the statistics of batch norm).
"""

import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from common import UserError, random_at, ranks
from common.data import Dataset
from common.devices import seeded
from common.splits import Clients, shuffled

Batches = Iterator[tuple[Tensor, Tensor]]


def local_solver(
    model: nn.Module, theta: Tensor, batches: Batches, optimizer: torch.optim.Optimizer, autocast
):
    """Plain local training of one client, for papers that leave it open. Returns the mean loss."""
    set_weights(model, theta)
    total, samples = 0.0, 0
    for x, y in batches:
        with autocast():
            loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += len(y) * loss.detach()
        samples += len(y)
    return total / samples


def weights_of(model: nn.Module) -> list[Tensor]:
    """The tensors that theta consists of, in their order."""
    statistics = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    return [*model.parameters(), *statistics]


@torch.no_grad()
def get_weights(model: nn.Module) -> Tensor:
    """A copy of the model's weights as theta [P], float32."""
    return torch.cat([t.reshape(-1) for t in weights_of(model)])


@torch.no_grad()
def set_weights(model: nn.Module, theta: Tensor) -> None:
    """Writes theta [P] into the model."""
    for name, buffer in model.named_buffers():
        if name.endswith("num_batches_tracked"):  # of batch norm: unused, and not in theta
            buffer.zero_()
    for t, part in zip(weights_of(model), unflatten(model, theta), strict=True):
        t.copy_(part)


def unflatten(model: nn.Module, theta: Tensor) -> list[Tensor]:
    """Views of theta [P] in the shapes of the model's parameters, then of its buffers."""
    tensors = weights_of(model)
    parts = theta.split([t.numel() for t in tensors])
    return [part.view_as(t) for t, part in zip(tensors, parts, strict=True)]


def new_table(clients: int, parameters: int, device: torch.device) -> Tensor:
    """A row of zeros for each client's latest update. Tells its size if that is above 1 GB.

    Raises UserError if the system refuses so much memory.
    """
    size = 4e-9 * clients * parameters
    takes = f"the table of updates takes {size:.1f} GB"
    if size > 1 and ranks.RANK == 0:
        tqdm.write(f"{takes} in each process", file=sys.stderr)
    try:
        return torch.zeros(clients, parameters, device=device)
    except RuntimeError as e:
        raise UserError(f"{takes}, which is too much: see sketch in docs/variations/") from e


class Trainer:
    """Local training and evaluation of these clients.

    args      seed, and the settings of local training: local_epochs, batch_size, lr, optimizer
              ("sgd" or "adam", new for each client in each round), momentum, and precision
              ("float32", "tf32", or "bfloat16": autocast, while the weights stay in float32)
    progress  called with the share of a round's training that has just been done
    """

    def __init__(
        self,
        data: Dataset,
        clients: Clients,
        device: torch.device,
        args: Namespace,
        progress: Callable[[float], None] = lambda share: None,
    ):
        self.x, self.y = data.x.to(device), data.y.to(device)
        self.classes = len(data.classes)
        self.clients, self.device = clients, device
        self.args, self.progress = args, progress
        most = 5_000_000 // data.x[0, 0].numel()  # by pixels: 99 images of 224 x 224
        # The batch size of the evaluation
        self.chunk = max(1, min(most, 1000 if device.type == "cuda" else 250))

    def autocast(self) -> torch.autocast:
        return torch.autocast(
            self.device.type, torch.bfloat16, enabled=self.args.precision == "bfloat16"
        )

    def batch(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The samples at these positions: images as float32 in -1..1, and their labels."""
        x = self.x[positions].to(memory_format=torch.channels_last)
        return x.float().div_(127.5).sub_(1), self.y[positions]

    def train(
        self,
        client_update: Callable[..., Tensor],
        model: nn.Module,
        theta: Tensor,
        selected: Tensor,
        t: int,
        per_client: Mapping[str, Sequence] = {},
        **options,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The selected clients, int64 [K], train from theta in round t, each on its own samples.

        client_update  called as client_update(model, theta, batches, optimizer, autocast, ...);
                       trains `model` from theta on the batches (x, y), and returns the mean loss.
                       It must begin with set_weights(model, theta), because `model` still has the
                       weights of another client
        per_client     name -> one value per client id, for client_update as a keyword argument
        options        keyword arguments of client_update that are the same for all clients

        A client with weights or a loss that are not finite is left out. Returns three tensors for
        the k others: their ids, int64 [k], and on the device their weights `thetas` [k, P] and
        losses [k]. Raises UserError if no client is left.
        """
        sizes = [len(self.clients.train[k]) for k in selected]
        mine = ranks.share_out(sizes)  # the other processes train the other clients
        total = sum(sizes[i] for i in mine)
        uploads = theta.new_zeros(len(selected), len(theta) + 1)  # weights and loss
        for i in mine:
            k = int(selected[i])
            model.train()
            batches = self._batches(k, t, total)
            optimizer = self._optimizer(model)
            own = {name: values[k] for name, values in per_client.items()}
            with seeded(self.device, self.args.seed, "dropout", t, k):  # the same on any process
                loss = client_update(
                    model, theta, batches, optimizer, self.autocast, **own, **options
                )
            uploads[i, :-1], uploads[i, -1] = get_weights(model), loss
        ranks.add_up(uploads)

        usable = torch.isfinite(uploads.sum(1)).cpu()
        if not usable.all():
            if ranks.RANK == 0:
                left_out = f"{(~usable).sum()} of {len(selected)}"
                text = f"round {t}: {left_out} uploads were not finite: left out"
                tqdm.write(text, file=sys.stderr)
            if not usable.any():
                raise UserError(f"training diverged in round {t}: lower --lr")
            selected, uploads = selected[usable], uploads[usable]
        return selected, uploads[:, :-1], uploads[:, -1]

    def map(
        self,
        function: Callable[..., Tensor],
        model: nn.Module,
        theta: Tensor,
        ids: Tensor,
        samples: Sequence[Tensor],
        t: int,
        per_client: Mapping[str, Sequence] = {},
        **options,
    ) -> Tensor:
        """What `function` computes for each of these clients, int64 [K]: a matrix [K, n].

        function  called as function(model, batches, autocast, ...), where the model already has the
                  weights theta, unlike in train(), and the batches are all of samples[client], in
                  order; returns a vector [n]
        per_client, options  as for train()

        Raises UserError if a result is not finite.
        """
        set_weights(model, theta)
        results = {}
        for i in ranks.share_out([len(samples[k]) for k in ids]):
            k = int(ids[i])
            model.eval()
            pieces = samples[k].to(self.device).split(self.chunk)
            batches = (self.batch(piece) for piece in pieces)
            own = {name: values[k] for name, values in per_client.items()}
            with seeded(self.device, self.args.seed, "evaluation", t, k):
                results[i] = function(model, batches, self.autocast, **own, **options)
        return finite(torch.stack(ranks.gather(results)).to(self.device))

    def _optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        args = self.args
        if args.optimizer == "adam":
            return torch.optim.Adam(model.parameters(), lr=args.lr, fused=True)
        return torch.optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum, fused=True)

    def _batches(self, k: int, t: int, total: int) -> Batches:
        """A client's batches: in each epoch consecutive slices of a new random order.

        The last slice may be smaller. `total` is the number of samples of all clients that this
        process trains in the round, which tells how far a batch moves the clock.
        """
        samples, epochs = self.clients.train[k], self.args.local_epochs
        rng = random_at(self.args.seed, "batches", t, k)
        orders = torch.stack([shuffled(samples, rng) for _ in range(epochs)])
        for order in orders.to(self.device):  # all epochs in one copy
            for positions in order.split(self.args.batch_size):
                yield self.batch(positions)
                self.progress(len(positions) / (epochs * total))

    def evaluate(self, model: nn.Module, theta: Tensor, selected: Tensor) -> dict:
        """The accuracies of the model with weights theta, by column of metrics.csv.

        id_accuracy      on the held-out samples of all participating clients together
        id_selected      the same for the clients selected in this round, int64 [K]: Wu et al.'s ID
        ood_accuracy     on clients.tests["ood"], and so on for the other test sets there
        confusion        how many samples of class i are called j, [classes, classes], in the OOD
                         samples, or without these in those of id_accuracy
        selected_size    mean number of training samples of the selected clients
        rare_selected    which share of them holds a rare class, if there are rare classes
        """
        clients = self.clients
        tests = {"id_accuracy": clients.held_out}
        tests["id_selected"] = torch.cat([clients.test[k] for k in selected])
        for name, samples in clients.tests.items():
            tests[f"{name}_accuracy"] = samples
        tests = {name: samples for name, samples in tests.items() if len(samples)}
        accuracies, _, predictions = self.measure(model, theta, [*tests.values()])
        measures = dict(zip(tests, accuracies.tolist(), strict=True))
        shown = [*tests].index("ood_accuracy" if "ood" in clients.tests else "id_accuracy")
        predicted, labels = predictions[shown]
        measures["confusion"] = confusion(labels, predicted, self.classes)
        measures["selected_size"] = clients.sizes[selected].mean()
        if "rare" in clients.tests:
            rare = [clients.groups[k] != "more classes" for k in selected]
            measures["rare_selected"] = sum(rare) / len(rare)
        return measures

    @torch.no_grad()
    def measure(
        self, model: nn.Module, theta: Tensor, parts: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """The model with weights theta on each of these parts of the pool, int64 [n].

        Returns accuracies [parts], mean cross-entropies [parts], and per part what is predicted for
        its samples and what is right, int64 [2, n]. Raises UserError if a loss is not finite,
        because the largest of NaN logits would count as class 0.
        """
        set_weights(model, theta)
        model.eval()
        sizes = [len(part) for part in parts]
        samples = torch.cat([*parts]).to(self.device)  # all in one copy
        batches = [batch for part in samples.split(sizes) for batch in part.split(self.chunk)]
        results = {}
        for i in ranks.share_out([len(batch) for batch in batches]):
            x, y = self.batch(batches[i])
            with self.autocast():
                logits = model(x).float()
            losses = F.cross_entropy(logits, y, reduction="none")
            results[i] = torch.stack([losses, logits.argmax(1), y])
        table = finite(torch.cat(ranks.gather(results), dim=1)).cpu()  # the first wait for a GPU
        losses, predictions = table[0].split(sizes), table[1:].long().split(sizes, dim=1)
        accuracies = [(guess == label).float().mean() for guess, label in predictions]
        means = [loss.mean() for loss in losses]
        return torch.stack(accuracies), torch.stack(means), [*predictions]


def confusion(labels: Tensor, predicted: Tensor, classes: int) -> Tensor:
    """How many samples of class i are called j: int64 [classes, classes]."""
    cells = torch.bincount(labels * classes + predicted, minlength=classes**2)
    return cells.view(classes, classes)


def accuracy(confusion: Tensor) -> Tensor:
    """The share of right answers, from the counts that confusion() returns [..., C, C]."""
    return confusion.diagonal(dim1=-2, dim2=-1).sum(-1) / confusion.sum((-2, -1))


def finite(results: Tensor) -> Tensor:
    """The same results. Raises UserError if one is not finite."""
    if not results.isfinite().all():
        raise UserError("training diverged, the model's results are not finite: lower --lr")
    return results
