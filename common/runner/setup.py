"""From flags to what a method works with: clients, model, trainer and run."""

from argparse import Namespace

import torch

from common import UserError, data, devices, models, splits
from common.runner.runs import Run
from common.train import Trainer


def load(args: Namespace) -> data.Dataset:
    """The data set. Runs with the same flags share it; without --rotate, other seeds do, too."""
    seed = args.seed if args.rotate else 0  # only the division into angles is random
    return data.load(args.dataset, args.data_dir, args.image_size, tuple(args.rotate or ()), seed)


def assemble(args: Namespace, **options) -> tuple[data.Dataset, splits.Clients, models.Classifier]:
    """The data, the clients and the initial model. Raises UserError if the flags do not fit."""
    dataset = load(args)
    if len(dataset.classes) == 1:
        only = dataset.classes[0]
        raise UserError(f"{dataset.name} has only one class, {only}: at least two are needed")
    clients = splits.deal(dataset, args)
    shape, classes = tuple(dataset.x.shape[1:]), len(dataset.classes)
    with devices.seeded(torch.device("cpu"), args.seed, "model", 0):  # the same on any device
        model = models.build(
            args.model, shape, classes, args.width, pretrained=args.pretrained or "", **options
        )
    return dataset, clients, model


def prepare(args: Namespace, **options):
    """What a method works with: clients, model, trainer and run, on this rank and its device.

    options  of models.build
    """
    dataset, clients, model = assemble(args, **options)
    devices.keep_freed_memory()
    device = devices.pick_device(args.device)
    precision = devices.pick_precision(args.precision, device, args.model)
    args = Namespace(**{**vars(args), "precision": precision})
    run = Run(args, dataset, clients, model, device)
    trainer = Trainer(dataset, clients, device, args, run.progress)
    return clients, model.to(device, memory_format=torch.channels_last), trainer, run
