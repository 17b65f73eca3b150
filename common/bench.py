"""How fast this machine trains, and how near this project comes to that. Runs for nearly three minutes.

    python -m common.bench
    python -m common.bench --csv speed.csv

Every time is a median over repetitions in which all rows take turns, so that what else the machine does hits all
alike. Ratios are to the first row of a group, the bare loop: eager float32 PyTorch over tensors in memory, all that a
user would write by hand, with glibc's malloc tuned as train.py tunes it. Samples are noise of the size of MNIST's, for
speed does not depend on what they show. This is a program beside the library, and therefore may import method files.
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
from torch.utils.flop_counter import FlopCounterMode

import fediir
import uefl
from common import flags, models, ranks, run, splits, train
from common.data import Dataset

CORES = os.cpu_count() or 1


@dataclass
class Row:
    """One thing to time: `work` samples pass in a call of `call`; on all ranks together, or on the first alone."""

    name: str
    work: int
    call: Callable[[], object]
    together: bool = False


@contextmanager
def one_rank():
    """Inside, this process works as if there were no others."""
    count, rank, ranks.COUNT, ranks.RANK = ranks.COUNT, ranks.RANK, 1, 0
    torch.set_num_threads(CORES)
    yield
    ranks.COUNT, ranks.RANK = count, rank
    torch.set_num_threads(max(1, CORES // count))


def timed(groups: list[list[Row]], repetitions: int, device: torch.device) -> list[list[float]]:
    """Median seconds of each row's call, the rows taking turns; a first turn does not count."""
    taken: list[list[list[float]]] = [[[] for _ in group] for group in groups]
    for turn in range(repetitions + 1):
        for group, times in zip(groups, taken, strict=True):
            for row, of_row in zip(group, times, strict=True):
                ranks.meet()
                began = time.perf_counter()
                if row.together:
                    row.call()
                elif ranks.RANK == 0:
                    with one_rank():
                        row.call()
                if device.type == "cuda":
                    torch.cuda.synchronize()
                if turn:
                    of_row.append(time.perf_counter() - began)
    return [[statistics.median(of_row) for of_row in times] for times in taken]


def bare_loop(
    model: nn.Module, x: Tensor, y: Tensor, clients: list[Tensor], epochs: int, batch: int, loss_fn: train.LossFn
) -> None:
    """Local training of all clients from the same weights, as one would write it down."""
    start = copy.deepcopy(model.state_dict())
    for samples in clients:
        model.load_state_dict(start)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(epochs):
            for positions in samples[torch.randperm(len(samples), device=samples.device)].split(batch):
                optimizer.zero_grad()
                loss_fn(model, x[positions], y[positions]).backward()
                optimizer.step()
    model.load_state_dict(start)


def group(
    data: Dataset, device: torch.device, model: nn.Module, name: str, clients: list[Tensor], epochs: int, batch: int,
    loss_fn: train.LossFn = train.cross_entropy, by_hand: nn.Module | None = None,
) -> list[Row]:  # fmt: skip
    """Local training of these clients by the bare loop and by this project, in each precision and on all ranks.

    by_hand  the model as it is usually written, if not like `model`
    """
    x, y = (data.x.float() / 127.5 - 1).to(device), data.y.to(device)
    by_hand = copy.deepcopy(by_hand or model).to(device, memory_format=torch.contiguous_format)
    ours = model.to(device, memory_format=torch.channels_last)
    work = epochs * sum(map(len, clients))
    on_device = [samples.to(device) for samples in clients]
    rows = [Row(f"{name}: bare loop", work, partial(bare_loop, by_hand, x, y, on_device, epochs, batch, loss_fn))]
    for together in (False, True) if ranks.COUNT > 1 else (False,):
        on_gpu = [("bfloat16", True)] if device.type == "cuda" else []
        for precision, graphs in [("float32", False), ("bfloat16", False), *on_gpu]:
            trainer = train.Trainer(
                data, device, seed=0, epochs=epochs, batch_size=batch, lr=0.01, precision=precision, graphs=graphs
            )  # fmt: skip
            call = partial(
                trainer.local_updates, ours, train.get_weights(ours), torch.arange(len(clients)), clients, 1, loss_fn
            )
            where = f", {ranks.COUNT} ranks" if together else ""
            recorded = ", CUDA graphs" if graphs else ""
            rows.append(Row(f"{name}: here, {precision}{recorded}{where}", work, call, together))
    return rows


def products(device: torch.device, precision: torch.dtype) -> float:
    """The rate of a large matrix product in FLOP/s: what the hardware could do."""
    n = 8192 if device.type == "cuda" else 2048
    a, b = (torch.randn(n, n, device=device).to(precision) for _ in range(2))
    return 2 * n**3 / timed([[Row("", 0, lambda: a @ b)]], 5, device)[0][0]


