"""What stays on disk, and what the user sees: flags, metrics, checkpoints and progress."""

import csv
import io
import json
import os
import shutil
import sys
import time
import zlib
from argparse import Namespace
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from pickle import UnpicklingError
from zipfile import ZipFile

import numpy as np
import torch
import torch.nn as nn
from torch import Tensor
from tqdm import tqdm

from common import UserError, first_line, ranks, train
from common.data import DRAWN, Dataset
from common.runner import plots
from common.runner.measures import MEASURES
from common.splits import Clients

SAVE_EVERY = 30  # seconds between two checkpoints, at least
# Flags that a resumed run may change, the data only if they are the same, and those it may raise
MAY_CHANGE = ("resume", "device", "data_dir", "processes", "dataset")
MAY_GROW = ("rounds", "iterations")
CHECKPOINTS = ("checkpoint.pt", "checkpoint-before.pt")
KEPT = ("state", "rows", "best", "confusion")  # what a checkpoint has, beside the facts


def most_rounds(args: Namespace) -> int:
    """The rounds of a run, or of UEFL the most, because it ends if no client is uncertain."""
    return args.rounds + (getattr(args, "iterations", 1) - 1) * getattr(args, "later_rounds", 0)


class Run:
    """A run and its folder args.out: args.json, metrics.csv, checkpoint.pt, model.pt and pictures.

    choose  a column of metrics.csv: the model of the first round with its largest value is left as
            best_id.pt, too

    state   what federate() yielded last, for the next round; {} in a new run. Its "w" or "theta" is
            the model
    rows    what metrics.csv holds, one dict per round, with numbers as numbers and lists as lists
    t       the last finished round
    facts   flags, data and code, which must be the same in all ranks and in a resumed run

    Makes the folder and starts the clock. Raises UserError if the folder is taken, or if the facts
    differ in the ranks, or from those of the checkpoint in the folder.
    """

    def __init__(
        self,
        args: Namespace,
        data: Dataset,
        clients: Clients,
        model: nn.Module,
        device: torch.device,
        choose: str | None = None,
    ):
        self.args, self.data, self.clients, self.folder = args, data, clients, Path(args.out)
        self.model, self.choose = model, choose
        self.state, self.rows, self.t = {}, [], 0
        self.best = None  # the chosen weights so far, [P]
        self.confusion = None  # of the last evaluation, [classes, classes]
        self.images = data.fingerprint()
        self.facts = {"data": self.images, **vars(args)}
        for flag in (*MAY_CHANGE, *MAY_GROW, "out", "name", "is_example", "method_rounds"):
            self.facts.pop(flag, None)
        self.started = time.monotonic()
        self.save_at = 0.0  # the first round is saved at once
        self.told = False  # whether the user knows if this will take hours
        checkpoint = self._restore(device) if args.resume else None
        weights = train.get_weights(model).double().sum().item()
        others = {"round": self.t, "initial weights": weights, "checkpoint": checkpoint}
        ranks.agree({**self.facts, **others})
        self._open()

    def _restore(self, device: torch.device) -> int | None:
        """Takes up the last checkpoint, or the one before if that is damaged; returns its hash."""
        found, wrong = None, ""
        for file in (self.folder / name for name in CHECKPOINTS):
            try:
                if ZipFile(file).testzip():  # torch.load would read a flipped bit without a word
                    raise UnpicklingError
                found = dict(torch.load(file, weights_only=True, map_location=device))
                break
            except FileNotFoundError:
                continue
            except Exception as e:  # there are many types for a file that is damaged
                wrong = f"{file} cannot be read ({type(e).__name__}): start a new run"
        if found is None and wrong:
            raise UserError(wrong)
        if wrong and ranks.RANK == 0:
            (self.folder / CHECKPOINTS[0]).unlink()  # or it would take the place of the good one
        facts = found or self._begun()
        for what, fact in self.facts.items():
            if facts and facts.get(what) != fact:
                where = f"{self.folder} belongs to other {what}"
                raise UserError(f"{where}: use those, or start a new run")
        if found is None:
            return None
        for name in KEPT:
            setattr(self, name, found[name])
        self.t = self.rows[-1]["round"]
        if self.t > most_rounds(self.args):
            flag = "--iterations" if hasattr(self.args, "iterations") else "--rounds"
            raise UserError(f"{self.folder} has had {self.t} rounds: repeat the {flag} that it had")
        self.started -= self.rows[-1]["seconds"]
        return zlib.crc32(file.read_bytes())

    def _begun(self) -> dict:
        """The facts of a run that has no checkpoint yet, or {} if no run has begun here."""
        file = self.folder / "args.json"
        if not file.exists():
            check_free(self.folder)
            return {}
        try:
            about = json.loads(file.read_text())
            return {"data": about["data"], **about["flags"]}
        except (ValueError, KeyError) as e:
            raise UserError(f"{file} cannot be read ({first_line(e)}): start a new run") from e

    def _open(self) -> None:
        """Makes the folder and the progress bar."""
        self.bar = tqdm(
            desc=f"{self.args.name} round {self.t}",
            total=most_rounds(self.args),
            initial=self.t,
            bar_format="{desc}{percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}",
            mininterval=0.2 if sys.stderr.isatty() else 60,
            ncols=shutil.get_terminal_size().columns,  # 80 if a terminal does not tell
            disable=ranks.RANK > 0,
        )
        if ranks.RANK == 0:
            about = {
                "flags": vars(self.args),
                "data": self.facts["data"],
                "classes": self.data.classes,
                "shape": [*self.data.x.shape[1:]],
                "python": sys.version.split()[0],
                "torch": version("torch"),
                "torchvision": version("torchvision"),
                "processes": ranks.COUNT,
            }
            write_args(self.folder, about, self.args.resume)
            if self.rows:
                self._write_metrics()  # in its place may be those of fewer rounds
            plots.partition(self.folder / "partition.png", self.data, self.clients)
            if self.args.partition in ("domain", "silos"):
                title = "turned by {}°" if self.args.rotate else "domain {}"
                plots.samples(self.folder / "samples.png", self.data, title)

    def progress(self, t: int, share: float) -> None:
        """Moves the clock by this share of round t. Training before round 1 counts as none."""
        self.bar.set_description(f"{self.args.name} round {t}/{self.bar.total}", refresh=False)
        self.bar.update(min(share, t - self.bar.n))
        if ranks.RANK > 0 or self.told:
            return
        done, elapsed = self.bar.n - self.bar.initial, time.time() - self.bar.start_t
        if done > 0 and elapsed > 30:
            self.told, hours = True, elapsed / done * (self.bar.total - self.bar.n) / 3600
            if hours > 1:
                is_short = self.args.small or self.args.dataset in DRAWN
                shorter = "" if is_short else "; --small takes minutes"
                text = f"{self.args.name}: about {hours:.0f} more hours at this pace{shorter}"
                tqdm.write(text, file=sys.stderr)

    def record(self, state: dict, row: dict) -> None:
        """Ends a round: adds a row to metrics.csv, shows it, and saves from time to time.

        state  what the next round and a resumed run need, as numbers and tensors by name; "t" is
               the round that has ended
        row    columns of metrics.csv, each a number or numbers: tensors, arrays, lists, tuples.
               `confusion`, how many samples of class i are called j, [classes, classes], is saved
               and drawn at the end, and the row has its columns' sums as `predicted`, and its
               diagonal as `hits`

        Raises UserError if a value is something else, or if a resumed run could not read the state.
        """
        self.state, self.t, row = state, state["t"], dict(row)
        confusion = row.pop("confusion", None)
        if confusion is not None:
            self.confusion = confusion
            row |= {"predicted": confusion.sum(0), "hits": confusion.diagonal()}
        seconds = round(time.monotonic() - self.started, 2)
        row = {column: _plain(value, column) for column, value in row.items()}
        self.rows.append({"round": self.t, "seconds": seconds, **row})
        if self.choose in row and self.best_row() is self.rows[-1]:
            self.best = weights_in(state).clone()  # a method may go on in place, as with +=
        self._write_metrics()
        self.bar.update(self.t - self.bar.n)
        self.bar.set_postfix_str(_short(row), refresh=False)
        is_terminated = ranks.is_terminated()
        if time.monotonic() > self.save_at or is_terminated:
            self.save()
        if is_terminated:
            ranks.exchange(None)  # all wait for the checkpoint
            raise ranks.Terminated

    def save(self) -> None:
        """Writes the checkpoint. Raises UserError if the first one cannot be read again."""
        began = time.monotonic()
        kept = {name: getattr(self, name) for name in KEPT}
        last, before = (self.folder / name for name in CHECKPOINTS)
        if ranks.RANK == 0 and last.exists():
            last.replace(before)
        self._write(last.name, {**self.facts, **kept})
        if ranks.RANK == 0 and not self.save_at:  # it is the first one of this program
            try:  # on meta, which leaves out the numbers
                torch.load(self.folder / "checkpoint.pt", weights_only=True, map_location="meta")
            except UnpicklingError as e:
                wrong = "federate() yielded a state with something else than numbers and tensors"
                raise UserError(f"{wrong}: no run could resume from it ({first_line(e)})") from e
        took = time.monotonic() - began
        self.save_at = began + SAVE_EVERY * max(1, took / 0.3)  # at most a hundredth of the time

    def finish(self, draw: Callable[["Run", dict], None] | None = None) -> "Run":
        """Saves the last checkpoint, the model, and the method's picture. Returns this run.

        draw  called with this run and its last state
        """
        self.bar.close()
        if self.t < self.bar.total:
            print(f"{self.args.name} has ended after round {self.t} of at most {self.bar.total}")
        self.save()
        if self.best is not None:
            self._save_model("best_id.pt", self.best)
            for file, row in (("model.pt", self.rows[-1]), ("best_id.pt", self.best_row())):
                print(f"{self.args.name}: {file} is of round {row['round']}, {_short(row)}")
        if self.confusion is not None:
            classes, self.confusion = self.data.classes, self.confusion.cpu()
            rows = zip(classes, self.confusion.tolist(), strict=True)
            header = ["class", *(f"called {name}" for name in classes)]
            lines = [header, *([name, *counts] for name, counts in rows)]
            self._write("confusion.csv", _csv(lines))
            plots.confusion(self.folder / "confusion.png", self.confusion, classes)
        self._save_model("model.pt", weights_in(self.state))
        if draw:
            draw(self, self.state)
        if ranks.RANK == 0:
            (self.folder / CHECKPOINTS[1]).unlink(missing_ok=True)
        self.state, self.model = {}, None  # a table of updates may be large
        return self

    def best_row(self) -> dict:
        """The row of the first round with the largest value of the chosen column."""
        return max(self.rows, key=lambda row: row.get(self.choose, -1))

    def _write_metrics(self) -> None:
        columns = dict.fromkeys(column for row in self.rows for column in row)
        cells = [[_cell(row.get(column, "")) for column in columns] for row in self.rows]
        self._write("metrics.csv", _csv([columns, *cells]))

    def _save_model(self, name: str, theta: Tensor) -> None:
        train.set_weights(self.model, theta)
        self._write(name, {key: t.cpu() for key, t in self.model.state_dict().items()})

    def _write(self, name: str, content: str | dict) -> None:
        if ranks.RANK == 0:
            write_whole(self.folder / name, content)


