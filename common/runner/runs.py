"""A run and its folder: metrics, checkpoint, model and pictures, and the progress bar.

A run can be killed at any time, and goes on with `--resume`: each file is written whole, and the
checkpoint is some 30 seconds old. It takes its place when the round after it has ended, so it is
never that of the last round. So a resumed run repeats a round, and notices if that comes out
otherwise. Until it has repeated all rounds in metrics.csv, only the checkpoint changes, and one
that has come out the same does not wait.
"""

import csv
import errno
import io
import json
import os
import sys
import time
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from pickle import PickleError

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from common import UserError, few, first_line, load_tensors, ranks, train
from common.ranks import say, say_once
from common.runner import plots
from common.runner.flags import OF_A_MACHINE, read_args, refuse_others

tqdm.monitor_interval = 0  # its thread would be lost in the forked ranks
SAVE_EVERY = 30  # seconds between two checkpoints
ON_THE_BAR = {  # column -> its name there
    "train_loss": "loss", "id_accuracy": "ID", "unseen_accuracy": "unseen", "ood_accuracy": "OOD",
}  # fmt: skip


class Run:
    """A run and its folder args.out.

    command   the flags of the command if it has several runs, whose folder gets them, or None
    state     what federate() yielded last, for the next round; {} in a new run. Its "w" or "theta"
              is the model
    rows      what metrics.csv holds, one dict per round, with numbers as numbers and lists as lists
    t         the last finished round
    ended     whether the run has come to its end
    recorded  the norms, as text, of the rounds in metrics.csv that it has to repeat
    next      the file of a checkpoint that waits until another round has ended, or None
    total     the round in which the run ends
    images    which images these are: the data set's name, and their fingerprint before a rotation,
              which is the same for all seeds
    about     what args.json holds: flags, data, and machines, see machine_of
    machine   see machine_in

    Makes the folder and starts the clock, or takes up the last checkpoint in it. Raises UserError
    if the folder is taken, if it belongs to other data, or if the ranks do not fit together.
    """

    def __init__(self, args, data, clients, model, device, command=None):
        self.args = args
        self.command = command
        self.clients = clients
        self.model = model
        self.classes = data.classes
        self.images = f"{data.name} {data.source or data.fingerprint()}"
        self.folder = Path(args.out)
        self.checkpoint = self.folder / "checkpoint.pt"
        self.next = None
        self.state = {}
        self.rows = []
        self.recorded = {}
        self.ended = False
        self.has_args = False
        self.started = time.monotonic()
        self.save_at = 0.0  # the first round is saved at once
        self.total = args.stop or args.rounds + (args.iterations - 1) * args.later_rounds
        self.about = {
            "flags": {**vars(args)},
            "clients": [len(clients.train), clients.participating, clients.per_round],  # N, M, K
            "images": self.images,
            "classes": self.classes,
            "shape": [*data.x.shape[1:]],
            "machines": [machine_of(device)],
        }
        self.is_new = not (self.folder / "args.json").exists()
        if not self.is_new:
            self._take_up(device)
        facts = {flag: value for flag, value in vars(args).items() if flag not in OF_A_MACHINE}
        ranks.agree({**facts, "data": self.images, "round": self.t}, "start all alike")
        self.machine = machine_in(self.about)
        if self.is_new and not ranks.RANK:
            check_free(self.folder)
            self.folder.mkdir(parents=True, exist_ok=True)
        self.bar = tqdm(
            desc=f"{args.name}, seed {args.seed}, round {self.t}: ",
            total=self.total,
            initial=self.t,
            bar_format="{desc}{percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}",
            mininterval=0.2 if os.isatty(2) else 60,
            disable=bool(ranks.RANK or os.environ.get("TQDM_DISABLE")),
        )

    @property
    def t(self):
        """The last finished round."""
        return self.rows[-1]["round"] if self.rows else 0

    def _take_up(self, device):
        """Goes on from the checkpoint in the folder, if there is one yet."""
        before = read_args(self.folder)
        saved = {**before["flags"], "data": before.get("images")}
        has_other_length = refuse_others(
            self.folder, saved, {**vars(self.args), "data": self.images}
        )
        machines = before["machines"]
        now = machine_of(device)
        others = [name for name in now if now[name] != machines[-1].get(name)]
        if others:
            machines.append(now)
            say(f"{self.folder} began with another {few(others)}, so its numbers may differ")
        self.about["machines"] = machines
        rows = []
        with suppress(Exception):  # metrics.csv is damaged, so there is nothing to compare
            rows = read_rows(self.folder)
        if not has_other_length and rows and before.get("finished") == rows[-1]["round"]:
            self.rows = rows
            self.ended = True
            return
        try:
            found = load_tensors(self.checkpoint, device)
            self.state = found["state"]
            self.rows = found["rows"]
            self.started -= self.rows[-1]["seconds"]
        except FileNotFoundError:  # it was stopped in round 2
            pass
        except Exception as e:  # there are many types for a file that is damaged
            say(f"{self.checkpoint} cannot be read ({first_line(e)}), so it begins with round 1")
        # On another machine the last digits may differ
        later = [row for row in rows if row["round"] > self.t]
        self.recorded = {row["round"]: None if others else _cell(row["norm"]) for row in later}
        done = max([self.t + 1, *self.recorded])
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

        Adds the norm of the model's weights, by which two runs can be compared. Leaves out what is
        None, and says so if it leaves out something else. Raises UserError if args have changed, or
        if the round had another norm before a kill has undone it.
        """
        if taken := {"round", "seconds", "norm"} & row.keys():
            raise UserError(f"{' and '.join(taken)} is a column already: choose another name")
        for flag, value in vars(self.args).items():
            if value is not self.about["flags"].get(flag):
                raise UserError(
                    f"federate() changes args.{flag}: use a variable, or set trainer.local from t"
                )
        row = {**row, "norm": weights_in(state).norm()}
        confusion = row.pop("confusion", None)
        if confusion is not None:
            row |= {"predicted": confusion.sum(0), "hits": confusion.diagonal()}
        t = state["t"]
        numbers = {"round": t, "seconds": round(time.monotonic() - self.started, 2)}
        wrong = []
        for column, value in row.items():
            number = _plain(value)
            if number is not None:
                numbers[column] = number
            elif value is not None:
                wrong.append(column)
        if wrong:
            say_once(f"\n{few(wrong)} is no number and no list of numbers, so it is left out")
        if self.recorded.get(t) not in (None, _cell(numbers["norm"])):
            raise UserError(
                f"{self.folder}: round {t} has another norm than before the run was stopped: "
                "does federate() yield all that a round needs, and is this the same processor?"
            )
        self.state = state
        self.rows.append(numbers)
        self.bar.update(t - self.bar.n)
        shown = {name: numbers[c] for c, name in ON_THE_BAR.items() if c in numbers}
        self.bar.set_postfix(shown, refresh=False)
        if not ranks.RANK:
            self._write(confusion)

    def _write(self, confusion):
        """Writes what is new in the folder."""
        if self.t >= max(self.recorded, default=0):  # else it still repeats rounds
            self._write_args()
            self._write_metrics()
            if confusion is not None:
                header = ["class", *(f"called {name}" for name in self.classes)]
                lines = zip(self.classes, *confusion.T.tolist())
                write_whole(self.folder / "confusion.csv", as_csv([header, *lines]))
        if self.next:  # the round before was not the last one
            self.next.replace(self.checkpoint)
            self.next = None
        if time.monotonic() > self.save_at and self.t < self.total:
            content = {"state": self.state, "rows": self.rows}
            if self.t in self.recorded:  # it stood there before a stop, so it need not wait
                write_whole(self.checkpoint, content)
            else:
                self.next = write_beside(self.checkpoint, content)
            self.save_at = time.monotonic() + SAVE_EVERY

    def _write_args(self):
        """Claims the folder with the first round, or says what is new since a run was stopped."""
        if self.has_args:
            return
        self.has_args = True
        if self.command:
            flags = {**vars(self.command), "precision": self.args.precision}
            write_whole(Path(self.command.out) / "args.json", as_json({"flags": flags}))
        if self.is_new:
            text = as_json(self.about)
            with open(self.folder / "args.json", "x") as file:
                file.write(text)  # at once, because a kill must not leave an empty file
        else:  # it may be longer now, and is not finished
            (self.folder / "model.pt").unlink(missing_ok=True)
            write_whole(self.folder / "args.json", as_json(self.about))

    def _write_metrics(self):
        columns = dict.fromkeys(column for row in self.rows for column in row)
        cells = [[_cell(row.get(column, "")) for column in columns] for row in self.rows]
        write_whole(self.folder / "metrics.csv", as_csv([columns, *cells]))

    def finish(self):
        """Saves the model and the picture. Returns this run."""
        self.bar.close()
        ranks.agree({"last round": self.t}, "end by what they share, and by no clock")
        if not self.ended and not ranks.RANK:
            self._write_metrics()  # in its place may be those of more rounds
            train.set_weights(self.model, weights_in(self.state))
            weights = {key: t.cpu() for key, t in self.model.state_dict().items()}
            write_whole(self.folder / "model.pt", weights)
            plots.try_to(plots.clients, self)
            write_whole(self.folder / "args.json", as_json(self.about | {"finished": self.t}))
            if self.next:
                self.next.unlink()
        self.state = {}  # a table of updates may be large
        self.model = None
        self.bar = None
        return self


def weights_in(state):
    """The model's weights [P] in what federate() yields: some papers call them w, others theta."""
    for name in ("w", "theta"):
        if name in state and "t" in state:
            return state[name]
    raise UserError(
        "federate() yields no state, or one without the round: call it t, or without "
        "the model: call it w, or theta"
    )


