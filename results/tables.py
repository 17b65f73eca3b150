"""The recorded runs, the lines of comparisons.csv, and their numbers.

A CSV of runs has a line per round, with some columns of metrics.csv. A run's first line also says
which experiment and seed it is, which code made it, and with which version of torch.
"""

import csv
import re
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
from scipy.stats import t as student

from common import UserError
from common.compare import interval

RESULTS = Path(__file__).parent
IN_PERCENT = ("accuracies", "rare_", "turned_", "id_", "ood_", "neutral_", "mA")
Series = dict[int, float]  # round -> value of a column, for the rounds that have one


def read(file: Path) -> dict[str, dict[int, list[dict]]]:
    """The runs of a CSV: experiment -> seed -> rows, with texts as cells."""
    runs = {}
    with file.open(encoding="utf-8") as f:
        for row in csv.DictReader(f):
            if row["experiment"]:
                rows = runs.setdefault(row["experiment"], {}).setdefault(int(row["seed"]), [])
            rows.append(row)
    return runs


def series(rows: list[dict], column: str) -> Series:
    """A column of a run over the rounds, accuracies in percent.

    accuracies[3:9]           the mean of these numbers of a list
    ood_accuracy@id_accuracy  only in the round in which the other column is largest
    """
    name, _, best = column.partition("@")
    name, *part = re.split(r"[\[:\]]", name)
    first, last = map(int, part[:2] or (0, 999))
    scale = 100 if column.startswith(IN_PERCENT) else 1
    cells = {int(row["round"]): np.array(row.get(name, "").split(), float) for row in rows}
    found = {t: scale * cell[first:last].mean() for t, cell in cells.items() if len(cell)}
    if best:
        others = series(rows, best)
        chosen = max(others, key=others.get)
        found = {chosen: found[chosen]}
    return found


def whole_run(values: Series) -> float:
    return float(np.mean(list(values.values())))


def last_five(values: Series) -> float:
    """The first measure: the mean of the last five evaluations."""
    return float(np.mean(list(values.values())[-5:]))


