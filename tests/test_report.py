"""results/report.py: what it makes of a user's own runs, and what it refuses."""

import json
import sys
from itertools import takewhile
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
def printed(tmp_path, monkeypatch, capsys):
    """printed(word, ...) runs the program in tmp_path, and returns what it prints."""
    monkeypatch.chdir(tmp_path)

    def main(*words):
        monkeypatch.setattr(sys, "argv", ["report.py", *map(str, words)])
        report.main()
        return capsys.readouterr().out

    return main


@pytest.fixture
def compared(printed):
    """compared(word, ...) is the first table that the program prints: row -> cells."""

    def first_table(*words):
        lines = printed(*words).splitlines()[2:]
        cells = [[cell.strip() for cell in line.split("  ") if cell] for line in lines]
        return {label: found for label, *found in takewhile(lambda of: len(of) > 1, cells)}

    return first_table


def test_runs_that_differ_in_the_seed_alone_are_one_row(tmp_path, compared):
    """By hand: the means of the last five rounds are 60 and 80, so 70 +- 14.1."""
    make_run(tmp_path / "runs/a", [0.1, 0.6, 0.6, 0.6, 0.6, 0.6], seed=1)
    make_run(tmp_path / "runs/b", [0.1, 0.8, 0.8, 0.8, 0.8, 0.8], seed=0)
    make_run(tmp_path / "runs/c", [0.9] * 6, lr=0.5)
    make_run(tmp_path / "runs/d", [0.3] * 6, name="UEFL", method="uefl")
    make_run(tmp_path / "runs/e", [0.2] * 6, name="UEFL", method="uefl", code="def")
    rows = compared("runs", "runs/a")  # a folder that is given twice counts once
    assert rows["FedIIR lr=0.1"] == ["1 0", "2 to 6", "70.0 ± 14.1", "30.0 ± 14.1"]
    assert rows["FedIIR lr=0.5"] == ["0", "2 to 6", "90.0", "10.0"]
    assert rows["UEFL code=abc"][2:] == ["30.0", "70.0"], "other code is another row"


def test_long_values_that_begin_alike_are_two_rows_and_how_a_run_was_started_is_none(
    tmp_path, compared
):
    for name in ("PACS", "VLCS"):
        path = f"/a/long/path/to/{name}"
        for seed in (0, 1):
            out = tmp_path / f"runs/{name}{seed}"
            make_run(out, [0.5], seed, dataset=path, is_example=bool(seed))
    rows = compared("runs")
    labels = [f"FedIIR dataset=/a/long/path/to/{name}" for name in ("PACS", "VLCS")]
    assert [rows[label][0] for label in labels] == ["0 1", "0 1"]


def test_differences_are_paired_over_the_seeds_that_both_have(tmp_path, compared):
    """The interval is that of scipy's paired t-test; seed 4 has no partner."""
    ours, theirs = [0.50, 0.62, 0.45], [0.41, 0.55, 0.47]
    for seed, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        make_run(tmp_path / f"runs/{seed}", [a], seed)
        make_run(tmp_path / f"runs/{seed}-fedavg", [b], seed, name="FedAvg", method_rounds=1)
    make_run(tmp_path / "runs/4", [0.9], 4)
    low, high = ttest_rel(ours, theirs).confidence_interval()
    seeds, difference, _ = compared("runs")["FedIIR - FedAvg"]
    assert (seeds, difference) == ("0 1 2", f"+4.7 ({100 * low:+.1f} to {100 * high:+.1f})")


