"""What stays on disk, and what the user sees: metrics, checkpoints, progress, the table at the end."""

import argparse
import fcntl
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from datetime import datetime
from pathlib import Path
from typing import TextIO

import torch
import torch.nn as nn
import torchvision
from torch import Tensor
from tqdm import tqdm

from common import UserError, first_line, flags, ranks, train
from common.splits import Clients
from common.train import Trainer

VERSION = 4  # of the format of checkpoint.pt
SAVE_EVERY = 10  # seconds between two checkpoints, at least
LONG = 2  # hours; if a run on a CPU will take longer, it says so
COLUMNS = ["round", "seconds", "train_loss", "id_accuracy", "ood_accuracy", "id_selected", "selected_size", "selected",
           "left_out"]  # fmt: skip


class Run:
    """The folder of a run (args.json, metrics.csv, checkpoint.pt, model.pt, pictures) and its progress bar.

    columns  the method's own columns of metrics.csv
    folder   the run's folder; by default --resume, else --out, else a new folder under runs/
    name     what tables, pictures and the progress bar call this run; by default the method file's name

    rows     what metrics.csv holds, with numbers as numbers and lists as lists

    Raises UserError if the folder is taken, or if its checkpoint cannot be used.
    """

    def __init__(
        self, args: argparse.Namespace, trainer: Trainer, columns: list[str], folder: Path | None = None, name: str = ""
    ):
        method = Path(sys.argv[0]).stem
        self.name, self.columns, self.trainer = name or method, COLUMNS + columns, trainer
        kept = {flag: value for flag, value in vars(args).items() if flag not in flags.FREE}
        self.about = {"version": VERSION, "method": method, "data": trainer.fingerprint, "flags": kept}
        self.folder = open_folder(args, folder, self.name)
        self.evaluate_every, self.left_out, self.bar = args.evaluate_every, trainer.left_out, None
        self.saved_at = self.started = time.monotonic()
        self.save_took, self.rows, self.checkpoint = 0.0, [], None
        self.may_be_long = trainer.device.type == "cpu" and ranks.RANK == 0 and not args.small
        if args.resume and (self.folder / "checkpoint.pt").exists():
            self.checkpoint = self._read(self.folder / "checkpoint.pt")
            self.rows = self.checkpoint["rows"]
        self.seconds_before = self.rows[-1]["seconds"] if self.rows else 0.0
        ranks.meet()  # all ranks read the checkpoint before the first one writes the next
        part = self.folder / "metrics.part"
        with open(part if ranks.RANK == 0 else os.devnull, "w") as f:
            f.writelines([",".join(self.columns) + "\n", *map(self._line, self.rows)])
        if ranks.RANK == 0:
            part.replace(self.folder / "metrics.csv")
        self.metrics = open(self.folder / "metrics.csv" if ranks.RANK == 0 else os.devnull, "a")  # noqa: SIM115

    def restore(self, state: dict) -> dict:
        """What the server remembers: the checkpoint's state in a resumed run, else the state given here."""
        if not self.checkpoint:
            return {"round": 0, **state}
        if not state.keys() <= self.checkpoint["state"].keys():
            raise UserError(f"{self.folder / 'checkpoint.pt'} is incomplete: start a new run")
        return self.checkpoint["state"]

    def rounds(self, state: dict, until: int, at_most: int | None = None) -> Iterator[int]:
        """Yields the rounds from state["round"] + 1 to `until`. Keeps state["round"] and the checkpoint up to date.

        at_most  where the progress bar ends, if the run may continue after `until`
        """
        if self.bar is None:
            shape = "{desc}{percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"
            self.bar = tqdm(total=at_most or until, initial=state["round"], bar_format=shape,
                            mininterval=0.2 if sys.stderr.isatty() else 60, disable=ranks.RANK > 0)  # fmt: skip
            _bars.append(self.bar)
        for t in range(state["round"] + 1, until + 1):
            self.t, self.until, self.trainer.progress = t, until, self._tick
            self.bar.set_description(f"{self.name} round {t}/{at_most or until}", refresh=False)
            yield t
            state["round"] = t
            self._tick(1)
            if ranks.RANK == 0 and time.monotonic() - self.saved_at > max(SAVE_EVERY, 20 * self.save_took):
                self.save(state)

    def _tick(self, share: float) -> None:
        """Moves the progress bar by this share of a round, but never past the end of the present round."""
        self.bar.update(min(share, self.t - self.bar.n))
        seconds = time.monotonic() - self.started
        if self.may_be_long and seconds > 20 and self.bar.n > self.bar.initial:
            self.may_be_long = False
            hours = seconds / 3600 * (self.bar.total - self.bar.initial) / (self.bar.n - self.bar.initial)
            if hours > LONG:
                text = f"at this speed the run takes about {hours:.0f} hours; with --small it takes minutes, see --help"
                self.bar.write(text, file=sys.stderr)

    def evaluate(self, model: nn.Module, w: Tensor, clients: Clients, selected: Tensor) -> dict[str, float]:
        """This round's accuracies of the model with weights w, by column; an empty dict if none is due.

        id_accuracy    on the held-out samples of all participating clients together
        id_selected    the same for the clients selected in this round, int64 [K]: the ID of Wu et al.
        ood_accuracy   on clients.ood, if there are any
        selected_size  mean number of training samples of the selected clients (not an accuracy)
        """
        if not self.due:
            return {}
        of_selected = torch.cat([clients.test[k] for k in selected.tolist()])
        parts = {"id_accuracy": clients.held_out, "id_selected": of_selected, "ood_accuracy": clients.ood}
        parts = {column: part for column, part in parts.items() if len(part)}
        found = dict(zip(parts, self.trainer.evaluate(model, w, [*parts.values()])[0].tolist(), strict=True))
        return {**found, "selected_size": clients.sizes[selected].mean().item()}

    @property
    def due(self) -> bool:
        """Whether this round is evaluated: every --evaluate-every rounds, and the last one."""
        return self.t % self.evaluate_every == 0 or self.t == self.until

    def log(self, train_loss: Tensor, selected: Tensor, **values) -> None:
        """Writes this round's row of metrics.csv and shows it. Columns without a value stay empty."""
        seconds = round(self.seconds_before + time.monotonic() - self.started, 2)
        values |= {"round": self.t, "seconds": seconds, "train_loss": train_loss, "selected": selected}
        values["left_out"], self.left_out = self.trainer.left_out - self.left_out, self.trainer.left_out
        values = {column: v.tolist() if isinstance(v, Tensor) else v for column, v in values.items()}
        row = {column: values.get(column) for column in self.columns}
        self.rows.append(row)
        self.metrics.write(self._line(row))
        self.metrics.flush()
        shown = {"loss": row["train_loss"], "ID": row["id_accuracy"], "OOD": row["ood_accuracy"]}
        text = "  ".join(f"{name} {value:.6g}" for name, value in shown.items() if value is not None)
        self.bar.set_postfix_str(text, refresh=False)

    def _line(self, row: dict) -> str:
        return ",".join(_cell(row[column]) for column in self.columns) + "\n"

    def save(self, state: dict) -> None:
        """Writes the checkpoint."""
        began = time.monotonic()
        _write(self.folder / "checkpoint.pt", {**self.about, "rows": self.rows, "state": state})
        self.saved_at = time.monotonic()
        self.save_took = self.saved_at - began

    def _read(self, file: Path) -> dict:
        """The checkpoint in this file, after a check that it belongs to this run."""
        try:
            found = torch.load(file, weights_only=True, map_location=self.trainer.device)
            version, complete = found["version"], {*self.about, "rows", "state"} <= found.keys()
        except PermissionError:
            raise
        except Exception as e:  # many types; UnpicklingError's text advises an unsafe load, so it is left out
            raise UserError(f"{file} cannot be read as a checkpoint: it is damaged; start a new run") from e
        if version != VERSION or not complete:
            raise UserError(f"{file} was written by another version of this project: start a new run")
        if found["method"] != self.about["method"]:
            raise UserError(f"{file} was written by {found['method']}.py, not by {self.about['method']}.py")
        if found["flags"] != self.about["flags"]:
            raise UserError(
                f"{file} and args.json have different flags, so they belong to different runs: start a new run"
            )
        if found["data"] != self.about["data"]:
            raise UserError(f"{file}: the data set has changed since this run began: restore it, or start a new run")
        return found

    def finish(self, state: dict, model: nn.Module, w: Tensor) -> None:
        """Saves the model (its state_dict, in model.pt) and the last checkpoint."""
        self.bar.close()
        self.metrics.close()
        left_out = sum(row["left_out"] for row in self.rows)
        if left_out:
            print(f"{left_out} uploads were not finite and left out: see left_out in {self.folder / 'metrics.csv'}")
        train.set_weights(model, w)
        if ranks.RANK == 0:
            self.save(state)
            _write(self.folder / "model.pt", {name: t.cpu() for name, t in model.state_dict().items()})

    def report(self, title: str) -> None:
        """Prints how the run ended: its last evaluation, and the mean of its last five."""
        evaluated = [row for row in self.rows if row["id_accuracy"] is not None]
        columns = [column for column in COLUMNS[2:5] if evaluated[-1][column] is not None]
        numbers = [[row[c] for c in columns] for row in evaluated[-5:]]
        mean = [sum(column) / len(column) for column in zip(*numbers, strict=True)]
        rows = [[f"round {evaluated[-1]['round']}", *numbers[-1]], [f"mean of last {len(numbers)}", *mean]]
        table(f"{self.name}: {title}", ["", *(c.replace("_", " ") for c in columns)], rows)
        print("ID: held-out samples of the participating clients; OOD: the test set, or the domain left out")
        print(f"{self.rows[-1]['seconds']:.0f} s; metrics, model and pictures are in {self.folder}")


