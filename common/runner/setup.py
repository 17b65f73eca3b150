"""From flags to what a method works with: clients, trainer and run."""

from argparse import Namespace
from collections.abc import Callable

import torch

from common import UserError, devices, models, splits
from common.data import Dataset
from common.runner.runs import Run
from common.train import LocalTraining, Trainer


def build_model(args: Namespace, shape: tuple[int, ...], classes: int) -> models.Classifier:
    """The model of these flags for images of this shape (channels, height, width)."""
    return models.build(args.model, shape, classes, args.width, pretrained=args.pretrained)


def assemble(
    args: Namespace, data: Dataset, build: Callable = build_model
) -> tuple[splits.Clients, torch.nn.Module]:
    """The clients and the initial model. Raises UserError if the flags do not fit the data."""
    if len(data.classes) == 1:
        raise UserError(f"{data.name} has only one class, {data.classes[0]}: two are needed")
    clients = splits.make_clients(
        data,
        args.seed,
        args.partition,
        clients=args.clients,
        participating=args.participating,
        per_round=args.sample,
        alpha=args.dirichlet,
        silo_numbers=args.silos or (),
        silo_size=args.silo_size,
        test_domain=args.test_domain,
        held_out=args.held_out,
    )
    with devices.seeded(torch.device("cpu"), args.seed, "model", 0):  # the same on any device
        model = build(args, tuple(data.x.shape[1:]), len(data.classes))
    return clients, model


def local_training(args: Namespace) -> LocalTraining:
    """How a client trains, from these flags."""
    return LocalTraining(
        args.local_epochs, args.batch_size, args.lr, args.optimizer, args.momentum,
        args.weight_decay, args.lr_decay,
    )  # fmt: skip


def prepare(
    args: Namespace, data: Dataset, build: Callable = build_model
) -> tuple[splits.Clients, Trainer, Run]:
    """What a method works with, on this rank and its device."""
    clients, model = assemble(args, data, build)
    device, args.precision = devices.set_up(args.device, args.precision, args.model)
    run = Run(args, data, clients, model, device)
    trainer = Trainer(
        data, clients, model, device, local_training(args), args.seed, args.precision,
        args.evaluate_every, args.rounds, run.progress,
    )  # fmt: skip
    if run.rows:
        trainer.samples = run.rows[-1].get("samples", 0)
        trainer.megabytes = run.rows[-1].get("megabytes", 0.0)
    return clients, trainer, run
