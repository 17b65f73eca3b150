"""What the programs of the pages share: the runs of a CSV, their tables, paired differences and pictures.

A CSV has rows of the metrics.csv of finished runs, each with its experiment and seed; a run's first row also has its
commit (if known) and version of torch. Instead of the list `selected` it has `clients`, how many clients trained in the
round, and `clients_so_far`, how many different ones trained up to it. In a page, <!-- NAME --> marks the block of this
name: it ends with an empty line.
"""

import csv
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from scipy.stats import ttest_1samp

from common import UserError, plots

RESULTS = Path(__file__).parent
FRESH = {"wu/glyphs/": 5, "wu/cifar10/": 3, "uefl/mnist/": 3, "fediir/narrow-": 3}  # beginning -> first fresh seed
TITLES = {
    "id_accuracy": "ID", "ood_accuracy": "OOD", "id_selected": "ID, selected", "selected_size": "n_i",
    "train_loss": "training loss", "penalty_share": "penalty's share", "gradient_spread": "spread of gradients",
    "rare_accuracy": "accuracy on the rare classes", "rare_share": "rare clients among the selected",
    "turned_accuracy": "accuracy of the turned silos", "upright_accuracy": "accuracy of the upright silos",
    "gap_share": "ID minus OOD",
}  # fmt: skip
LABELS = {  # of rows in pictures
    "random-as-many": "as many random clients", "by-size-more": "15 clients by size", "random": "ten random clients",
    "largest-as-many": "as many, the largest", "uefl": "UEFL", "fedavg": "FedAvg", "static-codebook": "static codebook",
    "uefl-no-norm": "UEFL without norm", "fedavg-no-norm": "FedAvg without norm", "fediir-fedavg": "FedAvg",
    "fedavg-no-momentum": "FedAvg without momentum", "fediir": "FedIIR", "gamma-1.7": "FedIIR, gamma 1.7",
}  # fmt: skip
DIGITS = {"vertices": 1, "seconds": 0, "selected_size": 0, "gradient_spread": 4}  # decimals; 1 for percent, else 3


@dataclass
class Run:
    """One run: its rows, column -> a number, a list of numbers, or None for an empty cell."""

    seed: int
    label: str = ""  # the commit, or what is special about this run
    rows: list[dict] = field(default_factory=list)


Runs = list[Run]  # that differ in the seed alone, in its order
Rows = Mapping[str, Runs]
Cells = list[list[str]]  # of a table: its header, then its rows


@dataclass
class Pair:
    """Two rows that are compared in a column, seed by seed: their numbers [2, seeds]."""

    label: str
    column: str
    both: np.ndarray
    paper: str = ""  # what the paper reports, as in "92.0 against 78.0"
    note: str = ""

    def __post_init__(self):
        self.difference = self.both[0] - self.both[1]
        self.effect = float(np.subtract(*map(float, self.paper.split(" against ")))) if self.paper else None
        highest = 100 if in_percent(self.column) else math.inf
        self.fits = not self.paper or not self.both.size or self.both[1].mean() + self.effect <= highest


def value(cell: str) -> float | list[float] | None:
    """What a cell of metrics.csv stands for. Raises ValueError if it is no number."""
    numbers = [float(word) for word in cell.split()]
    return numbers if len(numbers) > 1 else numbers[0] if numbers else None


def read(name: str, fresh: bool = False) -> Rows:
    """The runs of a CSV in results/, by experiment. Of the experiments in FRESH only the fresh seeds, or the others."""
    found: dict[str, dict[int, Run]] = {}
    with (RESULTS / name).open(encoding="utf-8") as f:
        for line in csv.DictReader(f):
            experiment, seed, commit, _ = (line.pop(column) for column in ("experiment", "seed", "commit", "torch"))
            first = next((first for begin, first in FRESH.items() if experiment.startswith(begin)), None)
            if first is None or (int(seed) >= first) == fresh:
                run = found.setdefault(experiment, {}).setdefault(int(seed), Run(int(seed), commit))
                run.rows.append({column: value(cell) for column, cell in line.items()})
    return {experiment: [seeds[seed] for seed in sorted(seeds)] for experiment, seeds in found.items()}


def group(runs: Rows, folder: str, names: str) -> Rows:
    """The experiments of a folder with these names, with spaces between them. One without runs has an empty list."""
    return {name: runs.get(f"{folder}/{name}", []) for name in names.split()}


def in_percent(column: str) -> bool:
    return column in ("mA", "id_selected") or column.endswith(("accuracy", "share"))


