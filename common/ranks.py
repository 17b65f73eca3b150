"""Several processes that work on one run, called ranks: `--processes N`, or torchrun.

With --processes, the program forks the ranks after it has loaded the data (start), and with
torchrun each rank is a program of its own. All of them go through all rounds. They share the
training and the evaluation, exchange the results, and then all compute the same server step. Only
the first rank writes files and prints. Each rank computes with one thread, so a result depends
neither on the number of ranks nor on the number of cores.
"""

import logging
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
from datetime import timedelta
from functools import lru_cache
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing import ProcessExitedException, start_processes

from common import UserError, first_line

RANK, COUNT = 0, 1
LOCAL_RANK = 0  # among the ranks of this machine
MEETING = None  # a file in which the ranks find each other, or None for torchrun's environment
if {"TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE"} <= set(os.environ):  # torchrun started this
    RANK, COUNT = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    LOCAL_RANK = int(os.environ["LOCAL_RANK"])
A_WORD_AFTER = 600  # seconds
may_fork = False  # only a program from the command line may, on Linux
_all = None  # the group of all ranks, which wait for each other for days


def how_many(processes, device, most):
    """How many ranks to fork: `processes`, or one per GPU or core, but at most `most`.

    0 if this process itself should do the work: one of torchrun's ranks, a notebook, or another
    system than Linux. This process must not compute on a GPU, because the ranks then could not.
    """
    if COUNT > 1 or not may_fork:
        return 0
    gpus = torch.cuda.device_count() if device in ("auto", "cuda") else int("cuda" in device)
    return min(processes or gpus or len(os.sched_getaffinity(0)), most)


def start(work, count):
    """Runs work() in `count` ranks on this machine. Returns what it returned in the first one.

    The ranks are forked, so they share the memory of what is loaded by now. If one ends early, so
    do the others. Raises the UserError or OSError that a rank has met, or ChildProcessError if one
    was killed.
    """
    from torch import _dynamo  # noqa: F401  (the first optimizer would, for seconds, in each rank)

    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            arguments = (work, count, folder)
            ranks = start_processes(_rank, arguments, count, join=False, start_method="fork")
            while not ranks.join(grace_period=1):
                pass
            return pickle.loads((folder / "result0").read_bytes())
        except ProcessExitedException as e:
            if errors := [*folder.glob("error*")]:
                raise pickle.loads(errors[0].read_bytes()) from None
            raise ChildProcessError(
                f"a process was ended by {e.signal_name or 'sys.exit'}: if memory is short, use "
                "fewer --processes"
            ) from e
        finally:
            for process in multiprocessing.active_children():
                process.kill()
                process.join()


def _rank(rank, work, count, folder):
    """Connects this rank, runs work(), and leaves its result or error in the folder."""
    global RANK, COUNT, LOCAL_RANK, MEETING
    RANK = LOCAL_RANK = rank
    COUNT = count
    MEETING = str(folder / "meeting")
    for ends in (signal.SIGINT, signal.SIGTERM):  # at once, and so does the parent's death
        signal.signal(ends, signal.SIG_DFL)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        connect()
        (folder / f"result{rank}").write_bytes(pickle.dumps(work()))
        disconnect()
    except (UserError, OSError) as e:
        (folder / f"error{rank}").write_bytes(pickle.dumps(e))
        sys.exit(1)
    except RuntimeError:
        time.sleep(0.5)  # if another rank was killed, the parent should find that one first
        raise


def connect():
    """Connects the ranks, if there are several, and lets only the first one print.

    They wait a minute for each other, about another for the connection, and then for days, because
    a client may train for hours.
    Raises UserError if they cannot connect.
    """
    global _all
    if COUNT == 1:
        return
    if RANK:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  (open until the program ends)
    minute = timedelta(minutes=1)
    try:
        if MEETING:
            store = dist.FileStore(MEETING, COUNT)
        else:  # torchrun's, in which the addresses of ranks that it has restarted would still be
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            store, *_ = next(dist.rendezvous("env://", RANK, COUNT, timeout=minute))
            store = dist.PrefixStore(attempt, store)
        store.set(f"here {RANK}", "")
        store.wait([f"here {rank}" for rank in range(COUNT)], minute)
        # Who is connected to waits five times as long as who connects
        dist.init_process_group("gloo", None, timedelta(seconds=15), COUNT, RANK, store)
        _all = dist.new_group(timeout=timedelta(days=7))
    except (RuntimeError, ValueError) as e:
        raise UserError(
            f"the processes cannot connect to each other ({first_line(e)}): use --processes 1, or "
            "with several machines name their network in GLOO_SOCKET_IFNAME, such as eth0"
        ) from e


def disconnect():
    """Ends the connections."""
    if COUNT > 1:
        dist.destroy_process_group()


def exchange(mine):
    """What all ranks hand in here, in their order. Says so if one of them takes long."""
    handed_in = [mine] * COUNT
    if COUNT > 1:
        word = [f"\nprocess {RANK} waits for one that works, or hangs: then try --processes 1\n"]
        timer = threading.Timer(A_WORD_AFTER, sys.stderr.write, word)
        timer.daemon = True  # it ends with the program if the other one has ended
        timer.start()
        dist.all_gather_object(handed_in, mine, group=_all)
        timer.cancel()
    return handed_in


def barrier():
    """Waits for all ranks."""
    exchange(None)


def agree(facts, advice):
    """Raises UserError if the ranks differ in these facts, so that they would not fit together."""
    others = exchange(facts)
    names = [name for name in facts if any(other.get(name) != facts[name] for other in others)]
    if names:
        raise UserError(f"the processes differ in their {' and '.join(names)}: {advice}")


def say(text):
    """Prints a line on stderr, on each machine once. Control characters of a name are escaped."""
    if not LOCAL_RANK:
        shown = [c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text]
        print("".join(shown), file=sys.stderr)


say_once = lru_cache(say)


def share_out(sizes):
    """Divides pieces of work of these sizes among the ranks. Returns the indices of this rank's.

    The largest piece goes first, and each goes to the rank with the least work, or the first of
    those with equal work.
    """
    load = [0] * COUNT
    mine = []
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        rank = load.index(min(load))
        load[rank] += sizes[i]
        if rank == RANK:
            mine.append(i)
    return mine


def gather(results):
    """Results 0, 1, 2 and so on, of which each rank has some: all of them, in this order."""
    if COUNT > 1:
        parts = exchange({i: tuple(t.cpu() for t in result) for i, result in results.items()})
        results = {i: result for part in parts for i, result in part.items()}
    return [results[i] for i in sorted(results)]


def add_up(table):
    """Replaces the table by the sum of all ranks' tables. In most, a row holds zeros."""
    if COUNT > 1:
        barrier()  # which says so if it takes long
        total = table.cpu()  # by gloo, which notices if a rank has ended; NCCL would wait
        dist.all_reduce(total, group=_all)
        table.copy_(total)
