"""What the user types: the flags that all methods share, with defaults by data set."""

import argparse
import json
import re
import sys
import sysconfig
from argparse import BooleanOptionalAction
from datetime import datetime
from functools import cache
from hashlib import sha1
from os.path import isfile, relpath
from pathlib import Path

from common import RunError, UserError, data, few, models
from common.splits import PARTITIONS

# Flags that move no number: where a run computes, and where its files lie. The images of a folder
# are compared by its name and their fingerprint
OF_A_MACHINE = {"resume", "out", "device", "processes", "data_dir", "dataset", "compare"}
NEEDS = {  # flag -> the values of another flag with which it changes anything
    "dirichlet": ("partition", ["dirichlet"]),
    "silos": ("partition", ["silos"]),
    "silo_size": ("partition", ["silos"]),
    "clients": ("partition", PARTITIONS),
    "held_out": ("partition", PARTITIONS),
    "width": ("model", models.OWN),
    "momentum": ("optimizer", ["sgd"]),
}

# What --small changes in FedAvg and Wu et al.'s methods, ours
QUICK = dict(
    model="cnn", width=0.25, batch_size=32, local_epochs=5, lr=0.05, rounds=20, evaluate_every=1,
)  # fmt: skip
SMALL = {"other": QUICK, "folder": QUICK | dict(image_size=32)}


def within(kind, low, high=10**9):
    """An argparse type: a number of this kind, int or float, from low to high."""

    def number(text):
        value = kind(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text} is out of range: {low:g} to {high:g}")
        return value

    number.__name__ = kind.__name__  # which argparse's errors name
    return number


positive = within(float, 1e-12)


class Help(argparse.ArgumentDefaultsHelpFormatter):
    """Names the default of each flag that has one."""

    def _get_help_string(self, action):
        return action.help if action.default in (None, "") else super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """Reports a wrong flag as a UserError."""

    def error(self, message):
        raise UserError(f"{message} (see {self.prog} --help)")