def numbers(runs: Runs, column: str, last: int = 5, best: str = "", until: float = math.inf) -> np.ndarray:
    """One number per run: its mean over the last evaluations up to a round, or its value where `best` is largest.

    The array is empty if no run has this column.
    """
    found = []
    for run in runs:
        rows = [row for row in run.rows if row["round"] <= until and row.get(best or column) is not None]
        rows = [max(rows, key=lambda row: row[best])] if best and rows else rows[-last:]
        values = [row[column] for row in rows if row.get(column) is not None]
        found.append(np.mean(values) if values else None)
    return np.array([] if set(found) == {None} else found, dtype=float) * (100 if in_percent(column) else 1)


def paired(sides: list[Runs], column: str, **options) -> np.ndarray:
    """The numbers of each side for the seeds that all of them have [sides, seeds]."""
    seeds = set.intersection(*({run.seed for run in side} for side in sides))
    return np.array([numbers([run for run in side if run.seed in seeds], column, **options) for side in sides])


def pair(runs: Rows, label: str, folders: str, names: str, column: str, paper="", note="", **options) -> Pair:
    """Two rows compared in a column: the mean over these folders. numbers() describes the options."""
    sides = [side for folder in folders.split() for side in group(runs, folder, names).values()]
    return Pair(label, column, paired(sides, column, **options).reshape(len(sides) // 2, 2, -1).mean(0), paper, note)


def pairs(runs: Rows, folder: str, names: str, columns: list[str], about="", note="", **options) -> list[Pair]:
    """A pair for each column and each two rows, which stand in `names` as "one other, one other"."""
    found = []
    for two in names.split(", "):
        label = " minus ".join(name.split("/")[-1] for name in two.split()) + about
        found += [pair(runs, f"{label}: {TITLES.get(c, c)}", folder, two, c, note=note, **options) for c in columns]
    return found


def show(found: np.ndarray, column: str, sign: str = "") -> str:
    """mean ± sample standard deviation; with the sign "+", mean (low to high): the 95 % interval by Student's t."""
    form = f"{sign}.{1 if in_percent(column) else DIGITS.get(column, 3)}f"
    if len(found) < 2:
        return "".join(f"{number:{form}}" for number in found)
    if not sign:
        return f"{found.mean():{form}} ± {found.std(ddof=1):{form}}"
    low, high = ttest_1samp(found, 0).confidence_interval()
    return f"{found.mean():{form}} ({low:{form}} to {high:{form}})"


def table(of: Rows, columns: list[str], against: str = "", **options) -> Cells:
    """A table of those columns that some of the runs have. numbers() describes the options.

    against  the row to compare with, in mA and mE, or else in the last column
    """
    columns = [c for c in columns if any(len(numbers(runs, c)) for runs in of.values())]
    compared = ([c for c in columns if c in ("mA", "mE")] or columns[-1:]) if against else []
    lines = [
        ["", "runs", *(TITLES.get(c, c) for c in columns), *(f"{TITLES.get(c, c)} minus {against}" for c in compared)]
    ]
    for name, runs in of.items():
        commits = ", ".join(dict.fromkeys(run.label for run in runs if run.label))
        seeds = f"seed{'s' * (len(runs) > 1)} {', '.join(str(run.seed) for run in runs)}" if runs else "not run yet"
        line = [name, seeds + (commits and f" ({commits})"), *(show(numbers(runs, c, **options), c) for c in columns)]
        for c in compared:
            both = paired([runs, of[against]], c, **options)
            line.append(show(both[0] - both[1], c, "+") if name != against else "")
        lines.append(line)
    return lines


def tables(runs: Rows, specs: Mapping[str, tuple], **options) -> dict[str, Cells]:
    """The tables of a page, by their blocks. A spec is: folder, rows, columns, the row to compare with."""
    return {
        block: table(group(runs, folder, names), columns, against, **options)
        for block, (folder, names, columns, against) in specs.items()
    }


def differences(of: list[Pair], ours: str = "method", theirs: str = "baseline") -> Cells:
    """A table with one pair per line. A column without any text is left out."""
    lines = [["", ours, theirs, "difference", "seeds", "the paper reports", "note"]]
    for p in of:
        sides = [show(side, p.column) for side in p.both]
        lines.append([p.label, *sides, show(p.difference, p.column, "+"), str(p.both.shape[1]), p.paper, p.note])
    return [list(line) for line in zip(*(c for c in zip(*lines, strict=True) if any(c[1:])), strict=True)]


def build(page: str, blocks: Mapping[str, Cells]) -> None:
    """Writes these tables into the blocks of a page. Its path is relative to results/."""
    text = (RESULTS / page).read_text()
    marks = re.findall(r"(?m)^<!-- (\S+) -->$", text)
    if sorted(marks) != sorted(blocks):
        raise UserError(f"{page} marks {', '.join(marks)}, but the tables are {', '.join(blocks)}")
    for name, (header, *rows) in blocks.items():
        lines = [f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows)]
        new = "\n".join([f"<!-- {name} -->", *lines, ""])
        text = re.sub(rf"(?m)^<!-- {name} -->\n(?:.+\n)*", lambda _, new=new: new, text)
    (RESULTS / page).write_text(text)


def curves(file: Path, rows: Rows, columns: list[str]) -> None:
    """Columns over the rounds: the mean over the seeds, in a band of one standard deviation."""
    with plots.drawn(file, 3.4 * len(columns), 3.5) as figure:
        for axes, column in zip(np.atleast_1d(figure.subplots(1, len(columns))), columns, strict=True):
            for i, (name, runs) in enumerate(rows.items()):
                lines = [{r["round"]: r[column] for r in run.rows if r.get(column) is not None} for run in runs]
                at = sorted(set.intersection(*map(set, lines)))  # the rounds that all seeds have
                values = np.array([[line[t] for t in at] for line in lines]) * (100 if in_percent(column) else 1)
                mean, std = values.mean(0), values.std(0, ddof=1) if len(values) > 1 else 0
                colour, style = (options[i % len(options)] for options in (plots.COLOURS, plots.LINES))
                axes.plot(at, mean, style, color=colour, lw=1.2, label=LABELS.get(name, name))
                axes.fill_between(at, mean - std, mean + std, color=colour, alpha=0.15, lw=0)
            axes.set(title=TITLES.get(column, column) + ", percent" * in_percent(column), xlabel="round")
        figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(columns))
        figure.suptitle("lines: mean over the seeds; bands: one standard deviation", x=0.01, ha="left", fontsize=9)


def draw_pairs(file: Path, panels: Mapping[str, list[Pair]]) -> None:
    """Differences seed by seed, with their mean and its 95 % interval, and the paper's effect. panels: title -> pairs.

    Intervals of more than twice the median width do not set an axis. A seed beyond its ends is an arrow.
    """
    heights = [len(pairs) + 0.7 for pairs in panels.values()]
    with plots.drawn(file, 7.6, 0.5 + 0.45 * sum(heights)) as figure:
        all_axes = figure.subplots(len(panels), 1, height_ratios=heights, squeeze=False)[:, 0]
        for axes, (title, pairs) in zip(all_axes, panels.items(), strict=True):
            intervals = [ttest_1samp(p.difference, 0).confidence_interval() for p in pairs]
            widths, better = np.ptp(intervals, axis=1), pairs[0].column != "mE"
            shown = [0, *(p.difference.mean() for p in pairs), *(p.effect for p in pairs if p.paper)]
            shown += list(np.array(intervals)[widths <= 2 * np.median(widths)].flat)
            ends = np.array([min(shown), max(shown)]) + 0.12 * np.ptp(shown) * np.array([-1, 1])
            axes.axvline(0, color="0.5", lw=0.9)
            for y, (p, interval) in enumerate(zip(pairs, intervals, strict=True)):
                axes.plot(interval, [y, y], color=plots.COLOURS[1], lw=5, solid_capstyle="butt", alpha=0.45)
                axes.plot(p.difference.mean(), y, "|", ms=11, mew=2, color=plots.COLOURS[1])
                for seed in p.difference:
                    marker = ("<o>" if better else ">o<")[np.searchsorted(ends, seed)]
                    axes.plot(seed.clip(*ends), y + 0.28, marker, mfc="none", color=plots.COLOURS[0], clip_on=False)
                axes.plot(p.effect if p.paper else np.nan, y, "D", color="black", mfc="black" if p.fits else "white")
            axes.text(0, -0.55, "worse  ", ha="right", color="0.4")
            axes.text(0, -0.55, "  better", ha="left", color="0.4")
            axes.set(title=title, xlim=ends if better else ends[::-1], ylim=(len(pairs) - 0.4, -0.9))
            axes.set_yticks(range(len(pairs)), [p.label for p in pairs])
        about = "circles: seeds; bars: mean and 95 % interval; diamonds: the paper's effect, hollow if above 100 %"
        figure.suptitle(about, x=0.01, ha="left", fontsize=9)
