"""The table of a comparison: what results/report.py makes of a user's runs, and what it refuses."""

import json
import re
import sys
from argparse import Namespace

import pytest

from common import UserError
from common.runner import table
from results import report


def make_run(folder, accuracies, seed=0, domain=None, about=(), **flags):
    """A finished run with these ID accuracies; its OOD accuracies are 1 minus these."""
    folder.mkdir(parents=True)
    shared = {"lr": 0.1, "rounds": 9, "method": "fediir", "code": {"fediir.py": "abc"}}
    flags = {**shared, "seed": seed, "test_domain": domain, "out": str(folder), **flags}
    facts = {"flags": flags, "images": 1, "classes": ["cat", "dog"], "finished": len(accuracies)}
    facts["machines"] = [{"torch": "2.14"}]
    (folder / "args.json").write_text(json.dumps({**facts, **dict(about)}))
    rows = [f"{t},{x},{1 - x},{5 * x},3 17" for t, x in enumerate(accuracies, start=1)]
    lines = ["round,id_accuracy,ood_accuracy,norm,selected", *rows, ""]
    (folder / "metrics.csv").write_text("\n".join(lines))
    return folder


@pytest.fixture
def printed(tmp_path, monkeypatch, capsys):
    """printed(word, ...) runs the program in tmp_path: what it prints, and what it says beside."""
    monkeypatch.chdir(tmp_path)

    def main(*words):
        monkeypatch.setattr(sys, "argv", ["report.py", *map(str, words)])
        report.main()
        return capsys.readouterr()

    return main


@pytest.fixture
def compared(printed):
    """compared(word, ...) is the table that the program prints: row -> cells."""

    def main(*words):
        lines = [re.split(" {2,}", line) for line in printed(*words).out.splitlines()]
        return {label: cells for label, *cells in lines}

    return main


def test_a_folder_is_a_row_with_its_runs_wherever_they_lie_in_it(tmp_path, compared):
    """By hand: the means of the last five rounds are 60 and 80, so 70 ± 14.1.

    A baseline stops where its method has stopped, which can depend on the seed.
    """
    make_run(tmp_path / "runs/a/x/y", [0.1] + 5 * [0.6], 1, stop=6, processes=4, dataset="pets")
    make_run(tmp_path / "runs/a/seed0", [0.1] + 5 * [0.8], stop=7, dataset="/home/me/pets")
    make_run(tmp_path / "runs/b", [0.9] * 6, lr=0.5)
    make_run(tmp_path / "other/b", [0.3] * 6)
    assert compared("runs/a")["a"] == ["0 1", "70.0 ± 14.1", "30.0 ± 14.1"]
    assert compared("runs/b", "runs/a", "./runs/b/")["a - b"] == ["0", "-10.0", "+10.0"]
    assert compared("runs/b", "other/b")["runs/b - other/b"] == ["0", "+60.0", "-60.0"]


UNLIKE = """
"lr": 0.5, "code": {"fediir.py": "def"} -> lr 0.1 .0., 0.5 .1.; code of fediir.py abc .0., def
"about": {"images": 2} -> images 1 .0., 2 .1.$
"seed": 0, "out": "elsewhere" -> 0 and .*1 have the same seed: give each as a row
"""  # changes of the second run -> what is said


@pytest.mark.parametrize("case", UNLIKE.strip().splitlines())
def test_a_row_may_differ_in_seed_and_test_domain_alone(tmp_path, compared, case):
    changes, says = case.split(" -> ")
    make_run(tmp_path / "a/0", [0.5])
    make_run(tmp_path / "a/1", [0.7], **{"seed": 1, **json.loads(f"{{{changes}}}")})
    with pytest.raises(UserError, match=says):
        compared("a")


def test_differences_are_paired_within_a_test_domain_and_then_averaged(tmp_path, compared):
    """`few` has B alone, and A is far easier: across domains it would be -6.7."""
    for domain, ours, theirs in (("A", 0.9, 0.8), ("B", 0.5, 0.3), ("C", 0.6, 0.6)):
        make_run(tmp_path / f"ours/{domain}", [ours], domain=domain)
        make_run(tmp_path / f"fedavg/{domain}", [theirs], domain=domain)
    make_run(tmp_path / "few", [0.5], domain="B")
    make_run(tmp_path / "other", [0.5], domain="D")
    make_run(tmp_path / "fedavg/A1", [0.1], seed=1, domain="A")
    rows = compared("ours", "few", "other", "fedavg")
    assert rows["ours - fedavg"] == ["0", "+10.0", "-10.0"]
    assert rows["few - fedavg"] == ["0", "+20.0", "-20.0"]
    assert rows["other - fedavg"] == ["none in common"]
    assert rows["fedavg"][:2] == ["0", "56.7"]  # seed 1 has not all domains


