"""The pages of results/: their numbers, tables and pictures, and how finished runs come into the CSVs."""

import csv
import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import ttest_1samp, ttest_rel

from common import UserError
from results import tables
from results.tables import Run

ROOT = Path(__file__).parents[1]
METHODS = ["fedavg", "entropy_weighting", "minimax_select", "convex_hull_select", "fediir", "uefl"]
PAGES = [f"results/{page}.md" for page in ("README", "wu", "fediir", "uefl", "small", "speed")]
PAGES += [f"docs/{method}.md" for method in METHODS]


def runs(*accuracies: list) -> list[Run]:
    """One run per list of ID accuracies; the OOD accuracies are 1 minus these."""
    found = [Run(seed, "abc") for seed in range(len(accuracies))]
    for run, of_seed in zip(found, accuracies, strict=True):
        run.rows = [{"round": t, "id_accuracy": a, "ood_accuracy": 1 - a} for t, a in enumerate(of_seed, start=1)]
    return found


FOUND = {"x/random": runs([0.1, 0.3, 0.5], [0.1, 0.5, 0.5]), "x/hull": runs([0.2, 0.8, 0.8], [0.2, 0.8, 0.7]),
         "y/random": runs([0.3], [0.3]), "y/hull": runs([0.4], [0.4])}  # fmt: skip


# ------------------------------------------------------------------------------------------------- the committed pages


@pytest.fixture(scope="module")
def rebuilt(tmp_path_factory):
    """A copy of results/ and the pages without their pictures, in which `python -m results` has run."""
    folder = tmp_path_factory.mktemp("copy")
    shutil.copytree(ROOT / "results", folder / "results", ignore=shutil.ignore_patterns("*.png"))
    for page in ("README.md", *PAGES):
        (folder / page).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / page, folder / page)
    (folder / "common").symlink_to(ROOT / "common")
    subprocess.run([sys.executable, "-m", "results"], cwd=folder, check=True)
    return folder


@pytest.mark.parametrize("page", ["README.md", *PAGES])
def test_the_committed_pages_agree_with_the_csvs(rebuilt, page):
    text = (ROOT / page).read_text()
    assert "<!-- " in text
    assert (rebuilt / page).read_text() == text, "run python -m results"


def test_the_pictures_are_those_that_the_pages_show(rebuilt):
    drawn = {file.name for file in (rebuilt / "results").glob("*.png")}
    assert drawn == {file.name for file in (ROOT / "results").glob("*.png")}
    texts = "".join(file.read_text() for file in (ROOT / "results").glob("*.md"))
    assert all(f"]({name})" in texts for name in drawn)


@pytest.mark.parametrize("name", ["wu", "fediir", "uefl", "small", "precision", "examples"])
def test_the_csvs_hold_whole_runs(name):
    for fresh in (False, True):
        for experiment, of_experiment in tables.read(f"{name}.csv", fresh).items():
            assert experiment.split("/")[0] == name
            for run in of_experiment:
                assert [row["round"] for row in run.rows] == list(range(1, len(run.rows) + 1)), (experiment, run.seed)


# ------------------------------------------------------------------------------------------------- numbers and tables


def test_numbers_of_a_run():
    """The mean of the last rounds, up to a round, and at the best value of another column, all by hand."""
    one = runs([0.1, 0.9, 0.2, 0.6])
    assert tables.numbers(one, "id_accuracy", last=2) == pytest.approx([40.0])
    assert tables.numbers(one, "id_accuracy", last=2, until=3) == pytest.approx([55.0])
    assert tables.numbers(one, "ood_accuracy", best="id_accuracy") == pytest.approx([10.0])
    assert len(tables.numbers(one, "mE")) == 0
    one[0].rows[1]["id_accuracy"] = None  # a round without an evaluation
    assert tables.numbers(one, "id_accuracy", last=2, until=3) == pytest.approx([15.0])


def test_an_interval_is_that_of_the_paired_t_test():
    """scipy computes the same interval. A seed without a partner does not count."""
    both = tables.paired([runs([0.50], [0.62], [0.45], [0.9]), runs([0.41], [0.55], [0.47])], "id_accuracy")
    low, high = ttest_rel([50, 62, 45], [41, 55, 47]).confidence_interval()
    assert tables.show(both[0] - both[1], "id_accuracy", "+") == f"+4.7 ({low:+.1f} to {high:+.1f})"
    assert tables.show(np.array([9.0]), "mE", "+") == "+9.000"
    assert tables.show(np.array([9.0]), "seconds") == "9"