# fmt: off
def add_shared_flags(parser, example):
    """The flags that all methods share, with the defaults that hold if no data set's do.

    example  the data set of the method's example
    """
    # Only some methods have these as flags
    parser.set_defaults(held_out=None, iterations=1, later_rounds=0)
    # No flags: the name of a row, the round in which its run stops, and what parse() adds
    parser.set_defaults(name=None, stop=None, is_example=False)
    add = parser.add_argument_group("settings").add_argument
    add("--dataset", default=example,
        help=f"{', '.join(data.NAMES)} (emnist: its ten digits), or a folder of images")
    add("--small", action=BooleanOptionalAction, default=False,
        help="our cut of the settings: minutes without a GPU")
    add("--resume", nargs="?", const="--out", metavar="DIR",
        help="""continue what was started in this folder, with its flags; without a DIR, that in
        --out, or start it there if there is nothing yet""")

    whole = within(int, 1)
    add = parser.add_argument_group("data").add_argument
    add("--data-dir", default="data",
        help="folder of the data sets; downloads go there, too")
    add("--image-size", type=within(int, 8), default=96,
        help="pixels: a folder's images are scaled to this size")
    add("--rotate", type=within(float, -360, 360), nargs="+", metavar="DEGREES",
        help="divide the images into domains, one for each angle")
    add("--test-domain", metavar="NAME",
        help="leave this domain out of training and test on it (OOD); all: each of them in turn")

    add = parser.add_argument_group("clients").add_argument
    add("--partition",
        choices=[*PARTITIONS, "silos"],
        help="""which client holds which samples. dirichlet: different shares of the labels; iid:
        random equal parts; shards: equal parts with about two labels each; domain: one domain per
        client; silos: see --silos; rare: three clients hold a class that nobody else has;
        specialists: most clients hold one class, the others all (if unset: the example's on glyphs,
        domain with --rotate or --test-domain, silos in uefl.py, else dirichlet)""")
    add("--dirichlet", type=positive, default=0.1, metavar="ALPHA",
        help="smaller: the clients' labels differ more")
    add("--clients", type=whole,
        help="N, all clients (if unset: 100, or fewer on small data; or one per domain)")
    add("--participating", type=whole,
        help="M, clients that may train (if unset: 40 percent, or all)")
    add("--sample", type=whole,
        help="K, clients per round (if unset: M / 4, one per domain, all silos, or all vertices)")
    add("--silos", type=within(int, 0), nargs="+", metavar="N", help="silos of each domain")
    add("--silo-size", type=whole, default=2000, help="training samples of each silo")

    add = parser.add_argument_group("model and training").add_argument
    add("--model", choices=models.NAMES, default="cnn", help="see common/models.py")
    add("--width", type=within(float, 1e-3, 32), default=1.0,
        help="multiplies the channels of cnn, convnet, resblocks and resnet18-cifar")
    add("--pretrained", nargs="?", default="", const="imagenet", metavar="FILE",
        help="start from ImageNet weights, downloaded or from FILE (resnet18, resnet50, vgg16)")
    add("--rounds", type=whole, default=30, help="T, communication rounds")
    add("--local-epochs", type=whole, default=5, help="E, a client's passes over its data")
    add("--local-steps", type=whole, help="so many steps of a client take the place of its epochs")
    add("--batch-size", type=whole, default=32, help="B, samples in a step of local training")
    add("--lr", type=positive, default=0.05, help="step size of local training")
    add("--lr-decay", type=within(float, 1e-3, 1), default=1.0,
        help="lr is multiplied by this after each round")
    add("--optimizer", choices=["sgd", "adam"], default="sgd", help="of local training")
    add("--momentum", type=within(float, 0, 0.999), default=0.0, help="momentum of sgd")
    add("--weight-decay", type=within(float, 0), default=0.0, help="of both optimizers")

    add = parser.add_argument_group("run").add_argument
    add("--compare", action=BooleanOptionalAction, default=True,
        help="also run the baselines, each in the folder DIR-NAME")
    add("--evaluate-every", type=whole, default=1, metavar="N",
        help="rounds from one evaluation to the next")
    add("--seed", dest="seeds", type=within(int, 0), nargs="+", default=[0], metavar="SEED",
        help="of every random draw; with several, everything runs with each, and is compared")
    add("--device", default="auto",
        help="cpu, cuda, cuda:1, ...; auto takes a GPU if there is one")
    add("--processes", type=whole, metavar="N",
        help="""on Linux, how many processes share a round's clients and the GPUs; no result
        depends on it (default: one per core or GPU, and no more than clients in a round)""")
    add("--precision", choices=["float32", "bfloat16", "auto"], default="auto",
        help="of the forward pass; bfloat16: autocast; auto: what is fast here")
    add("--out", metavar="DIR",
        help="the run's folder (default: a new one under runs/)")
# fmt: on


