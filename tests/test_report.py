"""results/report.py: its numbers, its words, its mistakes, and whether the committed pages agree with the runs."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import ttest_rel

from common import UserError
from results import report

ROOT = Path(__file__).parents[1]


def make_run(folder: Path, accuracies: list[float], seed: int = 0, method: str = "fedavg", name="", **flags) -> Path:
    """A run with these accuracies. It is finished, unless `rounds` asks for more."""
    folder.mkdir(parents=True)
    flags = {"seed": seed, "out": str(folder), "lr": 0.1, "rounds": len(accuracies), **flags}
    (folder / "args.json").write_text(json.dumps({"method": method, "name": name, "flags": flags}))
    rows = [f"{t},{accuracy},{1 - accuracy}" for t, accuracy in enumerate(accuracies, start=1)]
    (folder / "metrics.csv").write_text("\n".join(["round,id_accuracy,ood_accuracy", *rows, ""]))
    return folder


@pytest.fixture
def page(tmp_path):
    """A page with a table of two rows and two seeds, and the paper's numbers."""
    make_run(tmp_path / "runs" / "random" / "0", [0.1, 0.3, 0.5])
    make_run(tmp_path / "runs" / "random" / "1", [0.1, 0.5, 0.5], seed=1)
    make_run(tmp_path / "runs" / "hull" / "0", [0.2, 0.8, 0.8])
    make_run(tmp_path / "runs" / "hull" / "1", [0.2, 0.8, 0.7], seed=1)
    (tmp_path / "runs" / "paper.csv").write_text("row,id_accuracy\nrandom,45.0 ± 0.5\nhull,70 ± 1\nfull,99\n")
    page = tmp_path / "page.md"
    page.write_text("Text.\n\n<!-- table runs id_accuracy last=2 against=random -->\nold\n\nMore.\n")
    return page


def test_a_new_table_replaces_the_old_one(page):
    """By hand: the runs of `hull` have means of 80 and 75 over the last two rounds: 77.5 and sqrt(12.5) = 3.5.

    They are 40 and 25 points above random: 32.5 +- 12.706 * 10.61 / sqrt(2), with t's 12.706 for two seeds.
    """
    assert report.rebuild(page).splitlines() == [
        "Text.",
        "",
        "<!-- table runs id_accuracy last=2 against=random -->",
        "|  | runs | ID | paper's ID | ID minus random |",
        "| --- | --- | --- | --- | --- |",
        "| random | seeds 0, 1 | 45.0 ± 7.1 | 45.0 ± 0.5 |  |",
        "| hull | seeds 0, 1 | 77.5 ± 3.5 | 70 ± 1 | +32.5 (-62.8 to +127.8) |",
        "| full | not run |  | 99 |  |",
        "",
        "More.",
    ]


def test_a_table_of_some_rows(page):
    page.write_text("<!-- table runs id_accuracy last=2 rows=full,hull -->\n\n")
    assert [line.split(" | ")[0] for line in report.rebuild(page).splitlines()[3:5]] == ["| full", "| hull"]
    page.write_text(
        "<!-- table runs id_accuracy ood_accuracy last=1 rows=hull against=random of=id_accuracy,ood_accuracy -->\n\n"
    )
    differences = ["+25.0 (-38.5 to +88.5)", "-25.0 (-88.5 to +38.5)"]  # as in test_a_claim_is_the_mean below
    assert report.rebuild(page).splitlines()[3].strip("| ").split(" | ")[-2:] == differences
    page.write_text("<!-- table runs id_accuracy rows=nobody -->\n\n")
    with pytest.raises(UserError, match="no runs of nobody"):
        report.rebuild(page)


def test_the_committed_pages_agree_with_the_runs():
    pages = [ROOT / "README.md", *sorted((ROOT / "results").rglob("*.md"))]
    assert sum(page.read_text().count("<!-- table ") for page in pages) > 5
    for page in pages:
        assert report.rebuild(page, draw=False) == page.read_text(), f"{page}: run python -m results.report results/"


