"""How clients learn and how a model is evaluated; devices and precision.

A model travels as one vector w [P]: its parameters in their order, then its floating-point buffers (the statistics
of batch norm). A client's upload is a row of G [K, P], row i = w - w_i, so that a server's step reads as in the
papers: w = w - alpha @ G.

A round's clients are shared out among the ranks (common/ranks.py), and so are the samples of an evaluation.
"""

import ctypes
import os
from collections.abc import Callable, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from common import UserError, first_line, random_at, ranks
from common.data import Dataset
from common.splits import shuffled
from common.steps import RecordedStep, Step

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
LossFn = Callable[[nn.Module, Tensor, Tensor], Tensor]


def keep_freed_memory() -> None:
    """Tells glibc to keep what is freed, for otherwise each batch maps its buffers anew; elsewhere does nothing."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt and any(mallopt(M_MMAP_THRESHOLD, size) for size in (1 << 30, 1 << 25)):  # old ones refuse the first
        mallopt(M_TRIM_THRESHOLD, 1 << 30)


def pick_device(name: str) -> torch.device:
    """`auto` is the GPU where there is one, each rank's own where there are several.

    Raises UserError for a device that is not there.
    """
    keep_freed_memory()
    if ranks.COUNT > 1 and name.startswith("cuda:"):
        raise UserError(f"--device {name}: several ranks cannot share a GPU; leave it out, and each takes its own")
    found = "cuda" if name == "auto" and torch.cuda.is_available() else "cpu" if name == "auto" else name
    if found == "cuda" and ranks.COUNT > 1:
        found = f"cuda:{os.environ['LOCAL_RANK']}"
        if int(os.environ["LOCAL_RANK"]) >= torch.cuda.device_count():
            raise UserError(
                f"--nproc-per-node is more than the {torch.cuda.device_count()} GPUs: lower it, or --device cpu"
            )
    try:
        device = torch.empty(1, device=found).device  # cuda becomes cuda:0
    except (RuntimeError, AssertionError) as e:
        raise UserError(f"--device {name} cannot be used ({first_line(e)}): choose auto or cpu") from e
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"--device {name} is not supported: choose auto, cpu or cuda")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cudnn.deterministic = True  # else a resumed run would end elsewhere
    ranks.join(device)
    return device


def pick_precision(name: str, device: torch.device) -> str:
    """`auto` is bfloat16 where the device multiplies in it natively, else float32. See results/speed.md.

    On a GPU float32 is what PyTorch makes of it: its convolutions multiply in TF32.
    """
    if name != "auto":
        return name
    if device.type == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
    cpu = torch.cpu.get_capabilities()
    return "bfloat16" if cpu.get("avx512_bf16") or cpu.get("amx_bf16") else "float32"


def weights_of(model: nn.Module) -> list[Tensor]:
    """The tensors that w holds, in their order."""
    return [*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())]


@torch.no_grad()
def get_weights(model: nn.Module) -> Tensor:
    """w [P], float32, a copy."""
    return torch.cat([t.reshape(-1) for t in weights_of(model)])


@torch.no_grad()
def set_weights(model: nn.Module, w: Tensor) -> None:
    """Writes w [P] into the model."""
    tensors = weights_of(model)
    for buffer in model.buffers():
        if buffer.dtype == torch.long:  # not in w: batch norm's count of batches, which nobody uses
            buffer.zero_()
    for t, part in zip(tensors, unflatten(model, w), strict=True):
        t.copy_(part)


def unflatten(model: nn.Module, w: Tensor) -> list[Tensor]:
    """Views of w [P] in the shapes of weights_of(model)."""
    tensors = weights_of(model)
    return [part.view_as(t) for t, part in zip(tensors, w.split([t.numel() for t in tensors]), strict=True)]


def span(model: nn.Module, name: str) -> slice:
    """Where in w the parameter called `name` lies."""
    start = 0
    for other, parameter in model.named_parameters():
        if other == name:
            return slice(start, start + parameter.numel())
        start += parameter.numel()
    raise KeyError(name)


@contextmanager
def seeded(device: torch.device, seed: int, purpose: str, *where: int):
    """Inside, torch's global generators (which dropout and weight initialisation draw from) start at that address."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(int(random_at(seed, purpose, *where).integers(2**63)))
        yield


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