def parse(file, doc, settings, small, own_flags, argv=None):
    """The flags of the method in this file.

    doc        the method file's docstring; its first paragraph begins the help
    settings   data set -> its defaults; the first data set is the default one, "folder" stands for
               every folder of images, and "other" for all data sets that are not named
    small      the same for what --small changes
    own_flags  called with argparse's add_argument, to add the method's own flags

    Adds `method`, its name; `code`, see code_of; and `is_example`, whether this is the example as
    it stands. Raises UserError for flags that make no sense, or that NEEDS says have no effect.
    """
    argv = sys.argv[1:] if argv is None else argv
    # An empty value comes from a shell variable that is not set
    if any(not word or re.fullmatch("--[a-z-]+=", word) for word in argv):
        raise UserError("a flag's value is empty: give one, or leave the flag out")
    method = Path(file).stem
    example = next(iter(settings))
    about = doc.strip().split("\n\n")[0]
    parser = Parser(
        prog=f"{method}.py",
        usage="python %(prog)s [--flag value ...]",
        add_help=False,
        allow_abbrev=False,
        formatter_class=Help,
        description=f"{about} The defaults depend on the data set, and are the paper's if the "
        "paper uses it: `--dataset mnist --help` shows those.",
    )
    add_shared_flags(parser, example)
    own_flags(parser.add_argument_group("this method").add_argument)
    known = parser._option_string_actions  # --flag -> what argparse knows of it
    given = [known[flag] for word in argv if (flag := word.split("=")[0]) in known]
    typed = {action.dest: action.option_strings[0] for action in given}
    for action in given:  # of other flags the last one counts, as argparse has it
        takes_several = action.nargs == "+" or action.dest == "test_domain"
        if takes_several and given.count(action) > 1:
            raise UserError(f"{typed[action.dest]} is given twice: give it once")
    chosen, _ = parser.parse_known_args(argv)  # --dataset, --small and --resume say the defaults
    saved = saved_flags(chosen, method)
    preset = saved or defaults_for(chosen, settings, small)
    parser.set_defaults(**as_typed(parser, preset))
    parser.add_argument("-h", "--help", action="help", help="show this text")  # with these defaults
    args = parser.parse_args(argv)
    args.resume = saved.get("out")
    args.seeds = list(dict.fromkeys(args.seeds))
    args.method = method
    args.code = code_of(file, args.pretrained)
    if saved:
        if args.precision == "auto":  # the run began with what this meant there
            args.precision = saved.get("precision", "auto")
        refuse_others(Path(args.resume), saved, vars(args))
    else:
        infer_partition(args, typed)
        refuse_useless(args, typed)
        changed = typed.keys() - OF_A_MACHINE - {"seeds", "precision"}
        args.is_example = args.dataset == example and not changed
    name = f"{method}-{Path(args.dataset).stem}-{datetime.now():%Y%m%d-%H%M%S-%f}"
    args.out = str(Path(args.out or f"runs/{name}"))
    return args


def own_modules():
    """The files of the modules that this program has imported, except of what is installed."""
    installed = rf".*(site|dist)-packages|.*torchinductor|{re.escape(sysconfig.get_path('stdlib'))}"
    own = rf"(?!{installed}).*[/\\].*\.py$"
    files = [getattr(module, "__file__", None) or "" for module in [*sys.modules.values()]]
    return {file for file in files if re.match(own, file)}


@cache  # for as long as the program, which keeps the code that it has imported, too
def code_of(file, weights=""):
    """A hash of each file of own_modules(), of this one and of common/, by its path from here.

    It is that of the code alone, without empty lines and lines of comment.

    weights  a file that has a hash, too, if there is one
    """
    files = {file, *own_modules(), *map(str, Path(__file__).parents[1].rglob("*.py"))}
    if isfile(weights):
        files.add(weights)
    found = {}
    for f in sorted(files):
        code = Path(f).read_bytes()
        if f.endswith(".py"):
            lines = [line.rstrip() for line in code.splitlines()]
            code = b"\n".join(line for line in lines if line and not line.lstrip().startswith(b"#"))
        found[relpath(f, Path(file).parent)] = sha1(code).hexdigest()[:7]
    return found


def defaults(method, words=""):
    """The flags of one run of a method, such as fedavg, with these words of a command line."""
    own = method.SETTINGS, method.SMALL, method.own_flags
    args = parse(method.__file__, method.__doc__, *own, words.split())
    args.seed = args.seeds[0]
    return args


def defaults_for(chosen, settings, small):
    """The defaults of the chosen data set.

    Raises UserError if --small does not fit it, or if a default belongs to no flag.
    """
    kind = chosen.dataset if chosen.dataset in data.NAMES else "folder"
    defaults = settings.get(kind, settings.get("other", {}))
    if chosen.small:
        if kind in data.OFFLINE:
            raise UserError(f"--small: {kind} is small already; leave it out")
        defaults = defaults | small.get(kind, small["other"])
    refuse_unknown("SETTINGS", defaults, chosen)
    return defaults


def refuse_unknown(where, own, args):
    """Raises UserError if one of these names is no flag's."""
    if unknown := [*own.keys() - vars(args).keys()]:
        raise UserError(f"{where} has {few(unknown)}, which no flag is called")


