"""How fast this project is on your machine: python -m results.bench [REPETITIONS]

First, FedAvg's local training, compared with a bare loop: ten clients train the cnn for five epochs on noise. A time is
the median of the repetitions (default: 3), in ms per 1,000 samples. The bare loop is eager float32 PyTorch over tensors
in memory, as a user would write it by hand. Both use all cores here, while a run has one thread per process.

Then whole programs, from their start to their end, in seconds: in one process, in two, and two runs at the same time.
The rows of each part take turns, so that other work slows all of them alike.
"""

import copy
import statistics
import subprocess
import sys
import tempfile
import time

import torch
import torch.nn.functional as F

import fedavg
from common import models, train
from common.data import Dataset


def bare_loop(model, x, y, clients) -> None:
    start = copy.deepcopy(model.state_dict())
    for samples in clients:
        model.load_state_dict(start)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(5):
            for positions in samples[torch.randperm(len(samples), device=x.device)].split(64):
                optimizer.zero_grad()
                F.cross_entropy(model(x[positions]), y[positions]).backward()
                optimizer.step()


def training(repetitions: int) -> dict[str, list[float]]:
    """The times of local training by row, in ms per 1,000 samples."""
    device = train.pick_device("auto")
    precisions = {"float32", train.pick_precision("auto", device)}  # bfloat16 takes hours on hardware without it
    times = {"bare loop": [], **{f"here, {precision}": [] for precision in sorted(precisions, reverse=True)}}
    x, y = torch.randint(256, (4000, 1, 28, 28), dtype=torch.uint8), torch.randint(10, (4000,))
    data = Dataset("noise", x, y, torch.arange(4000), torch.arange(0), list("0123456789"))
    clients, plain = torch.arange(4000).split(400), models.build("cnn", (1, 28, 28), 10).to(device)
    images, labels, on_device = (x.float() / 127.5 - 1).to(device), y.to(device), [c.to(device) for c in clients]
    model = copy.deepcopy(plain).to(memory_format=torch.channels_last)
    for repetition in range(repetitions + 1):
        for name, of_row in times.items():
            began = time.perf_counter()
            if name == "bare loop":
                bare_loop(plain, images, labels, on_device)
            else:
                settings = {"seed": 0, "epochs": 5, "batch_size": 64, "lr": 0.01, "precision": name.split()[1]}
                trainer, w = train.Trainer(data, device, **settings), train.get_weights(model)
                trainer.local_updates(fedavg.client_update, model, w, torch.arange(10), clients, 1)
            if device.type == "cuda":
                torch.cuda.synchronize()
            if repetition:  # the first warms up
                of_row.append(1e6 * (time.perf_counter() - began) / 20_000)
    return times


def programs(command: str, repetitions: int) -> dict[str, list[float]]:
    """The times of a program by row, in seconds."""
    rows = {"one process": ["1"], "two processes": ["2"], "two runs at once, of two processes each": ["2", "2"]}
    times = {f"{command}, {name}": [] for name in rows}
    for _ in range(repetitions):
        for of_row, processes in zip(times.values(), rows.values(), strict=True):
            with tempfile.TemporaryDirectory() as folder:
                began = time.perf_counter()
                started = [
                    subprocess.Popen(
                        [sys.executable, *command.split(), "--processes", count, "--out", f"{folder}/{i}"],
                        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                    )
                    for i, count in enumerate(processes)
                ]  # fmt: skip
                assert not any(run.wait() for run in started), command
                of_row.append(time.perf_counter() - began)
    return times


def show(times: dict[str, list[float]], unit: str) -> None:
    """Prints median, smallest and largest time of each row, and the median's ratio to the first row's."""
    base = statistics.median(next(iter(times.values())))
    for name, of_row in times.items():
        median, low, high = statistics.median(of_row), min(of_row), max(of_row)
        print(f"{name}: {median:.1f} {unit} ({low:.1f} to {high:.1f}), ratio {median / base:.2f}", flush=True)


def main() -> None:
    repetitions = int((sys.argv[1:] or [3])[0])
    show(training(repetitions), "ms per 1,000 samples")
    for command in ("fedavg.py --no-compare --rounds 6", "uefl.py --no-compare"):
        show(programs(command, repetitions), "s")


if __name__ == "__main__":
    main()
