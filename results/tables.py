"""The recorded runs, the lines of comparisons.csv, and their numbers.

A CSV of runs has a line per round, with some columns of metrics.csv. A run's first line also says
which experiment and seed it is, which code made it, and with which version of torch. Here a run is
the list of its lines, each a dict of texts. Its *series* of a column is a dict: round -> number.
A *measure* is a function that says of rounds [n] the mean of which of them counts, as indices.
"""

import csv
import fnmatch
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from scipy import stats

from common.runner.measures import in_percent

RESULTS = Path(__file__).parent
# These compare updates, so that before round 1 all participating clients train
WITH_A_PASS = {"hull", "minimax", "maxsim", "interior"}


def read_csv(file):
    lines = file.read_text(encoding="utf-8").splitlines()
    return list(csv.DictReader(lines, restval=""))


def read(*files):
    """The runs of these CSVs: experiment -> seed -> run."""
    runs = {}
    for file in files:
        for line in read_csv(file):
            if line["experiment"]:
                run = runs.setdefault(line["experiment"], {}).setdefault(int(line["seed"]), [])
            run.append(line)
    return runs


def csv_of(experiment):
    """The CSV of an experiment, which the first word of its name names."""
    return RESULTS / f"{experiment.split('/')[0]}.csv"


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


def samples(runs, run):
    """round -> how many samples a run has trained on until then, in the rounds that say it.

    The pass before round 1 is included. All 40 clients train in it, so it counts as four rounds of
    the experiment "random" in the same folder, in which ten of them are drawn.
    """
    columns = ["round", "clients", "selected_size"]
    found = [[float(line[c]) for c in columns] for line in run if line.get("selected_size")]
    rounds, clients, sizes = np.array(found).reshape(-1, 3).T
    trained = (clients * sizes * np.diff(rounds, prepend=0)).cumsum()
    folder, _, selection = run[0]["experiment"].rpartition("/")
    if selection in WITH_A_PASS:
        of_random = samples(runs, runs[f"{folder}/random"][int(run[0]["seed"])])
        trained += 4 * max(of_random.values()) / max(of_random)
    return dict(zip(rounds, trained, strict=True))


def experiments(runs, names):
    """The experiments of a side, each seed -> run. If it has several words, their seeds together.

    names  one name; or one with a *, which stands for several; or several words
    """
    words = [[runs[name] for name in fnmatch.filter(runs, word)] for word in names.split()]
    return [{seed: run for of in side for seed, run in of.items()} for side in zip(*words)]


