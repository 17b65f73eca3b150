"""Several processes that are one run: the ranks that `torchrun --nproc-per-node N` starts.

Each of them runs the whole program. What costs time is shared out among them, what they found is exchanged, and each
takes the same server's step. Only the first writes and prints. Each computes the server's step for itself; on unlike
machines, rounding could make them decide differently.
"""

import heapq
import os
from collections.abc import Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

RANK, COUNT = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # torchrun sets them


def join(device: torch.device) -> None:
    """Lets the ranks, each with a device of this type, find each other, if there are several."""
    if COUNT > 1 and not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(days=7))  # a client's local epochs may take hours


def meet() -> None:
    """Waits for all ranks."""
    if COUNT > 1:
        dist.all_reduce(torch.zeros(1))


@contextmanager
def first_rank_first():
    """Inside, the first rank goes first: it downloads a data set, and the others find it. They have join()ed before."""
    if RANK > 0:
        meet()
    yield
    if RANK == 0:
        meet()


def leave() -> None:
    """The end of what join() began."""
    if dist.is_initialized():
        dist.destroy_process_group()


def share_out(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Which pieces of work each rank does: the largest first, to whoever has least. Ties go to the first."""
    load, pieces = [(0, r) for r in range(count)], [[] for _ in range(count)]
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        work, r = load[0]
        heapq.heapreplace(load, (work + sizes[i], r))
        pieces[r].append(i)
    return pieces
