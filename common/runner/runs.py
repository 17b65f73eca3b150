"""A run and its folder: flags, metrics, checkpoint, model and pictures, and the progress bar.

A run can be killed at any time, and goes on with `--resume`: each file is written whole, and the
checkpoint is some 30 seconds old. A new one, next.pt, takes its place when the round after it has
ended, or when a resumed run has repeated its round. So a resumed run mostly repeats a round, and
notices if it comes out otherwise. While it repeats rounds, nothing in the folder changes. At the
end next.pt is the last state, and a run that is made longer goes on from the checkpoint before.
"""

import csv
import io
import json
import os
import re
import sys
import sysconfig
import time
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path
from pickle import PickleError
from zlib import crc32

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from common import RunError, UserError, first_line, ranks, train
from common.folders import few, say, say_once
from common.runner import plots

tqdm.monitor_interval = 0  # its thread would be lost in the forked ranks
SAVE_EVERY = 30  # seconds between two checkpoints
ANEW = "start a new run, or if it is one seed of several, delete its folder and resume"
ON_THE_BAR = {"train_loss": "loss", "id_accuracy": "ID", "ood_accuracy": "OOD"}
MAY_CHANGE = {"resume", "device", "data_dir", "processes"}  # flags that move no number
KEPT = ("state", "rows", "ended", "kept")  # what a checkpoint has