def test_a_changed_number_shows_in_the_readme(tmp_path):
    shutil.copytree(ROOT / "results", tmp_path / "results")
    readme = tmp_path / "README.md"
    shutil.copy(ROOT / "README.md", readme)
    folder = next(line.split()[2] for line in readme.read_text().splitlines() if line.startswith("<!-- table "))
    for metrics in report.below(tmp_path / folder):
        rows = (metrics / "metrics.csv").read_text().splitlines()
        (metrics / "metrics.csv").write_text("\n".join(row.replace("0.", "0.1") for row in rows) + "\n")
    assert report.rebuild(readme, draw=False) != readme.read_text()


def test_numbers_of_a_run(tmp_path):
    """The mean of the last rounds, up to a round, and at the best value of another column, all by hand."""
    runs = report.collect([make_run(tmp_path / "a", [0.1, 0.9, 0.2, 0.6])])
    assert runs.numbers("id_accuracy", last=2) == pytest.approx([40.0])
    assert runs.numbers("id_accuracy", last=2, until=3) == pytest.approx([55.0])
    assert runs.numbers("ood_accuracy", best="id_accuracy") == pytest.approx([10.0])
    assert np.isnan(runs.numbers("mE")).all()


def test_an_interval_is_that_of_the_paired_t_test(tmp_path):
    """scipy computes the same interval. A seed without a partner, or without a round, does not count."""
    for seed, (ours, theirs) in enumerate([(0.50, 0.41), (0.62, 0.55), (0.45, 0.47), (0.7, 0.6)]):
        make_run(tmp_path / "a" / str(seed), [ours], seed)
        make_run(tmp_path / "b" / str(seed), [theirs] if seed < 3 else [], seed)
    make_run(tmp_path / "a" / "4", [0.9], 4)
    a, b = (report.collect(report.below(tmp_path / name)) for name in "ab")
    differences = report.paired(a, b, "id_accuracy")
    assert differences == pytest.approx([9, 7, -2])
    low, high = ttest_rel([50, 62, 45], [41, 55, 47]).confidence_interval()
    assert report.show_difference(differences, "id_accuracy") == f"+4.7 ({low:+.1f} to {high:+.1f})"
    assert report.show_difference(differences[:1], "mE") == "+9.000"
    assert report.show_difference(differences[:0], "mE") == ""


def test_runs_that_differ_in_the_seed_alone_are_one_row(tmp_path):
    folders = [
        make_run(tmp_path / "a", [0.5], seed=1),
        make_run(tmp_path / "b", [0.7], seed=0),
        make_run(tmp_path / "c", [0.9], seed=0, lr=0.5),
        make_run(tmp_path / "d", [0.9], method="uefl"),
    ]
    found = report.compare(folders)
    assert {name: runs.seeds for name, runs in found.items()} == {
        "fedavg --lr 0.1": [0, 1],
        "fedavg --lr 0.5": [0],
        "uefl": [0],
    }
    assert report.compare([*folders, folders[0]]).keys() == found.keys(), "a run given twice counts once"
    assert report.compare([*folders, folders[0]])["fedavg --lr 0.1"].seeds == [0, 1]
    older = [make_run(tmp_path / name / "older", [0.1], method="uefl", **{name: 2}) for name in ("width", "depth")]
    names = {*found, "uefl (older)", f"uefl ({older[1].resolve()})"}
    assert set(report.compare([*folders, *older])) == names, "flags that only one of them has"
    assert report.show(found["fedavg --lr 0.1"].numbers("id_accuracy"), "id_accuracy") == "60.0 ± 14.1"