def test_a_table():
    """By hand: the runs of `hull` have means of 80 and 75 over the last two rounds: 77.5 and sqrt(12.5) = 3.5.

    They are 40 and 25 points above random: 32.5 +- 12.706 * 10.61 / sqrt(2), with t's 12.706 for two seeds.
    """
    rows = tables.group(FOUND, "x", "random hull later")
    assert tables.table(rows, ["mE", "id_accuracy"], "random", last=2) == [
        ["", "runs", "ID", "ID minus random"],
        ["random", "seeds 0, 1 (abc)", "45.0 ± 7.1", ""],
        ["hull", "seeds 0, 1 (abc)", "77.5 ± 3.5", "+32.5 (-62.8 to +127.8)"],
        ["later", "not run yet", "", ""],
    ]


def test_a_pair_over_two_folders_is_the_mean_over_the_folders():
    """By hand: in y, both seeds are 10 points above random; in x, they are 30 and 20: 20 and 15 together.

    Their mean is 17.5, and the interval is 17.5 +- 12.706 * sqrt(12.5) / sqrt(2) = 31.8. The rows have the means
    (80 + 40) / 2 and (70 + 40) / 2, and (50 + 30) / 2 twice. Without its second seed, y has one pair left.
    """
    pairs = [
        *tables.pairs(FOUND, "x", "hull random", ["id_accuracy"], ", a", last=1),
        tables.pair(FOUND, "both", "x y", "hull random", "id_accuracy", "9.0 against 6.0", "later", last=1),
    ]
    assert pairs[1].effect == 3 and pairs[0].effect is None
    assert tables.differences(pairs, "hull", "random") == [
        ["", "hull", "random", "difference", "seeds", "the paper reports", "note"],
        ["hull minus random, a: ID", "75.0 ± 7.1", "50.0 ± 0.0", "+25.0 (-38.5 to +88.5)", "2", "", ""],
        ["both", "57.5 ± 3.5", "40.0 ± 0.0", "+17.5 (-14.3 to +49.3)", "2", "9.0 against 6.0", "later"],
    ]
    assert tables.differences(pairs[:1])[0] == ["", "method", "baseline", "difference", "seeds"]
    short = tables.pair({**FOUND, "y/hull": FOUND["y/hull"][:1]}, "", "x y", "hull random", "id_accuracy", last=1)
    assert short.difference == pytest.approx([20])


# ------------------------------------------------------------------------------------------------- the main claims


@pytest.fixture(scope="module")
def claims(rebuilt):
    """results/claims.py, which builds the copy's pages when it is imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "RESULTS", rebuilt / "results")
        return importlib.import_module("results.claims")


def test_holm(claims):
    """By its definition: go from the smallest of m p-values up, and stop at the first above level / (m - rejected)."""
    rng = np.random.default_rng(0)
    for p, level in [(rng.beta(0.3, 3, 8), level) for level in (0.01, 0.05, 0.2) for _ in range(200)]:
        rejected = set()
        for i in np.argsort(p):
            if p[i] > level / (8 - len(rejected)):
                break
            rejected.add(i)
        assert set(np.flatnonzero(claims.holm(p) <= level)) == rejected


def test_the_visible_effect_is_found_in_80_percent_of_the_experiments(claims):
    found, rng = np.array([1.0, 4.0, 2.0, 2.5, 0.3]), np.random.default_rng(0)
    effect = claims.visible(found)
    p = ttest_1samp(rng.normal(effect, found.std(ddof=1), (20_000, 5)), 0, axis=1).pvalue
    assert np.mean(p < 0.05) == pytest.approx(0.8, abs=0.01)


def test_where_a_number_lies(claims):
    """By hand: the differences 1, 2, 3 have the interval 2 +- 4.303 / sqrt(3) = -0.48 to 4.48."""
    three, many = np.array([1.0, 2.0, 3.0]), np.tile([1.0, 2.0, 3.0], 10)
    places = claims.places([three, three, three, many, many[:1]], [0, 4.4, 4.6, 0, 0])
    assert [place for place, _ in places] == ["inside", "inside", "excluded before Holm", "excluded", "inside"]
    assert places[4][1] == "1.000 and 1.000", "one seed says nothing"
    assert claims.says("excluded", "inside", "a gain") == "a gain; one as large as the paper's is possible"
    assert claims.says("inside", "excluded", "a gain") == "no difference seen; one as large as the paper's is excluded"
    assert claims.says("excluded before Holm", "", "a loss") == "a hint of a loss"


def test_an_effect_that_would_lead_above_100_percent_is_not_called_excluded(rebuilt):
    """FedAvg has 90.8 % on MNIST, so the paper's +14.0 points cannot be seen there, but its +4.0 on CIFAR-10 can."""
    rows = {
        row.split(" | ")[1]: row for row in (rebuilt / "results/README.md").read_text().splitlines() if "seeds |" in row
    }
    assert "| does not fit |" in rows["+14.0"] and "would lead above 100 %" in rows["+14.0"]
    assert "does not fit" not in rows["+4.0"] and "does not fit" not in rows["-0.124"]


