"""How fast this project is on your machine: python -m results.bench [REPETITIONS]

FedAvg's local training is compared with a bare loop: ten clients train the cnn for five epochs on
noise. A time is the median of the repetitions (default: 3), in ms per 1,000 samples. The bare loop
is eager float32 PyTorch over tensors in memory, as a user would write it by hand. Both use all
cores here, while a run has one thread per process.
"""

import copy
import statistics
import sys
import time
from argparse import Namespace
from functools import partial

import torch
import torch.nn.functional as F

import fedavg
from common import devices, models, train
from common.data import Dataset
from common.splits import Clients

SETTINGS = {
    "seed": 0, "local_epochs": 5, "batch_size": 64, "lr": 0.01, "optimizer": "sgd", "momentum": 0.0,
}  # fmt: skip


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


def main() -> None:
    device = devices.pick_device("auto")
    x, y = torch.randint(256, (4000, 1, 28, 28), dtype=torch.uint8), torch.randint(10, (4000,))
    data = Dataset("noise", x, y, torch.arange(4000), torch.arange(0), list("0123456789"))
    held = list(torch.arange(4000).split(400))
    clients = Clients(held, held, 10, 10, [""] * 10, {})
    plain = models.build("cnn", (1, 28, 28), 10).to(device)
    model = copy.deepcopy(plain).to(memory_format=torch.channels_last)
    theta = train.get_weights(model)
    images, labels = (x.float() / 127.5 - 1).to(device), y.to(device)
    on_device = [samples.to(device) for samples in held]
    rows = {"bare loop": partial(bare_loop, plain, images, labels, on_device)}
    for precision in sorted({"float32", devices.pick_precision("auto", device)}, reverse=True):
        trainer = train.Trainer(data, clients, device, Namespace(**SETTINGS, precision=precision))
        job = (fedavg.client_update, model, theta, clients.ids, 1)
        rows[f"here, {precision}"] = partial(trainer.train, *job)
    times = {name: [] for name in rows}
    for _ in range(int((sys.argv[1:] or [3])[0]) + 1):
        for name, work in rows.items():  # in turns, so that other work slows all of them alike
            began = time.perf_counter()
            work()
            if device.type == "cuda":
                torch.cuda.synchronize()
            times[name].append((time.perf_counter() - began) * 1e6 / 20_000)
    for name, (_, *after_warming_up) in times.items():
        middle = statistics.median(after_warming_up)
        print(f"{name}: {middle:.1f} ms per 1,000 samples", flush=True)


if __name__ == "__main__":
    main()