def copied(state, device):
    """The state as a resumed run reads it. Raises UserError if it cannot be written and read."""
    file = io.BytesIO()
    try:
        torch.save(state, file)
        file.seek(0)
        return torch.load(file, device, weights_only=True)
    except (PickleError, AttributeError, TypeError) as e:  # the last two are of a lambda
        raise UserError(
            "federate() yields something else than numbers and tensors in the state: convert it"
        ) from e


def cells(row):
    """The numbers of a row, by column, as metrics.csv has them. A clock's are left out."""
    return {name: _cell(_plain(row[name])) for name in row if "seconds" not in name}


def machine_of(device):
    """What a number's last digits depend on here, beside flags, data and code, by name."""
    chip = torch.backends.cpu.get_cpu_capability()
    chip += f" of {torch.cpu.get_capabilities().get('cpu_name')}"
    if device.type == "cuda":
        chip = torch.cuda.get_device_name(device)
    found = {"Python": sys.version.split()[0], "device": f"{device.type} {chip}"}
    return found | {name: version(name) for name in ("torch", "torchvision", "numpy", "scipy")}


def machine_in(about):
    """On which machines a run was, such as torch: "2.11, then 2.14"."""
    machines = about["machines"]
    return {name: ", then ".join(dict.fromkeys(m[name] for m in machines)) for name in machines[0]}


