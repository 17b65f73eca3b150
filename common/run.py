"""What stays on disk and what the user sees: metrics, checkpoints, progress, the table at the end."""

import argparse
import csv
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from datetime import datetime
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torchvision
from torch import Tensor
from tqdm import tqdm

from common import UserError, first_line, ranks, train
from common.splits import Clients
from common.train import Trainer

VERSION = 3  # of what checkpoint.pt and metrics.csv hold
SAVE_EVERY = 10  # seconds between two checkpoints, at least
CHECKPOINTS = ["checkpoint.pt", "checkpoint.before.pt"]  # the newest, and the one before
COLUMNS = ["round", "seconds", "train_loss", "id_accuracy", "ood_accuracy", "selected", "left_out"]


def id_and_ood(trainer: Trainer, model: nn.Module, w: Tensor, clients: Clients) -> dict[str, float | None]:
    """ID: accuracy on the held-out samples of all participating clients together; OOD: on clients.ood, None if none."""
    held_out = torch.cat([clients.test[k] for k in clients.participating])
    parts = [held_out, clients.ood] if len(clients.ood) else [held_out]
    accuracy, _ = trainer.evaluate(model, w, parts)
    return {"id_accuracy": accuracy[0].item(), "ood_accuracy": accuracy[1].item() if len(parts) == 2 else None}


