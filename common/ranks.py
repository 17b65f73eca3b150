"""Several processes that work on one run, called ranks: `--processes N`, or `torchrun` for several machines.

Every rank runs the whole program. The ranks share the training and the evaluation, exchange the results, and then all
compute the same server step. Only the first rank writes files and prints. On a CPU each rank computes with one thread,
so a result depends neither on the number of ranks nor on the number of cores.
"""

import ctypes
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from common import UserError

RANK, COUNT = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # torchrun sets them
PR_SET_PDEATHSIG = 1  # of Linux's prctl.h
_is_program, _helpers, _store = False, [], None  # _helpers: process ids of the ranks that start() has forked


def begin() -> None:
    """Says that a program begins here. start() may fork it, as it has no other threads, and it gets no more of them."""
    global _is_program
    _is_program = True
    torch.set_num_threads(1)
    if RANK > 0:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115


def cores() -> int:
    """How many CPU cores this program may use, by its affinity and by the limit of its container (cgroup 2)."""
    count = len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1
    with suppress(OSError, ValueError):  # there is no such file, or it says "max"
        quota, period = map(int, Path("/sys/fs/cgroup/cpu.max").read_text().split())
        count = min(count, max(1, round(quota / period)))
    return count


def start(processes: int | None, device: str, most: int) -> None:
    """Forks this program, so that there are `processes` ranks, but no more than `most` and than GPUs, if it uses them.

    The default is one rank for each GPU, or else for each core. The helpers return from here as ranks 1, 2, ... They
    share the memory of what is loaded by now, and the system ends them when the first rank ends. Nothing happens if
    torchrun has started the ranks, or if begin() was not called. Raises UserError if this system cannot fork safely.
    """
    global RANK, COUNT, _store
    gpus = torch.cuda.device_count() if device in ("auto", "cuda") else int(device.startswith("cuda"))
    count = min(processes or gpus or cores(), most, gpus or most)
    if COUNT > 1 or count == 1 or not _is_program:
        return
    if sys.platform != "linux":
        raise UserError("--processes: only Linux can fork a program safely; use --processes 1, or torchrun")
    sys.stdout.flush()
    first, COUNT, door = os.getpid(), count, socket.create_server(("127.0.0.1", 0))
    signal.signal(signal.SIGCHLD, _helper_ended)
    for rank in range(1, count):
        _helpers.append(os.fork())
        if not _helpers[-1]:
            RANK, sys.stdout = rank, open(os.devnull, "w")  # noqa: SIM115
            _helpers.clear()
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the first rank
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != first:
                os._exit(1)
            break
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    port, listen = door.getsockname()[1], {"master_listen_fd": door.detach()} if RANK == 0 else {}
    _store = dist.TCPStore("127.0.0.1", port, is_master=RANK == 0, wait_for_workers=False, **listen)


def _helper_ended(*_) -> None:
    """Ends the first rank when a helper has failed, wherever the first rank is at this moment."""
    for pid in _helpers:
        end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if end and end.si_status:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # one message is enough
            killed = f"killed by signal {end.si_status}, perhaps for lack of memory: use fewer --processes"
            raise ChildProcessError(f"a helper process {'failed' if end.si_code == os.CLD_EXITED else 'was ' + killed}")


def join(device: torch.device) -> None:
    """Connects the ranks, if there are several. Each rank has one device of this type."""
    if COUNT > 1 and not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        forever = timedelta(days=7)  # one client may train for hours
        dist.init_process_group(backend, store=_store, rank=RANK, world_size=COUNT, timeout=forever)


def meet() -> None:
    """Waits until all ranks are here."""
    sum_over(torch.zeros(1))


def leave() -> None:
    """Ends the helpers, and disconnects the ranks."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for pid in _helpers:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    if dist.is_initialized():
        dist.destroy_process_group()


def share_out(sizes: Sequence[int]) -> list[int]:
    """Divides pieces of work of these sizes among the ranks. Returns the indices of this rank's pieces.

    The largest piece goes first, and each goes to the rank with the least work, or the first of those with equal work.
    """
    load, mine = [0] * COUNT, []
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        rank = load.index(min(load))
        load[rank] += sizes[i]
        if rank == RANK:
            mine.append(i)
    return mine


def sum_over(values: Tensor) -> Tensor:
    """The sum of the ranks' tensors, in place."""
    if COUNT > 1:
        work = dist.all_reduce(values, async_op=True)
        while not work.is_completed():
            time.sleep(0.001)  # unlike work.wait(), this lets Ctrl-C through
        work.wait()
    return values


def gather(results: dict[int, Tensor]) -> dict[int, Tensor]:
    """Each rank's results, joined into one dict. The keys of the ranks must differ."""
    if COUNT == 1:
        return results
    meet()
    of_ranks: list[dict] = [{}] * COUNT
    dist.all_gather_object(of_ranks, {i: result.cpu() for i, result in results.items()})
    return {i: result for results in of_ranks for i, result in results.items()}