def check_free(folder):
    """Raises UserError if this folder holds something, so that no run overwrites another one.

    A run that has not finished a round has left no more than a picture, so it may begin again.
    """
    files = [path for path in folder.rglob("*") if path.is_file()]
    if folder.is_file() or any(path.name != "clients.png" for path in files):
        raise UserError(f"{folder} is taken: choose another --out, or continue a run by --resume")


def write_beside(file, content):
    """Writes a text or a dict of tensors whole, in a file that can then take the place of another.

    Returns its path.
    """
    part = file.with_name(f"{file.name}.part")
    try:
        with open(part, "wb") as open_file:
            if isinstance(content, str):
                open_file.write(content.encode(errors="backslashreplace"))
            else:
                torch.save(content, open_file)
            open_file.flush()
            try:
                os.fsync(open_file.fileno())  # so that it is whole after a power loss, too
            except OSError as e:
                if e.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems have none
                    raise
    except RuntimeError as e:  # torch's error for a full disk
        raise OSError(f"{file} cannot be written ({first_line(e)})") from e
    return part


def write_whole(file, content):
    """Writes a text or a dict of tensors, so that a kill leaves the old file whole."""
    write_beside(file, content).replace(file)


def read_rows(folder):
    """The rows of metrics.csv: numbers, and lists of numbers. What was not measured is left out."""
    csv.field_size_limit(2**31 - 1)  # a column may hold a whole model
    text = (folder / "metrics.csv").read_text(encoding="utf-8-sig")
    if ";" in text:  # a spreadsheet has saved it, and may have written 0,5 for 0.5
        text = text.replace(",", ".").replace(";", ",")
    rows = []
    for line in csv.DictReader(text.splitlines()):
        if None in line.values():
            raise ValueError("metrics.csv is cut off")
        row = {c: [*map(float, cell.split())] for c, cell in line.items() if cell}
        row = {c: numbers if len(numbers) > 1 else numbers[0] for c, numbers in row.items()}
        rows.append(row | {"round": int(row["round"])})
    return rows


def as_json(about):
    return json.dumps(about, indent=1, default=str)  # of a Path, say


def as_csv(lines):
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue()


def _plain(value):
    """A tensor, an array or a list as numbers that CSV and a checkpoint can hold, or None."""
    try:
        found = np.asarray(value.tolist() if isinstance(value, Tensor) else value)
    except ValueError:  # of lists whose lengths differ
        return None
    if found.dtype.kind not in "biuf":
        return None
    return (found + 0).tolist()  # of bools, too, where True becomes 1


def _cell(value):
    """A value as it stands in metrics.csv: numbers have six digits, lists have spaces inside."""
    if isinstance(value, list):
        return " ".join(map(_cell, value))
    return f"{value:.6g}" if isinstance(value, float) else str(value)
