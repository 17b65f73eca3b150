"""Several processes that work on one run, called ranks: `--processes N`, or `torchrun` for several machines.

Every rank runs the whole program. The ranks share the training and the evaluation, exchange the results, and then all
compute the same server step. Only the first rank writes files and prints. In a program that launch() runs, each rank
computes with one thread, so a result depends neither on the number of ranks nor on the number of cores.
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

RANK, COUNT = 0, 1
if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun has started this program
    RANK, COUNT = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
PR_SET_PDEATHSIG = 1  # of Linux's prctl.h
_is_program, _helpers, _store = False, [], None  # _helpers: process ids of the ranks that start() has forked


def begin() -> None:
    """Says that a program begins here. start() may fork it, because nothing has been computed in threads yet."""
    global _is_program
    _is_program = True
    torch.set_num_threads(1)
    if RANK > 0:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115


def cores() -> int:
    """How many cores this program may use, by its affinity and its container (cgroup 2); 1 where it cannot fork."""
    count = len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1
    with suppress(OSError, ValueError):  # there is no such file, or it says "max"
        quota, period = map(int, Path("/sys/fs/cgroup/cpu.max").read_text().split())
        count = min(count, max(1, round(quota / period)))
    return count


def start(processes: int | None, device: str, most: int) -> None:
    """Forks this program, so that there are `processes` ranks, but no more than `most` and than GPUs, if it uses them.

    The default is one rank for each GPU, or else for each core. The helpers return from here as ranks 1, 2, ... They
    share the memory of what is loaded by now, and the system ends them when the first rank ends. Only the first call of
    a program does this, and only after begin(). Raises UserError if this system cannot fork safely, or if torchrun has
    already started the ranks and `processes` is given, too.
    """
    global RANK, COUNT, _store
    gpus = torch.cuda.device_count() if device in ("auto", "cuda") else int(device.startswith("cuda"))
    count = min(processes or gpus or cores(), most, gpus or most)
    if COUNT > 1 and processes and not _store:
        raise UserError("--processes: torchrun says how many there are; leave it out")
    if COUNT > 1 or count == 1 or not _is_program:
        return
    if sys.platform != "linux":
        raise UserError("--processes: only Linux can fork a program safely; use --processes 1, or torchrun")
    from torch import _dynamo  # noqa: F401  (the first optimizer needs it, which would take seconds in every process)

    if sys.stdout:
        sys.stdout.flush()
    parent, COUNT, listener = os.getpid(), count, socket.create_server(("127.0.0.1", 0))
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the first rank alone
    for rank in range(1, count):
        if pid := os.fork():
            _helpers.append(pid)
            continue
        RANK, sys.stdout = rank, open(os.devnull, "w")  # noqa: SIM115
        _helpers.clear()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        break
    if RANK == 0:
        signal.signal(signal.SIGINT, handler)
        signal.signal(signal.SIGCHLD, check_helpers)
        check_helpers()  # one may have ended before
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    port, listen = listener.getsockname()[1], {"master_listen_fd": listener.detach()} if RANK == 0 else {}
    _store = dist.TCPStore("127.0.0.1", port, is_master=RANK == 0, wait_for_workers=False, **listen)


def check_helpers(*_) -> None:
    """Ends the first rank, wherever it is at this moment, when a helper has failed: raises ChildProcessError."""
    for pid in _helpers:
        end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if end and end.si_status:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # one message is enough
            memory = ", perhaps for lack of memory: use fewer --processes" if end.si_status == signal.SIGKILL else ""
            killed = f"was killed by signal {end.si_status}{memory}"
            raise ChildProcessError(f"a helper process {'failed' if end.si_code == os.CLD_EXITED else killed}")


def join(device: torch.device) -> None:
    """Connects the ranks, if there are several. Each rank has one device of this type."""
    if COUNT > 1 and not dist.is_initialized():
        if _store:
            _store.add("here", 1)
        while _store and _store.add("here", 0) < COUNT:
            check_helpers()
            time.sleep(0.01)  # lets signals through, while the next call would not before all ranks are here
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        patience = timedelta(days=7)  # one client may train for hours
        dist.init_process_group(backend, store=_store, rank=RANK, world_size=COUNT, timeout=patience)


def meet() -> None:
    """Waits until all ranks are here. Unlike dist.barrier, this lets Ctrl-C through."""
    sum_over(torch.zeros(1))


def leave() -> None:
    """Ends the helpers, and disconnects the ranks."""
    global COUNT, _store
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if _helpers:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C would leave some of them behind
    for pid in _helpers:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    _helpers.clear()
    if dist.is_initialized():
        dist.destroy_process_group()
    if _store:
        COUNT, _store = 1, None


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