def test_a_comparison_leaves_a_picture(tmp_path, capsys):
    runs = [str(make_run(tmp_path / name, [0.1, 0.2], seed=i)) for i, name in enumerate("ab")]
    report.main([*runs, "--out", str(tmp_path / "report.png")])
    assert "15.0 ± 0.0" in capsys.readouterr().out
    assert (tmp_path / "report.png").stat().st_size > 5000


def test_flags_are_named_as_a_user_types_them(tmp_path):
    """Runs from before some flags were renamed have names, too."""
    flags = [{"token_norm": True, "silos": [3, 1]}, {"token_norm": False, "silos": [3, 1]}]
    old = [{"no_token_norm": True}, {"no_token_norm": False, "alpha": 0.5}]
    runs = [make_run(tmp_path / str(i), [0.5], method="uefl", **f) for i, f in enumerate(flags)]
    runs += [make_run(tmp_path / f"old{i}", [0.5], method="fedavg", **f) for i, f in enumerate(old)]
    assert list(report.compare(runs)) == [
        "uefl --token-norm", "uefl --no-token-norm", "fedavg --no-token-norm", "fedavg --token-norm",
    ]  # fmt: skip
    assert report.as_typed("silo_sizes", [3, 1]) == "--silo-sizes 3 1"


def test_a_baseline_may_have_other_rounds_with_another_seed(tmp_path):
    """uefl.py trains FedAvg for as many rounds as UEFL, and that depends on the seed."""
    runs = [make_run(tmp_path / str(n), [0.5] * n, seed=n, method="uefl", name="FedAvg") for n in (3, 4)]
    assert {name: found.seeds for name, found in report.compare(runs).items()} == {"FedAvg beside uefl": [3, 4]}


def test_an_unfinished_run_is_named(tmp_path, page, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.rmtree(tmp_path / "runs" / "hull" / "1")
    make_run(tmp_path / "runs" / "hull" / "1", [0.2, 0.8], seed=1, rounds=3)
    label = "seeds 0, 1 (seed 1 unfinished: 2 of 3 rounds)"
    assert f"| hull | {label} | 65.0 ± 21.2 |" in report.rebuild(page)
    assert "| random | seeds 0, 1 |" in report.rebuild(page)
    page.write_text(page.read_text().replace("last=2", "last=2 until=2"))
    assert "| hull | seeds 0, 1 |" in report.rebuild(page), "the first two rounds are all there"
    report.main(["runs/hull"])
    assert f"fedavg  {label}" in capsys.readouterr().out
    make_run(tmp_path / "runs" / "hull" / "2", [], seed=2, rounds=3)
    report.main(["runs/hull"])
    printed = capsys.readouterr().out
    assert "seeds 0, 1, 2 (seed 1 unfinished: 2 of 3 rounds, seed 2 unfinished: 0 of 3 rounds)" in printed


def test_printed_rows_are_narrow(tmp_path, monkeypatch, capsys):
    """Long names become letters, which are explained below the table."""
    monkeypatch.chdir(tmp_path)
    for lr in range(28):
        flags = {"lr": lr, "dirichlet": lr, "momentum": lr, "width": lr, "server_lr": lr, "event_threshold": lr}
        make_run(tmp_path / "runs" / str(lr), [lr / 100], **flags, rounds=1 + lr % 2)
    report.main(["runs", "--columns", "id_accuracy"])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) < 100
    start = next(i for i, line in enumerate(lines) if line.split()[:1] == ["A"])
    assert lines[start].split() == ["A", "0.0"]
    assert lines[start + 1].split() == ["B", "(unfinished)", "1.0"]
    assert len({line.split()[0] for line in lines[start : start + 28]}) == 28, "every row has its own letter"
    text = " ".join(line.strip() for line in lines)
    assert "A: fedavg --lr 0 --rounds 1 --dirichlet 0 --momentum 0" in text
    assert "(seed 0 unfinished: 1 of 2 rounds)" in text


