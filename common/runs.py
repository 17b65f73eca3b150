"""What stays on disk, and what the user sees: metrics, checkpoints, progress, the table at the end."""

import argparse
import fcntl
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from io import BytesIO
from pathlib import Path

import torch
import torch.nn as nn
from torch import Tensor
from tqdm import tqdm

from common import UserError, first_line, ranks, train
from common.splits import Clients
from common.train import Trainer

VERSION = 5  # of the format of checkpoint.pt
SAVE_EVERY = 10  # seconds between two checkpoints, at least
FREE = ("resume", "out", "device", "data_dir", "processes")  # flags that a resumed run may change
COLUMNS = [
    "round", "seconds", "train_loss", "id_accuracy", "ood_accuracy", "rare_accuracy", "id_selected", "selected_size",
    "selected", "left_out",
]  # fmt: skip
SHOWN = {"id_accuracy": "ID", "id_selected": "ID, selected", "ood_accuracy": "OOD", "rare_accuracy": "rare classes"}
_started: list["Run"] = []  # by this program; --resume takes the folder of the first


def baseline(args: argparse.Namespace, name: str, **changes) -> argparse.Namespace:
    """The flags of a baseline: an ordinary run that differs in some flags, in the folder OUT-name beside the run's."""
    own = {"name": name, "compare": False, "out": f"{args.out}-{name.lower()}"}
    return argparse.Namespace(**{**vars(args), **changes, **own})