class Trainer:
    """Local training and evaluation on one pool of samples.

    epochs, batch_size, lr, momentum   of a client's local training
    optimizer                          "sgd", or "adam", made anew for each client in each round
    precision                          "float32", or "bfloat16": autocast, weights stay in float32
    graphs                             replay steps as CUDA graphs
    """

    def __init__(
        self, data: Dataset, device: torch.device, *, seed: int, epochs: int, batch_size: int, lr: float,
        optimizer: str = "sgd", momentum: float = 0.0, precision: str = "float32", graphs: bool = False,
    ):  # fmt: skip
        self.x, self.y, self.device = data.x.to(device), data.y.to(device), device
        self.seed, self.epochs, self.batch_size, self.lr = seed, epochs, batch_size, lr
        self.optimizer, self.momentum, self.precision = optimizer, momentum, precision
        self.graphs, self.recorded = graphs, None  # the step recorded last
        self.left_out = 0  # uploads so far that could not be used
        self.chunk = 1000 if device.type == "cuda" else 250  # samples in a step of evaluation

    def batch(self, positions: Tensor) -> Tensor:
        """The samples at these positions as a model takes them: images float32 in -1..1, text int64."""
        x = self.x[positions]
        if x.dim() == 2:
            return x.long()
        return x.to(memory_format=torch.channels_last).float().div_(127.5).sub_(1)

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bfloat16")

    def local_updates(
        self, model: nn.Module, w: Tensor, clients: Tensor, samples: Sequence[Tensor], round: int,
        loss_fn: LossFn = cross_entropy, per_client: Callable[[nn.Module, int], None] | None = None,
        progress: Callable[[float], None] = lambda share: None, needed: int = 1,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Every client in `clients`, int64 [K], trains from w on its samples[client].

        loss_fn     (model, x, y) -> the scalar that local training descends
        per_client  called as (model, client) before a client trains: sets what differs from client to client
        progress    called after each local epoch with the share of this rank's work that it was

        Returns the clients whose upload can be used, int64 [K], and on the device G [K, P], row i = w - w_i, and their
        mean training loss [K]. A client whose update or loss is not finite is left out and counted in self.left_out.
        Raises UserError where fewer than `needed` are left.
        """
        ids = clients.tolist()
        updates = torch.empty(len(ids), len(w), device=self.device)
        losses = torch.zeros(len(ids), device=self.device)
        rows_of = ranks.share_out([len(samples[client]) for client in ids], ranks.COUNT)
        mine, under_way = rows_of[ranks.RANK], []
        share = 1 / max(1, len(mine)) / self.epochs
        for turn in range(max(map(len, rows_of))):
            if turn < len(mine):
                i, client = mine[turn], ids[mine[turn]]
                set_weights(model, w)
                if per_client is not None:
                    per_client(model, client)
                with seeded(self.device, self.seed, "dropout", round, client):
                    losses[i] = self._train(model, samples[client], round, client, loss_fn, lambda: progress(share))
                torch.sub(w, get_weights(model), out=updates[i])
            if ranks.COUNT > 1:  # travels while the next client trains
                here = [(r, rows[turn]) for r, rows in enumerate(rows_of) if turn < len(rows)]
                under_way += [dist.broadcast(updates[i], src=r, async_op=True) for r, i in here]
        if ranks.COUNT > 1:
            for transfer in under_way:
                transfer.wait()
            dist.all_reduce(losses)  # each is known to one rank, and 0 to the others
        usable = torch.isfinite(updates.sum(1) + losses)
        if usable.all():
            return clients, updates, losses
        if usable.sum() < needed:
            raise UserError(f"training diverged in round {round}: lower --lr")
        self.left_out += int((~usable).sum())
        return clients[usable.cpu()], updates[usable], losses[usable]

    def _train(
        self, model: nn.Module, samples: Tensor, round: int, client: int, loss_fn: LossFn, after_epoch: Callable
    ) -> Tensor:
        """One client's local epochs, on `model` in place. Returns the mean loss over all its samples."""
        model.train()
        if not self.graphs or len(samples) < self.batch_size:
            step = Step(self, model, loss_fn)
        else:
            if self.recorded is None or not self.recorded.fits(model, loss_fn):
                self.recorded = None  # gives its memory back first
                self.recorded = RecordedStep(self, model, loss_fn)
            step = self.recorded
            step.restart()
        rng = random_at(self.seed, "batches", round, client)
        orders = [shuffled(samples, rng) for _ in range(self.epochs)]
        for order in torch.stack(orders).to(self.device):  # one copy a client, since a GPU's queue runs empty meanwhile
            for positions in order.split(self.batch_size):
                step(positions)
            after_epoch()
        return step.total / (self.epochs * len(samples))

    @torch.no_grad()
    def predict(
        self, model: nn.Module, w: Tensor, samples: Tensor, function: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """What `function`, by default the model itself, gives for each sample, float32 [N, ...].

        The model has weights w, and afterwards keeps them and is in evaluation mode.
        """
        set_weights(model, w)
        model.eval()
        each = -(-len(samples) // ranks.COUNT)  # all ranks the same number; the last ones repeat the last sample
        at = torch.arange(ranks.RANK * each, (ranks.RANK + 1) * each).clamp(max=len(samples) - 1)
        mine = samples[at].to(self.device)
        with self.autocast():
            found = torch.cat([(function or model)(self.batch(p)).float() for p in mine.split(self.chunk)])
        if ranks.COUNT == 1:
            return found
        everything = found.new_empty(ranks.COUNT * each, *found.shape[1:])
        dist.all_gather_into_tensor(everything, found.contiguous())
        return everything[: len(samples)]

    def mean(
        self, model: nn.Module, w: Tensor, samples: Tensor, function: Callable[[nn.Module, Tensor, Tensor], Tensor]
    ) -> Tensor:
        """The mean over all samples of function(model, x, y), which gives the mean over the samples of a batch.

        The samples pass in chunks; the model has weights w, and afterwards keeps them and is in evaluation mode.
        """
        set_weights(model, w)
        model.eval()
        mine = samples.tensor_split(ranks.COUNT)[ranks.RANK].to(self.device)
        chunks, has_any = (mine.split(self.chunk), True) if len(mine) else ([samples[:1].to(self.device)], False)
        with self.autocast():
            sums = [function(model, self.batch(p), self.y[p]).float() * len(p) for p in chunks]
        total = torch.stack(sums).sum(0) * has_any
        if ranks.COUNT > 1:
            dist.all_reduce(total)
        return total / len(samples)

    def evaluate(self, model: nn.Module, w: Tensor, parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Accuracy and mean cross-entropy of the model with weights w on each part, two tensors [len(parts)]."""
        samples = torch.cat(list(parts)).to(self.device)
        logits, y = self.predict(model, w, samples), self.y[samples]
        sizes = [len(p) for p in parts]
        right = (logits.argmax(1) == y).float().split(sizes)
        loss = F.cross_entropy(logits, y, reduction="none").split(sizes)
        return torch.stack([r.mean() for r in right]), torch.stack([part.mean() for part in loss])
