"""The pages of results: their numbers and tables, and how finished runs come into the CSVs."""

import csv
import fnmatch
import importlib
import re
import sys
from argparse import Namespace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from helpers import METHODS, ROOT
from scipy.stats import ttest_1samp, ttest_ind_from_stats

from results import experiments, page, tables

EXPERIMENTS = tables.read_csv(ROOT / "results/experiments.csv")
COMPARISONS = tables.read_csv(ROOT / "results/comparisons.csv")
PAGES = [*METHODS, "fediir_limits", "what_fedavg_reaches"]
BUILT = [
    "README.md",
    "results/README.md",
    "results/also_run.md",
    *(f"docs/{name}.md" for name in PAGES),
]


# ------------------------------------------------------------------------------ the committed pages


@pytest.fixture(scope="module")
def rebuilt():
    """What would be written into each page: its text with one table after another rebuilt."""
    texts = {}

    def write(file, text):
        texts.setdefault(file.resolve(), set()).add(text)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "write_text", write)
        patch.setattr(page, "picture", lambda *args: None)
        patch.setattr(page, "curves", lambda *args: None)
        page.main()
    assert texts.keys() <= {ROOT / name for name in BUILT}
    return texts


@pytest.fixture(scope="module")
def runs():
    return tables.recorded_runs()


@pytest.mark.parametrize("name", BUILT)
def test_the_committed_pages_agree_with_the_csvs(rebuilt, name):
    says = f"{name} has no table of results, or needs python -m results"
    assert rebuilt.get(ROOT / name) == {(ROOT / name).read_text()}, says


def test_the_predictions_are_counted():
    """Semicolons separate them. The last line says how many held, failed, neither, and not ran."""
    *table, last = (ROOT / "results/predictions.md").read_text().split("| --- |\n")[1].splitlines()
    came_out, failed, neither, not_run = 0, 0, 0, 0
    for line in table:
        _, _, expected, outcome, _ = line.split("|")
        count = expected.count(";") + 1
        if outcome == " not run ":
            not_run += count
        elif in_git := re.match(r" (\d+) predictions, in git", expected):
            came_out, failed = came_out + int(in_git[1]), failed + int(outcome.split()[0])
            neither += outcome.count("one undecided")
        elif outcome.strip():  # else it is a date, or did not run yet
            assert outcome.count(";") + 1 == count, line
            came_out, failed = came_out + count, failed + outcome.count("**failed**")
            neither += outcome.count("**void**")
    held = came_out - failed - neither
    assert re.findall(r"\d+", last) == [str(n) for n in (held, failed, neither, not_run)], last


def by_hand(run, level):
    """The round and the samples in which a run reaches the level, all its samples, and its end."""
    found, values, at, so_far = [], [], 0, 0
    for line in run:
        t = int(line["round"])
        if line["selected_size"]:
            so_far += int(line["clients"]) * float(line["selected_size"]) * (t - at)
            at = t
        if line["ood_accuracy"]:
            values.append(100 * float(line["ood_accuracy"]))
            if not found and len(values) > 1 and sum(values[-2:]) / 2 >= level:
                found = [t, so_far]
    return found, so_far, np.mean(values[-5:])


@pytest.mark.parametrize("row", [row for row in COMPARISONS if row["label"].endswith("(CIFAR-10)")])
def test_the_main_claims_by_another_way(runs, row):
    """With plain loops. A pass of all 40 clients is like four rounds of ten random ones."""
    ours, theirs = runs[row["method"]], runs[row["baseline"]]
    level = float(row["paper_baseline"].split()[0])
    found = []
    for seed in {*ours} & {*theirs}:
        (t, trained), _, end = by_hand(ours[seed], level)
        (t_theirs, trained_theirs), _, end_theirs = by_hand(theirs[seed], level)
        if row["method"].endswith(("hull", "minimax")):
            random = runs["wu/full/random"][seed]
            trained += 4 * by_hand(random, level)[1] / int(random[-1]["round"])
        found.append([np.log(t / t_theirs), np.log(trained / trained_theirs), end - end_theirs])
    cells = []
    for of_seeds, form in zip(np.transpose(found), [".2f", ".2f", "+.1f"]):
        numbers = [of_seeds.mean(), *ttest_1samp(of_seeds, 0).confidence_interval()]
        mean, low, high = (format(x if "+" in form else np.exp(x), form) for x in numbers)
        cells.append(f"{mean} ({low} to {high})")
    lines = (ROOT / "README.md").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"| {row['label']} |"))
    assert line.split(" | ")[2:5] == cells