class Run:
    """A run and its folder args.out.

    state   what federate() yielded last, for the next round; {} in a new run. Its "w" or "theta" is
            the model
    rows    what metrics.csv holds, one dict per round, with numbers as numbers and lists as lists
    t       the last finished round
    ended   how many rounds it could have had when it ended, or 0
    kept    hashes of what federate() keeps beside the state: see Watch
    data    a number that changes if the data do
    images  the same for all seeds: the name, and the number before a rotation
    machine  see machine_of

    Makes the folder and starts the clock, or takes up the last checkpoint in it. Raises UserError
    if the folder is taken, if it belongs to other data, or if the ranks do not fit together.
    """

    def __init__(self, args, data, clients, model, device):
        self.args, self.clients, self.folder = args, clients, Path(args.out)
        self.checkpoint, self.next = self.folder / "checkpoint.pt", self.folder / "next.pt"
        self.model, self.state, self.rows, self.t = model, {}, [], 0
        self.ended, self.has_saved, self.kept = 0, False, {}
        self.classes, self.data = data.classes, data.fingerprint()
        self.images = f"{data.name} {data.source or self.data}"
        self.machine = machine_of(device)
        self.started = time.monotonic()
        self.save_at = 0.0  # the first round is saved at once
        self.seen = {0: {}}  # round -> its line in metrics.csv, of rounds that a kill has undone
        self.total = args.rounds + (args.iterations - 1) * args.later_rounds  # the most
        goes_on = args.resume and (self.folder / "args.json").exists()
        if goes_on:
            self._take_up(device)
        self.about = {
            "flags": {**vars(args)},
            "data": self.data,
            "images": self.images,
            "classes": self.classes,
            "shape": [*data.x.shape[1:]],
            "machine": self.machine,
        }
        own = {*MAY_CHANGE, "out", "dataset"}  # of each machine
        facts = {flag: value for flag, value in vars(args).items() if flag not in own}
        ranks.agree({**facts, "data": self.data, "round": self.t}, "", "start all alike")
        if not ranks.RANK and not goes_on:
            write_args(self.folder, self.about, False)
        self.bar = tqdm(
            desc=f"{args.name}, seed {args.seed}, round {self.t}",
            total=self.total,
            initial=self.t,
            bar_format="{desc}{percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}",
            mininterval=0.2 if os.isatty(2) else 60,
            **({"disable": True} if ranks.RANK else {}),  # else TQDM_DISABLE decides
        )

    def _take_up(self, device):
        """Goes on from the checkpoint in the folder, if there is one yet."""
        before = read_args(self.folder)
        saved = {**before["flags"], "out": self.args.out, "data": before["data"]}
        refuse_others(self.folder, saved, {**vars(self.args), "data": self.data})
        began, now = before["machine"], self.machine
        others = [name for name in began if began[name].split(", then ")[-1] != now.get(name)]
        if others:
            say(f"{self.folder} began with another {few(others)}, so its numbers may differ")
        self.machine |= began | {name: f"{began[name]}, then {now.get(name)}" for name in others}
        with suppress(Exception):  # it is missing or damaged
            lines = csv.DictReader((self.folder / "metrics.csv").read_text("utf-8").splitlines())
            if all("." in name for name in others):  # which a module of the user's holds
                self.seen |= {int(line["round"]): line for line in lines}
        for file in filter(Path.exists, (self.checkpoint, self.next)):
            try:
                found = torch.load(file, weights_only=True, map_location=device)
                has_ended = (self.folder / "model.pt").exists() and found["ended"] == self.total
                if file == self.checkpoint or has_ended:
                    last = found["rows"][-1]
                    vars(self).update(found, t=last["round"])
                    self.started = time.monotonic() - last["seconds"]
            except Exception as e:  # there are many types for a file that is damaged
                say(f"{file} cannot be read ({type(e).__name__}), so more rounds may be repeated")
        done = max(self.t + (not self.ended), *self.seen)
        if done > self.total:
            raise UserError(f"{self.folder} has had {done} rounds: allow as many, or more")

    def progress(self, t, share):
        """Moves the clock by this share of round t. Training before round 1 counts as none."""
        self.bar.set_description(
            f"{self.args.name}, seed {self.args.seed}, round {t}/{self.total}", refresh=False
        )
        self.bar.update(min(share, t - self.bar.n))

    def record(self, state, row):
        """Ends a round: adds a row to metrics.csv, shows it, and saves from time to time.

        state  what the next round and a resumed run need, as numbers and tensors by name; "t" is
               the round that has ended
        row    columns of metrics.csv, each a number or numbers: tensors, arrays, lists, tuples.
               `confusion`, how many samples of class i are called j, [classes, classes], has a
               file of its own, and the row has its columns' sums as `predicted`, and its diagonal
               as `hits`

        Adds the norm of the model's weights, by which two runs can be compared, and leaves out what
        is None. Raises UserError if a value is something else in the first round (later it is left
        out), if args have changed, or if a resumed run could not read the state. It does so, too,
        if a process has another row, or if the round had another norm before a kill has undone it,
        and says so if only another column differs. (One with `seconds` in its name may differ.)
        """
        if taken := {"round", "seconds", "norm"} & row.keys():
            raise UserError(f"{' and '.join(taken)} is a column already: choose another name")
        for flag, value in vars(self.args).items():
            if value is not self.about["flags"].get(flag):
                raise UserError(
                    f"federate() changes args.{flag}: use a variable, or set trainer.local from t"
                )
        row, self.state, self.t = {**row, "norm": weights_in(state).norm()}, state, state["t"]
        confusion = row.pop("confusion", None)
        if confusion is not None:
            row |= {"predicted": confusion.sum(0), "hits": confusion.diagonal()}
        plain = {column: _plain(value) for column, value in row.items() if value is not None}
        if wrong := [column for column in plain if plain[column] is None]:
            why = f"{few(wrong)} is no number and no list of numbers"
            if not self.rows:
                raise UserError(why)
            say_once(f"\n{why}, so it is left out")  # because the rounds before are worth more
        row = {column: value for column, value in plain.items() if value is not None}
        cells = {column: _cell(row[column]) for column in row if "seconds" not in column}
        ranks.agree(
            cells,
            f"in round {self.t} ",
            "measure by trainer.map, and call a clock's column my_seconds",
        )
        before = self.seen.get(self.t, {})
        others = [c for c in cells if before.get(c) not in (None, "", cells[c])]
        if others:
            why = (
                f"{self.folder}: a round has another {few(others)} than before the run was "
                "stopped: does federate() begin after state['t'], yield all that it needs, and run "
                "on the same processor?"
            )
            if "norm" in others:
                raise UserError(why)
            say_once(f"\n{why} (Call a clock's column my_seconds)")  # because the model is the same
        # Twice in a row, because rounding may give two models the same norm
        if [r["norm"] for r in self.rows[-2:]] == 2 * [row["norm"]]:
            say_once("\nthe model is that of the round before")
        seconds = round(time.monotonic() - self.started, 2)
        self.rows.append({"round": self.t, "seconds": seconds, **row})
        self.bar.update(self.t - self.bar.n)
        shown = {name: row[c] for c, name in ON_THE_BAR.items() if c in row}
        self.bar.set_postfix(shown, refresh=False)
        if self.t < max(self.seen):  # it still repeats rounds
            return
        self._write_metrics()
        if confusion is not None:
            header = ["class", *(f"called {name}" for name in self.classes)]
            lines = zip(self.classes, *confusion.T.tolist())
            self._write("confusion.csv", _csv([header, *lines]))
        if not ranks.RANK:
            (self.folder / "model.pt").unlink(missing_ok=True)  # which says that it has finished
            if self.has_saved:
                self.next.replace(self.checkpoint)
                self.has_saved = False
        if time.monotonic() > self.save_at:
            self.save()
        if before and self.t < self.total and not ranks.RANK:  # so that each program gets on
            self.next.replace(self.checkpoint)
            self.has_saved = False

    def save(self):
        """Writes the next checkpoint. Raises UserError if it cannot be read again."""
        try:
            self._write(self.next.name, {name: getattr(self, name) for name in KEPT})
            if not ranks.RANK:  # takes a millisecond, because meta leaves out the numbers
                write_args(self.folder, self.about, True)
                torch.load(self.next, weights_only=True, map_location="meta")
        except (PickleError, AttributeError, TypeError) as e:  # the last two are of a lambda
            raise UserError(
                "federate() yields something else than numbers and tensors in the state: convert it"
            ) from e
        self.save_at, self.has_saved = time.monotonic() + SAVE_EVERY, True

    def finish(self):
        """Saves the model, the picture and the last state. Returns this run."""
        self.bar.close()
        ranks.agree({"last round": self.t}, "", "end by what they share, and by no clock")
        self._write_metrics()  # in its place may be those of more rounds
        if not self.ended:
            train.set_weights(self.model, weights_in(self.state))
            self._write("model.pt", {key: t.cpu() for key, t in self.model.state_dict().items()})
            plots.clients(self)
            self.ended = self.total
            self.save()
        self.state, self.model, self.bar = {}, None, None  # a table of updates may be large
        return self

    def _write_metrics(self):
        columns = dict.fromkeys(column for row in self.rows for column in row)
        cells = [[_cell(row.get(column, "")) for column in columns] for row in self.rows]
        self._write("metrics.csv", _csv([columns, *cells]))

    def _write(self, name, content):
        if not ranks.RANK:
            write_whole(self.folder / name, content)


