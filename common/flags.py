"""What the user types: the flags that all methods share, and the data, clients, model and trainer they ask for."""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from common import UserError, data, first_line, models, random_at, ranks, splits, train
from common.splits import Clients
from common.train import Trainer

FREE = ("resume", "out", "device", "data_dir")  # flags that a resumed run may change
TINY = 1e-12  # the smallest number that counts as above 0


def at_least(low: float, kind: type = int, most: float = float("inf")) -> Callable[[str], float]:
    """An argparse type: a number of this kind between low and most. Whole numbers are at most 10^9 by default."""
    most = 10**9 if kind is int and most == float("inf") else most

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


positive = at_least(TINY, float)


def not_empty(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("is empty: give a name, or leave the flag out")
    return text


class Parser(argparse.ArgumentParser):
    """Reports a wrong flag as a UserError."""

    def error(self, message: str):
        raise UserError(f"{message} (see {self.prog} --help)")


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    def _get_help_string(self, action):  # the help text says what happens without the flag
        return action.help if action.default is None else super()._get_help_string(action)


# fmt: off
def _shared_flags(group: Callable) -> None:
    add = group("data")
    add("--dataset", type=not_empty, default="glyphs", help=f"{', '.join(data.NAMES)}, or the path of a folder of"
        " images, of a text file of plays, or of LEAF's JSON")
    add("--small", action="store_true", help="smaller settings than the paper's, so that a run takes minutes without a"
        " GPU; do not compare its figures with the paper's; `--dataset cifar10 --small --help` shows it")
    add("--data-dir", type=not_empty, default="data", help="folder of the data sets; downloads go there, too")
    add("--image-size", type=at_least(8), default=96, help="pixels: a folder's images are scaled to this size",
        idle_if=lambda a: a.dataset in data.NAMES and f"{a.dataset} has its own size")
    add("--rotate", type=at_least(-360, float, 360), nargs="+", metavar="DEGREES",
        help="divide the images into domains, one for each angle")
    add("--test-domain", metavar="NAME", help="leave this domain out of training; it becomes the OOD test set")

    add = group("clients")

    def only_for(kind: str) -> Callable:
        return lambda a: a.partition != kind and f"it needs --partition {kind}, and this is {a.partition}"

    kinds = ["dirichlet", "iid", "domain", "speaker", "silos"]
    add("--partition", choices=kinds, help="which client holds which samples. dirichlet: different shares of the"
        " labels; iid: random equal parts; domain: one domain per client; speaker: one speaker per client; silos: see"
        " --silos (default: domain with --rotate or --test-domain, speaker for text, silos in uefl.py, else"
        " dirichlet)")
    add("--dirichlet", type=positive, default=0.1, metavar="ALPHA", idle_if=only_for("dirichlet"),
        help="a smaller number makes the clients' labels differ more")
    add("--clients", type=at_least(1), help="N, all clients (default: 100, or fewer on small data; with --partition"
        " domain, one per domain)",
        idle_if=lambda a: a.partition == "silos" and "--silos says how many there are")
    add("--participating", type=at_least(1), help="M, clients that may train (default: 40 percent; all with domain)",
        idle_if=lambda a: a.partition == "silos" and "all silos participate")
    add("--sample", type=at_least(1),
        help="K, clients selected per round (default: a quarter of M; with domain one per domain, with silos all)")
    add("--silos", type=at_least(0), nargs="+", metavar="N", idle_if=only_for("silos"), help="silos of each domain")
    add("--silo-size", type=at_least(1), default=2000, idle_if=only_for("silos"), help="training samples of each silo")
    add("--label-noise", type=at_least(0, float, 1), nargs=2, metavar=("CLIENTS", "FLIPS"),
        help="probability that a client is noisy, and that a training label of a noisy client is wrong")

    add = group("model and training")
    add("--model", default="cnn", help=", ".join(models.NAMES))
    add("--width", type=positive, default=1.0, help="multiplies the channels of this project's own models",
        idle_if=lambda a: a.model in (*models.RESNETS, "vgg16") and f"{a.model} has a fixed width")
    add("--pretrained", type=not_empty, nargs="?", const="imagenet", metavar="FILE",
        help="start from ImageNet weights, downloaded or from FILE (resnet18, resnet50, vgg16)")
    add("--rounds", type=at_least(1), default=30,
        help="T, communication rounds; in uefl.py the rounds of the first iteration")
    add("--local-epochs", type=at_least(1), default=5, help="E, a client's passes over its data per round")
    add("--batch-size", type=at_least(1), default=32, help="B, samples in a step of local training")
    add("--lr", type=positive, default=0.05, help="step size of local training")
    add("--optimizer", choices=["sgd", "adam"], default="sgd", help="optimizer of local training")
    add("--momentum", type=at_least(0, float, 0.999), default=0.0, help="momentum of sgd",
        idle_if=lambda a: a.optimizer == "adam" and "it belongs to --optimizer sgd")

    add = group("run")
    add("--evaluate-every", type=at_least(1), default=1, metavar="N", help="rounds from one evaluation to the next")
    add("--seed", type=at_least(0, int, 2**63 - 1), default=0, help="seed of every random draw")
    add("--device", default="auto", help="cpu, cuda, cuda:1, ...; auto takes a GPU if there is one")
    add("--precision", choices=["float32", "bfloat16", "auto"], default="auto",
        help="bfloat16 means autocast; auto takes it if the hardware has it, else float32")
    add("--out", type=not_empty, metavar="DIR", help="the run's folder (default: a new one under runs/)",
        idle_if=lambda a: a.resume and "--resume continues in its own folder")
    add("--resume", type=not_empty, metavar="DIR", help="continue the run in this folder, with its flags")
# fmt: on


def parse(
    doc: str, settings: dict[str, dict], own_flags: Callable[[Callable], None], argv: list[str] | None = None,
    **idle_if: Callable[[argparse.Namespace], str | bool],
) -> argparse.Namespace:  # fmt: skip
    """The flags of a method.

    doc        the method file's docstring; its first line is the first line of the help
    settings   data set -> its defaults; "folder" stands for every folder of images. "small" -> data set -> what --small
               changes
    own_flags  called with a function `add` that adds the method's own flags. It takes what argparse's add_argument
               takes, and `idle_if`, a function of all flags. If the others make this flag useless, it returns the
               reason, else something false
    idle_if    shared flag -> such a function, for shared flags that this method may not use

    Raises UserError for flags that do not make sense, or have no effect.
    """
    argv = sys.argv[1:] if argv is None else argv
    parser = Parser(
        description=f"{doc.strip().splitlines()[0]} The defaults depend on the data set: `--dataset mnist --help` shows"
        " the defaults for mnist. They are the paper's, if the paper uses this data set.",
        usage="python %(prog)s [--flag value ...]", formatter_class=_Help, allow_abbrev=False,
        epilog="example: python %(prog)s --rounds 10 --seed 1 --out runs/first",
    )  # fmt: skip
    idle: dict[str, Callable | None] = {}

    def group(title: str) -> Callable:
        add_argument = parser.add_argument_group(title).add_argument

        def add(flag: str, idle_if: Callable | None = None, **options) -> None:
            idle[flag] = idle_if
            add_argument(flag, **options)

        return add

    _shared_flags(group)
    own_flags(group("this method"))
    idle |= {f"--{name}": why for name, why in idle_if.items()}

    first = Parser(add_help=False, allow_abbrev=False)
    for flag in ("--dataset", "--resume", "--partition"):
        first.add_argument(flag)
    first.add_argument("--small", action="store_true")
    known, _ = first.parse_known_args(argv)
    saved = _saved_flags(known.resume) if known.resume else {}
    name = known.dataset or "glyphs"
    kind = name if name in data.NAMES else "shakespeare" if Path(name).is_file() else "folder"
    small = settings["small"].get(kind)
    if known.small and not saved and small is None:
        raise UserError(f"--small: {name} has no small settings; leave it out or choose {', '.join(settings['small'])}")
    defaults = {**settings.get(kind, {}), **(small if known.small else {})}
    if defaults.get("partition") == "silos" and known.partition in ("dirichlet", "iid"):
        defaults = {**defaults, "rotate": None}  # the rotations make the silos; label skew does not need them
    if empty := [flag for flag, value in saved.items() if value is None and parser.get_default(flag) is not None]:
        raise UserError(f"--resume {known.resume}: args.json is damaged, it has no value for {empty[0]}")
    parser.set_defaults(**{**defaults, "partition": None, **saved})
    args = parser.parse_args(argv)
    for flag, value in saved.items():
        if flag not in FREE and getattr(args, flag) != value:
            flag, now = flag.replace("_", "-"), getattr(args, flag)
            raise UserError(f"{args.resume} was run with --{flag} {value}, not {now}: leave --{flag} out")
    if args.partition is None:
        usual = "speaker" if kind == "shakespeare" else "domain" if args.rotate else "dirichlet"
        args.partition = "domain" if args.test_domain else defaults.get("partition", usual)
    typed = {word.split("=")[0] for word in argv}
    for flag in idle.keys() & (typed | {f"--{word[5:]}" for word in typed if word.startswith("--no-")}):
        if idle[flag] and (why := idle[flag](args)):
            raise UserError(f"{flag} has no effect here: {why}")
    return args


def _saved_flags(folder: str) -> dict:
    method = Path(sys.argv[0]).stem
    try:
        saved = json.loads((Path(folder) / "args.json").read_text())
        if saved["method"] != method:
            raise UserError(f"--resume {folder}: this is a run of {saved['method']}.py, not of {method}.py")
        return dict(saved["flags"])
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise UserError(f"--resume {folder}: there is no run to resume ({first_line(e)})") from e


def load(args: argparse.Namespace) -> data.Dataset:
    """The data set that these flags ask for. Raises UserError as data.load() does."""
    with ranks.first_rank_first():
        return data.load(args.dataset, args.data_dir, args.image_size, args.rotate or (), args.seed)


def prepare(args: argparse.Namespace, **model_options) -> tuple[data.Dataset, Clients, models.Classifier, Trainer]:
    """Data, clients, initial model and trainer that these flags ask for.

    Fills in args.precision and args.sample, the number of clients selected per round. Raises UserError if the flags do
    not fit together.
    """
    device = train.pick_device(args.device)
    args.precision = train.pick_precision(args.precision, device)
    dataset = load(args)
    if len(dataset.classes) < 2:
        raise UserError(f"{dataset.name} has only one class, {dataset.classes[0]}: at least two are needed")
    clients = splits.deal(
        dataset, args.seed, args.partition, alpha=args.dirichlet, clients=args.clients,
        participating=args.participating, test_domain=args.test_domain, silos_per_domain=args.silos,
        silo_size=args.silo_size,
    )  # fmt: skip
    m = clients.participating
    if args.label_noise:
        rng = random_at(args.seed, "label noise")
        dataset.y = splits.symmetric_noise(dataset.y, clients.train, *args.label_noise, len(dataset.classes), rng)
    if args.sample is None:
        usual = {"silos": m, "domain": len(set(clients.domains))}.get(args.partition, max(2, m // 4))
        args.sample = min(m, usual)
    if args.sample > m:
        raise UserError(f"--sample {args.sample}: only {m} clients participate; lower it, or raise --participating")
    model = initial_model(args, dataset, device, **model_options)
    trainer = Trainer(
        dataset, device, seed=args.seed, epochs=args.local_epochs, batch_size=args.batch_size, lr=args.lr,
        optimizer=args.optimizer, momentum=args.momentum, precision=args.precision,
    )  # fmt: skip
    print(about(args, dataset, clients))
    return dataset, clients, model, trainer


def about(args: argparse.Namespace, dataset: data.Dataset, clients: Clients) -> str:
    """What this run works on, in one line."""

    def some(names: list[str]) -> str:
        return f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"

    domains = f", {len(dataset.domains)} domains ({some(dataset.domains)})" if dataset.domains else ""
    most = 100 * int(dataset.y.bincount().max()) / len(dataset.y)
    ood = f"OOD on {len(clients.ood)}" if len(clients.ood) else "no OOD samples"
    return (
        f"{dataset.name}: {len(dataset.x)} samples, {len(dataset.classes)} classes ({some(dataset.classes)}; the "
        f"largest has {most:.0f} %){domains}; {len(clients.train)} clients (--partition {args.partition}), "
        f"{clients.participating} participate; ID on {len(clients.held_out)} samples, {ood}"
    )


def initial_model(
    args: argparse.Namespace, dataset: data.Dataset, device: torch.device, member: int = 0, **model_options
) -> models.Classifier:
    """The model that these flags ask for. Every `member` has its own random weights, the same ones on any device."""
    with ranks.first_rank_first(), train.seeded(torch.device("cpu"), args.seed, "model", member):
        model = models.build(
            args.model, tuple(dataset.x.shape[1:]), len(dataset.classes), args.width, pretrained=args.pretrained or "",
            **model_options,
        )  # fmt: skip
    return model.to(device, memory_format=torch.channels_last)
