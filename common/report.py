"""Compares runs, mean and standard deviation over seeds, and rebuilds the tables and pictures of results/ and README.

    python -m common.report runs/a runs/b                a table and report.png; runs that differ in nothing but the
                                                         seed are one row; a folder stands for all runs below it
    python -m common.report results/                     whatever the pages mark, as below

In a page, what stands between such a mark and the next empty line is rebuilt from the runs in a folder, which holds
one folder a row with one run a seed (args.json, metrics.csv), and, if a paper has the same table, a paper.csv:

    <!-- table FOLDER id_accuracy ood_accuracy last=5 against=random -->
    <!-- curves FOLDER ood_accuracy -->                 the picture that the next line links to
    <!-- hull FOLDER/row/seed -->                        likewise

last=N takes each run's mean over its last N evaluations (5), best=COLUMN the evaluation where that is highest, and
until=N only looks at the first N rounds.
The verdict is about the last column. First beside the paper: "within" its standard deviation, "above" or "below". Then
beside the row named by against=: "level" if they are closer than the larger of our two standard deviations, else
whether our difference has the sign of the paper's. Of one seed each the difference is all that is said.
"""

import argparse
import csv
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from common import UserError, flags, plots, run

MEASURES = {  # column of metrics.csv -> what it is called; accuracies are in percent
    "id_accuracy": "ID", "ood_accuracy": "OOD", "mA": "mA", "mE": "mE", "mP": "mP", "train_loss": "training loss",
}  # fmt: skip
NOT_COMPARED = ("seed", "out", "resume", "device", "data_dir", "compare")


@dataclass
class Runs:
    """Runs that differ in nothing but the seed: a list of rows of metrics.csv for each, and their seeds."""

    metrics: list[list[dict[str, str]]]
    seeds: list[int]

    @property
    def which(self) -> str:
        """Their seeds, as they are printed."""
        return f"seed{'s' * (len(self.seeds) > 1)} {', '.join(map(str, self.seeds))}"

    def numbers(self, column: str, last: int = 5, best: str | None = None, until: int = sys.maxsize) -> np.ndarray:
        """One number a run, of its rounds up to `until`: the mean over the last evaluations, or what it was at the one
        where `best` was highest; nan if there is none."""
        found = []
        for rows in self.metrics:
            rows = [row for row in rows if row.get(best or column) and int(row["round"]) <= until]
            rows = [max(rows, key=lambda row: float(row[best]))] if best and rows else rows[-last:]
            values = [float(row[column]) for row in rows if row.get(column)]
            found.append(np.mean(values) if values else np.nan)
        return np.array(found) * (100 if in_percent(column) else 1)


def is_number(cell: str) -> bool:
    try:
        return not np.isnan(float(cell))
    except ValueError:
        return False


def in_percent(column: str) -> bool:
    return column == "mA" or column.endswith("accuracy")


def spread(numbers: np.ndarray) -> float:
    """Standard deviation over seeds, of the sample; of one run it is not known: nan."""
    return numbers.std(ddof=1) if len(numbers) > 1 else np.nan


def show(numbers: np.ndarray, column: str) -> str:
    """mean ± standard deviation, as it is printed."""
    if np.isnan(numbers).any():
        return ""
    digits = 1 if in_percent(column) or column == "vertices" else 3
    text = f"{numbers.mean():.{digits}f}"
    return text if len(numbers) == 1 else f"{text} ± {spread(numbers):.{digits}f}"


def read(folder: Path) -> tuple[dict, list[dict[str, str]]]:
    """A run's flags, its method among them, and its metrics. Raises UserError where there is none."""
    try:
        about = json.loads((folder / "args.json").read_text())
        own, name = about["method"], about.get("name", "")
        if name.lower() not in ("", own):  # another method's baseline, which runs for as many rounds as that did
            about |= {"method": f"{name} beside {own}", "flags": {**about["flags"], "rounds": None}}
        return {"method": about["method"], **about["flags"]}, run.read_metrics(folder / "metrics.csv")
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise UserError(
            f"{folder} is not the folder of a run ({e}): give folders with args.json and metrics.csv"
        ) from e


def below(folder: Path) -> list[Path]:
    """The folders of runs in this one, itself included, in the order of their names."""
    return sorted(file.parent for file in folder.rglob("metrics.csv"))