def test_metrics_become_typed_rows(tmp_path):
    """As Run.rows holds them. The file may start with a byte-order mark, and its last line may be cut short."""
    file = tmp_path / "metrics.csv"
    file.write_bytes("\ufeffround,loss,selected,what\r\n1,,3 17,a b\r\n2,-1e-3,4,\r\n3,2".encode())
    assert report.read_metrics(file) == [
        {"round": 1, "loss": None, "selected": [3, 17], "what": "a b"},
        {"round": 2, "loss": -0.001, "selected": [4], "what": None},
    ]
    assert isinstance(report.read_metrics(file)[0]["selected"][0], int)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"round,id_accuracy\n1,0.5\n2\n", "metrics.csv: line 3 has 1 cells"),
        (b"round,id_accuracy\n1,0.5\n\n2,0.5\n", "metrics.csv: line 3 has 1 cells"),
        (b"round,id_accuracy\n1,0.5,7\n", "metrics.csv: line 2 has 3 cells"),
        (b"turn,id_accuracy\n1,0.5\n", "metrics.csv: line 2 has no number in the column `round`"),
        (b"round,id_accuracy\nx,0.5\n", "metrics.csv: line 2 has no number in the column `round`"),
        (b"round,id_accuracy\n1,0.5\n1,0.5\n", "metrics.csv: line 3 has a round that is not after the one before"),
        (b"\xff\xfe\x00\n", "metrics.csv cannot be read"),
        (b"round,id_accuracy\n", "no round yet"),
        (b"", "no round yet"),
    ],
)
def test_damaged_metrics(tmp_path, content, says):
    folder = make_run(tmp_path / "one", [0.5])
    (folder / "metrics.csv").write_bytes(content)
    with pytest.raises(UserError, match=says):
        report.main([str(folder), "--out", str(tmp_path / "new.png")])
    assert not (tmp_path / "new.png").exists()


@pytest.mark.parametrize(
    ("about", "says"),
    [
        ("{", "not the folder of a run"),
        ("[]", "does not hold the method and the flags"),
        ('{"flags": {"seed": 0, "rounds": 1}}', "does not hold the method and the flags"),
        ('{"method": "fedavg"}', "does not hold the method and the flags"),
        ('{"method": "fedavg", "flags": [0, 1]}', "does not hold the method and the flags"),
        ('{"method": "fedavg", "flags": {"seed": 0, "rounds": null}}', "rounds is None, not a whole number"),
        ('{"method": "fedavg", "flags": {"seed": 0}}', "rounds is None, not a whole number"),
        ('{"method": "fedavg", "flags": {"seed": "0", "rounds": 1}}', "seed is '0', not a whole number"),
    ],
)
def test_damaged_args(tmp_path, about, says):
    folder = make_run(tmp_path / "one", [0.5])
    (folder / "args.json").write_text(about)
    with pytest.raises(UserError, match=says) as error:
        report.main([str(folder), "--out", str(tmp_path / "new.png")])
    assert "one" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_full_disk_leaves_the_old_page_and_picture(tmp_path, page, monkeypatch):
    readme = tmp_path / "README.md"
    readme.write_text(page.read_text() + "\n<!-- curves runs id_accuracy -->\n![Curves (mean)](curves.png)\n")
    (tmp_path / "curves.png").write_text("old")
    before = readme.read_text()

    def full(path, *args, **kwargs):
        with open(path, "w") as f:
            f.write("half")
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        with pytest.raises(OSError, match="No space"):
            report.main([str(tmp_path)])
    assert readme.read_text() == before
    assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG", "the disk was full after the picture"
    (tmp_path / "curves.png").write_text("old")
    with monkeypatch.context() as patch:
        patch.setattr(report.Figure, "savefig", lambda self, file, **options: full(file))
        with pytest.raises(OSError, match="No space"):
            report.main([str(tmp_path)])
    assert (tmp_path / "curves.png").read_text() == "old"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["README.md", "curves.png", "page.md", "runs"]
    report.main([str(tmp_path)])
    assert "| hull | seeds 0, 1 | 77.5 ± 3.5 |" in readme.read_text()
    assert readme.read_text().endswith("![Curves (mean)](curves.png)\n")