_opened: dict[Path, TextIO] = {}  # this program's folders, each with its args.json; --resume takes the first one
_bars: list[tqdm] = []


def open_folder(args: argparse.Namespace, folder: Path | None = None, name: str = "") -> Path:
    """Makes a run's folder, with the flags in its args.json. By default it is --resume, --out, or new under runs/.

    Raises UserError if the folder is taken, unless the run is resumed.
    """
    if folder is None and (args.resume or args.out):
        folder = Path(args.resume or args.out)
    if ranks.RANK > 0:
        return folder or Path("runs")
    if folder is None:  # with microseconds, because several runs may start in the same second
        folder = Path("runs") / f"{Path(sys.argv[0]).stem}-{Path(args.dataset).stem}-{datetime.now():%Y%m%d-%H%M%S-%f}"
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is not a folder: choose another --out")
    if folder.exists() and any(folder.iterdir()) and not args.resume:
        raise UserError(f"{folder} exists and is not empty: choose another --out, or continue it with --resume")
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "args.json").exists():
        about = {
            "method": Path(sys.argv[0]).stem, "name": name, "command": shlex.join(["python", *sys.argv]),
            "flags": vars(args), "threads": torch.get_num_threads(), "ranks": ranks.COUNT,
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_initialized() else None,
            "python": sys.version.split()[0], "torch": torch.__version__, "torchvision": torchvision.__version__,
        }  # fmt: skip
        (folder / "args.part").write_text(json.dumps(about, indent=1) + "\n")
        (folder / "args.part").replace(folder / "args.json")
    _opened[folder] = file = open(folder / "args.json", "r+")  # noqa: SIM115  (the lock ends with the program)
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as e:
        raise UserError(f"{folder}: another program is working in this folder; wait until it has ended") from e
    return folder


