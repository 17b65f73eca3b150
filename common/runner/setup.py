"""From flags to what a method works with: clients, trainer and run."""

from argparse import Namespace
from collections.abc import Callable

import torch

from common import UserError, data, devices, models, splits
from common.runner.runs import Run
from common.train import LocalTraining, Trainer


def load(args: Namespace) -> data.Dataset:
    """The data set. Runs with the same flags share it; without --rotate, other seeds do, too."""
    seed = args.seed if args.rotate else 0  # only the division into angles is random
    return data.load(args.dataset, args.data_dir, args.image_size, tuple(args.rotate or ()), seed)


def build_model(args: Namespace, shape: tuple[int, ...], classes: int) -> models.Classifier:
    """The model of these flags for images of this shape (channels, height, width)."""
    return models.build(args.model, shape, classes, args.width, pretrained=args.pretrained or "")


def assemble(
    args: Namespace, build: Callable = build_model
) -> tuple[data.Dataset, splits.Clients, torch.nn.Module]:
    """The data, the clients and the initial model. Raises UserError if the flags do not fit."""
    dataset = load(args)
    if len(dataset.classes) == 1:
        only = dataset.classes[0]
        raise UserError(f"{dataset.name} has only one class, {only}: at least two are needed")
    clients = splits.make_clients(
        dataset,
        args.seed,
        args.partition,
        clients=args.clients,
        participating=args.participating,
        per_round=args.sample,
        alpha=args.dirichlet,
        silo_numbers=args.silos or (),
        silo_size=args.silo_size,
        test_domain=args.test_domain,
        held_out=getattr(args, "held_out", None),  # only fedavg.py has this flag
    )
    with devices.seeded(torch.device("cpu"), args.seed, "model", 0):  # the same on any device
        model = build(args, tuple(dataset.x.shape[1:]), len(dataset.classes))
    return dataset, clients, model


def local_training(args: Namespace) -> LocalTraining:
    """How a client trains, from these flags."""
    return LocalTraining(
        args.local_epochs, args.batch_size, args.lr, args.optimizer, args.momentum,
        args.weight_decay, args.lr_decay,
    )  # fmt: skip


def prepare(
    args: Namespace, build: Callable = build_model, choose: str | None = None
) -> tuple[splits.Clients, Trainer, Run]:
    """What a method works with, on this rank and its device.

    choose  a column of metrics.csv: see Run
    """
    dataset, clients, model = assemble(args, build)
    devices.keep_freed_memory()
    device = devices.pick_device(args.device)
    precision = devices.pick_precision(args.precision, device, args.model)
    args = Namespace(**{**vars(args), "precision": precision})
    run = Run(args, dataset, clients, model, device, choose)
    trainer = Trainer(
        dataset, clients, model, device, local_training(args), args.seed, precision,
        args.evaluate_every, args.rounds, run.progress,
    )  # fmt: skip
    return clients, trainer, run