def weights_in(state: dict) -> Tensor:
    """The model's weights [P] in what federate() yields: some papers call them w, others theta."""
    return state["w"] if "w" in state else state["theta"]


def write_whole(file: Path, content: str | dict) -> None:
    """Writes a text or a dict of tensors, so that a kill leaves the old file whole."""
    part = file.with_name(f"{file.name}.part")
    try:
        if isinstance(content, str):
            part.write_text(content, encoding="utf-8", newline="\n")
        else:
            with open(part, "wb") as open_file:
                torch.save(content, open_file)
                os.fsync(open_file.fileno())  # so that it is whole after a power loss, too
    except RuntimeError as e:  # torch's error for a full disk
        raise OSError(f"{file} cannot be written ({first_line(e)})") from e
    for seconds in (0.1, 0.5, 1, 2, 4, 0):
        try:
            part.replace(file)
            return
        except PermissionError:  # on Windows' disks, while a spreadsheet has the file open
            if not seconds:
                raise
            time.sleep(seconds)


def write_args(folder: Path, about: dict, resume: bool) -> None:
    """Writes args.json. For a new run, only the program that creates this file has the folder."""
    text = json.dumps(about, indent=1) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    if resume:
        write_whole(folder / "args.json", text)
        return
    part = folder / f"args.{os.getpid()}.part"
    try:
        part.write_text(text)
        try:
            os.link(part, folder / "args.json")  # whole at once, unless there is one
        except OSError:  # there is one, or the disk has no links, as some of Windows
            if (folder / "args.json").exists():
                refuse(folder)
            part.replace(folder / "args.json")
    finally:
        part.unlink(missing_ok=True)