def check_free(folder: Path) -> None:
    """Raises UserError if this folder holds something, so that a run never overwrites another one."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} is taken: choose another --out, or continue the run in it with --resume")


class Run:
    """The folder args.out of a run, with args.json, metrics.csv, checkpoint.pt, model.pt and pictures.

    columns  the method's own columns of metrics.csv

    t        the present round
    rows     what metrics.csv holds, with numbers as numbers and lists as lists

    Raises UserError if another program works in the folder, or if its checkpoint cannot be used.
    """

    def __init__(self, args: argparse.Namespace, trainer: Trainer, clients: Clients, columns: list[str] = []):  # noqa: B006
        self.name, self.folder, self.trainer, self.clients = args.name, Path(args.out), trainer, clients
        self.columns, self.evaluate_every, self.last_round = COLUMNS + columns, args.evaluate_every, args.rounds
        flags = {flag: value for flag, value in vars(args).items() if flag not in FREE}
        self.about = {"version": VERSION, "flags": flags, "data": trainer.fingerprint}
        self.bar, self.t, self.rows, self.checkpoint = None, 0, [], None
        self.left_out, self.save_took = trainer.left_out, 0.0
        self.saved_at = self.started = time.monotonic()
        if ranks.RANK == 0:
            self._open(args)
        ranks.meet()
        if (self.folder / "checkpoint.pt").exists():  # only in a run that is resumed
            self.checkpoint = self._read(self.folder / "checkpoint.pt")
            self.rows = self.checkpoint["rows"]
            self.started -= self.rows[-1]["seconds"]
        ranks.meet()  # all ranks have read the checkpoint before the first one writes the next
        self._write_metrics()
        _started.append(self)

    def _open(self, args: argparse.Namespace) -> None:
        """Makes the folder with its args.json, and locks it for this program."""
        if not args.resume:
            check_free(self.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        if not (self.folder / "args.json").exists():
            about = {
                "method": args.method, "name": args.name, "flags": vars(args), "processes": ranks.COUNT,
                "gpu": torch.cuda.get_device_name() if torch.cuda.is_initialized() else None,
                "python": sys.version.split()[0], "torch": torch.__version__, "torchvision": version("torchvision"),
            }  # fmt: skip
            _write(self.folder / "args.json", lambda part: part.write_text(json.dumps(about, indent=1) + "\n"))
        self.lock = open(self.folder / "args.json", "r+")  # noqa: SIM115  (the lock ends with the program)
        try:
            fcntl.lockf(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            raise UserError(f"{self.folder}: another program works in this folder; wait until it has ended") from e

    def _read(self, file: Path) -> dict:
        """The checkpoint in this file, after a check that it is whole and belongs to this run."""
        content = file.read_bytes()
        if hashlib.sha256(content[:-32]).digest() != content[-32:]:
            raise UserError(f"{file} is damaged or was changed: start a new run")
        found = torch.load(BytesIO(content), weights_only=True, map_location=self.trainer.device)
        for what, says in [
            ("version", "was written by another version of this project: start a new run"),
            ("flags", "and args.json have different flags, so they belong to different runs: start a new run"),
            ("data", "belongs to other data; they have changed since this run began: restore them, or start a new run"),
        ]:
            if found[what] != self.about[what]:
                raise UserError(f"{file} {says}")
        return found

    def restore(self, state: dict) -> dict:
        """What the server remembers: in a resumed run the checkpoint's state, else `state` with "round" 0 added."""
        return self.checkpoint["state"] if self.checkpoint else {"round": 0, **state}

    def rounds(self, state: dict, until: int) -> Iterator[int]:
        """Yields the rounds from state["round"] + 1 to `until`. Keeps state["round"] and the checkpoint up to date."""
        if self.bar is None:
            shape = "{desc}{percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"
            self.bar = tqdm(total=self.last_round, initial=state["round"], bar_format=shape, disable=ranks.RANK > 0,
                            mininterval=0.2 if sys.stderr.isatty() else 60)  # fmt: skip
        self.t = state["round"]
        for self.t in range(state["round"] + 1, until + 1):
            self.trainer.progress = lambda share: self.bar.update(min(share, self.t - self.bar.n))
            self.bar.set_description(f"{self.name} round {self.t}/{self.last_round}", refresh=False)
            self.due = self.t % self.evaluate_every == 0 or self.t == until
            yield self.t
            state["round"] = self.t
            self.trainer.progress(1)
            if time.monotonic() - self.saved_at > max(SAVE_EVERY, 20 * self.save_took):
                self.save(state)

    def evaluate(self, model: nn.Module, w: Tensor, selected: Tensor) -> dict[str, float]:
        """This round's accuracies of the model with weights w, by column; an empty dict if none is due.

        id_accuracy    on the held-out samples of all participating clients together
        id_selected    the same for the clients selected in this round, int64 [K]: the ID of Wu et al.
        ood_accuracy   on clients.ood, and rare_accuracy on clients.rare, if there are any
        selected_size  mean number of training samples of the selected clients (not an accuracy)
        """
        if not self.due:
            return {}
        of_selected = torch.cat([self.clients.test[k] for k in selected.tolist()])
        samples = {"id_accuracy": self.clients.held_out, "id_selected": of_selected}
        samples |= {"ood_accuracy": self.clients.ood, "rare_accuracy": self.clients.rare}
        samples = {column: positions for column, positions in samples.items() if len(positions)}
        accuracies = self.trainer.evaluate(model, w, [*samples.values()])[0].tolist()
        size = self.clients.sizes[selected].mean().item()
        return {"selected_size": size, **dict(zip(samples, accuracies, strict=True))}

    def record(self, train_loss: Tensor, selected: Tensor, **values) -> None:
        """Adds this round's row to metrics.csv and shows it. Columns without a value stay empty."""
        values |= {"round": self.t, "seconds": round(time.monotonic() - self.started, 2), "train_loss": train_loss}
        values |= {"selected": selected, "left_out": self.trainer.left_out - self.left_out}
        self.left_out = self.trainer.left_out
        values = {column: v.tolist() if isinstance(v, Tensor) else v for column, v in values.items()}
        self.rows.append({column: values.get(column) for column in self.columns})
        self._write_metrics()
        shown = {"loss": values["train_loss"], "ID": values.get("id_accuracy"), "OOD": values.get("ood_accuracy")}
        text = "  ".join(f"{name} {value:.3g}" for name, value in shown.items() if value is not None)
        self.bar.set_postfix_str(text, refresh=False)

    def _write_metrics(self) -> None:
        lines = [",".join(self.columns), *(",".join(_cell(row[c]) for c in self.columns) for row in self.rows)]
        _write(self.folder / "metrics.csv", lambda part: part.write_text("\n".join([*lines, ""])))

    def save(self, state: dict) -> None:
        """Writes the checkpoint. It ends with the SHA-256 of what comes before, which torch.load does not mind."""
        began = time.monotonic()

        def write(part: Path) -> None:
            torch.save({**self.about, "rows": self.rows, "state": state}, part)
            with open(part, "r+b") as f:
                f.write(hashlib.file_digest(f, "sha256").digest())
                os.fsync(f.fileno())

        _write(self.folder / "checkpoint.pt", write)
        self.saved_at = time.monotonic()
        self.save_took = self.saved_at - began

    def finish(self, state: dict, model: nn.Module, w: Tensor) -> "Run":
        """Saves the model with weights w (its state_dict, in model.pt) and the last checkpoint. Returns this run."""
        self.bar.close()
        left_out = sum(row["left_out"] for row in self.rows)
        if left_out:
            print(f"{left_out} uploads were not finite and left out: see left_out in {self.folder / 'metrics.csv'}")
        train.set_weights(model, w)
        self.save(state)
        on_cpu = {name: t.cpu() for name, t in model.state_dict().items()}
        _write(self.folder / "model.pt", lambda part: torch.save(on_cpu, part))
        return self

    def mean_of_last(self, column: str, count: int = 5) -> float | None:
        """The mean of this column over the last `count` evaluations; None if the run has no such number."""
        found = [row[column] for row in self.rows if row.get(column) is not None][-count:]
        return sum(found) / len(found) if found else None