def first_half(values: Series) -> float:
    return float(np.mean(list(values.values())[: len(values) // 2]))


def around(level: int) -> Callable[[Series], float]:
    """The second measure: the mean of the five evaluations that are nearest to a round."""

    def measure(values: Series) -> float:
        nearest = sorted(values, key=lambda t: abs(t - level))[:5]
        return float(np.mean([values[t] for t in nearest]))

    return measure


def spread(text: str) -> tuple[float, float]:
    """Mean and standard deviation of "42.9 ± 1.1"; a deviation that is not given is 0."""
    mean, _, deviation = text.partition("±")
    return float(mean), float(deviation or 0)


@dataclass
class Comparison:
    """A line of comparisons.csv: a method and a baseline, run by run with the same seeds.

    method, baseline  experiments; a * stands for several, of which the mean counts
    seeds             "3-7", or "" for all that both have
    measure           "" for the last five evaluations, "all" for all of them, "ratio" for the ratio
                      of the means over all of them
    paper, paper_baseline  what the paper reports, as "42.9 ± 1.1"
    """

    page: str
    block: str
    label: str
    method: str
    baseline: str
    column: str
    seeds: str
    measure: str
    paper: str
    paper_baseline: str

    def load(self, runs: dict) -> None:
        """Finds the runs: self.found[side][experiment] is seed -> series."""
        low, _, high = (self.seeds or "0-999999").partition("-")
        sides = [
            [of_name for name, of_name in sorted(runs.items()) if fnmatchcase(name, pattern)]
            for pattern in (self.method, self.baseline)
        ]
        common = set(range(int(low), int(high) + 1)) if all(sides) else set()
        self.common = sorted(common.intersection(*sides[0], *sides[1]))
        self.found = [
            [{s: series(of_name[s], self.column) for s in self.common} for of_name in side]
            for side in sides
        ]

    def sides(self, measure: Callable | None = None) -> np.ndarray:
        """A measure, a function of a series, of the method's and the baseline's runs [2, seeds]."""
        measure = measure or (whole_run if self.measure else last_five)
        values = np.zeros((2, len(self.common)))
        for i, side in enumerate(self.found):
            for j, seed in enumerate(self.common):
                found = [measure(of_name[seed]) for of_name in side]
                values[i, j] = np.mean(np.log(found) if self.measure == "ratio" else found)
        return values

    def difference(self, measure: Callable | None = None) -> np.ndarray:
        """Method minus baseline, seed by seed [seeds]; of logarithms for a ratio."""
        method, baseline = self.sides(measure)
        return method - baseline

    def curves(self) -> tuple[list[int], np.ndarray]:
        """The rounds that all runs have, and both sides over them [rounds, 2, seeds]."""
        every = [values for side in self.found for of_name in side for values in of_name.values()]
        rounds = sorted(set.intersection(*map(set, every)))
        values = np.array([self.sides(lambda values, t=t: values[t]) for t in rounds])
        return rounds, np.exp(values) if self.measure == "ratio" else values

    @property
    def effect(self) -> float:
        """The paper's difference."""
        return spread(self.paper)[0] - spread(self.paper_baseline)[0]

    def level(self) -> int | None:
        """The first round around which the baseline's mean reaches what the paper's baseline has.

        None if it never does, or if it is then beyond by more than 2 points, or 0.02 nats.
        """
        rounds, _ = self.curves()
        if not self.paper or not rounds:
            return None
        baseline = np.array([self.sides(around(t))[1].mean() for t in rounds])
        beyond = baseline - spread(self.paper_baseline)[0]
        if self.column == "mE":  # which falls
            beyond = -100 * beyond
        reached = np.flatnonzero(beyond >= 0)
        return rounds[reached[0]] if len(reached) and beyond[reached[0]] < 2 else None

    def welch(self, difference: np.ndarray, count: int = 3) -> float:
        """p of Welch's test: these differences [n] and the paper's have the same mean.

        count  seeds behind each of the paper's numbers
        """
        parts = [(difference.var(ddof=1) / len(difference), len(difference) - 1)]
        for text in (self.paper, self.paper_baseline):
            parts.append((spread(text)[1] ** 2 / count, count - 1))
        total = sum(variance for variance, _ in parts)
        freedom = total**2 / sum(variance**2 / more for variance, more in parts)
        distance = abs(difference.mean() - self.effect)
        return float(2 * student.sf(distance / total**0.5, freedom))


def comparisons(page: str, runs: dict) -> dict[str, list[Comparison]]:
    """The lines of comparisons.csv for a page, by the page's blocks."""
    blocks = {}
    with (RESULTS / "comparisons.csv").open(encoding="utf-8") as f:
        for line in csv.DictReader(f):
            if line["page"] == page:
                comparison = Comparison(**line)
                comparison.load(runs)
                blocks.setdefault(comparison.block, []).append(comparison)
    return blocks


def show(value: float, column: str, sign: str = "") -> str:
    return f"{value:{sign}.{1 if column.startswith(IN_PERCENT) else 3}f}"


def pm(values: np.ndarray, column: str) -> str:
    """mean ± sample standard deviation."""
    words = [show(values.mean(), column)] if len(values) else []
    if len(values) > 1:
        words.append(show(values.std(ddof=1), column))
    return " ± ".join(words)


def with_interval(difference: np.ndarray, column: str) -> str:
    """mean (low to high), which is the 95 % interval by Student's t."""
    if len(difference) < 2:
        return "".join(show(value, column, "+") for value in difference)
    return "{} ({} to {})".format(*(show(bound, column, "+") for bound in interval(difference)))


def build(file: Path, blocks: dict[str, list[list[str]]]) -> None:
    """Writes tables into a page, each after its line <!-- NAME -->."""
    text = file.read_text()
    for name, (header, *lines) in blocks.items():
        mark, table = f"<!-- {name} -->\n", ""
        if mark not in text:
            raise UserError(f"{file} has no line {mark.strip()} for its table")
        for cells in (header, ["---"] * len(header), *lines):
            table += f"| {' | '.join(cells)} |\n"
        text = re.sub(rf"{mark}(?:\|.*\n)*", lambda _, new=mark + table: new, text)
    file.write_text(text)
