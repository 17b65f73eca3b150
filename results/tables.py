"""The recorded runs, the lines of comparisons.csv, and their numbers.

A CSV of runs has a line per round, with some columns of metrics.csv. A run's first line also says
which experiment and seed it is, which code made it, and with which version of torch. Here a run is
the list of its lines, each a dict of texts. Its *series* of a column is a dict: round -> number.
A *measure* is a function that says of rounds [n] the mean of which of them counts, as indices.
"""

import csv
import fnmatch
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from scipy.stats import gmean
from scipy.stats import t as student

from common import UserError
from common.runner.measures import in_percent, measure_of

RESULTS = Path(__file__).parent


def read_csv(file):
    return list(csv.DictReader(file.read_text(encoding="utf-8").splitlines()))


def read(file):
    """The runs of a CSV: experiment -> seed -> run."""
    runs = {}
    for line in read_csv(file):
        if line["experiment"]:
            run = []
            runs.setdefault(line["experiment"], {})[int(line["seed"])] = run
        run.append(line)
    return runs


def series(run, column):
    """A column of a run over the rounds, accuracies in percent.

    accuracies[3:9]           the mean of these numbers of a list
    ood_accuracy@id_accuracy  only in the round in which the other column is largest
    """
    column, _, other = column.partition("@")
    name, *part = re.split(r"[\[:\]]", column)
    first, last = map(int, part[:2] or (0, 999))
    found = {}
    for line in run:
        numbers = np.array(line.get(name, "").split(), float)[first:last]
        if len(numbers):
            found[int(line["round"])] = numbers.mean() * (100 if in_percent(name) else 1)
    if other:
        others = series(run, other)
        best = max(others, key=others.get)
        found = {best: found[best]}
    return found


def around(level, count=5):
    """The measure that is the mean of the `count` evaluations that are nearest to a round."""
    return lambda rounds: abs(rounds - level).argsort(kind="stable")[:count]


def rounds_to(target, rounds, curve):
    """The round in which a curve [rounds] reaches the target, or inf: McMahan et al., section 3.

    It is the best value so far that counts, on a line from evaluation to evaluation.
    """
    best = np.maximum.accumulate(curve)
    return np.interp(target - 1e-9, best, rounds, right=np.inf)  # the first round of equal ones


def spread(text):
    """Mean and standard deviation of "42.9 ± 1.1"; a deviation that is not given is 0."""
    mean, _, deviation = text.partition("±")
    return float(mean or "nan"), float(deviation or 0)


@dataclass
class Comparison:
    """A line of comparisons.csv: a method and a baseline, run by run with the same seeds.

    block             the table; that of runs at the papers' own size may wait for its runs
    family            whose p are corrected for their number, or ""
    label             "METHOD, not BASELINE: what is compared"
    method, baseline  experiments; a * stands for several, of which the mean counts
    seeds             "3-7", or "" for all that both have
    measure           "" for the last five evaluations, "last" for the last one, "all" for all of
                      them, "ratio" for the ratio of the means over all of them, "to 40" for that of
                      the rounds to 40 percent
    paper, paper_baseline  what the paper reports, as "42.9 ± 1.1"
    """

    page: str
    block: str
    family: str
    label: str
    method: str
    baseline: str
    column: str
    seeds: str
    measure: str
    paper: str
    paper_baseline: str

    def load(self, runs):
        """Finds self.values [method or baseline, seed, experiment, round], and other numbers."""
        patterns = (self.method, self.baseline)
        sides = [[runs[name] for name in fnmatch.filter(runs, pattern)] for pattern in patterns]
        low, high = map(int, (self.seeds or "0-999").split("-"))
        self.common = []
        if all(sides):
            self.common = sorted(set(range(low, high + 1)).intersection(*sides[0], *sides[1]))
        papers = [spread(self.paper), spread(self.paper_baseline)]
        self.paper_means, self.paper_deviations = np.array(papers).T
        self.effect = self.paper_means[0] - self.paper_means[1]
        self.p = None  # corrected, if the comparison belongs to a family
        self.is_ratio = self.measure not in ("", "last", "all")
        self.sign = measure_of(self.column).better
        if not self.common:
            assert self.block == "full", f"comparisons.csv: there are no runs for {self.label}"
            return
        found = [
            [[series(of_seeds[seed], self.column) for of_seeds in side] for seed in self.common]
            for side in sides
        ]
        self.rounds = np.array([*found[0][0][0]])  # all runs of a comparison have the same rounds
        self.values = np.array([[[[*run.values()] for run in of] for of in side] for side in found])

    def names(self):
        """The label's parts: method, baseline, and what is compared."""
        names, _, what = self.label.partition(": ")
        return *names.split(", not "), what

    def over_experiments(self, values):
        """The mean over the experiments: [2, seeds, experiments, ...] becomes [2, seeds, ...]."""
        return gmean(values, axis=2) if self.measure == "ratio" else values.mean(2)

    def sides(self, measure=None):
        """A measure of the method's and the baseline's runs [2, seeds]."""
        if self.measure.startswith("to "):
            target = float(self.measure[3:])
            reached = partial(rounds_to, target, self.rounds)
            return np.apply_along_axis(reached, -1, self.over_experiments(self.values))
        measure = measure or around(10**9, {"": 5, "last": 1}.get(self.measure, 10**9))
        return self.over_experiments(self.values[..., measure(self.rounds)].mean(-1))

    def difference(self, measure=None):
        """Method minus baseline, seed by seed [seeds]; for a ratio, the logarithm of it."""
        method, baseline = self.sides(measure)
        return np.log(method / baseline) if self.is_ratio else method - baseline

    def level(self):
        """The first round around which the baseline's mean reaches what the paper's baseline has.

        None if it never does, or if it is then beyond by 2 points, or 0.02 nats.
        """
        for t in self.rounds:
            beyond = self.sign * (self.sides(around(t))[1].mean() - self.paper_means[1])
            if beyond >= 0:
                return t if beyond < (2 if in_percent(self.column) else 0.02) else None
        return None

    def welch(self, difference):
        """p of Welch's test: these differences [n] and the paper's have the same mean.

        Three seeds stand behind each of the paper's numbers.
        """
        n = len(difference)
        variances = np.array([difference.var(ddof=1) / n, *self.paper_deviations**2 / 3])
        total = variances.sum()
        freedom = total**2 / (variances**2 / [n - 1, 2, 2]).sum()
        return 2 * student.sf(abs(difference.mean() - self.effect) / total**0.5, freedom)


def comparisons():
    """The lines of comparisons.csv: (page, block) -> lines."""
    runs, blocks = {}, {}
    for name in ("wu", "mcmahan", "fediir", "uefl", "examples", "silos", "oracle"):
        runs |= read(RESULTS / f"{name}.csv")
    for line in read_csv(RESULTS / "comparisons.csv"):
        comparison = Comparison(**line)
        comparison.load(runs)
        blocks.setdefault((comparison.page, comparison.block), []).append(comparison)
    return blocks


def build(file, blocks):
    """Writes tables, name -> table, into a page, each after its line <!-- NAME -->."""
    text = file.read_text()
    for name, (header, *lines) in blocks.items():
        mark = f"<!-- {name} -->\n"
        if mark not in text:
            raise UserError(f"{file} has no line {mark.strip()} for its table")
        table = ""
        for cells in (header, ["---"] * len(header), *lines):
            table += f"| {' | '.join(cells)} |\n"
        text = re.sub(rf"{mark}(\|.*\n)*", mark + table, text)
    file.write_text(text)