def test_a_main_claim_by_another_way(rebuilt):
    """The hull against random clients on CIFAR-10, from the CSV with scipy's paired test: its seeds are 3 and later."""
    last = {}
    with (ROOT / "results/wu.csv").open() as f:
        for row in csv.DictReader(f):
            if row["experiment"] in ("wu/cifar10/hull", "wu/cifar10/random") and int(row["round"]) > 45:
                last.setdefault(row["experiment"][11:], {}).setdefault(int(row["seed"]), []).append(row["ood_accuracy"])
    seeds = sorted(seed for seed in last["hull"] if seed >= 3 and seed in last["random"])
    hull, random = (100 * np.array([last[name][seed] for seed in seeds], float).mean(1) for name in ("hull", "random"))
    low, high = ttest_rel(hull, random).confidence_interval()
    here = f"| {(hull - random).mean():+.1f} ({low:+.1f} to {high:+.1f}), {len(seeds)} of 5 seeds |"
    assert here in (rebuilt / "results/README.md").read_text()


# ------------------------------------------------------------------------------------------------- pages and CSVs


def test_a_page_gets_new_tables_in_its_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("Text.\n\n<!-- a -->\nold\nold\n\nMore.\n\n<!-- b -->\n\nEnd.\n")
    blocks = {"a": [["", "x"], ["one", "1"]], "b": [["y"], ["2"]]}
    for _ in range(2):
        tables.build("page.md", blocks)
        assert page.read_text() == (
            "Text.\n\n<!-- a -->\n|  | x |\n| --- | --- |\n| one | 1 |\n\nMore.\n\n"
            "<!-- b -->\n| y |\n| --- |\n| 2 |\n\nEnd.\n"
        )
    for wrong in ({"a": blocks["a"]}, {**blocks, "c": blocks["a"]}):
        with pytest.raises(UserError, match=r"page.md marks a, b, but the tables are"):
            tables.build("page.md", wrong)


def test_a_csv_is_read(tmp_path, monkeypatch):
    """Fresh seeds come only on request, where an experiment has any."""
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    header, line = "experiment,seed,commit,torch,round,mA,accuracies\n", "{},{},abc,2.14,1,,0.5 0.7\n"
    rows = [("uefl/x", 1), ("uefl/x", 0), ("uefl/mnist/a", 3), ("uefl/mnist/a", 2), ("uefl/mnist/a", 4)]
    (tmp_path / "uefl.csv").write_text(header + "".join(line.format(*row) for row in rows))

    def found(*seeds):
        return [Run(seed, "abc", [{"round": 1, "mA": None, "accuracies": [0.5, 0.7]}]) for seed in seeds]

    assert tables.read("uefl.csv") == {"uefl/x": found(0, 1), "uefl/mnist/a": found(2)}
    assert tables.read("uefl.csv", fresh=True) == {"uefl/x": found(0, 1), "uefl/mnist/a": found(3, 4)}
    (tmp_path / "uefl.csv").write_text(header + line.format("uefl/x", 1).replace("0.7", "7 %"))
    with pytest.raises(ValueError, match="%"):
        tables.read("uefl.csv")


@pytest.mark.parametrize(
    "row", list(csv.DictReader((ROOT / "results/experiments.csv").open())), ids=lambda row: row["experiment"]
)
def test_the_commands_of_the_experiments_are_understood(row, monkeypatch):
    """By the parser of their program, up to the point where it would train; those of a variation need its flags."""
    program, *flags = row["command"].split()
    method = importlib.import_module(program.removesuffix(".py"))
    started = []
    monkeypatch.setattr(method, "federate", lambda args: started.append(args) or sys.exit())
    if row["variation"]:
        assert (ROOT / "docs/variations" / f"{row['variation']}.diff").exists()
    else:
        with pytest.raises(SystemExit):
            method.main([*flags, "--seed", row["seeds"].split()[0], "--out", "nowhere"])
        assert program[:-3] in METHODS and started[0].out == "nowhere"


# ------------------------------------------------------------------------------------------------- experiments

