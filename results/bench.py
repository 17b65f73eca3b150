"""How fast this project trains and evaluates on this machine, compared with a bare loop. Takes about three minutes.

    python -m results.bench
    python -m results.bench --csv speed.csv

Every time is a median over repetitions. The rows take turns, so that other work on the machine slows all of them alike.
A ratio compares a row with the first row of its group, the bare loop: eager float32 PyTorch over tensors in memory, as
a user would write it by hand, with glibc's malloc tuned as in train.py. The samples are noise of the size of MNIST's
images, because the speed does not depend on what an image shows.
"""

import argparse
import copy
import csv
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedavg
import fediir
import uefl
from common import flags, models, ranks, run, splits, train
from common.data import Dataset

CORES, BARE = os.cpu_count() or 1, "bare loop"


@dataclass
class Row:
    """One thing to time. A call processes `work` samples, on all ranks together or on the first one alone."""

    name: str
    work: int
    call: Callable[[], object]
    together: bool = False


@contextmanager
def one_rank():
    """Inside the block, this process works as if it were the only one."""
    count, rank, ranks.COUNT, ranks.RANK = ranks.COUNT, ranks.RANK, 1, 0
    torch.set_num_threads(CORES)
    yield
    ranks.COUNT, ranks.RANK = count, rank
    torch.set_num_threads(max(1, CORES // count))


def timed(rows: list[Row], repetitions: int) -> list[float]:
    """The median seconds of each row's call. The rows take turns, and the first turn does not count."""
    taken: list[list[float]] = [[] for _ in rows]
    for turn in range(repetitions + 1):
        for row, times in zip(rows, taken, strict=True):
            ranks.meet()
            began = time.perf_counter()
            if row.together:
                row.call()
            elif ranks.RANK == 0:
                with one_rank():
                    row.call()
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            if turn:
                times.append(time.perf_counter() - began)
    return [statistics.median(times) for times in taken]


def bare_loop(
    model: nn.Module, x: Tensor, y: Tensor, clients: list[Tensor], epochs: int, batch: int, loss: Callable
) -> None:
    """Local training of all clients from the same weights, as a user would write it by hand."""
    start = copy.deepcopy(model.state_dict())
    for samples in clients:
        model.load_state_dict(start)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(epochs):
            for positions in samples[torch.randperm(len(samples), device=samples.device)].split(batch):
                optimizer.zero_grad()
                loss(model, x[positions], y[positions]).backward()
                optimizer.step()
    model.load_state_dict(start)


def group(
    name: str, data: Dataset, model: nn.Module, clients: list[Tensor], epochs: int, batch: int, *, device: torch.device,
    client_update: Callable, loss: Callable, by_hand: nn.Module | None = None, **shared,
) -> list[Row]:  # fmt: skip
    """Local training of these clients: by the bare loop, then by this project in each precision, then on all ranks.

    client_update  the method's own, with the keyword arguments `shared`
    loss, by_hand  the bare loop's loss(model, x, y), and its model if people usually write that differently
    """
    x, y, work = (data.x.float() / 127.5 - 1).to(device), data.y.to(device), epochs * sum(map(len, clients))
    by_hand = copy.deepcopy(by_hand or model).to(device, memory_format=torch.contiguous_format)
    on_device = [samples.to(device) for samples in clients]
    rows = [Row(f"{name}: {BARE}", work, partial(bare_loop, by_hand, x, y, on_device, epochs, batch, loss))]
    model.to(device, memory_format=torch.channels_last)
    everything = client_update, model, train.get_weights(model), torch.arange(len(clients)), clients, 1
    for together in (False, True) if ranks.COUNT > 1 else (False,):
        for precision in ("float32", "bfloat16"):
            trainer = train.Trainer(data, device, seed=0, epochs=epochs, batch_size=batch, lr=0.01, precision=precision)
            call, where = partial(trainer.local_updates, *everything, **shared), f", {ranks.COUNT} ranks" * together
            rows.append(Row(f"{name}: here, {precision}{where}", work, call, together))
    return rows


def noise(count: int, *shape: int) -> Dataset:
    x, y = torch.randint(256, (count, *shape), dtype=torch.uint8), torch.randint(10, (count,))
    return Dataset("noise", x, y, torch.arange(count), torch.arange(0), list("0123456789"))


def workloads(device: torch.device) -> list[Row]:
    """Everything that is timed. The bare loop of a row is the last one above it."""
    torch.manual_seed(0)  # all ranks need the same samples
    data, rng = noise(60_000, 1, 28, 28), np.random.default_rng(0)
    parts = splits.dirichlet(data.y, 100, 0.1, rng)
    ten = [parts[k][: len(parts[k]) // 4] for k in splits.draw(torch.arange(100), 10, rng)]
    four, small = ([samples[:size] for samples in ten[:4]] for size in (128, 60))
    cnn, convnet = (models.build(name, (1, 28, 28), 10) for name in ("cnn", "convnet"))
    relu_first = nn.Sequential(*(cnn.features[i] for i in (0, 2, 1, 3, 5, 4)), *cnn.classifier)
    encoder = models.build("resblocks", (1, 28, 28), 10, width=0.125, dropout=0.1)
    tokens = uefl.UEFL(encoder.features, uefl.ExtensibleCodebook(64, 64, 8), encoder.classifier, token_norm=True)
    allowed = torch.ones(64, dtype=torch.bool, device=device)
    gradient = torch.zeros(sum(p.numel() for p in convnet.classifier.parameters()), device=device)

    def fedavg_loss(model, x, y):
        return F.cross_entropy(model(x), y)

    def fediir_loss(model, x, y):
        return fediir.fediir_loss(model.features, model.classifier, x, y, gradient, 1e-2)

    def uefl_loss(model, x, y):
        codewords, code_loss, _ = model.codebook(model.encode(x), allowed)
        return F.cross_entropy(model.classify(codewords), y) + code_loss

    def both(name: str, work: int, call: Callable) -> list[Row]:
        trainer = partial(train.Trainer, data, device, seed=0, epochs=1, batch_size=64, lr=0.01)
        return [Row(f"{name}, {p}", work, partial(call, trainer(precision=p))) for p in ("float32", "bfloat16")]

    avg = partial(group, device=device, loss=fedavg_loss, client_update=fedavg.client_update)
    iir = partial(group, device=device, loss=fediir_loss, client_update=fediir.client_update, global_gradient=gradient,
                  gamma=1e-2)  # fmt: skip
    code = partial(group, device=device, loss=uefl_loss, client_update=uefl.client_update, allowed=allowed)
    ids, some, weights = torch.arange(4), list(data.train[:2000].split(500)), train.get_weights
    rows = [
        *avg("cnn, batch 64", data, cnn, ten, 5, 64, by_hand=relu_first),
        *both("cnn: evaluation", 2000, lambda on: on.evaluate(cnn, weights(cnn), some)),
        *avg("cnn, clients of 60, batch 16", data, cnn, small, 5, 16, by_hand=relu_first),
        *iir("FedIIR, convnet, batch 64", data, convnet, four, 1, 64),
        *both("FedIIR: evaluation", 2000, lambda on: on.evaluate(convnet, weights(convnet), some)),
        *both("FedIIR: FedAvg's local training", 512,
              lambda on: on.local_updates(fedavg.client_update, convnet, weights(convnet), ids, four, 1)),
        *both("FedIIR: global gradient", 512,
              lambda on: on.map_clients(fediir.client_gradient, convnet, weights(convnet), ids, four)),
        *iir("FedIIR, clients of 60, batch 16", data, convnet, small[:2], 1, 16),
        *code("UEFL, resblocks / 8, batch 64", data, tokens, four, 2, 64),
        *both("UEFL: evaluation, 20 passes", 2000, lambda on: on.map_clients(
              uefl.client_evaluation, tokens, weights(tokens), ids, some, allowed=allowed, passes=20)),
        *code("UEFL, clients of 60, batch 16", data, tokens, small, 1, 16),
    ]  # fmt: skip
    if device.type == "cuda":  # enough work for a GPU, and for comparison the same network trained on all data at once
        colour, large = noise(16_000, 3, 32, 32), models.build("cnn", (3, 32, 32), 10)
        for size, batch in [(400, 16), (400, 128), (16_000, 1024)]:
            clients = list(colour.train.split(size))
            rows += avg(f"CIFAR-10's cnn, clients of {size}, batch {batch}", colour, large, clients, 1, batch)
    return rows


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", metavar="FILE", help="also write the table to this file")
    parser.add_argument("--repetitions", type=flags.at_least(1), default=3, help="of each row")
    args = parser.parse_args(argv)
    count = torch.cuda.device_count() or min(CORES, 8)
    if ranks.COUNT == 1 and count > 1:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
        os.execv(sys.executable, [*torchrun, "-m", "results.bench", *sys.argv[1:]])
    device = train.pick_device("auto")
    torch.set_num_threads(max(1, CORES // ranks.COUNT))

    rows, cells, base = workloads(device), [], 1.0
    for row, seconds in zip(rows, timed(rows, args.repetitions), strict=True):
        base = seconds / row.work if row.name.endswith(BARE) else base
        cells.append([row.name, f"{1e6 * seconds / row.work:.1f}", f"{seconds / row.work / base:.2f}"])
    header = ["", "ms per 1,000 samples", "ratio"]
    if ranks.RANK == 0:
        gpu = torch.cuda.get_device_name() if device.type == "cuda" else "no GPU"
        print(f"{CORES} cores, {gpu}, torch {torch.__version__}, medians of {args.repetitions}")
        run.table("local training", header, cells)
        if args.csv:
            with open(args.csv, "w", newline="") as f:
                csv.writer(f, lineterminator="\n").writerows([header, *cells])
    ranks.leave()


if __name__ == "__main__":
    main()