def test_the_hull_is_drawn_from_the_rows(tmp_path):
    """A run from before `points` was a column leaves the picture as it is."""
    folder = make_run(tmp_path / "hull" / "0", [0.5, 0.6], method="convex_hull_select", hull_dim=2)
    page = tmp_path / "page.md"
    page.write_text("<!-- hull hull/0 -->\n![Hull](hull.gif)\n")
    (tmp_path / "hull.gif").write_text("old")
    assert report.rebuild(page) == page.read_text()
    assert (tmp_path / "hull.gif").read_text() == "old"
    (folder / "metrics.csv").write_text(
        "round,id_accuracy,ood_accuracy,selected,present,points\n"
        "1,0.5,0.4,0 1,0 1 2 3,0 0 1 0 0 1 1 1\n"
        "2,0.6,0.5,2,2,0.5 0.5\n"
    )
    report.rebuild(page)
    assert (tmp_path / "hull.gif").read_bytes()[:3] == b"GIF"


def test_a_claim_is_the_mean_of_the_paired_differences(page, tmp_path, capsys):
    """By hand: the last accuracies of hull and random differ by 0.8 - 0.5 and 0.7 - 0.5, so by 30 and 20 points.

    The interval is 25 +- 12.706 * sqrt(50) / sqrt(2) = 63.5, because t with 1 degree of freedom has 12.706 at 97.5 %.
    A third seed of hull has no partner.
    """
    make_run(tmp_path / "runs" / "hull" / "2", [0.0], seed=2)
    header = "label,claim,paper,test,answer,folder,row,against,column,last,best,cut,page\n"
    line = "a,Hull beats random,42,as many clients,holds,runs,hull,random,id_accuracy,1,,short,page.md\n"
    (tmp_path / "claims.csv").write_text(header + line + "b,Other,,,not tested,,,,,,,,\n")
    page.write_text("<!-- claims claims.csv -->\n\n<!-- pairs claims.csv -->\n![pairs](pairs.png)\n")
    lines = report.rebuild(page).splitlines()
    effect = "+25.0 (-38.5 to +88.5) points, 2 seeds"
    assert lines[3] == f"| Hull beats random | 42 | [as many clients](page.md) | holds | {effect} | short |"
    assert "not tested" in lines[4] and (tmp_path / "pairs.png").exists()


def test_a_claim_over_two_folders_is_the_mean_over_the_folders(page, tmp_path):
    """By hand: in `more`, both seeds are 10 points above random; in `runs`, they are 30 and 20: 20 and 15 together.

    Their mean is 17.5, and the interval is 17.5 +- 12.706 * sqrt(12.5) / sqrt(2) = 31.8. The rows have the means
    (80 + 40) / 2 and (70 + 40) / 2, and (50 + 30) / 2 twice.
    """
    for seed in (0, 1):
        make_run(tmp_path / "more" / "random" / str(seed), [0.3], seed)
        make_run(tmp_path / "more" / "hull" / str(seed), [0.4], seed)
    header = "label,paper,folder,row,against,column,last,best\n"
    lines = "a,,runs,hull,random,id_accuracy,1,\nboth,+3.0,runs more,hull,random,id_accuracy,1,\n"
    (tmp_path / "angles.csv").write_text(header + lines)
    page.write_text("<!-- differences angles.csv -->\n\n")
    assert report.rebuild(page).splitlines()[1:5] == [
        "|  | hull | random | difference | the paper reports |",
        "| --- | --- | --- | --- | --- |",
        "| a | 75.0 ± 7.1 | 50.0 ± 0.0 | +25.0 (-38.5 to +88.5) |  |",
        "| both | 57.5 ± 3.5 | 40.0 ± 0.0 | +17.5 (-14.3 to +49.3) | +3.0 |",
    ]