class Comparison(SimpleNamespace):
    """A line of comparisons.csv: a method and a baseline, run by run with the same seeds.

    page, block       the table
    family            whose p are corrected for their number, or ""
    label             of a row; in a picture "METHOD, not BASELINE: WHAT" or, as README has it,
                      "METHOD, over BASELINE (WHAT)"
    method, baseline  experiments, see experiments(); of several with a * the mean counts
    column            of the runs, see series(); or two, the method's and the baseline's
    seeds             "3-7", or "" for all that both have
    measure           "" for the last five evaluations, "last" for the last one, "all" for all of
                      them, "ratio" for the ratio of the means over all of them; "best" compares the
                      method's best one with the baseline's last five; "samples" compares
                      the baseline's last five with those of the method around the round in which
                      it has trained on as many samples as the baseline at its end; a number: the
                      five evaluations around this round
    paper, paper_baseline  what the paper reports, as "42.9 ± 1.1"; the baseline's is the level for
                      reach(), also in a row of which the paper reports nothing
    picture           the picture in results/ that shows it, or ""

    It finds self.values [method or baseline, seed, experiment, round], and other numbers. With the
    measures "best" and "samples" all rounds of the method have the number that counts.
    """

    def __init__(self, runs, **line):
        super().__init__(**line)
        sides = [experiments(runs, names) for names in (self.method, self.baseline)]
        low, high = map(int, (self.seeds or "0-999").split("-"))
        assert all(sides), f"comparisons.csv: there are no runs for {self.label}"
        self.common = sorted(set(range(low, high + 1)).intersection(*sides[0], *sides[1]))
        papers = [text or "nan" for text in (self.paper, self.paper_baseline)]
        papers = [f"{text} ± 0".split("±")[:2] for text in papers]  # not given, a deviation is 0
        self.paper_means, self.paper_deviations = np.array(papers, float).T
        self.effect = self.paper_means[0] - self.paper_means[1]
        # p is corrected, if the comparison belongs to a family
        self.p, self.is_ratio = None, self.measure == "ratio"
        columns = self.column.split()
        found = [
            [[series(of_seeds[seed], column) for of_seeds in side] for seed in self.common]
            for side, column in zip(sides, [columns[0], columns[-1]], strict=True)
        ]
        # One side may end earlier, so a seed's runs count until both have ended. In UEFL one seed's
        # runs may end before those of another, and then the last rounds of each seed count
        lengths = [min(len(run) for side in found for run in side[i]) for i in range(len(found[0]))]
        n = min(lengths)
        self.rounds = np.array([*found[0][lengths.index(n)][0]][:n])
        self.values = np.array([
            [[[*run.values()][:length][-n:] for run in of] for of, length in zip(side, lengths)]
            for side in found
        ])  # fmt: skip
        if self.measure == "best":
            self.values[0] = self.values[0].max(-1, keepdims=True)
        if self.measure == "samples":
            for seed, of_seed in zip(self.common, self.values[0], strict=True):
                trained, others = (samples(runs, side[0][seed]) for side in sides)
                t = next(t for t, so_far in trained.items() if so_far >= max(others.values()))
                of_seed[:] = of_seed[:, around(t)(self.rounds)].mean(-1, keepdims=True)
        has_level = self.paper_baseline and len(self.rounds) > 1
        self.reached = self.reach(runs, sides) if has_level else []

    def over_experiments(self, values):
        """The mean over the experiments: [2, seeds, experiments, ...] becomes [2, seeds, ...]."""
        return stats.gmean(values, axis=2) if self.is_ratio else values.mean(2)

    def sides(self):
        """The measure of the method's and the baseline's runs [2, seeds]."""
        count = {"last": 1, "all": 10**9, "ratio": 10**9}.get(self.measure, 5)
        at = int(self.measure) if self.measure.isdigit() else 10**9
        return self.over_experiments(self.values[..., around(at, count)(self.rounds)].mean(-1))

    def difference(self):
        """Method minus baseline, seed by seed [seeds]; for a ratio, the logarithm of it."""
        method, baseline = self.sides()
        return np.log(method / baseline) if self.is_ratio else method - baseline

    def reach(self, runs, sides):
        """Rounds, and samples, until a run is as accurate as the paper's baseline at its end.

        It is there at the first evaluation whose mean with the one before it is. Each is
        [2, seeds], with nan for a run that is never there. Without samples, if nothing says them.
        """
        better = -1 if self.column == "mE" else 1  # uncertainty falls
        curves = self.over_experiments(self.values) * better
        there = (curves[..., 1:] + curves[..., :-1]) / 2 >= self.paper_means[1] * better
        rounds = np.where(there.any(-1), self.rounds[1:][there.argmax(-1)], np.nan)
        trained = [
            [samples(runs, side[0][seed]).get(t, np.nan) for seed, t in zip(self.common, of_side)]
            for side, of_side in zip(sides, rounds, strict=True)
        ]
        return [rounds, np.array(trained)][: 1 + np.isfinite(trained).any()]

    def welch(self, difference):
        """p of Welch's test: these differences [n] and the paper's have the same mean.

        Three seeds stand behind each of the paper's numbers.
        """
        n = len(difference)
        variances = np.array([difference.var(ddof=1) / n, *self.paper_deviations**2 / 3])
        total = variances.sum()
        freedom = total**2 / (variances**2 / [n - 1, 2, 2]).sum()
        return 2 * stats.t.sf(abs(difference.mean() - self.effect) / total**0.5, freedom)


def recorded_runs():
    """All runs of all CSVs: experiment -> seed -> run."""
    return read(*{csv_of(row["experiment"]) for row in read_csv(RESULTS / "experiments.csv")})
