"""What the user types: the flags that all methods share, and the data, clients, model and trainer they ask for."""

import argparse
import json
import sys
from argparse import BooleanOptionalAction
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path

import torch

from common import UserError, data, first_line, models, ranks, runs, splits, train
from common.splits import Clients
from common.train import Trainer

# What --small changes, by method and data set: cuts of ours, so that a run takes minutes on two cores without a GPU.
_IMAGES = {"model": "cnn", "width": 0.25, "batch_size": 32, "lr": 0.05, "local_epochs": 5, "rounds": 20}
_WU = {
    **dict.fromkeys(["mnist", "fmnist", "emnist", "gtsrb", "cifar10", "cifar100"], _IMAGES),
    "folder": {**_IMAGES, "dirichlet": 0.5, "image_size": 32, "clients": 12, "rounds": 30},
}
_FEDIIR = {
    "model": "convnet", "width": 0.25, "lr": 0.05, "momentum": 0.9, "batch_size": 32, "gamma": 0.09, "rounds": 15,
}  # fmt: skip
_UEFL = {
    "model": "resblocks", "width": 0.0625, "segments": 8, "commitment": 0.1, "lr": 1e-3, "batch_size": 32,
    "local_epochs": 4, "rounds": 5, "later_rounds": 2, "iterations": 3, "silo_size": 500,
}  # fmt: skip
SMALL = {
    **dict.fromkeys(["fedavg", "entropy_weighting", "minimax_select", "convex_hull_select"], _WU),
    "fediir": {
        **dict.fromkeys(["mnist", "fmnist", "emnist"], _FEDIIR),
        "folder": {**_FEDIIR, "image_size": 32, "clients": 12},
    },
    "uefl": {
        **{name: {**_UEFL, "gamma": 0.05} for name in ["mnist", "fmnist", "emnist", "gtsrb"]},
        **{name: {**_UEFL, "gamma": 0.02} for name in ["cifar10", "cifar100"]},
        "folder": {**_UEFL, "image_size": 32, "local_epochs": 2},
    },
}

# A flag that changes nothing here, so that a user would believe in a result that it did not touch: flag, when, why.
USELESS = [
    ("dirichlet", lambda a: a.partition != "dirichlet", "it needs --partition dirichlet"),
    ("silos", lambda a: a.partition != "silos", "it needs --partition silos"),
    ("clients", lambda a: a.partition == "silos", "--silos says how many there are"),
    ("momentum", lambda a: a.optimizer == "adam", "it belongs to --optimizer sgd"),
    ("out", lambda a: a.resume, "--resume continues in its own folder"),
]


def at_least(low: float, kind: type = int, most: float = 10**9) -> Callable[[str], float]:
    """An argparse type: a number of this kind between low and most."""

    def number(text: str):
        value = kind(text)
        if not low <= value <= most:
            raise argparse.ArgumentTypeError(f"{text} is out of range: between {low:g} and {most:g}")
        return value

    number.__name__ = "whole number" if kind is int else "number"  # for argparse, which reports a ValueError
    return number


positive = at_least(1e-12, float)


