"""results/report.py: what it makes of a user's own runs, and what it refuses."""

import json
import sys
from pathlib import Path

import pytest
from scipy.stats import ttest_rel

from common import UserError
from results import report


def make_run(folder: Path, accuracies: list, seed=0, name="FedIIR", finished=True, **flags) -> Path:
    """A run with these ID accuracies; its OOD accuracies are 1 minus these."""
    folder.mkdir(parents=True)
    shared = {"lr": 0.1, "rounds": len(accuracies), "method": "fediir", "code": "abc"}
    flags = {**shared, "seed": seed, "out": str(folder), "name": name, **flags}
    (folder / "args.json").write_text(json.dumps({"flags": flags, "torch": "2.15"}))
    rows = [f"{t},{accuracy},{1 - accuracy},3 17" for t, accuracy in enumerate(accuracies, start=1)]
    lines = ["round,id_accuracy,ood_accuracy,selected", *rows, ""]
    (folder / "metrics.csv").write_text("\n".join(lines))
    if finished:
        (folder / "model.pt").touch()
    return folder


@pytest.fixture
def compared(tmp_path, monkeypatch, capsys):
    """compared(folder, ...) runs the program in tmp_path and returns the cells that it prints."""
    monkeypatch.chdir(tmp_path)

    def main(*folders):
        monkeypatch.setattr(sys, "argv", ["report.py", *map(str, folders)])
        report.main()
        lines = capsys.readouterr().out.splitlines()
        return {
            line.split("  ")[0]: [c.strip() for c in line.split("  ") if c][1:] for line in lines
        }

    return main


def test_runs_that_differ_in_the_seed_alone_are_one_row(tmp_path, compared):
    """By hand: the means of the last five rounds are 60 and 80, so 70 +- 14.1."""
    make_run(tmp_path / "runs/a", [0.1, 0.6, 0.6, 0.6, 0.6, 0.6], seed=1)
    make_run(tmp_path / "runs/b", [0.1, 0.8, 0.8, 0.8, 0.8, 0.8], seed=0)
    make_run(tmp_path / "runs/c", [0.9] * 6, lr=0.5)
    make_run(tmp_path / "runs/d", [0.3] * 6, name="UEFL", method="uefl")
    make_run(tmp_path / "runs/e", [0.2] * 6, name="UEFL", method="uefl", code="def")
    rows = compared("runs", "runs/a")  # a folder that is given twice counts once
    assert rows["FedIIR (fediir) lr=0.1"] == ["0 1", "70.0 ± 14.1", "30.0 ± 14.1"]
    assert rows["FedIIR (fediir) lr=0.5"] == ["0", "90.0", "10.0"]
    assert rows["UEFL (uefl) code=abc"] == ["0", "30.0", "70.0"], "other code is another row"


def test_long_values_that_begin_alike_are_two_rows_and_how_a_run_was_started_is_none(
    tmp_path, compared
):
    for name in ("PACS", "VLCS"):
        path = f"/a/long/path/to/{name}"
        for seed in (0, 1):
            out = tmp_path / f"runs/{name}{seed}"
            make_run(out, [0.5], seed, dataset=path, is_example=bool(seed))
    rows = compared("runs")
    labels = [f"FedIIR (fediir) dataset=/a/long/path/to/{name}" for name in ("PACS", "VLCS")]
    assert [rows[label][0] for label in labels] == ["0 1", "0 1"]


def test_differences_are_paired_over_the_seeds_that_both_have(tmp_path, compared):
    """The interval is that of scipy's paired t-test; seed 4 has no partner."""
    ours, theirs = [0.50, 0.62, 0.45], [0.41, 0.55, 0.47]
    for seed, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        make_run(tmp_path / f"runs/{seed}", [a], seed)
        make_run(tmp_path / f"runs/{seed}-fedavg", [b], seed, name="FedAvg", gamma=0)
    make_run(tmp_path / "runs/4", [0.9], 4)
    low, high = ttest_rel(ours, theirs).confidence_interval()
    difference = compared("runs")["FedIIR (fediir) minus FedAvg (fediir)"][0]
    assert difference == f"+4.7 ({100 * low:+.1f} to {100 * high:+.1f})"


def test_a_baseline_may_have_other_rounds_with_another_seed(tmp_path, compared):
    """uefl.py trains FedAvg for as many rounds as UEFL, and that depends on the seed."""
    for n in (3, 4):
        make_run(tmp_path / f"runs/{n}-fedavg", [0.5] * n, n, name="FedAvg", method="uefl")
    for n in (3, 4):
        make_run(tmp_path / f"runs/{n}", [0.5] * n, n, name="FedAvg", method="fediir")
    rows = compared("runs")
    assert rows["FedAvg (uefl)"][0] == "3 4"
    assert {"FedAvg (fediir) rounds=3", "FedAvg (fediir) rounds=4"} <= rows.keys()


def test_a_run_that_has_just_started_does_not_hide_the_finished_seeds(tmp_path, compared, capsys):
    make_run(tmp_path / "runs/a", [0.5, 0.5])
    make_run(tmp_path / "runs/b", [], seed=1, rounds=2, finished=False)
    assert compared("runs")["FedIIR (fediir)"] == ["0", "50.0", "50.0"]


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("metrics.csv", "round,id_accuracy\n1,0.5\n2,abc\n"),
        ("metrics.csv", "turn,id_accuracy\n1,0.5\n"),
        ("args.json", "{"),
        ("args.json", '{"flags": [0, 1]}'),
        ("args.json", '{"flags": {"name": "FedAvg", "rounds": 1}}'),
    ],
)
def test_damaged_runs(tmp_path, compared, file, content):
    folder = make_run(tmp_path / "one", [0.5])
    (folder / file).write_text(content)
    with pytest.raises(UserError, match="one is not the folder of a run") as error:
        compared("one")
    assert "\n" not in str(error.value)


def test_what_is_no_run_is_refused(tmp_path, compared):
    make_run(tmp_path / "one", [0.5])
    make_run(tmp_path / "started", [0.5], finished=False)
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("not a run, but runs/* names it, too")
    assert compared("one", "notes.txt") == compared("one")
    for folders in (["empty"], ["one", "empty"], ["nowhere"], [], ["started"], ["notes.txt"]):
        with pytest.raises(UserError, match=r"no .*runs"):
            compared(*folders)