PROGRAM = """import json, sys
from pathlib import Path
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
out = Path(flags.get("--resume") or flags["--out"])
behaviour = flags.get("--be", "good")
for folder in [out] + [out.with_name(out.name + "-random")] * (behaviour != "alone"):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "args.json").write_text(json.dumps({"torch": "2.14"}))
    (folder / "metrics.csv").write_text("round,seconds,mA,selected\\n1,7,0.50,4 2\\n2,8,,2 3\\n")
    if behaviour != "unfinished" or folder == out:
        (folder / "model.pt").touch()
sys.exit(behaviour == "failing")
"""
EXPERIMENTS = """experiment,seeds,variation,command
x/good,0 1,,fake.py
x/alone,5,,fake.py --be alone
x/changed,0,louder,fake.py --be alone
y/failing,0,,fake.py --be failing
y/unfinished,0,,fake.py --be unfinished
"""
DIFF = """--- a/fake.py
+++ b/fake.py
@@ -1,2 +1,3 @@
+print('louder')
 import json, sys
 from pathlib import Path
"""


@pytest.fixture
def repository(tmp_path):
    """A repository with a program that pretends to train, results/experiments.py and two empty CSVs."""
    for name, text in {
        "fake.py": PROGRAM, "docs/variations/louder.diff": DIFF, "results/experiments.csv": EXPERIMENTS,
        "results/x.csv": "experiment,seed,commit,torch,round,mA,clients,clients_so_far\n",
        "results/y.csv": "experiment,seed,commit,torch,round,mA\n", ".gitignore": "/runs/\n",
    }.items():  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    shutil.copy(ROOT / "results" / "experiments.py", tmp_path / "results")
    git = ["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "begin"]):
        subprocess.run([*git, *words], check=True)
    return tmp_path


def experiments(repository, *beginnings):
    words = [sys.executable, "-m", "results.experiments", *beginnings]
    return subprocess.run(words, cwd=repository, capture_output=True, text=True)


def lines(*runs):
    """The rows of these runs in x.csv: (experiment, seed, commit). A run's later rows lack commit and torch."""
    cells = ("{},2.14,1,0.50,2,2", ",,2,,2,3")
    return sorted(f"{name},{seed},{of_round.format(commit)}" for name, seed, commit in runs for of_round in cells)


def test_finished_experiments_are_recorded_once(repository):
    done = experiments(repository, "x")
    assert (
        done.returncode == 0 and "x/changed: left out, as it needs git apply docs/variations/louder.diff" in done.stdout
    )
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=repository, capture_output=True, text=True)
    commit, file = head.stdout.strip(), repository / "results/x.csv"
    names = [("x/good", 0), ("x/good", 1), ("x/good-random", 0), ("x/good-random", 1), ("x/alone", 5)]
    expected = [(name, seed, commit) for name, seed in names]
    assert sorted(file.read_text().splitlines()[1:]) == lines(*expected)
    subprocess.run(["git", "apply", "docs/variations/louder.diff"], cwd=repository, check=True)
    assert "x/changed 0: done" in experiments(repository, "x/changed").stdout
    assert sorted(file.read_text().splitlines()[1:]) == lines(*expected, ("x/changed", 0, f"{commit}+louder"))
    assert (repository / "runs/experiments/log.txt").read_text().split() == ["louder"]
    before = file.read_text()
    assert experiments(repository, "x/").stdout == "" and file.read_text() == before


def test_an_experiment_that_fails_is_not_recorded(repository):
    """It failed although it left a model, or its baseline is not finished."""
    done = experiments(repository)
    assert done.returncode == 1
    assert "y/failing 0: did not finish" in done.stdout and "y/unfinished 0: did not finish" in done.stdout
    assert "x/good 1: done" in done.stdout
    assert (repository / "results/y.csv").read_text().count("\n") == 1


def test_a_full_disk_leaves_the_csv_as_it_was(repository, monkeypatch):
    from results import experiments as program

    monkeypatch.chdir(repository)
    folder = repository / "run"
    folder.mkdir()
    (folder / "args.json").write_text(json.dumps({"torch": "2.14"}))
    (folder / "metrics.csv").write_text("round,mA,selected\n1,0.5,4\n")
    before, write_text = (repository / "results/y.csv").read_text(), Path.write_text

    def full(path, text):
        write_text(path, text[:50])
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        with pytest.raises(OSError, match="No space"):
            program.record({"y/one": folder}, 0, "abc")
    assert (repository / "results/y.csv").read_text() == before
    program.record({"y/one": folder}, 0, "abc")
    assert (repository / "results/y.csv").read_text() == before + "y/one,0,abc,2.14,1,0.5\n"
