"""Runs the clients of a round and evaluates models, on one device or on several ranks.

A method says what a client does, in a function `client_update`. The trainer says where, in which order and in which
precision it runs.

A model travels as one vector w [P]: its parameters in their order, then its floating-point buffers (the statistics of
batch norm). A client's upload is a row of G [K, P], with row i = w - w_i, so a server step reads as in the papers:
w = w - alpha @ G.
"""

import ctypes
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from common import UserError, first_line, random_at, ranks
from common.data import Dataset
from common.splits import shuffled

Batches = Iterator[tuple[Tensor, Tensor]]
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h


def local_solver(model: nn.Module, w: Tensor, batches: Batches, optimizer: torch.optim.Optimizer, autocast) -> Iterator:
    """Plain local training of one client, for papers that leave the local solver open. Yields each batch's loss."""
    set_weights(model, w)
    for x, y in batches:
        with autocast():
            loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss


def keep_freed_memory() -> None:
    """Stops glibc from returning freed memory to the system, so that each batch reuses the buffers of the last one."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt and any(mallopt(M_MMAP_THRESHOLD, size) for size in (1 << 30, 1 << 25)):  # old versions refuse 1 << 30
        mallopt(M_TRIM_THRESHOLD, 1 << 30)


def pick_device(name: str) -> torch.device:
    """The device of this name. `auto` is a GPU if there is one. With `auto` or `cuda`, each rank takes its own GPU.

    Raises UserError if the device does not exist.
    """
    keep_freed_memory()
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if ranks.COUNT > 1 and name == "cuda":
        name = f"cuda:{os.environ.get('LOCAL_RANK', ranks.RANK)}"  # torchrun sets it
    try:
        device = torch.ones(1, device=name).device  # cuda becomes cuda:0
        assert device.type in ("cpu", "cuda"), "only cpu and cuda are supported"
    except (RuntimeError, AssertionError) as e:
        raise UserError(f"--device {name} cannot be used ({first_line(e)}): choose auto or cpu") from e
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cudnn.deterministic = True  # a resumed run must end with the same bytes
    ranks.join(device)
    return device


def pick_precision(name: str, device: torch.device) -> str:
    """`auto` means bfloat16 if the hardware multiplies in bfloat16, else float32. See results/speed.md."""
    if name != "auto":
        return name
    if device.type == "cuda":
        has_it = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        has_it = torch.cpu.get_capabilities().get("avx512_bf16") or torch.cpu.get_capabilities().get("amx_bf16")
    return "bfloat16" if has_it else "float32"


@contextmanager
def seeded(device: torch.device, seed: int, purpose: str, *where: int):
    """Inside the block, torch's global generators start at this address. Dropout and initialisation draw from them."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(int(random_at(seed, purpose, *where).integers(2**63)))
        yield


def weights_of(model: nn.Module) -> list[Tensor]:
    """The tensors that w consists of, in their order."""
    return [*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())]


@torch.no_grad()
def get_weights(model: nn.Module) -> Tensor:
    """A copy of the model's weights as w [P], float32."""
    return torch.cat([t.reshape(-1) for t in weights_of(model)])


@torch.no_grad()
def set_weights(model: nn.Module, w: Tensor) -> None:
    """Writes w [P] into the model."""
    for buffer in model.buffers():
        if buffer.dtype == torch.long:  # batch norm's count of batches: nobody uses it, and it is not in w
            buffer.zero_()
    for t, part in zip(weights_of(model), unflatten(model, w), strict=True):
        t.copy_(part)


def unflatten(model: nn.Module, w: Tensor) -> list[Tensor]:
    """Views of w [P] in the shapes of the model's parameters, then of its buffers."""
    tensors = weights_of(model)
    return [part.view_as(t) for t, part in zip(tensors, w.split([t.numel() for t in tensors]), strict=True)]