def test_each_kind_of_measure_by_hand():
    """Shares as the mean of the last five or of all evaluations, costs as the last number."""
    run = Namespace(args=Namespace(seed=3, test_domain=None))
    run.rows = [{"round": t, "samples": 1000 * t, "megabytes": t / 4} for t in range(1, 8)]
    for row, share in zip(run.rows[:6], [1, 0.5, 0.5, 0.5, 0.5, 0]):
        row |= {"ood_accuracy": share, "rare_selected": share}
    found = "|".join(map("; ".join, table.table({"a": [run], "b": [run]})))
    header = "; seeds; ood_accuracy; rare_selected, all evaluations; samples, in all; megabytes"
    line = "; 3; 40.0; 50.0; 7,000; 1.8"
    assert found == f"{header}, in all|a{line}|b{line}|a - b; 3; +0.0; +0.0; ; "
    early = Namespace(args=Namespace(seed=4, test_domain=None), rows=run.rows[6:])
    assert table.table({"a": [run, early]})[0][2].startswith("samples")  # no mean over one of two


SHARED = {"accuracies": [0.5] * 9, "gamma": 1, "rotate": [0, 90], "small": False, "data_dir": "x"}
NOT_SHARED = """
"method": "mine", "code": {"mine.py": "x"}, "small": true, "data_dir": "y" ->
"gamma": 0, "local_epochs": 1 -> gamma 0 (a), 1 (b)
"accuracies": [0.5, 0.5] -> rounds 2 (a), 9 (b)
"about": {"machines": [{"torch": "2.13"}, {"torch": "2.15"}]} -> torch 2.13, then 2.15 (a), 2.14 (b)
"about": {"images": 2} -> images 2 (a), 1 (b)
"code": {"fediir.py": "x"} -> code of fediir.py x (a), abc (b)
"""  # changes -> what is said


@pytest.mark.parametrize("case", NOT_SHARED.strip().splitlines())
def test_what_rows_do_not_share_is_named(tmp_path, printed, case):
    """Every flag, also a method's own; of two methods those that both have.

    The second seed has no partner.
    """
    changes, says = case.split(" ->")
    changes = json.loads(f"{{{changes}}}")
    second = {"seed": 1, "about": {**changes.get("about", {}), "machines": [{"torch": "2.16"}]}}
    make_run(tmp_path / "a/0", **{**SHARED, **changes})
    make_run(tmp_path / "a/1", **{**SHARED, **changes, **second})
    make_run(tmp_path / "b", **SHARED)
    found = printed("a", "b")
    *_, last = found.out.splitlines()
    assert last == f"Not the same in all rows:{says}" if says else "Not the same" not in last
    assert "chance is 50.0 % with 2 classes" in found.out
    # Its rows have the same numbers, and also the same norm, unless one is shorter
    assert ("a and b end with the same model" in found.out) == ("rounds" not in says)
    assert re.search(r"its runs differ in torch 2\.1.* \(0\), 2\.16 \(1\)", found.err)


def test_a_file_that_a_spreadsheet_saved_is_read(tmp_path, compared):
    for name, points in (("a", ","), ("b", ".")):
        file = make_run(tmp_path / name, [0.25, 0.5]) / "metrics.csv"
        text = file.read_text().replace(",", ";").replace(".", points)
        file.write_text(text, encoding="utf-8-sig", newline="\r\n")
        assert compared(name)[name] == ["0", "37.5", "62.5"]


DAMAGED = """
metrics.csv round,id_accuracy|1,0.5|2,abc|
metrics.csv round\tid_accuracy|1\t0.5|
metrics.csv
metrics.csv round,id_accuracy,norm|1,0.5
args.json {
args.json {"flags": {"name": "FedAvg", "rounds": 1}}
args.json {"flags": {"seed": 2}, "machines": "torch 2.14"}
args.json {"flags": {"seed": 2}, "machines": [{}], "images": 1, "classes": ["cat"]}
"""  # file and content; a full disk has cut the third one off, and in the last nothing is finished


@pytest.mark.parametrize("case", DAMAGED.strip().splitlines())
def test_a_run_that_cannot_be_read_is_left_out_with_a_word(tmp_path, printed, case):
    for seed in range(3):
        folder = make_run(tmp_path / f"a/{seed}", [0.5], seed)
    file, _, content = case.partition(" ")
    (folder / file).write_text(content.replace("|", "\n"))
    found = printed("a")
    assert "a  0 1    50.0 ± 0.0" in found.out
    assert found.err.startswith(f"left out {folder}: ") and found.err.count("\n") == 1


def test_what_is_no_run_is_refused(tmp_path, compared):
    make_run(tmp_path / "one", [0.5])
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("not a run, but runs/* names it, too")
    assert compared("one", "empty", "notes.txt") == compared("one")
    with pytest.raises(UserError, match="no finished runs"):
        compared("empty", "notes.txt")
    with pytest.raises(UserError, match="nowhere: no such folder"):
        compared("nowhere", "one")
