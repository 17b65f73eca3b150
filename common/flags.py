"""What the user types: the flags that all methods share, and what they ask for."""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from common import UserError, data, models, random_at, ranks, splits, train
from common.splits import Clients
from common.train import Trainer

TINY = 1e-12  # stands for the least number above 0
FREE_TO_CHANGE = ("resume", "out", "device", "data_dir", "cuda_graphs")  # flags that a resumed run may give anew


def at_least(low: float, kind: type = int, most: float = float("inf")) -> Callable[[str], float]:
    """An argparse type: a number of this kind in low..most."""

    def number(text: str):
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not {'a whole' if kind is int else 'a'} number") from None
        if not low <= value <= most or value == float("inf"):
            least = "above 0" if low == TINY else f"at least {low:g}"
            bound = least if most == float("inf") else f"between {low:g} and {most:g}"
            raise argparse.ArgumentTypeError(f"{text} is out of range: {bound}")
        return value

    return number


def folder_name(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("is empty: name a folder")
    return text


positive = at_least(TINY, float)


class Parser(argparse.ArgumentParser):
    """Tells a wrong flag as a UserError."""

    def error(self, message: str):
        raise UserError(f"{message} (see {self.prog} --help)")


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    def _get_help_string(self, action):  # "(default: None)" says nothing: those flags tell their default themselves
        return action.help if action.default is None else super()._get_help_string(action)


def parse(
    doc: str, settings: dict[str, dict], own_flags: Callable, argv: list[str] | None,
    without_effect: Callable[[argparse.Namespace], dict[str, str | bool]] = lambda args: {},
) -> argparse.Namespace:  # fmt: skip
    """The flags of a method.

    doc        the method file's docstring; its first line heads the help
    settings   data set -> its defaults, "folder" standing for every folder of images
    own_flags  adds the method's own flags to an argument group

    `without_effect` gives the flags that do nothing beside the others: flag -> why, else False. Given one, it warns but
    raises no error, so that one list of flags can be given to several methods.
    Raises UserError for what does not make sense.
    """
    argv = sys.argv[1:] if argv is None else argv
    parser = Parser(
        description=f"{doc.strip().splitlines()[0]} Defaults follow the data set: `--dataset mnist --help` shows those"
        " of mnist, which are the paper's where it used it.", formatter_class=_Help, allow_abbrev=False,
        usage="python %(prog)s [--flag value ...]",
        epilog=f"example: python {Path(sys.argv[0]).name} --rounds 10 --seed 1 --out runs/first",
    )  # fmt: skip
    add = parser.add_argument_group("data").add_argument
    add("--dataset", default="glyphs", help=f"{', '.join(data.NAMES)}, or the path of a folder of images,"
        " of a text file of plays, or of LEAF's JSON")  # fmt: skip
    add("--data-dir", default="data", help="where data sets are, or are downloaded to")
    add("--image-size", type=at_least(8), default=96, help="pixels to which a folder's images are scaled")
    add("--rotate", type=at_least(-360, float, 360), nargs="+", metavar="DEGREES",
        help="deal the images into domains, one an angle")  # fmt: skip
    add("--test-domain", metavar="NAME", help="leave this domain out of training; it becomes the OOD test set")
    add = parser.add_argument_group("clients").add_argument
    kinds = ["dirichlet", "iid", "domain", "speaker", "silos"]
    add("--partition", choices=kinds, help="who holds what: label skew, equal shares, clients of one domain each, a"
        " speaker each, or --silos (default: domain where there is a --rotate or --test-domain, speaker for text, the"
        " paper's silos in uefl.py, else dirichlet)")  # fmt: skip
    add("--alpha", type=positive, default=0.1, help="concentration of the Dirichlet label skew; smaller is more skewed")
    add("--clients", type=at_least(1), help="N, all clients (default: 100, or one per domain)")
    add("--participating", type=at_least(1), help="M, clients that may be selected (default: 4 in 10, or all domains)")
    add("--sample", type=at_least(1), help="K, clients selected a round (default: 1 in 4, or one per training domain)")
    add("--silos", type=at_least(0), nargs="+", metavar="N", help="silos: how many of them each domain has")
    add("--silo-size", type=at_least(1), default=2000, help="silos: training samples of each")
    add("--label-noise", type=at_least(0, float, 1), nargs=2, metavar=("CLIENTS", "FLIPS"),
        help="share of noisy clients, and of flipped training labels in each of them")  # fmt: skip
    add = parser.add_argument_group("model and training").add_argument
    add("--model", default="cnn", help=", ".join(models.NAMES))
    add("--width", type=positive, default=1.0, help="multiplies the channels of this project's own models")
    add("--pretrained", nargs="?", const="imagenet", metavar="FILE",
        help="start from ImageNet weights, downloaded or from FILE (resnet18, resnet50, vgg16)")  # fmt: skip
    add("--rounds", type=at_least(1), default=30, help="T, communication rounds")
    add("--local-epochs", type=at_least(1), default=5, help="E, passes over a client's data a round")
    add("--batch-size", type=at_least(1), default=32, help="B, samples in a step of local training")
    add("--lr", type=positive, default=0.05, help="step size of local training")
    add("--optimizer", choices=["sgd", "adam"], default="sgd", help="optimizer of local training")
    add("--momentum", type=at_least(0, float, 0.999), default=0.0, help="of sgd")
    add = parser.add_argument_group("run").add_argument
    add("--seed", type=at_least(0, int, 2**63 - 1), default=0, help="of every random draw")
    add("--device", default="auto", help="cpu, cuda, cuda:1, ...; auto takes a GPU where there is one")
    add("--precision", choices=["float32", "bfloat16", "auto"], default="auto",
        help="bfloat16 is autocast; auto takes it where the device has it in hardware, else float32")  # fmt: skip
    add("--cuda-graphs", action=argparse.BooleanOptionalAction, default=False,
        help="replay each step of local training as one CUDA graph (GPU only)")  # fmt: skip
    add("--out", type=folder_name, metavar="DIR", help="the run's folder (default: a new one under runs/)")
    add("--resume", metavar="DIR", help="continue the run in this folder, with its flags")
    own_flags(parser.add_argument_group("this method").add_argument)

    first = Parser(add_help=False, allow_abbrev=False)
    first.add_argument("--dataset", default="glyphs")
    first.add_argument("--resume")
    first.add_argument("--partition")
    known, _ = first.parse_known_args(argv)
    saved = _saved_flags(known.resume, Path(sys.argv[0]).stem) if known.resume else {}
    folder = "shakespeare" if Path(known.dataset).is_file() else "folder"
    of_data_set = settings.get(known.dataset if known.dataset in data.NAMES else folder, {})
    if of_data_set.get("partition") == "silos" and known.partition in ("dirichlet", "iid"):
        # label skew does not inherit the rotations that make the silos
        of_data_set = {**of_data_set, "rotate": None}
    parser.set_defaults(**{**of_data_set, "partition": None, **saved})
    args = parser.parse_args(argv)
    for flag, value in saved.items():
        if flag not in FREE_TO_CHANGE and getattr(args, flag) != value:
            name = flag.replace("_", "-")
            raise UserError(
                f"{args.resume} was run with --{name} {value}, not {getattr(args, flag)}: leave --{name} out"
            )
    if args.partition is None:
        is_text = known.dataset == "shakespeare" or folder == "shakespeare"
        usual = "speaker" if is_text else "domain" if args.rotate else "dirichlet"
        args.partition = "domain" if args.test_domain else of_data_set.get("partition", usual)
    given = {word.split("=")[0] for word in argv}
    for flag, why in _contradictions(args).items():
        if why and f"--{flag}" in given:
            raise UserError(f"--{flag} does not apply: {why}")
    for flag, why in without_effect(args).items():
        if why and f"--{flag}" in given and ranks.RANK == 0:
            print(f"{Path(sys.argv[0]).name}: --{flag} does nothing here: {why}", file=sys.stderr)
    return args


def _contradictions(args: argparse.Namespace) -> dict[str, str | bool]:
    """Which of the flags that all methods share do not go with the others: flag -> why, else False."""
    silos, own = args.partition == "silos", args.model in ("cnn", "convnet", "resblocks", "charrnn")
    return {
        "silos": not silos and f"it needs --partition silos, and this is {args.partition}",
        "silo-size": not silos and f"it needs --partition silos, and this is {args.partition}",
        "clients": silos and "--silos says how many there are",
        "participating": silos and "all of --silos take part",
        "alpha": args.partition != "dirichlet" and f"it needs --partition dirichlet, and this is {args.partition}",
        "momentum": args.optimizer == "adam" and "it is of --optimizer sgd",
        "image-size": args.dataset in data.NAMES and f"{args.dataset} comes in its own size",
        "width": not own and f"{args.model} has the width that it has",
        "out": bool(args.resume) and "--resume goes on in its own folder",
    }


def _saved_flags(folder: str, method: str) -> dict:
    try:
        saved = json.loads((Path(folder) / "args.json").read_text())
        if saved["method"] != method:
            raise UserError(f"--resume {folder}: this is a run of {saved['method']}.py, not of {method}.py")
        return saved["flags"]
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise UserError(f"--resume {folder}: there is no run to resume ({e})") from e


def load(args: argparse.Namespace) -> data.Dataset:
    """The data set that these flags ask for. Raises UserError as data.load() does."""
    with ranks.first_rank_first():
        return data.load(args.dataset, args.data_dir, args.image_size, args.rotate or (), args.seed)


def prepare(args: argparse.Namespace, **model_options) -> tuple[data.Dataset, Clients, models.Classifier, Trainer]:
    """Data, clients, the initial model and the trainer that these flags ask for; the same for every method.

    Fills in args.sample, the number of clients selected a round. Raises UserError where the flags do not fit.
    """
    device = train.pick_device(args.device)
    args.precision = train.pick_precision(args.precision, device)
    if args.cuda_graphs and device.type != "cuda":
        raise UserError(f"--cuda-graphs needs a GPU, and this runs on {device}: leave it out, or take --no-cuda-graphs")
    dataset = load(args)
    clients = splits.deal(
        dataset, args.seed, args.partition, alpha=args.alpha, clients=args.clients, participating=args.participating,
        test_domain=args.test_domain, silos_per_domain=args.silos, silo_size=args.silo_size,
    )  # fmt: skip
    if args.label_noise:
        rng = random_at(args.seed, "label noise")
        dataset.y, _ = splits.symmetric_noise(dataset.y, clients.train, *args.label_noise, len(dataset.classes), rng)
    takes_part = len(clients.participating)
    if args.sample is None:
        domains = len(set(clients.domains))
        args.sample = {"silos": takes_part, "domain": domains}.get(args.partition, max(1, takes_part // 4))
    if args.sample > takes_part:
        raise UserError(
            f"--sample {args.sample}: only {takes_part} clients participate; lower it, or raise --participating"
        )
    model = initial_model(args, dataset, device, **model_options)
    trainer = Trainer(
        dataset, device, seed=args.seed, epochs=args.local_epochs, batch_size=args.batch_size, lr=args.lr,
        optimizer=args.optimizer, momentum=args.momentum, precision=args.precision, graphs=args.cuda_graphs,
    )  # fmt: skip
    return dataset, clients, model, trainer


def initial_model(
    args: argparse.Namespace, dataset: data.Dataset, device: torch.device, member: int = 0, **model_options
) -> models.Classifier:
    """The model that these flags ask for; every `member` has its own random weights, the same on any device."""
    with ranks.first_rank_first(), train.seeded(torch.device("cpu"), args.seed, "model", member):
        model = models.build(
            args.model, tuple(dataset.x.shape[1:]), len(dataset.classes), args.width, pretrained=args.pretrained or "",
            **model_options,
        )  # fmt: skip
    return model.to(device, memory_format=torch.channels_last)
