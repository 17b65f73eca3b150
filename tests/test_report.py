"""python -m common.report: what it counts, what it says of it, and that the pages say what the runs gave."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from common import UserError, report

ROOT = Path(__file__).parents[1]


def make_run(folder: Path, accuracies: list[float], seed: int = 0, method: str = "fedavg", **flags) -> Path:
    folder.mkdir(parents=True)
    about = {"method": method, "flags": {"seed": seed, "out": str(folder), "lr": 0.1, **flags}}
    (folder / "args.json").write_text(json.dumps(about))
    rows = [f"{t},{accuracy},{1 - accuracy}" for t, accuracy in enumerate(accuracies, start=1)]
    (folder / "metrics.csv").write_text("\n".join(["round,id_accuracy,ood_accuracy", *rows, ""]))
    return folder


@pytest.fixture
def page(tmp_path):
    """A page with a table of two rows, two seeds each, beside a paper's."""
    make_run(tmp_path / "runs" / "random" / "0", [0.1, 0.3, 0.5])
    make_run(tmp_path / "runs" / "random" / "1", [0.1, 0.5, 0.5], seed=1)
    make_run(tmp_path / "runs" / "hull" / "0", [0.2, 0.8, 0.8])
    make_run(tmp_path / "runs" / "hull" / "1", [0.2, 0.8, 0.7], seed=1)
    (tmp_path / "runs" / "paper.csv").write_text("row,id_accuracy\nrandom,45.0 ± 0.5\nhull,70 ± 1\nfull,99\n")
    page = tmp_path / "page.md"
    page.write_text("Text.\n\n<!-- table runs id_accuracy last=2 against=random -->\nold\n\nMore.\n")
    return page


def test_a_table_is_built_in_place_of_the_old_one(page):
    """The means by hand: hull's runs have 80 and 75 over the last two rounds, so 77.5 and sqrt(12.5) = 3.5."""
    assert report.rebuild(page).splitlines() == [
        "Text.",
        "",
        "<!-- table runs id_accuracy last=2 against=random -->",
        "|  | runs | ID | paper's ID | verdict |",
        "| --- | --- | --- | --- | --- |",
        "| random | seeds 0, 1 | 45.0 ± 7.1 | 45.0 ± 0.5 | within |",
        "| hull | seeds 0, 1 | 77.5 ± 3.5 | 70 ± 1 | above; as in the paper, above random |",
        "| full |  |  | 99 | not run |",
        "",
        "More.",
    ]


def test_the_committed_pages_say_what_the_runs_gave():
    pages = [ROOT / "README.md", *sorted((ROOT / "results").rglob("*.md"))]
    assert sum(page.read_text().count("<!-- table ") for page in pages) > 5
    for page in pages:
        assert report.rebuild(page, draw=False) == page.read_text(), f"{page}: run python -m common.report results/"


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
    """Mean of the last, up to a round, and at the best of another column, all by hand."""
    runs = report.collect([make_run(tmp_path / "a", [0.1, 0.9, 0.2, 0.6])])
    assert runs.numbers("id_accuracy", last=2) == pytest.approx([40.0])
    assert runs.numbers("id_accuracy", last=2, until=3) == pytest.approx([55.0])
    assert runs.numbers("ood_accuracy", best="id_accuracy") == pytest.approx([10.0])
    assert np.isnan(runs.numbers("mE")).all()


@pytest.mark.parametrize(
    ("ours", "theirs", "base", "their_base", "said"),
    [
        ([50, 51], "50 ± 1", None, "", "within"),
        ([48, 49], "50 ± 1", None, "", "below"),
        ([52, 53], "50 ± 1", [40, 41], "45", "above; as in the paper, above random"),
        ([52, 53], "50 ± 1", [40, 41], "55", "above; not as in the paper, above random"),
        ([40, 41], "50 ± 1", [52, 53], "55", "below; as in the paper, below random"),
        ([50, 51], "50 ± 1", [40, 60], "45", "within; level with random"),
        ([50, 51], "", [40, 41], "", "above random"),
        ([50], "", [40.5], "", "+9.5 to random, one seed"),
    ],
)
def test_verdicts(ours, theirs, base, their_base, said):
    base = None if base is None else np.array(base, dtype=float)
    assert report.verdict(np.array(ours, dtype=float), theirs, base, their_base, "random") == said


def test_runs_that_differ_in_the_seed_alone_are_one_row(tmp_path):
    folders = [
        make_run(tmp_path / "a", [0.5], seed=0),
        make_run(tmp_path / "b", [0.7], seed=1),
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
    older = make_run(tmp_path / "older", [0.1], method="uefl", width=2)
    assert set(report.compare([*folders, older])) == {*found, "uefl (older)"}, "flags that only one of them has"
    assert report.show(found["fedavg --lr 0.1"].numbers("id_accuracy"), "id_accuracy") == "60.0 ± 14.1"


def test_a_comparison_leaves_a_picture(tmp_path, capsys):
    runs = [str(make_run(tmp_path / name, [0.1, 0.2], seed=i)) for i, name in enumerate("ab")]
    report.main([*runs, "--out", str(tmp_path / "report.png")])
    assert "15.0 ± 0.0" in capsys.readouterr().out
    assert (tmp_path / "report.png").stat().st_size > 5000


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
    with pytest.raises(UserError, match="cannot be read"):
        report.rebuild(page)
    page.write_text("<!-- table runs id_accuracy against=nobody -->\n\n")
    with pytest.raises(UserError, match="no runs of nobody"):
        report.rebuild(page)
    (tmp_path / "one" / "args.json").write_text("{")
    with pytest.raises(UserError, match="not the folder of a run"):
        report.main([one, "--out", str(tmp_path / "new.png")])


def test_pictures_are_numbered(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "one", [0.5])
    for name in ("report.png", "report-2.png"):
        report.main(["one"])
        assert (tmp_path / name).exists()