def rows_of(folder: Path) -> dict[str, Runs]:
    """A table's folder: a row for each of its folders, in the order of paper.csv, then of the alphabet."""
    names = sorted({of_seed.parent.name for of_seed in below(folder)})
    of_paper = [name for name in paper(folder) if name in names]
    names = of_paper + [name for name in names if name not in of_paper]
    return {name: collect(below(folder / name)) for name in names}


def collect(folders: list[Path]) -> Runs:
    found = sorted((read(folder) for folder in folders), key=lambda one: one[0]["seed"])
    return Runs([metrics for _, metrics in found], [about["seed"] for about, _ in found])


def paper(folder: Path) -> dict[str, dict[str, str]]:
    """paper.csv: row -> column -> the paper's figure as it stands there, 42.0 ± 1.0."""
    file = folder / "paper.csv"
    return {row.pop("row"): row for row in csv.DictReader(file.open())} if file.exists() else {}


def verdict(ours: np.ndarray, theirs: str, base: np.ndarray | None, their_base: str, base_name: str) -> str:
    """What the module's docstring says, of one row; `base` is our row of that name, `their_base` the paper's."""
    words = []
    if theirs:
        value, _, std = theirs.partition("±")
        off = ours.mean() - float(value)
        words.append("within" if abs(off) <= float(std or 0) else "above" if off > 0 else "below")
    if base is not None:
        gain = ours.mean() - base.mean()
        if len(ours) == len(base) == 1:
            words.append(f"{gain:+.1f} to {base_name}, one seed")
        elif abs(gain) <= np.nanmax([spread(ours), spread(base), 0]):
            words.append(f"level with {base_name}")
        elif theirs and their_base:
            same = gain * (float(theirs.partition("±")[0]) - float(their_base.partition("±")[0])) > 0
            words.append(f"{'as' if same else 'not as'} in the paper, {'above' if gain > 0 else 'below'} {base_name}")
        else:
            words.append(f"{'above' if gain > 0 else 'below'} {base_name}")
    return "; ".join(words)


def markdown(folder: Path, columns: list[str], against: str = "", **which) -> list[str]:
    """The lines of a table that stands in a page; `which` as Runs.numbers() takes it.

    Raises UserError where `folder` has no runs, or no row `against`.
    """
    found, theirs = rows_of(folder), paper(folder)
    if not found or (against and against not in found):
        raise UserError(f"{folder} has no runs{f' of {against}' if against else ''}")
    of_paper = [c for c in columns if any(row.get(c) for row in theirs.values())]
    has_verdict = bool(of_paper or against)
    header = ["", "runs", *(MEASURES.get(c, c) for c in columns), *(f"paper's {MEASURES.get(c, c)}" for c in of_paper)]
    lines = [header + ["verdict"] * has_verdict, ["---"] * (len(header) + has_verdict)]
    for name in [*found, *(name for name in theirs if name not in found)]:
        paper_cells = [theirs.get(name, {}).get(c) or "" for c in of_paper]
        if name not in found:
            lines.append([name, "", *[""] * len(columns), *paper_cells, *["not run"] * has_verdict])
            continue
        numbers = {c: found[name].numbers(c, **which) for c in columns}
        line = [name, found[name].which, *(show(numbers[c], c) for c in columns), *paper_cells]
        if has_verdict:
            c = columns[-1]
            base = found[against].numbers(c, **which) if against and name != against else None
            line.append(
                verdict(numbers[c], theirs.get(name, {}).get(c, ""), base, theirs.get(against, {}).get(c, ""), against)
            )
        lines.append(line)
    return [f"| {' | '.join(line)} |" for line in lines]


def rebuild(page: Path, draw: bool = True) -> str:
    """The page's text with the tables that it marks rebuilt; with `draw`, its pictures are drawn again, too.

    Raises UserError where a mark cannot be read.
    """
    lines, built = iter(page.read_text().splitlines()), []
    for line in lines:
        built.append(line)
        mark = re.fullmatch(r"<!-- (table|curves|hull) (\S+)(.*) -->", line)
        if not mark:
            continue
        kind, folder, words = mark[1], page.parent / mark[2], mark[3].split()
        columns = [word for word in words if "=" not in word]
        if kind == "table":
            options = dict(word.split("=") for word in words if "=" in word)
            try:
                which = {name: int(options.pop(name)) for name in ("last", "until") if name in options}
                built += markdown(folder, columns, **options, **which)
            except (TypeError, ValueError) as e:
                raise UserError(f"{page}: {line} cannot be read ({e}); see python -m common.report --help") from e
            while next(lines, ""):  # the old table ends with an empty line
                pass
            built.append("")
        else:
            built.append(next(lines))
            if draw:
                draw_again(kind, folder, columns, page.parent / built[-1].split("(")[-1].removesuffix(")"))
    return "\n".join(built) + "\n"