def weights_in(state):
    """The model's weights [P] in what federate() yields: some papers call them w, others theta."""
    for name in ("w", "theta"):
        if name in state and "t" in state:
            return state[name]
    raise UserError(
        "federate() yields no state, or one without the round: call it t, or without "
        "the model: call it w, or theta"
    )


def machine_of(device):
    """What a number depends on, beside flags, data and code, by name.

    These are the processor, and versions, also of what the user's modules import. The values of
    these modules count, too, because they may be of another file: numbers, text, and lists, dicts,
    sets, tensors, arrays, objects and partial functions of them. What is long is a hash.
    """
    chip = torch.backends.cpu.get_cpu_capability()
    chip += f" of {torch.cpu.get_capabilities().get('cpu_name')}"
    if device.type == "cuda":
        chip = torch.cuda.get_device_name(device)
    found = {"Python": sys.version.split()[0], "device": f"{device.type} {chip}"}
    found |= {name: version(name) for name in ("torch", "torchvision", "numpy", "scipy")}
    for place, module in own_modules().items():
        for name, value in vars(module).items():
            if "common." in place or "__" in name:
                continue
            with suppress(Exception):  # it is not installed
                origin = getattr(value, "__module__", getattr(value, "__name__", None))
                package = origin.split(".")[0]
                found[package] = version(package)
            with suppress(Exception):  # it is something else
                if not hasattr(value, "__name__"):  # as functions, classes and modules have
                    text = json.dumps(value, default=_contents)
                    text = text if len(text) < 30 else str(crc32(text.encode()))
                    found[f"{Path(module.__file__).stem}.{name}"] = text
    return found