class Trainer:
    """Local training and evaluation on one pool of samples.

    epochs, batch_size, lr, momentum   of a client's local training
    optimizer                          "sgd" or "adam"; each client starts a new one in each round
    precision                          "float32", or "bfloat16": autocast, while the weights stay in float32
    """

    def __init__(
        self, data: Dataset, device: torch.device, *, seed: int, epochs: int, batch_size: int, lr: float,
        optimizer: str = "sgd", momentum: float = 0.0, precision: str = "float32",
    ):  # fmt: skip
        self.x, self.y, self.device, self.fingerprint = data.x.to(device), data.y.to(device), device, data.fingerprint()
        self.seed, self.epochs, self.batch_size, self.lr = seed, epochs, batch_size, lr
        self.optimizer, self.momentum, self.precision = optimizer, momentum, precision
        self.left_out = 0  # how many uploads were not finite, so far
        self.progress: Callable[[float], None] = lambda share: None  # called with the share of the work just finished
        self.chunk = 1000 if device.type == "cuda" else 250  # batch size of the evaluation

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bfloat16")

    def batch(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The samples at these positions: images as float32 in -1..1, and their labels."""
        x = self.x[positions].to(memory_format=torch.channels_last)
        return x.float().div_(127.5).sub_(1), self.y[positions]

    def local_updates(
        self, client_update: Callable[..., Iterator[Tensor]], model: nn.Module, w: Tensor, clients: Tensor,
        samples: Sequence[Tensor], round: int, *, each: Mapping[str, Sequence] | None = None, **shared,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Every client in `clients`, int64 [K], trains from w on its own samples[client].

        client_update  called as client_update(model, w, batches, optimizer, autocast, ...); trains `model` from w on
                       the batches (x, y) and yields each batch's loss
        each           name -> one value per client id; client_update gets that client's value as a keyword argument
        shared         keyword arguments of client_update that are the same for all clients

        A client with an upload or a loss that is not finite is left out. Returns three tensors for the others: their
        ids, int64 [K'], and on the device their G [K', P], with row i = w - w_i, and their mean training losses [K'].
        Raises UserError if no client is left.
        """
        ids = clients.tolist()
        updates, losses = torch.zeros(len(ids), len(w), device=self.device), torch.zeros(len(ids), device=self.device)
        mine = ranks.share_out([len(samples[k]) for k in ids])
        work = self.epochs * sum(len(samples[ids[i]]) for i in mine)
        for i in mine:
            k = ids[i]
            model.train()
            own = {name: values[k] for name, values in (each or {}).items()}
            steps = client_update(
                model, w, self._batches(samples[k], round, k), self._optimizer(model), self.autocast, **shared, **own
            )
            sizes = [len(part) for part in samples[k].split(self.batch_size)] * self.epochs
            with seeded(self.device, self.seed, "dropout", round, k):
                for loss, size in zip(steps, sizes, strict=True):
                    losses[i] += loss.detach() * (size / self.epochs / len(samples[k]))
                    self.progress(size / work)
            torch.sub(w, get_weights(model), out=updates[i])
        ranks.sum_over(updates)  # each row is known to one rank, and 0 on the others
        ranks.sum_over(losses)
        return self._finite(round, clients, updates, losses)

    def _finite(self, round: int, clients: Tensor, *rows: Tensor, needed: int = 1) -> tuple[Tensor, ...]:
        """The clients whose row is finite in each of these tensors [K, ...], and their rows. The others are left out.

        Raises UserError if fewer than `needed` clients are left.
        """
        usable = torch.isfinite(sum(values.reshape(len(clients), -1).sum(1) for values in rows))
        if usable.sum() < needed:
            raise UserError(f"training diverged in round {round}: lower --lr")
        if usable.all():  # then nothing is copied
            return clients, *rows
        self.left_out += int((~usable).sum())
        return clients[usable.cpu()], *(values[usable] for values in rows)

    def _optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        if self.optimizer == "adam":
            return torch.optim.Adam(model.parameters(), lr=self.lr, fused=True)
        return torch.optim.SGD(model.parameters(), lr=self.lr, momentum=self.momentum, fused=True)

    def _batches(self, samples: Tensor, round: int, client: int) -> Batches:
        """A client's batches: in each epoch consecutive slices of a new random order. The last slice may be smaller."""
        rng = random_at(self.seed, "batches", round, client)
        orders = torch.stack([shuffled(samples, rng) for _ in range(self.epochs)])
        orders = orders.to(self.device)  # all epochs in one copy
        return map(self.batch, chain.from_iterable(order.split(self.batch_size) for order in orders))

    def map_clients(
        self, function: Callable[..., Tensor], model: nn.Module, w: Tensor, clients: Tensor,
        samples: Sequence[Tensor], round: int, *, needed: int = 1, each: Mapping[str, Sequence] | None = None, **shared,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """What `function` returns for every client in `clients`, int64 [K].

        function  called as function(model, batches, autocast, ...), with `each` and `shared` as in local_updates; the
                  model has weights w and is in evaluation mode, and the batches are all of samples[client], in order

        A client with a result that is not finite is left out. Returns the ids of the others, int64 [K'], and their
        results, stacked: [K', ...] on the device. Raises UserError if fewer than `needed` clients are left.
        """
        ids, results = clients.tolist(), {}
        set_weights(model, w)
        for i in ranks.share_out([len(samples[k]) for k in ids]):
            k = ids[i]
            own = {name: values[k] for name, values in (each or {}).items()}
            batches = map(self.batch, samples[k].to(self.device).split(self.chunk))
            with seeded(self.device, self.seed, "evaluation", round, k):
                results[i] = function(model.eval(), batches, self.autocast, **shared, **own)
        results = ranks.gather(results)
        stacked = torch.stack([results[i] for i in range(len(ids))]).to(self.device)
        return self._finite(round, clients, stacked, needed=needed)

    @torch.no_grad()
    def evaluate(self, model: nn.Module, w: Tensor, parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Accuracy and mean cross-entropy of the model with weights w on each part, two tensors [len(parts)].

        Raises UserError if a cross-entropy is not finite: the largest of NaN logits would count as class 0.
        """
        set_weights(model, w)
        model.eval()
        chunks = [part.split(self.chunk) for part in parts]
        pieces = [chunk for of_part in chunks for chunk in of_part]
        sums = torch.zeros(len(pieces), 2, device=self.device)
        for i in ranks.share_out([len(chunk) for chunk in pieces]):
            x, y = self.batch(pieces[i].to(self.device))
            with self.autocast():
                logits = model(x).float()
            sums[i, 0] = (logits.argmax(1) == y).sum()
            sums[i, 1] = F.cross_entropy(logits, y, reduction="sum")
        of_parts = ranks.sum_over(sums).split([len(of_part) for of_part in chunks])  # each row is known to one rank
        accuracy, loss = torch.stack([rows.sum(0) / len(part) for rows, part in zip(of_parts, parts, strict=True)], 1)
        if not loss.isfinite().all():
            raise UserError("training diverged, because the model's logits are not finite: lower --lr")
        return accuracy, loss