class Run:
    """The folder of a run (args.json, metrics.csv, checkpoint.pt, model.pt, pictures) and its progress bar.

    columns  the method's own columns of metrics.csv
    folder   where to; by default args.out, else a new folder under runs/
    trainer  whose uploads that could not be used are counted in the column left_out
    name     what the progress bar calls it, where a program has several runs
    state    what a resumed run's checkpoint holds, None in a new run

    Raises UserError where the folder is taken, or its checkpoint cannot be read.
    """

    def __init__(
        self, args: argparse.Namespace, columns: list[str], trainer: Trainer, folder: Path | None = None, name: str = ""
    ):
        self.method, self.columns, self.state = Path(sys.argv[0]).stem, COLUMNS + columns, None
        self.name = f"{name} " if name else ""
        self.trainer, self.left_out = trainer, trainer.left_out
        self.rows: list[dict] = []
        self.folder = folder or folder_of(args)
        checkpoints = [self.folder / name for name in CHECKPOINTS if (self.folder / name).exists()]
        if args.resume and checkpoints:
            _opened.append(self.folder)
            self.state = _read_checkpoint(checkpoints[0], self.method, trainer.device)
            ranks.meet()  # before the first rank writes the next one
        else:
            open_folder(args, self.folder, name)
        self._open_metrics(self.state["round"] if self.state else 0)
        self.saved_at = self.started = time.monotonic()
        self.save_took, self.bar = 0.0, None

    def _open_metrics(self, rounds: int) -> None:
        """Keeps the rows of the first `rounds` rounds, which the checkpoint knows of, and goes on after them."""
        file, part = self.folder / "metrics.csv", self.folder / "metrics.part"
        if rounds:
            self.rows = [row for row in read_metrics(file) if int(row["round"]) <= rounds]
        self.seconds_before = float(self.rows[-1]["seconds"]) if self.rows else 0.0
        if ranks.RANK == 0:
            with open(part, "w", newline="") as f:
                writer = csv.DictWriter(f, self.columns, lineterminator="\n")
                writer.writeheader()
                writer.writerows(self.rows)
            part.replace(file)
        self.metrics = open(file if ranks.RANK == 0 else os.devnull, "a", newline="")  # noqa: SIM115

    def rounds(self, state: dict, until: int, at_most: int | None = None) -> Iterator[int]:
        """Counts rounds from the one after state["round"] up to `until`; keeps state["round"] and the checkpoint.

        at_most  where the progress bar ends, if the run may go on after `until`
        """
        if self.bar is None:
            shape = "{desc}{percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"
            self.bar = tqdm(total=at_most or until, initial=state["round"], bar_format=shape,
                            mininterval=0.2 if sys.stderr.isatty() else 10, disable=ranks.RANK > 0)  # fmt: skip
        for t in range(state["round"] + 1, until + 1):
            self.bar.set_description(f"{self.name}round {t}/{at_most or until}")
            yield t
            state["round"] = t
            if ranks.RANK == 0 and time.monotonic() - self.saved_at > max(SAVE_EVERY, 20 * self.save_took):
                self.save(state)

    def tick(self, share: float) -> None:
        """Moves the progress bar on by this share of a round."""
        self.bar.update(min(share, self.bar.total - self.bar.n))  # shares add up to a hair over one

    def log(self, round: int, train_loss: Tensor, selected: list[int], **values) -> None:
        """Writes a round's row of metrics.csv and shows it. Lists become numbers with spaces between them.

        Raises UserError where the loss is not finite.
        """
        if not torch.isfinite(train_loss):
            raise UserError(f"training diverged in round {round}: lower --lr")
        seconds = self.seconds_before + time.monotonic() - self.started
        values |= {"round": round, "train_loss": float(train_loss), "seconds": f"{seconds:.2f}", "selected": selected}
        values["left_out"], self.left_out = self.trainer.left_out - self.left_out, self.trainer.left_out
        row = {column: _cell(values[column]) for column in self.columns}
        line = ",".join(row[column] for column in self.columns)
        self.metrics.write(line + "\n")
        self.metrics.flush()
        self.rows.append(row)
        shown = {"loss": row["train_loss"], "ID": row["id_accuracy"], "OOD": row["ood_accuracy"]}
        self.bar.set_postfix_str("  ".join(f"{name} {value}" for name, value in shown.items() if value))

    @contextmanager
    def extra_work(self, what: str, rounds: float) -> Iterator[Callable[[float], None]]:
        """Inside, work that lasts as long as so many more rounds: the bar says `what`.

        Gives a function to be called with the share of that work just done.
        """
        description, self.bar.total = self.bar.desc, self.bar.total + rounds
        self.bar.set_description(what)
        yield lambda share: self.tick(share * rounds)
        self.bar.set_description(description.removesuffix(": "))

    def save(self, state: dict) -> None:
        """Writes the checkpoint and keeps the one before, so that a run killed while saving still has one."""
        began, part = time.monotonic(), self.folder / "checkpoint.part"
        newest, before = (self.folder / name for name in CHECKPOINTS)
        _write(part, {"version": VERSION, "method": self.method, **state})
        if newest.exists():
            newest.replace(before)
        part.replace(newest)
        self.saved_at = time.monotonic()
        self.save_took = self.saved_at - began

    def finish(self, state: dict, model: nn.Module, w: Tensor) -> None:
        """Saves the model (its state_dict, in model.pt) and the last checkpoint."""
        self.bar.close()
        self.metrics.close()
        left_out = sum(int(row["left_out"]) for row in self.rows)
        if left_out:
            print(f"{left_out} uploads were not finite and left out: see left_out in {self.folder / 'metrics.csv'}")
        train.set_weights(model, w)
        if ranks.RANK == 0:
            self.save(state)
            _write(self.folder / "model.part", {name: t.cpu() for name, t in model.state_dict().items()})
            (self.folder / "model.part").replace(self.folder / "model.pt")

    def report(self, title: str) -> None:
        """Prints how the run ended: its last round, and the mean of its last five."""
        columns = COLUMNS[2:5]
        numbers = [[float(row[c]) if row[c] else None for c in columns] for row in self.rows[-5:]]
        mean = [None if None in column else sum(column) / len(column) for column in zip(*numbers, strict=True)]
        rows = [[f"round {self.rows[-1]['round']}", *numbers[-1]], [f"mean of last {len(numbers)}", *mean]]
        table(title, ["", *(c.replace("_", " ") for c in columns)], rows)
        print("ID: held-out samples of the clients that take part; OOD: the test set, or the domain left out")
        print(f"{float(self.rows[-1]['seconds']):.0f} s; metrics, model and pictures are in {self.folder}")


_opened: list[Path] = []  # the folders of this program's runs; the first is the one that --resume takes


def folder_of(args: argparse.Namespace) -> Path:
    """Where a run with these flags leaves its files: --resume, --out or a new folder under runs/."""
    if args.resume or args.out:
        return Path(args.resume or args.out)
    stem = Path("runs") / f"{Path(sys.argv[0]).stem}-{Path(args.dataset).stem}-{datetime.now():%Y%m%d-%H%M%S}"
    names = (Path(f"{stem}{end}") for end in ("", *(f"-{i}" for i in range(2, 1000))))
    return next(name for name in names if not name.exists())