def check_free(folder: Path) -> None:
    """Raises UserError if this folder holds something, so that no run overwrites another one."""
    left = (file for file in folder.glob("*") if not file.match("args.*.part"))  # by a killed run
    if folder.is_file() or any(left):
        refuse(folder)


def refuse(folder: Path) -> None:
    is_run = (folder / "args.json").exists()
    resume = ", or continue the run in it with --resume" * is_run
    raise UserError(f"{folder} is taken: choose another --out{resume}")


def _csv(lines: Iterable[Iterable]) -> str:
    """These lines as CSV."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue()


def _short(row: dict) -> str:
    """The loss and the accuracies of a round."""
    names = {column: measure.bar for column, measure in MEASURES.items() if measure.bar}
    return "  ".join(f"{name} {row[c]:.3g}" for c, name in names.items() if c in row)


def _plain(value, column: str) -> float | list:
    """A tensor, an array or a list as numbers that CSV and a checkpoint can hold."""
    with suppress(ValueError):  # of lists whose lengths differ
        found = np.asarray(value.tolist() if isinstance(value, Tensor) else value)
        if found.dtype.kind in "biuf":
            return (found + 0).tolist()  # of bools, too, where True becomes 1
    raise UserError(f"{column} is no number and no list of numbers, but a {type(value).__name__}")


def _cell(value: float | list) -> str:
    """A value as it stands in metrics.csv: numbers have six digits, lists have spaces inside."""
    if isinstance(value, list):
        return " ".join(map(_cell, value))
    return f"{value:.6g}" if isinstance(value, float) else str(value)