def _write(file: Path, write: Callable[[Path], object]) -> None:
    """Calls write(part). Then `part` takes the place of `file`, so a run that is killed leaves the old file whole."""
    if ranks.RANK == 0:
        part = file.with_suffix(".part")
        try:
            write(part)
        except RuntimeError as e:  # torch's error for a full disk
            raise OSError(f"{file} cannot be written ({first_line(e)})") from e
        part.replace(file)


def _cell(value) -> str:
    """A value as it stands in metrics.csv: numbers to six digits, a list as numbers with spaces between them."""
    if isinstance(value, list):
        return " ".join(map(_cell, value))
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def percent(share: float | None) -> str:
    """A share as percent with one decimal."""
    return "" if share is None else f"{100 * share:.1f}"


def report(title: str, done: Mapping[str, Run], last: int = 5) -> None:
    """Prints how runs ended, as means of their last evaluations: name -> run."""
    columns = [c for c in SHOWN if any(run.mean_of_last(c) is not None for run in done.values())]
    rows = [["", *(SHOWN[c] for c in columns)]]
    rows += [[name, *(percent(run.mean_of_last(c, last)) for c in columns)] for name, run in done.items()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print(f"\n{title}; percent, mean of up to {last} last evaluations")
    for row in rows:
        print("  ".join([row[0].ljust(widths[0]), *(c.rjust(n) for c, n in zip(row[1:], widths[1:], strict=True))]))
    print("ID: held-out samples of the participating clients, or of the selected ones; OOD: the test set, or the")
    print(f"domain left out. Metrics, models and pictures are in {next(iter(done.values())).folder}")


def verdict(idea: str, outcome: str, holds: bool) -> None:
    """Prints what the method's idea predicts for this data, and what this run gave."""
    print(f"\nPrediction: {idea}.\nThis run: {outcome}. {'As predicted.' if holds else 'This is NOT as predicted.'}")


def launch(name: str, main: Callable[[], None]) -> None:
    """Runs the program called `name` from the command line, in as many processes as its flags ask for.

    Exit codes: 2 is a user's mistake, 130 is Ctrl-C, and 1 is an error of the operating system, such as a full disk.
    Each of these is one line on stderr. A rank after the first reports an error only if the first one, which usually
    meets the same error, has not ended the run three seconds later.
    """
    _started.clear()
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115  (closed by the user)
    try:
        ranks.begin()
        try:
            main()
            if ranks.RANK > 0:
                os._exit(0)  # at once: nothing that this rank could still do is needed, and its libraries could fail
        except Exception as e:
            if ranks.RANK > 0:
                time.sleep(3)
            elif ranks.COUNT > 1 and isinstance(e, RuntimeError):
                time.sleep(5)  # if the reason is that a helper has just ended, a signal says so within these seconds
                ranks.check_helpers()
            raise
        return
    except UserError as e:
        code, message = 2, str(e)
    except OSError as e:
        code, message = 1, str(e)
    except KeyboardInterrupt:
        code, message = 130, "stopped"
    finally:
        ranks.leave()
    if ranks.RANK > 0 and code == 130:
        sys.exit(code)
    for run in _started:
        if run.bar:
            run.bar.close()  # ends its line
    if _started and code != 2:
        message += f"; continue with --resume {_started[0].folder}"
    print(f"{name}: {message}", file=sys.stderr)
    sys.exit(code)
