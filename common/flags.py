"""What the user types: the flags that all methods share, with defaults by data set."""

import argparse
import hashlib
import json
import sys
from argparse import BooleanOptionalAction
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from common import UserError, data, first_line, models
from common.runs import FREE

NEEDS = {  # a flag that changes nothing with another value of this flag, so that a user would believe what is not so
    "dirichlet": ("partition", ["dirichlet"]),
    "silos": ("partition", ["silos"]),
    "silo_size": ("partition", ["silos"]),
    "clients": ("partition", ["dirichlet", "iid", "domain", "rare", "twins", "specialists"]),
    "width": ("model", models.OWN),
    "momentum": ("optimizer", ["sgd"]),
}


def at_least(low: float, kind: type = int, most: float = 10**9) -> Callable[[str], float]:
    """An argparse type: a number of this kind between low and most."""

    def number(text: str):
        value = kind(text)
        if not low <= value <= most:
            raise argparse.ArgumentTypeError(
                f"{text} is out of range: between {low:g} and {most:g}"
            )
        return value

    number.__name__ = (
        "whole number" if kind is int else "number"
    )  # for argparse, which reports a ValueError
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
def _first_flags(parser: Parser, dataset: str) -> None:
    """Those on which the defaults of the others depend."""
    add = parser.add_argument_group("settings").add_argument
    add("--dataset", type=not_empty, default=dataset, help=f"{', '.join(data.NAMES)}, or a folder of images")
    add("--small", action=BooleanOptionalAction, default=False, help="our cut of the settings: minutes without a GPU")
    add("--resume", type=not_empty, metavar="DIR", help="continue what was started in this folder, with its flags")


def _shared_flags(parser: Parser) -> None:
    add = parser.add_argument_group("data").add_argument
    add("--data-dir", type=not_empty, default="data", help="folder of the data sets; downloads go there, too")
    add("--image-size", type=at_least(8), default=96, help="pixels: a folder's images are scaled to this size")
    add("--rotate", type=at_least(-360, float, 360), nargs="+", metavar="DEGREES",
        help="divide the images into domains, one for each angle")
    add("--test-domain", metavar="NAME",
        help="leave this domain out of training; it becomes the OOD test set. all: each of them in turn")

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
    add("--compare", action=BooleanOptionalAction, default=True, help="also run the baselines, in folders DIR-NAME")
    add("--evaluate-every", type=at_least(1), default=1, metavar="N", help="rounds from one evaluation to the next")
    add("--seed", "--seeds", type=at_least(0), nargs="+", default=[0], metavar="SEED",
        help="of every random draw; with several seeds, everything runs with each, and is compared")
    add("--device", default="auto", help="cpu, cuda, cuda:1, ...; auto takes a GPU if there is one")
    add("--processes", type=at_least(1), metavar="N", help="how many processes share a round's clients; the results do"
        " not depend on it (default: one per core or GPU, and no more than clients in a round; 1 for a debugger)")
    add("--precision", choices=["float32", "bfloat16", "auto"], default="auto",
        help="bfloat16 means autocast; auto takes it if the hardware has it, else float32")
    add("--out", type=not_empty, metavar="DIR", help="the run's folder (default: a new one under runs/)")
# fmt: on


def parse(
    file: str, doc: str, settings: dict[str, dict], small: dict[str, dict], own_flags: Callable[[Callable], None],
    argv: list[str] | None = None,
) -> argparse.Namespace:  # fmt: skip
    """The flags of the method in this file, with the method's name as `method` and the run's as `name`.

    doc        the method file's docstring; its first line is the first line of the help
    settings   data set -> its defaults; the first data set is the default, "folder" stands for every folder of images,
               and "other" for all data sets that are not named
    small      the same for what --small changes
    own_flags  called with argparse's add_argument, to add the method's own flags

    Raises UserError for flags that do not make sense or have no effect, and for a folder that is taken.
    """
    argv = sys.argv[1:] if argv is None else argv
    method, example = Path(file).stem, next(iter(settings))
    sources = [Path(file), *sorted(Path(__file__).parent.glob("*.py"))]
    code = hashlib.sha1(b"".join(source.read_bytes() for source in sources)).hexdigest()
    parser = Parser(
        prog=f"{method}.py", usage="python %(prog)s [--flag value ...]", allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        description=f"{doc.strip().splitlines()[0]} The defaults depend on the data set, and are the paper's if the"
        " paper uses it: `--dataset mnist --help` shows those for mnist, and with --small our cut of them.",
    )  # fmt: skip
    _first_flags(parser, example)
    first, _ = parser.parse_known_args([word for word in argv if word not in ("-h", "--help")])
    _shared_flags(parser)
    own_flags(parser.add_argument_group("this method").add_argument)
    if first.resume:
        defaults = _saved_flags(first.resume, method)
    else:
        kind = first.dataset if first.dataset in data.NAMES else "folder"
        if first.small and kind in data.DRAWN:
            raise UserError(
                f"--small: {kind} is small already; leave it out, or choose another --dataset"
            )
        defaults = _of(settings, kind) | (_of(small, kind) if first.small else {})
    parser.set_defaults(**defaults)
    args = parser.parse_args(argv)
    words = [word.split("=")[0] for word in argv if word.startswith("--")]
    typed = {word[2:].removeprefix("no-").replace("-", "_") for word in words}
    args.method, args.code = method, code
    if first.resume:
        for flag in typed - {*FREE}:
            if getattr(args, flag) != defaults.get(flag):
                flag, value = flag.replace("_", "-"), defaults.get(flag)
                raise UserError(f"{first.resume} was run with --{flag} {value}: leave --{flag} out")
        args.out = str(Path(first.resume))  # without a last /
        return args

    if "partition" not in typed and (args.test_domain or "partition" not in defaults):
        args.partition = "domain" if args.test_domain or args.rotate else "dirichlet"
    if "rotate" not in typed and args.partition not in ("domain", "silos"):
        args.rotate = None  # the turned domains of the defaults are for clients with a domain each
    for flag, (other, values) in NEEDS.items():
        if flag in typed and getattr(args, other) not in values:
            shown = f"--{flag.replace('_', '-')}"
            raise UserError(f"{shown} has no effect with --{other} {getattr(args, other)}")
    now = f"{datetime.now():%Y%m%d-%H%M%S-%f}"  # several runs may start in the same second
    args.out = str(Path(args.out or f"runs/{method}-{Path(args.dataset).stem}-{now}"))
    args.is_example = not typed - {*FREE, "out", "seed", "precision"}
    return args


def _of(settings: dict[str, dict], kind: str) -> dict:
    return settings.get(kind, settings.get("other", {}))


def _saved_flags(folder: str, method: str) -> dict:
    """The flags of the run in this folder."""
    try:
        saved = json.loads((Path(folder) / "args.json").read_text())["flags"]
        if saved["method"] != method:
            raise UserError(
                f"--resume {folder}: this is a run of {saved['method']}.py, not of {method}.py"
            )
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise UserError(f"--resume {folder}: there is no run to resume ({first_line(e)})") from e
    seeds = saved["seed"] if isinstance(saved["seed"], list) else [saved["seed"]]
    own = {flag: value for flag, value in saved.items() if flag not in ("resume", "processes")}
    return {**own, "seed": seeds}