def _contents(value):
    """What json cannot write: an array's hash, a function's name, an object's attributes."""
    if hasattr(value, "nbytes"):
        return crc32(np.ascontiguousarray(value.data))
    if isinstance(value, set):
        return sorted(value)
    if isinstance(value, partial):
        return value.func, value.args, value.keywords
    return getattr(value, "__name__", None) or vars(value)


def own_modules():
    """The modules that this program has imported, but of what is installed, by name."""
    installed = rf".*(site|dist)-packages|.*torchinductor|{re.escape(sysconfig.get_path('stdlib'))}"
    own = rf"(?!{installed}).*[/\\].*\.py$"
    return {
        m.__name__: m
        for m in [*sys.modules.values()]
        if re.match(own, getattr(m, "__file__", None) or "")
    }


def write_whole(file, content):
    """Writes a text or a dict of tensors, so that a kill leaves the old file whole."""
    part = file.with_name(f"{file.name}.part")
    try:
        with open(part, "wb") as open_file:
            if isinstance(content, str):
                open_file.write(content.encode())
            else:
                torch.save(content, open_file)
            open_file.flush()
            os.fsync(open_file.fileno())  # so that it is whole after a power loss, too
        part.replace(file)
    except RuntimeError as e:  # torch's error for a full disk
        raise OSError(f"{file} cannot be written ({first_line(e)})") from e


def write_args(folder, about, goes_on):
    """Writes args.json. A new run has the folder if it can create this file."""
    file, text = folder / "args.json", json.dumps(about, indent=1, default=str)  # of a Path, say
    if goes_on:
        return write_whole(file, f"{text}\n")
    check_free(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with open(file, "x") as new:
        new.write(text)  # at once, because a kill must not leave an empty file


def read_args(folder):
    """What args.json says. Raises UserError if it cannot be read."""
    file = folder / "args.json"
    try:
        about = json.loads(file.read_text(encoding="utf-8"))
        return {**about, "flags": dict(about["flags"]), "machine": dict(about.get("machine", ()))}
    except Exception as e:  # there are many types for a file that is damaged
        raise RunError(f"{file} cannot be read ({first_line(e)}): {ANEW}") from e


def refuse_others(folder, saved, flags):
    """Raises UserError if what is in this folder was run with other flags, or with other code.

    A run may become longer or shorter, by --rounds or by UEFL's --iterations.
    """
    may_change = {*MAY_CHANGE, "dataset", "iterations"}  # a folder of images may have moved
    if saved.get("iterations") == 1:
        may_change |= {"rounds", "method_rounds"}
    flags = json.loads(json.dumps(flags, default=str))  # as args.json has them
    saved, flags = ({**found, **found.get("code", {}), "code": {}} for found in (saved, flags))
    names = saved.keys() & flags.keys() - may_change
    if names := sorted(name for name in names if saved[name] != flags[name]):
        raise UserError(
            f"{folder} differs in {few(names)}: undo that (for flags see its args.json), or start "
            "a new run (another seed may have a folder of its own inside)"
        )


def check_free(folder):
    """Raises UserError if this folder holds something, so that no run overwrites another one."""
    if folder.is_file() or any(folder.glob("*")):
        raise UserError(f"{folder} is taken: choose another --out, or continue a run by --resume")


def _csv(lines):
    """These lines as CSV."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue()


def _plain(value):
    """A tensor, an array or a list as numbers that CSV and a checkpoint can hold, or None."""
    with suppress(ValueError):  # of lists whose lengths differ
        found = np.asarray(value.tolist() if isinstance(value, Tensor) else value)
        if found.dtype.kind in "biuf":
            return (found + 0).tolist()  # of bools, too, where True becomes 1


def _cell(value):
    """A value as it stands in metrics.csv: numbers have six digits, lists have spaces inside."""
    if isinstance(value, list):
        return " ".join(map(_cell, value))
    return f"{value:.6g}" if isinstance(value, float) else str(value)