def flop_of(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Floating-point operations of a training step, for one sample."""
    with FlopCounterMode(display=False) as counter:
        F.cross_entropy(model(x), y).backward()
    return counter.get_total_flops() / len(x)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", metavar="FILE", help="write the table there, too")
    parser.add_argument("--repetitions", type=flags.at_least(1), default=3, help="of each row")
    args = parser.parse_args(argv)
    count = torch.cuda.device_count() or min(CORES, 8)
    if ranks.COUNT == 1 and count > 1:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
        os.execv(sys.executable, [*torchrun, "-m", "common.bench", *sys.argv[1:]])
    device = train.pick_device("auto")
    torch.set_num_threads(max(1, CORES // ranks.COUNT))

    rng, torch_rng = np.random.default_rng(0), torch.Generator().manual_seed(0)
    y = torch.randint(10, (60_000,), generator=torch_rng)
    x = torch.randint(256, (60_000, 1, 28, 28), generator=torch_rng, dtype=torch.uint8)
    data = Dataset("noise", x, y, torch.arange(60_000), torch.arange(0), list("0123456789"))
    of_all = splits.dirichlet(y, 100, 0.1, rng)
    some = [of_all[k] for k in splits.draw(torch.arange(100), 10, rng)]
    quarter = [samples[: len(samples) // 4] for samples in some]
    four, small = ([samples[:size] for samples in some[:4]] for size in (128, 60))
    with train.seeded(torch.device("cpu"), 0, "model"):
        cnn, convnet = (models.build(name, (1, 28, 28), 10) for name in ("cnn", "convnet"))
        encoder = models.build("resblocks", (1, 28, 28), 10, width=0.125, dropout=0.1)
    relu_first = nn.Sequential(*(cnn.features[i] for i in (0, 2, 1, 3, 5, 4)), *cnn.classifier)
    codebook = uefl.ExtensibleCodebook(64, 64, segments=8)
    tokens = uefl.UEFL(encoder.features, codebook, encoder.classifier, token_norm=True)
    gradient = torch.zeros(sum(p.numel() for p in convnet.classifier.parameters()), device=device)
    iir = partial(fediir.fediir_loss, global_gradient=gradient, gamma=1e-2)

    groups = [
        group(data, device, cnn, "cnn, batch 64", quarter, 5, 64, by_hand=relu_first),
        group(data, device, cnn, "cnn, clients of 60, batch 16", small, 5, 16, by_hand=relu_first),
        group(data, device, convnet, "FedIIR, convnet, batch 64", four, 1, 64, iir),
        group(data, device, convnet, "FedIIR, clients of 60, batch 16", small[:2], 1, 16, iir),
        group(data, device, tokens, "UEFL, resblocks / 8, batch 64", four, 2, 64, uefl.uefl_loss),
        group(data, device, tokens, "UEFL, clients of 60, batch 16", small, 1, 16, uefl.uefl_loss),
    ]
    if device.type == "cuda":  # work that fills a GPU, and beside it the same network's training on all data at once
        pixels = torch.randint(256, (16_000, 3, 32, 32), generator=torch_rng, dtype=torch.uint8)
        colour = Dataset("noise", pixels, y[:16_000], torch.arange(16_000), torch.arange(0), data.classes)
        with train.seeded(torch.device("cpu"), 0, "model"):
            large = models.build("cnn", (3, 32, 32), 10)
        of_400 = list(torch.arange(16_000).split(400))
        groups += [
            group(colour, device, large, "CIFAR-10's cnn, 40 clients of 400, batch 16", of_400, 1, 16),
            group(colour, device, large, "CIFAR-10's cnn, 40 clients of 400, batch 128", of_400, 1, 128),
            group(colour, device, large, "CIFAR-10's cnn, central, batch 1024", [torch.arange(16_000)], 1, 1024),
        ]
    for precision in ("float32", "bfloat16"):
        trainer = train.Trainer(data, device, seed=0, epochs=1, batch_size=64, lr=0.01, precision=precision)
        for at, name, model in ((0, "cnn", cnn), (2, "FedIIR", convnet), (4, "UEFL", tokens)):
            evaluate = partial(trainer.evaluate, model, train.get_weights(model), [data.train[:2000]])
            groups[at].append(Row(f"{name}: evaluation, {precision}", 2000, evaluate))
        step = partial(trainer.local_updates, convnet, train.get_weights(convnet), torch.arange(4), four, 1)
        gradients = partial(fediir.client_gradients, trainer, convnet, train.get_weights(convnet), four)
        groups[2].append(Row(f"FedIIR: FedAvg's local training, {precision}", 512, step))
        groups[2].append(Row(f"FedIIR: global gradient, {precision}", 512, gradients))

    rates = {name: products(device, getattr(torch, name)) for name in ("float32", "bfloat16")}
    times = timed(groups, args.repetitions, device)
    rows = []
    for of_group, of_times in zip(groups, times, strict=True):
        base = of_times[0] / of_group[0].work
        for row, seconds in zip(of_group, of_times, strict=True):
            rows.append([row.name, f"{1e6 * seconds / row.work:.1f}", f"{seconds / row.work / base:.2f}"])
    header = ["", "ms per 1,000 samples", "ratio"]
    if ranks.RANK == 0:
        gpu = torch.cuda.get_device_name() if device.type == "cuda" else "no GPU"
        print(f"{CORES} cores, {gpu}, torch {torch.__version__}, medians of {args.repetitions}")
        flop = flop_of(cnn, x[:64].float().to(device), y[:64].to(device))
        for name, at in (("float32", 1), ("bfloat16", 2)):
            reached = flop * groups[0][at].work / times[0][at]
            print(f"matrix product in {name}: {rates[name] / 1e9:.0f} GFLOP/s, of which training the cnn reaches "
                  f"{reached / rates[name]:.0%}")  # fmt: skip
        run.table("local training", header, rows)
        if args.csv:
            with open(args.csv, "w", newline="") as f:
                csv.writer(f, lineterminator="\n").writerows([header, *rows])
    ranks.leave()


if __name__ == "__main__":
    main()
