"""A step of local training: loss, gradients, optimizer; on a GPU, if asked to, recorded once and then replayed.

A small client's step is some forty small kernels, and a GPU waits for Python to start each. A CUDA graph starts all of
them at once. That is --cuda-graphs; see results/speed.md for what is known of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn as nn
from torch import Tensor

if TYPE_CHECKING:
    from common.train import LossFn, Trainer


class Step:
    """A client's steps, one call each, with an optimizer of its own; `total` adds up loss times samples."""

    def __init__(self, trainer: Trainer, model: nn.Module, loss_fn: LossFn):
        self.trainer, self.model, self.loss_fn = trainer, model, loss_fn
        if trainer.optimizer == "adam":
            in_graph = trainer.graphs and trainer.device.type == "cuda"
            self.optimizer = torch.optim.Adam(model.parameters(), lr=trainer.lr, fused=True, capturable=in_graph)
        else:
            self.optimizer = torch.optim.SGD(model.parameters(), lr=trainer.lr, momentum=trainer.momentum, fused=True)
        self.total = torch.zeros((), device=trainer.device)

    def __call__(self, positions: Tensor) -> None:
        """Learns from the samples at these positions in the pool."""
        self.optimizer.zero_grad()
        with self.trainer.autocast():
            loss = self.loss_fn(self.model, self.trainer.batch(positions), self.trainer.y[positions])
        loss.backward()
        self.optimizer.step()
        self.total += loss.detach() * len(positions)


class RecordedStep(Step):
    """The same for one client after the other, full batches as a CUDA graph.

    The graph knows tensors by their addresses: it fits() a model as long as these stay, and only the loss that was
    recorded, whose own tensors must change in place (as FedIIR's does). A batch that is not full is taken as Step
    takes it.
    """

    def __init__(self, trainer: Trainer, model: nn.Module, loss_fn: LossFn):
        super().__init__(trainer, model, loss_fn)
        self.addresses = addresses(model)
        self.positions = torch.zeros(trainer.batch_size, dtype=torch.long, device=trainer.device)
        tensors = [*model.parameters(), *model.buffers()]
        before = [t.detach().clone() for t in tensors]
        with torch.random.fork_rng([trainer.device] if trainer.device.type == "cuda" else []):
            self.replay = record(lambda: super(RecordedStep, self).__call__(self.positions))
        with torch.no_grad():
            for t, was in zip(tensors, before, strict=True):
                t.copy_(was)

    def fits(self, model: nn.Module, loss_fn: LossFn) -> bool:
        return self.loss_fn is loss_fn and self.addresses == addresses(model)

    def restart(self) -> None:
        """For the next client: an optimizer that remembers nothing, and no loss so far."""
        self.total.zero_()
        for of_parameter in self.optimizer.state.values():
            for remembered in of_parameter.values():
                if isinstance(remembered, Tensor):
                    remembered.zero_()

    def __call__(self, positions: Tensor) -> None:
        if len(positions) < len(self.positions):
            super().__call__(positions)
        else:
            self.positions.copy_(positions)
            self.replay()


def addresses(model: nn.Module) -> list[int]:
    return [t.data_ptr() for t in (*model.parameters(), *model.buffers())]


def record(step: Callable[[], None]) -> Callable[[], None]:
    """Captures `step` as a CUDA graph and returns its replay; takes three steps first, to warm up."""
    aside = torch.cuda.Stream()  # as PyTorch asks for: libraries set themselves up before a capture
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay
