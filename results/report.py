"""Compares runs over seeds, and rebuilds the tables and pictures of results/ and of the README.

    python -m results.report runs/a runs/b               prints a table and draws report.png; runs that differ only in
                                                         the seed are one row; a folder stands for all runs in it
    python -m results.report results/                    rebuilds every table and picture that the pages mark

A page marks a table or a picture with one line. The program replaces the lines after the mark, up to the next empty
line. FOLDER holds one folder per row, and in it one run per seed. It may also hold the paper's numbers, in paper.csv.

    <!-- table FOLDER id_accuracy ood_accuracy last=5 against=random -->
    <!-- curves FOLDER ood_accuracy -->                 the next line links to the picture
    <!-- hull FOLDER/row/seed -->                       the same, for one run of convex_hull_select.py
    <!-- claims FILE.csv -->                            a table of claims, each with the mean of its paired differences
    <!-- differences FILE.csv -->                       the same, but with the numbers of both rows instead of words
    <!-- pairs FILE.csv -->                             the next line links to a picture of these differences

last=N averages each run over its last N evaluations (default: 5). best=COLUMN takes the evaluation with the largest
value in that column. until=N uses only the first N rounds. rows=A,B takes these rows, in this order.
of=COLUMN,COLUMN compares these columns with the row of against=; by default it is the last column. x=samples draws
curves against the training samples so far, instead of rounds.

A claim compares two rows of a folder, `row` and `against`, in one column. It takes their difference for each seed that
both have, and gives the mean of these differences with its 95 % interval (Student's t). If a claim names several
folders, with spaces between them, it takes the mean over the folders first. A table with against=ROW does the same for
each of its rows. If its column `equal` holds the word samples, a claim compares two runs after equally many training
samples, at the last point that both reach. The number of a run is then the mean of the five rounds around this point.

The column `runs` gives the seeds and the commit that ran them, if results/experiments.py recorded it.

A run with fewer rounds than its --rounds is unfinished, and its row says so. UEFL trains for --rounds and then for
--later-rounds, so this finds a UEFL run that stopped in its first iteration, but not one that stopped later.
"""

import argparse
import csv
import json
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from scipy.stats import t as student

from common import UserError, first_line, flags, plots, run

MEASURES = {  # column of metrics.csv -> its name in tables; accuracies are in percent
    "id_accuracy": "ID", "ood_accuracy": "OOD", "mA": "mA", "mE": "mE", "mP": "mP", "train_loss": "training loss",
}  # fmt: skip
TITLES = {  # of the columns of the pages' tables
    **MEASURES, "id_selected": "ID, selected", "selected_size": "n_i", "penalty_share": "penalty's share",
    "gradient_spread": "spread of gradients",
}  # fmt: skip
DIGITS = {"vertices": 1, "seconds": 0, "selected_size": 0, "gradient_spread": 4}  # decimals; 1 for percent, else 3
NOT_COMPARED = ("seed", "out", "resume", "device", "data_dir", "compare")
MARK = re.compile(r"<!-- (table|curves|hull|claims|differences|pairs) (\S+)(.*) -->")
WIDTH = 99  # characters of a printed row, at most


# ------------------------------------------------------------------------------------------------- reading of runs


@dataclass
class Recorded:
    """One run as its folder has it: the method, the flags, and the rows of metrics.csv with numbers as numbers."""

    folder: Path
    method: str
    flags: dict
    rows: list[dict]
    commit: str = ""

    @property
    def compared(self) -> dict:
        """The flags that distinguish this run from others. A baseline's rounds may depend on the seed of its method."""
        ignored = (*NOT_COMPARED, "rounds") if " beside " in self.method else NOT_COMPARED
        return {flag: value for flag, value in self.flags.items() if flag not in ignored}

    @property
    def samples(self) -> np.ndarray:
        """How many training samples the clients have used up to each round, in one of their epochs: [rounds]."""
        return np.cumsum([row["selected_size"] * np.size(row["selected"]) for row in self.rows])

    def unfinished(self, until: int = sys.maxsize) -> str:
        """How many of the rounds up to `until` are there, in words; empty if all are."""
        done, planned = self.rows[-1]["round"] if self.rows else 0, min(self.flags["rounds"], until)
        return f"seed {self.flags['seed']} unfinished: {done} of {planned} rounds" if done < planned else ""


@dataclass
class Runs:
    """Runs that differ only in the seed, in the order of their seeds."""

    runs: list[Recorded]

    def __post_init__(self):
        self.runs = sorted(self.runs, key=lambda one: one.flags["seed"])
        for one, other in pairwise(self.runs):
            if one.flags["seed"] == other.flags["seed"]:
                raise UserError(f"{one.folder} and {other.folder} have the same flags and the same seed: leave one out")

    @property
    def seeds(self) -> list[int]:
        return [one.flags["seed"] for one in self.runs]

    def label(self, until: int = sys.maxsize) -> str:
        """The seeds, the commits that ran them if they are known, and which of the runs are unfinished."""
        notes = dict.fromkeys([one.commit for one in self.runs] + [one.unfinished(until) for one in self.runs])
        note = ", ".join(filter(None, notes))
        return f"seed{'s' * (len(self.runs) > 1)} {', '.join(map(str, self.seeds))}{note and f' ({note})'}"

    def numbers(self, column: str, last: int = 5, best: str | None = None, until: int = sys.maxsize) -> np.ndarray:
        """One number per run, from its rounds up to `until`; nan if the run has none.

        The number is the mean over the last evaluations, or the value at the evaluation where `best` is largest.
        """
        found = []
        for one in self.runs:
            rows = [row for row in one.rows if row.get(best or column) is not None and row["round"] <= until]
            rows = [max(rows, key=lambda row: row[best])] if best and rows else rows[-last:]
            values = [row[column] for row in rows if row.get(column) is not None]
            found.append(np.mean(values) if values else np.nan)
        return np.array(found) * (100 if in_percent(column) else 1)


def read(folder: Path) -> Recorded:
    """The run in this folder. Raises UserError if there is none, or if its files make no sense."""
    file = folder / "args.json"
    try:
        about = json.loads(file.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as e:
        raise UserError(
            f"{folder} is not the folder of a run ({first_line(e)}): give folders with args.json and metrics.csv"
        ) from e
    of_run = about.get("flags") if isinstance(about, dict) else None
    if not isinstance(of_run, dict) or not isinstance(about.get("method"), str):
        raise UserError(f"{file} does not hold the method and the flags of a run: give the folder of another run")
    for flag in ("seed", "rounds"):
        if not isinstance(of_run.get(flag), int):
            raise UserError(f"{file}: {flag} is {of_run.get(flag)!r}, not a whole number: correct it")
    method, name = about["method"], str(about.get("name") or "")
    if name.lower() not in ("", method):  # FedAvg, which fediir.py and uefl.py train for comparison
        method = f"{name} beside {method}"
    return Recorded(folder, method, of_run, read_metrics(folder / "metrics.csv"), str(about.get("commit") or ""))


def read_metrics(file: Path) -> list[dict]:
    """The rows of a metrics.csv as Run.rows holds them: None, numbers, lists of numbers, else text.

    A last line without its line end was cut short by a full disk or a kill, and is ignored. Raises UserError for
    anything else that is not a table of rounds.
    """
    try:
        lines = [line.split(",") for line in file.read_text(encoding="utf-8-sig").split("\n")[:-1]]
    except (OSError, ValueError) as e:
        raise UserError(f"{file} cannot be read ({first_line(e)})") from e
    header, rows = lines[0] if lines else [], []
    for i, cells in enumerate(lines[1:], start=2):
        if len(cells) != len(header):
            raise UserError(f"{file}: line {i} has {len(cells)} cells, but there are {len(header)} columns: correct it")
        rows.append(dict(zip(header, map(typed, cells), strict=True)))
        if not isinstance(rows[-1].get("round"), int):
            raise UserError(f"{file}: line {i} has no number in the column `round`: correct it")
        if len(rows) > 1 and rows[-1]["round"] <= rows[-2]["round"]:
            raise UserError(f"{file}: line {i} has a round that is not after the one before: correct it")
    for column in {column for row in rows for column in row if isinstance(row[column], list)}:
        for row in rows:  # a list of one number looks like a number in the file
            row[column] = [row[column]] if isinstance(row[column], (int, float)) else row[column]
    return rows


def typed(cell: str) -> int | float | str | list[int | float] | None:
    """What a cell of metrics.csv stands for."""
    words = cell.split()
    try:
        numbers = [int(word) if word.lstrip("-").isdecimal() else float(word) for word in words]
    except ValueError:
        return cell
    return numbers if len(words) > 1 else numbers[0] if words else None


def below(folder: Path) -> list[Path]:
    """The folders of runs in this one, itself included, in the order of their names."""
    return sorted(file.parent for file in folder.rglob("metrics.csv"))


def collect(folders: list[Path]) -> Runs:
    return Runs([read(folder) for folder in folders])


def rows_of(folder: Path) -> dict[str, Runs]:
    """The rows of a table, in the order of paper.csv, then in alphabetical order."""
    names = sorted({of_seed.parent.name for of_seed in below(folder)})
    in_paper = [name for name in paper(folder) if name in names]
    names = in_paper + [name for name in names if name not in in_paper]
    return {name: collect(below(folder / name)) for name in names}


def paper(folder: Path) -> dict[str, dict[str, str]]:
    """paper.csv: row -> column -> the paper's number as the file has it, for example 42.0 ± 1.0."""
    file = folder / "paper.csv"
    if not file.exists():
        return {}
    with file.open(encoding="utf-8-sig") as f:
        rows = list(csv.DictReader(f))
    if any(row.get("row") is None for row in rows):
        raise UserError(f"{file} has no column `row` with the rows' names: correct it")
    return {row.pop("row"): row for row in rows}


# ------------------------------------------------------------------------------------------------- numbers and words


def in_percent(column: str) -> bool:
    return column in ("mA", "id_selected", "penalty_share") or column.endswith("accuracy")


def spread(numbers: np.ndarray) -> float:
    """The sample standard deviation over seeds. It is nan for one seed."""
    return numbers.std(ddof=1) if len(numbers) > 1 else np.nan


def show(numbers: np.ndarray, column: str) -> str:
    """mean ± standard deviation, as tables show it."""
    if np.isnan(numbers).any():
        return ""
    digits = 1 if in_percent(column) else DIGITS.get(column, 3)
    text = f"{numbers.mean():.{digits}f}"
    return text if len(numbers) == 1 else f"{text} ± {spread(numbers):.{digits}f}"


def of_both(row: Runs, base: Runs, column: str, **options) -> np.ndarray:
    """The numbers of both rows for each seed that both have [2, n]. Runs.numbers() describes the options."""
    ours, theirs = (dict(zip(one.seeds, one.numbers(column, **options), strict=True)) for one in (row, base))
    found = np.array([(ours[seed], theirs[seed]) for seed in ours if seed in theirs]).reshape(-1, 2).T
    return found[:, np.isfinite(found).all(0)]


def paired(row: Runs, base: Runs, column: str, **options) -> np.ndarray:
    """row - base for each seed that both have."""
    numbers = of_both(row, base, column, **options)
    return numbers[0] - numbers[1]


def at_equal_samples(row: Runs, base: Runs, column: str) -> np.ndarray:
    """Both rows' numbers for each seed that both have, at the last point with equally many training samples [2, n].

    Each is the mean of five rounds, and this point is the middle one. Between two such means it is interpolated.
    """
    seeds = [seed for seed in row.seeds if seed in base.seeds]
    found = np.empty((2, len(seeds)))
    for i, seed in enumerate(seeds):
        two = [runs.runs[runs.seeds.index(seed)] for runs in (row, base)]
        samples = [one.samples[2:-2] for one in two]
        means = [np.convolve([r[column] for r in one.rows], np.full(5, 1 / 5), "valid") for one in two]
        last = min(of_one[-1] for of_one in samples)
        found[:, i] = [np.interp(last, *line, left=np.nan) for line in zip(samples, means, strict=True)]
    return found * (100 if in_percent(column) else 1)


def interval(differences: np.ndarray) -> np.ndarray:
    """The 95 % interval of the mean of differences over seeds [low, high]. It is nan for one seed."""
    n = len(differences)
    half = student.ppf(0.975, n - 1) * spread(differences) / n**0.5
    return differences.mean() + half * np.array([-1, 1])


def show_difference(differences: np.ndarray, column: str) -> str:
    """mean (low to high), as tables show it: the mean of differences over seeds, and its interval."""
    if len(differences) == 0:
        return ""
    digits = 1 if in_percent(column) else DIGITS.get(column, 3)
    mean, low, high = (f"{x:+.{digits}f}" for x in (differences.mean(), *interval(differences)))
    return f"{mean} ({low} to {high})" if len(differences) > 1 else mean


# ------------------------------------------------------------------------------------------------- pages


@contextmanager
def beside(file: Path) -> Iterator[Path]:
    """The block writes another file, which then takes this file's place. So a full disk leaves no half file."""
    part = file.with_name(f"part-{file.name}")
    try:
        yield part
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)


def markdown(
    folder: Path, columns: list[str], against: str = "", of: str = "", rows: str = "", **options
) -> list[str]:  # fmt: skip
    """The lines of a page's table. Runs.numbers() describes the other options.

    against  the row to compare with
    of       the columns to compare, with commas between them; by default the last one
    rows     the rows to show, with commas between them; by default all

    Raises UserError if the folder has no runs, or no row with such a name.
    """
    found, theirs = rows_of(folder), paper(folder)
    if not found or (against and against not in found):
        raise UserError(f"{folder} has no runs{f' of {against}' if against else ''}")
    in_paper = [c for c in columns if any(row.get(c) for row in theirs.values())]
    header = ["", "runs", *(TITLES.get(c, c) for c in columns), *(f"paper's {TITLES.get(c, c)}" for c in in_paper)]
    compared = (of.split(",") if of else columns[-1:]) if against else []
    header += [f"{TITLES.get(c, c)} minus {against}" for c in compared]
    lines = [header, ["---"] * len(header)]
    for name in rows.split(",") if rows else [*found, *(name for name in theirs if name not in found)]:
        if name not in {**found, **theirs}:
            raise UserError(f"{folder} has no runs of {name}")
        ours = found.get(name)
        label = ours.label(options.get("until", sys.maxsize)) if ours else "not run"
        line = [name, label, *(show(ours.numbers(c, **options), c) if ours else "" for c in columns)]
        line += [theirs.get(name, {}).get(c) or "" for c in in_paper]
        for c in compared:
            is_compared = ours and name != against
            line.append(show_difference(paired(ours, found[against], c, **options), c) if is_compared else "")
        lines.append(line)
    return [f"| {' | '.join(line)} |" for line in lines]


@dataclass
class Claim:
    """A line of a file of claims.

    words    the columns of the file: claim, paper, test, answer, cut, page
    column   of metrics.csv
    numbers  of `row` and of `against`, for each seed that both have: [2, n], the mean over the folders
    """

    words: dict[str, str]
    column: str
    numbers: np.ndarray

    @property
    def differences(self) -> np.ndarray:
        """row - against, one number per seed. The unit is points for an accuracy."""
        return self.numbers[0] - self.numbers[1]

    def effect(self) -> str:
        """The mean difference with its 95 % interval and the number of seeds."""
        n, unit = len(self.differences), "points" if in_percent(self.column) else "nats"
        return f"{show_difference(self.differences, self.column)} {unit}, {n} seed{'s' * (n > 1)}" if n else ""


def read_claims(file: Path) -> list[Claim]:
    """The claims of this file. Its columns folder, row, against, column, last and best say what to compare."""
    with file.open(encoding="utf-8") as f:
        lines, claims = list(csv.DictReader(f)), []
    names = {name for line in lines for name in line["folder"].split()}
    in_folder = {name: rows_of(file.parent / name) for name in names}
    for line in lines:
        numbers = []
        for found in (in_folder[name] for name in line["folder"].split()):
            row, base = found[line["row"]], found[line["against"]]
            if line.get("equal") == "samples":
                numbers.append(at_equal_samples(row, base, line["column"]))
            else:
                numbers.append(of_both(row, base, line["column"], last=int(line["last"]), best=line["best"] or None))
        claims.append(Claim(line, line["column"], np.mean(numbers, axis=0) if numbers else np.empty((2, 0))))
    return claims


def claims_table(file: Path) -> list[str]:
    """The lines of the table of this file's claims."""
    header = ["claim", "the paper reports", "compared with", "answer", "effect here (95 % interval)",
              "how far from the paper"]  # fmt: skip
    lines = [header, ["---"] * len(header)]
    for claim in read_claims(file):
        of_claim = claim.words
        test = f"[{of_claim['test']}]({of_claim['page']})"
        lines.append([of_claim["claim"], of_claim["paper"], test, of_claim["answer"], claim.effect(), of_claim["cut"]])
    return [f"| {' | '.join(line)} |" for line in lines]


def differences_table(file: Path) -> list[str]:
    """The lines of a table with both rows of each of this file's claims, and with their difference."""
    claims = read_claims(file)
    rows = {(claim.words["row"], claim.words["against"]) for claim in claims}
    header = ["", *(rows.pop() if len(rows) == 1 else ("method", "baseline")), "difference"]
    in_paper = any(claim.words.get("paper") for claim in claims)
    header += ["the paper reports"] * in_paper
    lines = [header, ["---"] * len(header)]
    for claim in claims:
        numbers = [show(of_row, claim.column) for of_row in claim.numbers]
        difference = show_difference(claim.differences, claim.column)
        lines.append([claim.words["label"], *numbers, difference, *([claim.words["paper"]] if in_paper else [])])
    return [f"| {' | '.join(line)} |" for line in lines]


def draw_pairs(file: Path, claims: list[Claim]) -> None:
    """The paired differences of each claim, seed by seed, around zero: one panel per unit."""
    tested = [claim for claim in claims if len(claim.differences)]
    panels = {
        "difference of accuracies (points)": [claim for claim in tested if in_percent(claim.column)],
        "difference of uncertainties (nats)": [claim for claim in tested if claim.column == "mE"],
    }
    panels = {title: of_panel for title, of_panel in panels.items() if of_panel}
    heights = [len(of_panel) for of_panel in panels.values()]
    with matplotlib.rc_context(plots.STYLE):
        figure = Figure(figsize=(7.6, 1.3 + 0.25 * sum(heights)))
        all_axes = figure.subplots(len(panels), 1, height_ratios=heights, squeeze=False)[:, 0]
        for axes, (title, of_panel) in zip(all_axes, panels.items(), strict=True):
            axes.axvline(0, color="0.5", lw=0.9)
            for y, claim in enumerate(of_panel):
                axes.plot(claim.differences, [y] * len(claim.differences), "o", mfc="none", color=plots.COLOURS[0])
                axes.plot(claim.differences.mean(), y, "|", ms=14, mew=2, color=plots.COLOURS[1])
                axes.plot(interval(claim.differences), [y, y], color=plots.COLOURS[1], lw=1)
            axes.set(xlabel=title, ylim=(len(of_panel) - 0.5, -0.5))
            axes.set_yticks(range(len(of_panel)), [claim.words["label"] for claim in of_panel])
        figure.suptitle(
            "circles: one seed each; bars: their mean; lines: its 95 % interval", x=0.01, ha="left", fontsize=9
        )
        figure.savefig(file, metadata={"Software": None})


def rebuild(page: Path, draw: bool = True) -> str:
    """The page's text with new tables. With `draw`, also draws the pictures that the page marks.

    Raises UserError for a mark that makes no sense.
    """
    lines, built = iter(page.read_text().splitlines()), []
    for line in lines:
        built.append(line)
        mark = MARK.fullmatch(line)
        if not mark:
            continue
        kind, folder, words = mark[1], page.parent / mark[2], mark[3].split()
        columns = [word for word in words if "=" not in word]
        try:
            options: dict = dict(word.split("=") for word in words if "=" in word)
            options |= {name: int(options[name]) for name in ("last", "until") if name in options}
            of_file = {"claims": claims_table, "differences": differences_table}
            if kind in ("table", *of_file):
                built += of_file[kind](folder) if kind in of_file else markdown(folder, columns, **options)
                while next(lines, ""):  # the old table ends with an empty line
                    pass
                built.append("")
            else:
                built.append(next(lines, ""))
                link = re.search(r"\(([^()\s]+)\)$", built[-1])
                if not link:
                    raise ValueError("the next line has no link to a picture")
                if draw:
                    draw_again(kind, folder, columns, page.parent / link[1], **options)
        except (KeyError, TypeError, ValueError) as e:
            hint = "see python -m results.report --help"
            raise UserError(f"{page}: {line} does not work ({first_line(e)}); {hint}") from e
    return "\n".join(built) + "\n"


def draw_again(kind: str, folder: Path, columns: list[str], picture: Path, rows: str = "", x: str = "round") -> None:
    """Draws the picture of a mark of this kind from the runs in the folder, or from these rows of it."""
    if kind == "pairs":
        with beside(picture) as part:
            draw_pairs(part, read_claims(folder))
    elif kind == "curves":
        with beside(picture) as part:
            found = rows_of(folder)
            bands(part, {name: found[name] for name in rows.split(",")} if rows else found, titles(columns), x)
    elif (one := read(folder)).rows and "points" in one.rows[0]:  # older runs keep their picture
        with beside(picture) as part:
            plots.hull_animation(part, one.rows, one.flags["hull_dim"])


# ------------------------------------------------------------------------------------------------- pictures


def titles(columns: list[str]) -> dict[str, str]:
    return {column: f"{TITLES.get(column, column)}{' accuracy' * column.endswith('accuracy')}" for column in columns}


def curve(runs: Runs, column: str, x: str) -> tuple[np.ndarray, np.ndarray]:
    """The points that all runs have [points], and each run's values there [runs, points], interpolated between rounds.

    x  "round", or "samples": thousands of training samples so far
    """
    lines = []
    for one in runs.runs:
        at = one.samples / 1000 if x == "samples" else [row["round"] for row in one.rows]
        points = [(p, row[column]) for p, row in zip(at, one.rows, strict=True) if row.get(column) is not None]
        lines += [np.array(points).T] if points else []
    if not lines:
        return np.empty(0), np.empty((1, 0))
    first, last = max(line[0, 0] for line in lines), min(line[0, -1] for line in lines)
    at = np.unique([p for line in lines for p in line[0] if first <= p <= last])
    return at, np.array([np.interp(at, *line) for line in lines])


def bands(file: Path, runs: Mapping[str, Runs], panels: Mapping[str, str], x: str = "round") -> None:
    """Columns of metrics.csv against rounds: the mean over seeds, in a band of one standard deviation.

    runs    label -> its runs
    panels  column -> title
    x       "round", or "samples": thousands of training samples so far
    """
    with matplotlib.rc_context(plots.STYLE):
        width = 3.4 * len(panels)
        legend_columns = max(1, int(12 * width / (max(map(len, runs)) + 8)))  # as many as fit
        figure = Figure(figsize=(width, 2.9 + 0.2 * -(-len(runs) // legend_columns)))
        for axes, (column, title) in zip(np.atleast_1d(figure.subplots(1, len(panels))), panels.items(), strict=True):
            for i, (label, of_label) in enumerate(runs.items()):
                at, values = curve(of_label, column, x)
                mean, std = values.mean(0), values.std(0, ddof=1) if len(values) > 1 else 0
                colour = plots.COLOURS[i % len(plots.COLOURS)]
                axes.plot(at, mean, plots.LINES[i % len(plots.LINES)], color=colour, lw=1.2, label=label)
                axes.fill_between(at, mean - std, mean + std, color=colour, alpha=0.15, lw=0)
            axes.set(title=title, xlabel={"samples": "training samples so far (thousands)"}.get(x, x))
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        handles = figure.axes[0].get_legend_handles_labels()
        figure.legend(*handles, loc="outside lower center", ncols=legend_columns)
        figure.savefig(file, metadata={"Software": None} if file.suffix == ".png" else None)


# ------------------------------------------------------------------------------------------------- comparison


def as_typed(flag: str, value) -> str:
    """A flag with its value, as a user types it."""
    name = f"--{flag.replace('_', '-')}"
    if value is None:
        return f"without {name}"
    if isinstance(value, bool):  # old runs have flags like no_token_norm
        return name if value else f"--no-{name[2:]}".replace("--no-no-", "--")
    return " ".join([name, *map(str, value if isinstance(value, list) else [value])])


def compare(folders: list[Path]) -> dict[str, Runs]:
    """Groups runs that differ only in the seed. A group's name has the flags in which it differs from the others."""
    groups: dict[str, list[Recorded]] = {}
    for folder in dict.fromkeys(folder.resolve() for folder in folders):
        one = read(folder)
        groups.setdefault(json.dumps([one.method, one.compared], sort_keys=True), []).append(one)
    firsts, named = [of_key[0] for of_key in groups.values()], {}
    for one, of_key in zip(firsts, groups.values(), strict=True):
        mine, others = one.compared, [other.compared for other in firsts if other.method == one.method]
        differ = [flag for flag in mine if any(other.get(flag, mine[flag]) != mine[flag] for other in others)]
        name = " ".join([one.method, *(as_typed(flag, mine[flag]) for flag in differ)])
        # groups may also differ in flags that only one of them has: then the folder tells them apart
        options = (name, f"{name} ({one.folder.name})", f"{name} ({one.folder})")
        named[next(option for option in options if option not in named)] = Runs(of_key)
    return named


def print_table(title: str, runs: dict[str, Runs], columns: list[str], last: int) -> None:
    """Prints the table of a comparison. If a row is too wide, rows get short names, explained below the table."""
    cells = [[show(of_name.numbers(c, last), c) for c in columns] for of_name in runs.values()]
    header = ["", "runs", *columns]
    rows = [[name, of_name.label(), *line] for (name, of_name), line in zip(runs.items(), cells, strict=True)]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    if sum(widths) + 2 * (len(widths) - 1) <= WIDTH:
        run.table(title, header, rows)
        return
    letters = [f"{chr(ord('A') + i % 26)}{i // 26 or ''}" for i in range(len(rows))]
    marks = [" (unfinished)" * any(one.unfinished() for one in of_name.runs) for of_name in runs.values()]
    lettered = zip(letters, marks, cells, strict=True)
    run.table(title, ["", *columns], [[letter + mark, *line] for letter, mark, line in lettered])
    for letter, (name, label, *_) in zip(letters, rows, strict=True):
        text = f"{letter}: {name}, {label}"
        print(textwrap.fill(text, WIDTH, subsequent_indent="   ", break_on_hyphens=False, break_long_words=False))


def main(argv: list[str] | None = None) -> None:
    parser = flags.Parser(
        prog="python -m results.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", nargs="+", type=Path, help="folders of runs, or the folder of the pages")
    parser.add_argument("--columns", nargs="+", help="of metrics.csv (default: the measures that the runs have)")
    parser.add_argument("--last", type=flags.at_least(1), default=5, help="evaluations over which the table averages")
    parser.add_argument("--out", type=Path, help="the picture (default: report.png, or the next number that is free)")
    args = parser.parse_args(argv)
    if len(args.run) == 1 and (args.run[0] / "README.md").exists():
        pages = [*sorted(args.run[0].rglob("*.md")), args.run[0].resolve().parent / "README.md"]
        for page in [page for page in pages if page.exists() and MARK.search(page.read_text())]:
            text = rebuild(page)
            with beside(page) as part:
                part.write_text(text)
            print(f"{page} is up to date")
        return
    empty = [folder for folder in args.run if not below(folder)]
    if empty:
        raise UserError(f"{empty[0]} has no runs: give folders with args.json and metrics.csv")
    if args.out and args.out.suffix not in (".png", ".pdf", ".svg"):
        raise UserError(f"--out {args.out}: name a .png, .pdf or .svg")
    if args.out and args.out.exists():
        raise UserError(f"{args.out} exists: choose another --out")
    names = (Path(f"report{end}.png") for end in ("", *(f"-{i}" for i in range(2, 1000))))
    picture = args.out or next(name for name in names if not name.exists())
    runs = compare([folder for given in args.run for folder in below(given)])
    rows = [row for of_name in runs.values() for one in of_name.runs for row in one.rows]
    has = {c for row in rows for c in row if isinstance(row[c], (int, float)) and not np.isnan(row[c])}
    columns = args.columns or [column for column in MEASURES if column in has]
    if not has:
        raise UserError(f"{args.run[0]} has no round yet: wait for the first")
    if set(columns) - has:
        raise UserError(f"--columns {min(set(columns) - has)}: the runs have {', '.join(sorted(has))}")
    title = f"mean of the last evaluations (up to {args.last}), over seeds; accuracies in percent"
    print_table(title, runs, columns, args.last)
    with beside(picture) as part:
        bands(part, runs, titles(columns))
    print(f"curves are in {picture}")


if __name__ == "__main__":
    sys.argv[0] = "report.py"
    run.launch(main)