@pytest.mark.parametrize("row", EXPERIMENTS, ids=lambda row: row["experiment"])
def test_the_commands_of_the_experiments_are_understood(row, tmp_path, monkeypatch):
    """By their program's parser; those of a variation may have flags of its own."""
    program, *flags = row["command"].split()
    method = importlib.import_module(program.removesuffix(".py"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(method.compare, "run", lambda args, *rest, **more: args.seeds)
    for variation in row["variation"].split():
        assert len([*ROOT.glob(f"*/*/{variation}.diff")]) == 1
    if not row["variation"]:
        seeds = row["seeds"].split()
        assert method.main([*flags, "--seed", *seeds]) == [*map(int, seeds)]


# ------------------------------------------------------------------------------------------ numbers


def loaded(runs, **changes):
    """The comparison of the experiments a and b among these runs."""
    cells = dict.fromkeys(COMPARISONS[0], "")
    cells |= {"method": "a", "baseline": "b", "column": "id_accuracy", **changes}
    return tables.Comparison(runs, **cells)


def comparison(method, baseline, **changes):
    """The comparison of two experiments whose seeds have these lists of ID accuracies.

    OOD they are half as large.
    """
    runs = {}
    for name, of_seeds in {"a": method, "b": baseline}.items():
        for seed, values in enumerate(of_seeds):
            rows = [{"round": str(t), "id_accuracy": str(v), "ood_accuracy": str(v / 2)}
                    for t, v in enumerate(values, 1)]  # fmt: skip
            rows[0] |= {"experiment": name}
            runs.setdefault(name, {})[seed] = rows
    return loaded(runs, **changes)


def test_a_column_of_a_run():
    text = "round,id_accuracy,mE,accuracies\n1,0.1,3,0.1 0.2 0.6\n2,,,\n3,0.9,2,0 0 0.5"
    rows = [*csv.DictReader(text.split("\n"))]
    assert tables.series(rows, "id_accuracy") == {1: 10, 3: 90}
    assert tables.series(rows, "mE@id_accuracy") == {3: 2}
    assert tables.series(rows, "accuracies[1:3]") == pytest.approx({1: 40, 3: 25})


def test_the_measures_of_a_comparison():
    """By hand. The third seed has no partner, and the method's last evaluation none, either."""
    c = comparison(
        [[0.9, 0.1, 0.1, 0.1, 0.1, 0.6, 1], [0.5] * 7, [0.7] * 7], [[0.1] * 6, [0.2] * 6]
    )
    for measure, expected in {"": [10, 30], "1": [16, 30], "last": [50, 30]}.items():
        c.measure = measure
        assert c.difference() == pytest.approx(expected)


def test_two_columns_and_the_best_evaluation_of_a_single_seed():
    two = {"column": "id_accuracy ood_accuracy", "measure": "best"}
    c = comparison([[0.1, 0.6, 0.2]], [[0.2, 0.2, 0.8]], **two)
    assert c.sides() == pytest.approx(np.array([[60], [20]]))


def test_the_rounds_to_the_papers_accuracy():
    """By hand: a mean of two neighbours counts, a single high one does not, and one never comes."""
    c = comparison(
        [[0.1, 0.5, 0.2, 0.5, 0.4], [0.1] * 5],
        [[0.4, 0.4, 0.1, 0.1, 0.1], [0.1, 0.9, 0.9, 0.9, 0.9]],
        paper_baseline="40",
    )
    assert page.cells(c)["rounds, ratio"] == "2.50; never 1 and 0 of 2"
    assert page.to_level(np.array([[np.nan], [2]])) == "never 1 and 0 of 1"


def text_of(page):
    return " ".join((ROOT / page).read_text().split())


def curves_of(runs, name, seeds=range(1000), column="ood_accuracy"):
    """[seeds, rounds]"""
    chosen = [run for seed, run in runs[name].items() if seed in seeds]
    return np.array([[*tables.series(run, column).values()] for run in chosen])


def test_the_sentence_on_mcmahans_table_repeats_from_its_csv(runs):
    """The round in which the best value so far reaches 99 percent, on a line between two rounds."""
    found = []
    for run in runs["mcmahan/iid-5-10"].values():
        curve = tables.series(run, "ood_accuracy")
        best = np.maximum.accumulate([*curve.values()])
        found.append(np.interp(99 - 1e-9, best, [*curve]))
    logs = np.log(found)
    low, high = np.exp(ttest_1samp(logs, 0).confidence_interval())
    text = text_of("results/README.md")
    *others, last = (f"{t:.1f}" for t in found)
    assert f"it takes {', '.join(others)} and {last} rounds" in text
    assert f"{np.exp(logs.mean()):.1f} ({low:.1f} to {high:.1f}) as a geometric mean" in text


@pytest.mark.parametrize("line", tables.read_csv(ROOT / "tests/sentences.csv"))
def test_a_sentence_repeats_from_the_csvs(runs, line):
    """In prose only the mean has a plus. The level is that of random clients in Wu et al."""
    cells = page.cells(loaded(runs, paper_baseline="38.9", **line))
    d = re.sub(r"(?<=[( ])\+", "", cells["difference"])
    words = {"d": d, "up": d.lstrip("+"), "mean": d.split()[0], "m": cells["method"].split()[0]}
    words |= {"b": cells["baseline"].split()[0], "rounds": cells["rounds, ratio"]}
    words |= {"samples": cells["samples, ratio"], "by": words["up"].split()[0]}
    assert line["says"].format(**words) in text_of(line["page"])


def test_the_sentences_on_wu_et_als_figures_repeat_from_their_csv(runs):
    fast = (
        "{hull} with hull, {minimax} with minimax, {by-size-13} with 13 clients by size, {full} "
        "with all 40, {random-as-many} with as many random as corners, {random} with ten, "
        "{interior} with Interior, {power-of-choice} with Power-of-Choice and {maxsim} with MaxSim"
    )
    steady = (
        "{full:.1f} points with all 40, {minimax:.1f} with minimax, {hull:.1f} with the hull, "
        "{by-size-13:.1f} by size, {random:.1f} with ten random, and {power-of-choice:.1f} with"
    )
    first, jumps = {}, {}
    for name in re.findall(r"{(.*?)}", fast):
        curves = curves_of(runs, f"wu/cifar10/{name}", (3, 4, 5))
        first[name] = np.argmax(curves.mean(0) >= 30) + 1
        jumps[name] = abs(np.diff(curves[:, 20:])).mean()
    text = text_of("results/README.md")
    assert fast.format(**first) in text and steady.format(**jumps) in text


@pytest.mark.parametrize(
    ("data", "seeds", "says"),
    [
        ("cifar10", range(300, 308), "OOD jumps by {} points (equal weights: {}; by size: {})"),
        ("mnist", range(8), "OOD jumps by {} ({}; {})"),
    ],
)
def test_the_sentence_on_the_curves_of_weights_repeats_from_their_csv(runs, data, seeds, says):
    """In the rounds 21 to 50, in which entropy is the highest in all, or in so many."""
    names = [f"weights/{data}/{by}" for by in ("entropy", "equal", "size")]
    curves = [curves_of(runs, name, seeds)[:, 20:] for name in names]
    jumps = [f"{np.abs(np.diff(curve)).mean():.1f}" for curve in curves]
    text = text_of("docs/entropy_weighting.md")
    assert says.format(*jumps) in text
    highest = (np.argmax([curve.mean(0) for curve in curves], 0) == 0).sum()
    assert highest == 30 or f"highest in {highest} of these 30 rounds" in text


def test_the_sentences_on_what_fedavg_reaches_repeat_from_their_csv(runs):
    text = text_of("docs/what_fedavg_reaches.md")

    def curves(name, **column):
        return curves_of(runs, f"fedavg/{name}", **column)

    at_50 = curves("cifar10/dirichlet-0.5")
    assert f"jumps by {abs(np.diff(at_50[:, 20:50])).mean():.1f} points" in text
    correct = curves("causes/correct")
    assert "seed 811 fell from {:.1f} to {:.1f} in round 37".format(*correct[1, 35:]) in text
    costs = [
        curves(f"{data}/iid", column=column)[:, 49] * unit
        for column, unit in (("samples", 1e-6), ("megabytes", 1))
        for data in ("mnist", "cifar10")
    ]
    says = (
        "train on {:.2f} million samples (CIFAR-10: {:.2f} million) and send {:.0f} MB ({:.0f} MB)"
    )
    assert all(says.format(*of_seed) in text for of_seed in zip(*costs))
    equal = at_50[:, 47:52].mean() - curves("causes/all-clients")[:, 2:7].mean()
    assert f"they have {equal:.1f} points less" in text
    assert f"; {-equal:.1f} |" in text_of("results/predictions.md")


def test_equally_many_samples():
    """By hand: ten random clients train on 10 samples a round, so all 40 on 40 before round 1.

    The hull trains on 20 a round, which every second line says, so it has the baseline's 100 after
    round 4, and rounds 2 to 6 count. Uncertainty falls, so both are below 9 from round 1 on.
    """
    runs = {}
    for name, size in {"x/hull": "10", "x/random": "5"}.items():
        lines = [{"round": str(t), "mE": str(t)} for t in range(1, 11)]
        for line in lines[1::2]:
            line |= {"clients": "2", "selected_size": size}
        lines[0] |= {"experiment": name, "seed": "7"}
        runs[name] = {7: lines}
    hull = {"method": "x/hull", "baseline": "x/random", "column": "mE", "paper_baseline": "9"}
    c = loaded(runs, measure="samples", **hull)
    assert c.sides().tolist() == [[4], [8]]
    assert np.array(loaded(runs, **hull).reached).tolist() == [[[2], [2]], [[80], [20]]]


def test_every_recorded_experiment_is_shown(runs):
    """In a row of comparisons.csv, or else by its name in a sentence."""
    names = [row[side] for row in COMPARISONS for side in ("method", "baseline")]
    patterns = {pattern for name in names for pattern in name.split()}
    text = (ROOT / "results/also_run.md").read_text()
    for name in runs:
        shown = any(fnmatch.fnmatch(name, pattern) for pattern in patterns)
        assert shown or f"`{name}`" in text, f"{name} was run: show it, or say so in also_run.md"


def test_holms_correction():
    """By hand: 3 times the smallest p, twice the next, and never less than the one before."""
    rows = [Namespace(difference=partial(np.array, d)) for d in ([3, 4, 5], [1, 2, 4], [2, 2, 4])]
    plain = [ttest_1samp(row.difference(), 0).pvalue for row in rows]
    page.correct(rows)
    one, two, three = sorted(plain)
    expected = np.maximum.accumulate([3 * one, 2 * two, three])
    assert [rows[i].p for i in np.argsort(plain)] == pytest.approx(expected)


def test_the_papers_effect_is_tested_with_the_papers_spread():
    d = np.array([1.0, 4.0, 2.0, 2.5, 0.3])
    by_scipy = {
        "9": ttest_1samp(d, 4),
        "9 ± 1.5": ttest_ind_from_stats(4, 1.5, 3, d.mean(), d.std(ddof=1), 5, equal_var=False),
    }
    for paper, expected in by_scipy.items():
        c = comparison([[1]], [[1]], paper=paper, paper_baseline="5")
        assert c.welch(d) == pytest.approx(expected.pvalue)


# -------------------------------------------------------------------------------------- experiments


HEADER = "experiment,seed,code,torch,round,mA,clients_so_far\n"


@pytest.fixture
def book(tmp_path, monkeypatch):
    """A CSV without lines for two planned experiments."""
    planned = {"seeds": "0", "variation": "", "command": "fedavg.py --no-such-flag"}
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    monkeypatch.setattr(experiments, "EXPERIMENTS", {"x/good": planned, "x/bad": planned})
    (tmp_path / "x.csv").write_text(HEADER)
    return tmp_path / "x.csv"


def finished(folder, seed):
    """A folder as an experiment leaves it, with a baseline."""
    for out in (folder / "x/good" / seed, folder / "x/good" / f"{seed}-random"):
        out.mkdir(parents=True)
        (out / "args.json").write_text(
            '{"flags": {"code": {"fedavg.py": "abcdefg"}, "method": "fedavg", "precision": ""}, '
            '"machines": [{"torch": "2.14", "device": "cpu"}]}'
        )
        (out / "metrics.csv").write_text("round,mA,selected\n1,0.5,4 2\n2,,2 3\n3,0.6,4\n")


def test_finished_runs_are_recorded_once(book, tmp_path):
    finished(tmp_path, "0")
    finished(tmp_path, "05")  # another seed, whose name begins alike
    lines = [f"x/good{name},0,abcdefg,2.14,1,0.5,2\n,,,,3,0.6,3\n" for name in ("", "-random")]
    for _ in range(2):
        assert experiments.record(tmp_path, "x/good", "0")
        assert book.read_text() == HEADER + "".join(lines)


@pytest.mark.usefixtures("book")
def test_a_run_that_fails_is_not_recorded(tmp_path, capsys):
    assert experiments.run(tmp_path, ("x/bad", "0")) is None
    assert "failed" in capsys.readouterr().out
    assert "no-such-flag" in (tmp_path / "x/bad/0.log").read_text()


def test_a_recorded_row_that_does_not_repeat_is_named(book, monkeypatch, capsys):
    def run(folder, job):
        finished(folder, job[1])
        return job

    book.write_text(f"{HEADER}x/good,0,abcdefg,2.14,1,0.6,2\n,,,,3,0.6,3\n")
    monkeypatch.setattr(experiments, "run", run)
    monkeypatch.setattr(sys, "argv", ["experiments", "--check", "x/good/0"])
    with pytest.raises(SystemExit) as end:
        experiments.main()
    assert end.value.code == 1
    assert "x/good, seed 0: differs\n" in capsys.readouterr().out