def test_a_claim_at_equal_samples(page, tmp_path):
    """By hand, with accuracies on straight lines, where the mean of five rounds is the middle one.

    The first run has 6 rounds of 2 clients with 10 samples: its middle rounds 3 and 4 end after 60 and 80 samples. The
    second has 10 rounds of 1 client: rounds 3 to 8 end after 30 to 80. So they meet at 80 samples, in rounds 4 and 8.
    """
    for seed, offset in enumerate([0.0, 0.1]):
        rows = {"a": [f"{t},{0.1 * t},10,0 1" for t in range(1, 7)]}
        rows["b"] = [f"{t},{0.04 * t + offset},10,{t}" for t in range(1, 11)]
        for name, lines in rows.items():
            folder = make_run(tmp_path / "work" / name / str(seed), [0.0], seed, name=name)
            header = "round,ood_accuracy,selected_size,selected"
            (folder / "metrics.csv").write_text("\n".join([header, *lines, ""]))
    header = "label,paper,folder,row,against,column,last,best,equal\n"
    (tmp_path / "work.csv").write_text(header + "work,,work,a,b,ood_accuracy,,,samples\n")
    page.write_text("<!-- differences work.csv -->\n\n<!-- curves work ood_accuracy x=samples -->\n![a](a.png)\n")
    line = report.rebuild(page).splitlines()[3]
    assert line.startswith("| work | 40.0 ± 0.0 | 37.0 ± 7.1 | +3.0 (")
    at, values = report.curve(report.collect(report.below(tmp_path / "work" / "a")), "ood_accuracy", "samples")
    assert at.tolist() == pytest.approx([0.02, 0.04, 0.06, 0.08, 0.10, 0.12])
    assert values[0] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])


def test_a_copied_run_does_not_count_twice(tmp_path):
    make_run(tmp_path / "one", [0.5])
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    with pytest.raises(UserError, match="one have the same flags and the same seed: leave one out"):
        report.main([str(tmp_path)])


def test_mistakes(tmp_path, page):
    one = str(make_run(tmp_path / "one", [0.5]))
    (tmp_path / "there.png").write_text("kept")
    (tmp_path / "empty").mkdir()
    for argv, says in [
        ([str(tmp_path / "empty")], "empty has no runs"),
        ([one, "--out", str(tmp_path / "there.png")], "there.png exists"),
        ([one, "--columns", "mA", "--out", str(tmp_path / "new.png")], "--columns mA: the runs have id_accuracy"),
        ([one, "--last", "0"], "--last: 0 is out of range"),
        ([one, "--out", str(tmp_path / "new.xyz")], "name a .png"),
        ([one, "--columns", "round", "name", "--out", str(tmp_path / "new.png")], "--columns name"),
    ]:
        with pytest.raises(UserError, match=says):
            report.main(argv)
    assert (tmp_path / "there.png").read_text() == "kept"
    page.write_text("<!-- table runs id_accuracy lost=2 -->\n\n")
    with pytest.raises(UserError, match="does not work"):
        report.rebuild(page)
    page.write_text("<!-- table runs id_accuracy against=nobody -->\n\n")
    with pytest.raises(UserError, match="no runs of nobody"):
        report.rebuild(page)
    page.write_text("<!-- curves runs id_accuracy -->\n")
    with pytest.raises(UserError, match="no link to a picture"):
        report.rebuild(page)
    page.write_text("<!-- table runs id_accuracy -->\n\n")
    (tmp_path / "runs" / "paper.csv").write_text("name,id_accuracy\nrandom,45\n")
    with pytest.raises(UserError, match="no column `row`"):
        report.rebuild(page)


def test_pictures_are_numbered(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "one", [0.5])
    for name in ("report.png", "report-2.png"):
        report.main(["one"])
        assert (tmp_path / name).exists()
