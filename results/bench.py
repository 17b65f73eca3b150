"""How fast this project is on your machine: python -m results.bench

FedAvg's local training is compared with a bare loop: one client trains the cnn on 1,000
images of noise, four times, of which the first warms up. The bare loop is eager float32 PyTorch
over tensors in memory, as a user would write it by hand. Both use all cores here, while a run has
one thread per process.
"""

import time
from argparse import Namespace
from functools import partial

import torch
import torch.nn.functional as F

import fedavg
from common import devices, models, train

SETTINGS = {
    "seed": 0, "local_epochs": 1, "batch_size": 64, "lr": 0.01, "optimizer": "sgd", "momentum": 0.0,
}  # fmt: skip


def bare_loop(model, x, y):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for positions in torch.randperm(len(x), device=x.device).split(64):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x[positions]), y[positions])
        loss.backward()
        optimizer.step()
    loss.item()  # waits for a GPU, as the trainer does


def main():
    device = devices.pick_device("auto")
    x = torch.randint(256, (1000, 1, 28, 28), dtype=torch.uint8, device=device)
    y = torch.randint(10, (1000,), device=device)
    plain, model = (models.build("cnn", (1, 28, 28), 10).to(device) for _ in range(2))
    model.to(memory_format=torch.channels_last)  # as in a run
    works = {"bare loop": partial(bare_loop, plain, x.float() / 127.5 - 1, y)}
    data, clients = Namespace(x=x, y=y, classes=range(10)), Namespace(train=[torch.arange(1000)])
    for precision in ("float32", devices.pick_precision("auto", device)):
        trainer = train.Trainer(data, clients, device, Namespace(**SETTINGS, precision=precision))
        job = (fedavg.client_update, model, train.get_weights(model), torch.arange(1), 1)
        works[f"here, {precision}"] = partial(trainer.train, *job)
    for _ in range(4):  # the first time warms up
        for name, work in works.items():  # in turns, so that other work slows all of them alike
            began = time.perf_counter()
            work()
            milliseconds = 1000 * (time.perf_counter() - began)
            print(f"{name}: {milliseconds:.1f} ms per 1,000 samples", flush=True)


if __name__ == "__main__":
    main()