def as_typed(parser, values):
    """Values of flags, as if they had been typed. Raises UserError for one that nobody can type.

    They come from SETTINGS or args.json, and of defaults argparse looks at texts alone.
    """
    found = dict(values)
    for action in parser._actions:
        value = values.get(action.dest, action.default)
        if value is None and action.default is None:
            continue
        is_switch = action.nargs == 0
        is_list = action.nargs not in (0, None, "?")
        fits = isinstance(value, bool) == is_switch and isinstance(value, list) == is_list
        if not fits or value == []:
            parser.error(f"{action.option_strings[0]} cannot be {value}")
        if not is_switch:
            words = value if is_list else [value]
            try:
                found[action.dest] = parser._get_values(action, [*map(str, words)])
            except argparse.ArgumentError as e:
                parser.error(str(e))
    return found


def saved_flags(chosen, method):
    """The flags of the run or comparison that goes on; none if a new one starts.

    Raises UserError if there is no such run in the folder that --resume names, or one of another
    method.
    """
    folder = chosen.resume
    if folder == "--out":
        if not chosen.out:
            raise UserError("--resume without a folder takes that in --out, which is missing")
        folder = chosen.out if (Path(chosen.out) / "args.json").exists() else None
    if not folder:
        return {}
    saved = read_args(Path(folder))["flags"]
    if saved.get("method") != method:
        raise UserError(f"{folder} was started by {saved.get('method')}.py: resume it with that")
    return saved | {"processes": None, "out": folder}


def read_args(folder):
    """What args.json says. Raises UserError if it cannot be read."""
    file = folder / "args.json"
    try:
        about = json.loads(file.read_text(encoding="utf-8"))
        flags = dict(about["flags"])
        flags["code"] = dict(flags.get("code", {}))
        machines = [dict(machine) for machine in about.get("machines") or [{}]]
        return {**about, "flags": flags, "machines": machines}
    except Exception as e:  # there are many types for a file that is damaged
        raise RunError(
            f"{file} cannot be read ({type(e).__name__}): name another folder, or start a new run "
            "(if it is one seed of several, delete its folder and resume)"
        ) from e


def refuse_others(folder, saved, flags):
    """Raises UserError if what has begun here was run with other flags, or with other code.

    Returns whether it becomes longer or shorter, by --rounds or by UEFL's --iterations.
    """
    length = {"iterations", "stop"}
    if saved.get("iterations") == 1:
        length.add("rounds")
    flags = json.loads(json.dumps(flags, default=str))  # as args.json has them
    then = {**saved, **saved["code"]}  # of code, each file has a name
    now = {**flags, **flags["code"]}
    files = saved["code"].keys() & flags["code"].keys()
    names = {*saved, *flags, *files} - OF_A_MACHINE - {"code"}
    differ = {name for name in names if then.get(name) != now.get(name)}
    if others := sorted(differ - length):
        texts = [f"{name} ({then.get(name)}, now {now.get(name)})" for name in others]
        raise UserError(f"{folder} differs in {few(texts)}: undo that, or start a new run")
    return bool(differ)


def infer_partition(args, typed):
    """Sets the partition if the user has not, and drops angles by default that serve nothing.

    With --test-domain it is domain, whatever the data set's defaults say. If they say nothing, it
    is domain with --rotate, and else dirichlet. N, M and K have their defaults in splits.divide
    and splits.participation.
    """
    if "partition" not in typed:
        if args.test_domain:
            args.partition = "domain"
        elif not args.partition:
            args.partition = "domain" if args.rotate else "dirichlet"
    needs_domains = args.test_domain or args.partition in ("domain", "silos")
    if "rotate" not in typed and not needs_domains:
        args.rotate = None


def refuse_useless(args, typed):
    """Raises UserError if a flag that was typed has no effect."""
    if "image_size" in typed and args.dataset in data.NAMES:
        raise UserError(f"--image-size is for folders of images; {args.dataset} has its own size")
    if {"local_steps", "local_epochs"} <= typed.keys():
        raise UserError("--local-steps takes the place of --local-epochs: give one of them")
    for flag, (other, values) in NEEDS.items():
        if flag in typed and getattr(args, other) not in values:
            raise UserError(
                f"{typed[flag]} has no effect with --{other} {getattr(args, other)}: leave it out "
                f"or choose another --{other}"
            )