def draw_again(kind: str, folder: Path, columns: list[str], picture: Path) -> None:
    """The picture that a mark of this kind stands for, from the runs in `folder`."""
    if kind == "curves":
        plots.bands(picture, {name: of_row.metrics for name, of_row in rows_of(folder).items()}, titles(columns))
    else:
        points = np.loadtxt(folder / "points.csv", delimiter=",", skiprows=1)
        about, rows = read(folder)
        plots.hull_animation(picture, torch.from_numpy(points), rows, about["hull_dim"])


def titles(columns: list[str]) -> dict[str, str]:
    return {column: f"{MEASURES.get(column, column)}{' accuracy' * column.endswith('accuracy')}" for column in columns}


def compare(folders: list[Path]) -> dict[str, Runs]:
    """Runs -> those that differ in nothing but the seed, named by the flags in which they differ from the others."""
    groups: dict[str, list[Path]] = {}
    about = {}
    for folder in dict.fromkeys(folder.resolve() for folder in folders):
        all_flags = {flag: value for flag, value in read(folder)[0].items() if flag not in NOT_COMPARED}
        key = json.dumps(all_flags, sort_keys=True)
        groups.setdefault(key, []).append(folder)
        about[key] = all_flags
    names = {}
    for key, mine in about.items():
        others = [other for other in about.values() if other["method"] == mine["method"]]
        differ = [f for f in mine if f != "method" and any(other.get(f, mine[f]) != mine[f] for other in others)]
        name = " ".join([mine["method"], *(f"--{flag.replace('_', '-')} {mine[flag]}" for flag in differ)])
        names[key] = name if name not in names.values() else f"{name} ({groups[key][0].name})"
    return {names[key]: collect(of_key) for key, of_key in groups.items()}


def main(argv: list[str] | None = None) -> None:
    parser = flags.Parser(
        prog="python -m common.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", nargs="+", type=Path, help="folders of runs, or the folder of the pages")
    parser.add_argument("--columns", nargs="+", help="of metrics.csv (default: the measures that the runs have)")
    parser.add_argument("--last", type=flags.at_least(1), default=5, help="evaluations over which the table averages")
    parser.add_argument("--out", type=Path, help="the picture (default: report.png, or the next number that is free)")
    args = parser.parse_args(argv)
    if len(args.run) == 1 and (args.run[0] / "README.md").exists():
        pages = [*sorted(args.run[0].rglob("*.md")), args.run[0].resolve().parent / "README.md"]
        for page in [page for page in pages if page.exists() and "<!-- table " in page.read_text()]:
            page.write_text(rebuild(page))
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
    runs = compare([run_folder for folder in args.run for run_folder in below(folder)])
    has = {
        column
        for of_row in runs.values()
        for rows in of_row.metrics
        for row in rows
        for column in row
        if is_number(row[column])
    }
    columns = args.columns or [column for column in MEASURES if column in has]
    if not has:
        raise UserError(f"{args.run[0]} has no round yet: wait for the first")
    if set(columns) - has:
        raise UserError(f"--columns {min(set(columns) - has)}: the runs have {', '.join(sorted(has))}")
    cells = [[name, of.which, *(show(of.numbers(c, args.last), c) for c in columns)] for name, of in runs.items()]
    longest = max(len(rows) for of in runs.values() for rows in of.metrics)
    title = f"mean of the last {min(args.last, longest)} evaluations, over seeds; accuracies in percent"
    run.table(title, ["", "runs", *columns], cells)
    plots.bands(picture, {name: of.metrics for name, of in runs.items()}, titles(columns))
    print(f"curves are in {picture}")


if __name__ == "__main__":
    sys.argv[0] = "report.py"
    run.launch(main)
