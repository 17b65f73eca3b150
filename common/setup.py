"""From flags to what a method works with: data, clients, model, trainer and run."""

from argparse import Namespace

import torch

from common import UserError, data, devices, models, ranks, splits
from common.runs import Run
from common.train import Trainer


def assemble(args: Namespace, **model_options) -> tuple[data.Dataset, splits.Clients, models.Classifier]:
    """The data, the clients and the initial model. Raises UserError if the flags do not fit together."""
    dataset = data.load(args.dataset, args.data_dir, args.image_size, tuple(args.rotate or ()), args.seed)
    clients = splits.deal(
        dataset, args.seed, args.partition, alpha=args.dirichlet, clients=args.clients,
        participating=args.participating, test_domain=args.test_domain, silos_per_domain=args.silos,
        silo_size=args.silo_size, sample=args.sample,
    )  # fmt: skip
    with devices.seeded(torch.device("cpu"), args.seed, "model", 0):  # the same on any device
        model = models.build(
            args.model, tuple(dataset.x.shape[1:]), len(dataset.classes), args.width, pretrained=args.pretrained or "",
            **model_options,
        )  # fmt: skip
    return dataset, clients, model


def prepare(
    args: Namespace, **model_options
) -> tuple[data.Dataset, splits.Clients, models.Classifier, Trainer, Run]:  # fmt: skip
    """What a method works with, on this rank and its device."""
    dataset, clients, model = assemble(args, **model_options)
    devices.keep_freed_memory()
    device = devices.pick_device(args.device)
    ranks.connect(device)
    precision = devices.pick_precision(args.precision, device)
    run = Run(Namespace(**vars(args) | {"precision": precision}), dataset, clients)
    trainer = Trainer(
        dataset, clients, device, seed=args.seed, epochs=args.local_epochs, batch_size=args.batch_size, lr=args.lr,
        optimizer=args.optimizer, momentum=args.momentum, precision=precision, progress=run.progress,
    )  # fmt: skip
    run.kept = {name: v.to(device) if isinstance(v, torch.Tensor) else v for name, v in run.kept.items()}
    return dataset, clients, model.to(device, memory_format=torch.channels_last), trainer, run