def not_empty(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("is empty: give a name, or leave the flag out")
    return text


class Parser(argparse.ArgumentParser):
    """Reports a wrong flag as a UserError."""

    def error(self, message: str):
        raise UserError(f"{message} (see {self.prog} --help)")


# fmt: off
def _shared_flags(parser: Parser, dataset: str) -> None:
    add = parser.add_argument_group("data").add_argument
    add("--dataset", type=not_empty, default=dataset, help=f"{', '.join(data.NAMES)}, or a folder of images")
    add("--small", action=BooleanOptionalAction, default=False, help="our cut of the settings: minutes without a GPU")
    add("--data-dir", type=not_empty, default="data", help="folder of the data sets; downloads go there, too")
    add("--image-size", type=at_least(8), default=96, help="pixels: a folder's images are scaled to this size")
    add("--rotate", type=at_least(-360, float, 360), nargs="+", metavar="DEGREES",
        help="divide the images into domains, one for each angle")
    add("--test-domain", metavar="NAME", help="leave this domain out of training; it becomes the OOD test set")

    add = parser.add_argument_group("clients").add_argument
    add("--partition", choices=["dirichlet", "iid", "domain", "silos", "rare", "twins", "specialists"],
        help="which client holds which samples. dirichlet: different shares of the labels; iid: random equal parts;"
        " domain: one domain per client; silos: see --silos; rare: three clients hold a class that nobody else has;"
        " twins: two clients hold each of these classes; specialists: most clients hold one class, the others all"
        " (default: the example's on glyphs, domain with --rotate or --test-domain, silos in uefl.py, else dirichlet)")
    add("--dirichlet", type=positive, default=0.1, metavar="ALPHA", help="smaller: the clients' labels differ more")
    add("--clients", type=at_least(1), help="N, all clients (default: 100, or fewer on small data; or one per domain)")
    add("--participating", type=at_least(1), help="M, clients that may train (default: 40 percent; all with domain)")
    add("--sample", type=at_least(1), help="K, clients per round (default: M / 4, one per domain, or all silos)")
    add("--silos", type=at_least(0), nargs="+", metavar="N", help="silos of each domain")
    add("--silo-size", type=at_least(1), default=2000, help="training samples of each silo")

    add = parser.add_argument_group("model and training").add_argument
    add("--model", choices=models.NAMES, default="cnn", help="see common/models.py")
    add("--width", type=positive, default=1.0, help="multiplies the channels of cnn, convnet and resblocks")
    add("--pretrained", type=not_empty, nargs="?", const="imagenet", metavar="FILE",
        help="start from ImageNet weights, downloaded or from FILE (resnet18, resnet50, vgg16)")
    add("--rounds", type=at_least(1), default=30, help="T, communication rounds")
    add("--local-epochs", type=at_least(1), default=5, help="E, a client's passes over its data per round")
    add("--batch-size", type=at_least(1), default=32, help="B, samples in a step of local training")
    add("--lr", type=positive, default=0.05, help="step size of local training")
    add("--optimizer", choices=["sgd", "adam"], default="sgd", help="optimizer of local training")
    add("--momentum", type=at_least(0, float, 0.999), default=0.0, help="momentum of sgd")

    add = parser.add_argument_group("run").add_argument
    add("--evaluate-every", type=at_least(1), default=1, metavar="N", help="rounds from one evaluation to the next")
    add("--seed", type=at_least(0), default=0, help="seed of every random draw")
    add("--device", default="auto", help="cpu, cuda, cuda:1, ...; auto takes a GPU if there is one")
    add("--processes", type=at_least(1), metavar="N", help="how many processes share a round's clients; the results do"
        " not depend on it (default: one per core or GPU, and no more than clients in a round; 1 for a debugger)")
    add("--precision", choices=["float32", "bfloat16", "auto"], default="auto",
        help="bfloat16 means autocast; auto takes it if the hardware has it, else float32")
    add("--out", type=not_empty, metavar="DIR", help="the run's folder (default: a new one under runs/)")
    add("--resume", type=not_empty, metavar="DIR", help="continue the run in this folder, with its flags")
# fmt: on


def parse(
    method: str, doc: str, settings: dict[str, dict], own_flags: Callable[[Callable], None],
    argv: list[str] | None = None, baselines: Sequence[str] = (),
) -> argparse.Namespace:  # fmt: skip
    """The flags of a method, with its name as `method` and `name`.

    doc        the method file's docstring; its first line is the first line of the help
    settings   data set -> its defaults; "folder" stands for every folder of images. The first data set is the default
    own_flags  called with argparse's add_argument, to add the method's own flags
    baselines  the runs that --compare adds, each in the folder OUT-baseline

    Raises UserError for flags that do not make sense or have no effect, and for a folder that is taken.
    """
    argv = sys.argv[1:] if argv is None else argv
    parser = Parser(
        prog=f"{method}.py", usage="python %(prog)s [--flag value ...]", allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        description=f"{doc.strip().splitlines()[0]} The defaults depend on the data set, and are the paper's if the"
        " paper uses it: `--dataset mnist --help` shows those for mnist, and with --small our cut of them.",
    )  # fmt: skip
    _shared_flags(parser, next(iter(settings)))
    group = parser.add_argument_group("this method")
    own_flags(group.add_argument)
    if baselines:
        group.add_argument("--compare", action=BooleanOptionalAction, default=True, help=f"also {', '.join(baselines)}")
    name, resume = method, _known(parser, argv).resume
    if resume:
        name, saved = _saved_flags(resume, method)
        before, argv = _with_defaults(parser, settings, saved), [*saved, *argv]
    args = _with_defaults(parser, settings, argv)
    for flag, value in vars(args).items():
        if resume and flag not in runs.FREE and getattr(before, flag) != value:
            shown = f"--{flag.replace('_', '-')}"
            raise UserError(f"{resume} was run with {shown} {getattr(before, flag)}, not {value}: leave {shown} out")
    for flag, when, why in USELESS:
        if getattr(args, flag) != parser.get_default(flag) and when(args):
            raise UserError(f"--{flag} has no effect here: {why}")
    now = f"{datetime.now():%Y%m%d-%H%M%S-%f}"  # with microseconds, because several runs may start in the same second
    args.out = str(Path(resume or args.out or f"runs/{method}-{Path(args.dataset).stem}-{now}"))  # without a last /
    args.method, args.name, args.compare = method, name, bool(baselines) and args.compare
    for name in ["", *(f"-{baseline.lower()}" for baseline in baselines if args.compare)] if not resume else []:
        runs.check_free(Path(args.out + name))
    return args


def _known(parser: Parser, argv: list[str]) -> argparse.Namespace:
    """The flags among these words. Unknown words and --help are for later."""
    return parser.parse_known_args([word for word in argv if word not in ("-h", "--help")])[0]


def _with_defaults(parser: Parser, settings: dict[str, dict], argv: list[str]) -> argparse.Namespace:
    """These words as flags, with the defaults of the data set that they name."""
    first, small = _known(parser, argv), SMALL[parser.prog.removesuffix(".py")]
    kind = first.dataset if first.dataset in data.NAMES else "folder"
    if first.small and kind not in small:
        raise UserError(f"--small: {kind} has no small settings; leave it out or choose {', '.join(small)}")
    defaults = {**settings.get(kind, {}), **(small[kind] if first.small else {})}
    if defaults.get("partition") == "silos" and first.partition not in (None, "silos", "domain"):
        defaults["rotate"] = None  # the rotations make the silos; label skew does not need them
    parser.set_defaults(**{**defaults, "partition": None})
    args = parser.parse_args(argv)
    if args.partition is None:
        usual = "domain" if args.rotate else "dirichlet"
        args.partition = "domain" if args.test_domain else defaults.get("partition", usual)
    return args


def typed(flags: dict) -> list[str]:
    """These flags as a user types them."""
    words = []
    for flag, value in flags.items():
        name = f"--{flag.replace('_', '-')}"
        if isinstance(value, bool):
            words.append(name if value else f"--no-{name[2:]}")
        elif value is not None:  # with =, because a value may start with a dash
            words += [name, *map(str, value)] if isinstance(value, list) else [f"{name}={value}"]
    return words


def _saved_flags(folder: str, method: str) -> tuple[str, list[str]]:
    """The name of the run in this folder, and its flags as words."""
    try:
        saved = json.loads((Path(folder) / "args.json").read_text())
        if saved["method"] != method:
            raise UserError(f"--resume {folder}: this is a run of {saved['method']}.py, not of {method}.py")
        ignored = ("method", "name", "out", "resume")
        return saved["name"], typed({flag: value for flag, value in saved["flags"].items() if flag not in ignored})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise UserError(f"--resume {folder}: there is no run to resume ({first_line(e)})") from e


def prepare(args: argparse.Namespace, **model_options) -> tuple[data.Dataset, Clients, models.Classifier, Trainer]:
    """Data, clients, initial model and trainer that these flags ask for.

    Fills in args.precision. From here on the program may run in several processes (common/ranks.py). Raises UserError
    if the flags do not fit together.
    """
    dataset = data.load(args.dataset, args.data_dir, args.image_size, tuple(args.rotate or ()), args.seed)
    if len(dataset.classes) < 2:
        raise UserError(f"{dataset.name} has only one class, {dataset.classes[0]}: at least two are needed")
    clients = splits.deal(
        dataset, args.seed, args.partition, alpha=args.dirichlet, clients=args.clients,
        participating=args.participating, test_domain=args.test_domain, silos_per_domain=args.silos,
        silo_size=args.silo_size, sample=args.sample,
    )  # fmt: skip
    with train.seeded(torch.device("cpu"), args.seed, "model", 0):  # the same on any device
        model = models.build(
            args.model, tuple(dataset.x.shape[1:]), len(dataset.classes), args.width, pretrained=args.pretrained or "",
            **model_options,
        )  # fmt: skip
    ranks.start(args.processes, args.device, most=clients.sample)
    device = train.pick_device(args.device)
    args.precision = train.pick_precision(args.precision, device)
    trainer = Trainer(
        dataset, device, seed=args.seed, epochs=args.local_epochs, batch_size=args.batch_size, lr=args.lr,
        optimizer=args.optimizer, momentum=args.momentum, precision=args.precision,
    )  # fmt: skip
    if args.name == args.method:  # a baseline works on the same data
        names = (", ".join(names[:3]) + ", ..." * (len(names) > 3) for names in (dataset.classes, dataset.domains))
        print(
            f"{dataset.name}: {len(dataset.x)} samples, {len(dataset.classes)} classes ({next(names)}), "
            f"{len(dataset.domains)} domains ({next(names)}); {len(clients.train)} clients (--partition "
            f"{args.partition}), {clients.participating} participate; ID on {len(clients.held_out)} samples, OOD on "
            f"{len(clients.ood)}"
        )
    return dataset, clients, model.to(device, memory_format=torch.channels_last), trainer