def _write(file: Path, content: dict) -> None:
    """Saves `content`. If the run is killed meanwhile, the old file stays. Raises OSError if the disk is full."""
    part = file.with_suffix(".part")
    try:
        with open(part, "wb") as f:
            torch.save(content, f)
            f.flush()
            os.fsync(f.fileno())
        part.replace(file)
    except RuntimeError as e:  # torch's error for a full disk
        raise OSError(f"{file} cannot be written ({first_line(e)})") from e


def _cell(value) -> str:
    """A value as it stands in metrics.csv: numbers to six digits, a list as numbers with spaces between them."""
    if isinstance(value, list):
        return " ".join(map(_cell, value))
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def table(title: str, header: list[str], rows: list[list]) -> None:
    """Prints a table, with four decimals."""
    cells = [header, *([f"{c:.4f}" if isinstance(c, float) else "" if c is None else str(c) for c in r] for r in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    print(f"\n{title}")
    for row in cells:
        print("  ".join([row[0].ljust(widths[0]), *(c.rjust(n) for c, n in zip(row[1:], widths[1:], strict=True))]))


def launch(main: Callable[[], None]) -> None:
    """Runs a method from the command line. Exit codes: 2 is a user's mistake, 130 is Ctrl-C, and 1 is an error of the
    operating system, such as a full disk.

    Each of these is one line on stderr. A rank other than the first prints an error only if no other rank has ended the
    run.
    """
    _opened.clear()
    _bars.clear()
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115  (closed by the user)
    try:
        with redirect_stdout(open(os.devnull, "w") if ranks.RANK > 0 else sys.stdout):
            main()
        ranks.leave()
        return
    except UserError as e:
        code, message = 2, str(e)
    except OSError as e:
        code, message = 1, f"{e}; fix this and continue with --resume {next(iter(_opened))}" if _opened else str(e)
    except KeyboardInterrupt:
        if ranks.RANK > 0:
            sys.exit(130)
        code, message = 130, "stopped before the run began"
        if _opened:
            saved = any((folder / "checkpoint.pt").exists() for folder in _opened)
            where = "from its last checkpoint" if saved else "from the start, because there is no checkpoint yet"
            message = f"stopped; --resume {next(iter(_opened))} continues {where}"
    except RuntimeError:
        if ranks.RANK > 0:
            time.sleep(3)  # another rank may have printed the reason and ended; then torchrun ends this one
        raise
    if ranks.RANK > 0:
        time.sleep(3)  # as above
    for bar in _bars:  # ends their line
        bar.close()
    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)
    sys.exit(code)