def test_differences_are_paired_within_a_test_domain_and_then_averaged(tmp_path, compared):
    """The row first by name has B alone, and A is far easier: across domains it would be +40."""
    for domain, ours, theirs in (("A", 0.9, 0.8), ("B", 0.5, 0.3), ("C", 0.6, 0.6)):
        make_run(tmp_path / f"runs/x{domain}", [ours], test_domain=domain)
        make_run(tmp_path / f"runs/y{domain}", [theirs], test_domain=domain, name="FedAvg")
    make_run(tmp_path / "runs/a", [0.5], test_domain="B", name="another")
    make_run(tmp_path / "runs/d", [0.5], test_domain="D", name="elsewhere")
    rows = compared("runs")
    assert rows["FedIIR - FedAvg"] == ["0", "+10.0", "-10.0"]
    assert [rows[f"FedIIR - FedAvg, {domain}"][1] for domain in "ABC"] == ["+10.0", "+20.0", "+0.0"]
    assert rows["another - FedAvg"] == ["0", "+20.0", "-20.0"]
    assert rows["elsewhere - FedAvg"] == ["none in common"]
    assert compared("runs", "--minus", "another")["FedIIR - another"] == ["0", "+0.0", "+0.0"]
    with pytest.raises(UserError, match="--minus fedavg: name one of the rows 'another', "):
        compared("runs", "--minus", "fedavg")


def test_a_baseline_is_what_its_flags_say_and_not_what_its_folder_is_called(tmp_path, compared):
    """A baseline has as many rounds as its method came to, which can depend on the seed."""
    for n in (3, 4):
        flags = {"name": "FedAvg", "seed": n, "method_rounds": 2}
        make_run(tmp_path / f"runs/{n}-fedavg", [0.5] * n, **flags)
        make_run(tmp_path / f"runs/{n}-random", [0.5] * n, n, name="random")
    rows = compared("runs")
    assert rows["FedAvg"][:2] == ["3 4", "1 to 4"]
    assert {"random rounds=3", "random rounds=4"} <= rows.keys()


def test_what_a_fair_comparison_shares_is_named_if_it_differs(tmp_path, printed):
    for name, epochs, common in (("a", 5, "x"), ("b", 1, "x"), ("c", 5, "x"), ("d", 5, "y")):
        flags = {"model": "cnn", "local_epochs": epochs, "code_of_common": common}
        make_run(tmp_path / name, [0.5] * 20, name=name, **flags)
    assert printed("a", "b").endswith("Not the same in all rows: local_epochs 5 (a), 1 (b)\n")
    assert printed("a", "d").endswith("Not the same in all rows: code_of_common x (a), y (d)\n")
    assert "Not the same" not in printed("a", "c")


def test_images_that_changed_between_two_runs_are_named(tmp_path, printed):
    for name, images in (("a", 1), ("b", 1), ("c", 2)):
        file = make_run(tmp_path / name, [0.5] * 20, name=name) / "args.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"data": images}))
    assert "Not the same" not in printed("a", "b")
    said = "Not the same in all rows: the images (seed 0), which have changed\n"
    assert printed("a", "c").endswith(said)


@pytest.mark.parametrize(("rounds", "beside"), [(19, True), (20, False)])
def test_the_last_round_stands_beside_a_mean_over_much_of_a_run(tmp_path, printed, rounds, beside):
    """The last five of 20 rounds are a quarter of them."""
    make_run(tmp_path / "a", [0.5] * (rounds - 1) + [0.75])
    lines = [line.split() for line in printed("a").splitlines()]
    mean = ["FedIIR", "0", f"{rounds - 4}", "to", f"{rounds}", "55.0", "45.0"]
    last = ["FedIIR", "0", f"{rounds}", "75.0", "25.0"]
    assert mean in lines and (last in lines) == beside


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("metrics.csv", "round,id_accuracy\n1,0.5\n2,abc\n"),
        ("metrics.csv", "turn,id_accuracy\n1,0.5\n"),
        ("metrics.csv", ""),
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
    make_run(tmp_path / "started", [], seed=1, rounds=1, finished=False)
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("not a run, but runs/* names it, too")
    assert compared("one", "started", "notes.txt") == compared("one")
    for folders in (["empty"], ["one", "empty"], ["nowhere"], [], ["started"], ["notes.txt"]):
        with pytest.raises(UserError, match=r"no .*runs"):
            compared(*folders)