def open_folder(args: argparse.Namespace, folder: Path | None = None, name: str = "") -> Path:
    """Makes a run's folder, by default folder_of(args), with the flags in its args.json.

    Raises UserError where there is one already, unless the run is to be resumed.
    """
    folder = folder or folder_of(args)
    if ranks.RANK > 0:
        return folder
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is not a folder: choose another --out")
    if folder.exists() and any(folder.iterdir()) and not args.resume:
        raise UserError(f"{folder} exists and is not empty: choose another --out, or continue it with --resume")
    folder.mkdir(parents=True, exist_ok=True)
    about = {
        "method": Path(sys.argv[0]).stem, "name": name, "command": shlex.join(["python", *sys.argv]),
        "flags": vars(args), "threads": torch.get_num_threads(), "ranks": ranks.COUNT,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_initialized() else None,
        "python": sys.version.split()[0], "torch": torch.__version__, "torchvision": torchvision.__version__,
    }  # fmt: skip
    (folder / "args.part").write_text(json.dumps(about, indent=1) + "\n")
    (folder / "args.part").replace(folder / "args.json")
    _opened.append(folder)
    return folder


def _write(file: Path, content: dict) -> None:
    """Saves what is in `content`, down to the disk. Raises OSError where it does not fit."""
    try:
        with open(file, "wb") as f:
            torch.save(content, f)
            f.flush()
            os.fsync(f.fileno())
    except RuntimeError as e:  # torch's word for a full disk
        raise OSError(f"{file} cannot be written ({first_line(e)})") from e


def _cell(value) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, (list, tuple, np.ndarray, Tensor)):
        return " ".join(_cell(v) for v in (value.tolist() if hasattr(value, "tolist") else value))
    return str(value)


def read_metrics(file: Path) -> list[dict[str, str]]:
    """The rows of a metrics.csv, without a last one that a full disk cut short."""
    return list(csv.DictReader(line for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")))


def write_points(file: Path, points: Tensor) -> None:
    """Saves what plots.hull_animation() draws, [n, 5]."""
    if ranks.RANK == 0:
        header = "round,client,first,second,selected"
        np.savetxt(
            file, points.numpy(), fmt=["%d", "%d", "%.5g", "%.5g", "%d"], delimiter=",", header=header, comments=""
        )


def _read_checkpoint(file: Path, method: str, device: torch.device) -> dict:
    try:
        state = torch.load(file, weights_only=True, map_location=device)
        version, writer = state.pop("version"), state.pop("method")
    except Exception as e:  # from EOFError to UnpicklingError, whose text tells users to load it unsafely
        before = file.with_name(CHECKPOINTS[1])
        advice = f"remove it, to go on from {before.name}" if before.exists() and before != file else "start a new run"
        raise UserError(f"{file} is not a checkpoint that can be read (damaged, or something else): {advice}") from e
    if version != VERSION:
        raise UserError(f"{file} was written by another version of this project")
    if writer != method:
        raise UserError(f"{file} was written by {writer}.py, not by {method}.py")
    return state


def table(title: str, header: list[str], rows: list[list]) -> None:
    """Prints a table, numbers to four digits."""
    cells = [header, *([f"{c:.4f}" if isinstance(c, float) else "" if c is None else str(c) for c in r] for r in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    print(f"\n{title}")
    for row in cells:
        print("  ".join([row[0].ljust(widths[0]), *(c.rjust(n) for c, n in zip(row[1:], widths[1:], strict=True))]))


def launch(main: Callable[[], None]) -> None:
    """Runs a method from the command line. A user's mistake is one line on stderr and exit code 2; 1 is for a full disk
    and its like; 130 is for Ctrl-C. Of several ranks only the first prints; another, only an error that it alone found.
    """
    _opened.clear()
    try:
        with redirect_stdout(open(os.devnull, "w") if ranks.RANK > 0 else sys.stdout):
            main()
        ranks.leave()
    except UserError as e:
        code, message = 2, str(e)
    except OSError as e:
        code, message = 1, f"{e}; once that is mended, --resume {_opened[0]} goes on" if _opened else str(e)
    except KeyboardInterrupt:
        code, message = 130, "stopped before it began"
        if _opened:
            saved = any((folder / name).exists() for folder in _opened for name in CHECKPOINTS)
            where = "from its last checkpoint" if saved else "from the start, for there is no checkpoint yet"
            message = f"stopped; --resume {_opened[0]} goes on {where}"
    except RuntimeError:
        if ranks.RANK > 0:
            time.sleep(3)  # another rank may have left, having told why: then torchrun ends this one meanwhile
        raise
    else:
        return
    if ranks.RANK > 0:
        time.sleep(3)  # likewise
    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)
    sys.exit(code)
