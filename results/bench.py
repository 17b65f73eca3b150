"""How fast this project is on your machine: python -m results.bench

FedAvg's local training is compared with a bare loop: one client trains the cnn for an epoch on
1,000 images of noise, four times, of which the first warms up. The bare loop calls client_update in
float32 on batches in memory. The trainer, which shuffles and converts the images, works in float32
and in the precision that a run would choose. All use all cores here, while a run has one thread per
process.
"""

import time
from argparse import Namespace
from contextlib import nullcontext

import torch

from common import devices, models, train
from fedavg import client_update


def main():
    device = devices.pick_device("auto")
    x = torch.randint(256, (1000, 1, 28, 28), dtype=torch.uint8, device=device)
    y = torch.randint(10, (1000,), device=device)
    batches = [*zip((x.float() / 127.5 - 1).split(64), y.split(64), strict=True)]
    plain, model = (models.build("cnn", (1, 28, 28), 10).to(device) for _ in range(2))
    model.to(memory_format=torch.channels_last)  # as in a run
    theta = train.get_weights(model)
    data = Namespace(x=x, y=y, classes=range(10))
    clients = Namespace(train=[torch.arange(1000)])
    args = Namespace(seed=0, local_epochs=1, batch_size=64, lr=0.01, optimizer="sgd", momentum=0)
    trainer = train.Trainer(data, clients, device, args)
    auto = devices.pick_precision("auto", device, "cnn")
    for name in ["bare loop", *{"float32", auto}] * 4:  # in turns: other work slows them alike
        began = time.perf_counter()
        if name == "bare loop":
            optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
            loss = client_update(plain, theta, batches, optimizer, nullcontext)
            loss.item()  # waits for a GPU, as the trainer does
        else:
            args.precision = devices.pick_precision(name, device, "cnn")
            trainer.train(client_update, model, theta, torch.arange(1), 1)
        milliseconds = 1000 * (time.perf_counter() - began)
        print(f"{name}: {milliseconds:.1f} ms per 1,000 samples", flush=True)


if __name__ == "__main__":
    main()
