"""What a reader relies on: the papers' lines stand in the code, and docs/ shows it as it is."""

import doctest
import importlib
import re

import pytest
from helpers import METHODS, ROOT, drawn, loss_and_gradient, make_tiny, prepared, read_rows

import common.data
import fediir
from common.runner.measures import MEASURES
from docs import lines, penalty

PAGES = dict.fromkeys(METHODS, "")  # of a new method without a page, a test says what is missing
PAGES |= {page.stem: page.read_text() for page in sorted(ROOT.glob("docs/*.md"))}
SNIPPETS = [
    (name, *found)
    for name, text in {**PAGES, "../README": (ROOT / "README.md").read_text()}.items()
    for found in re.findall(r"```python\n# (\S+\.py)\n(.*?)```", text, re.S)
]


@pytest.mark.parametrize("method", METHODS)
def test_a_page_shows_the_papers_lines_beside_the_code(method):
    """So each line of the listing in the docstring has a comment, such as `# line 9`."""
    page = PAGES[method]
    assert lines.MARK in page, f"docs/{method}.md has no {lines.MARK}"
    assert lines.build(method, page) == page, "run python docs/lines.py"
    assert page.split(lines.MARK)[1].count("\n| ") >= 6


@pytest.mark.parametrize("method", METHODS)
def test_the_difference_in_a_docstring_is_that_on_its_page(method):
    doc = " ".join(importlib.import_module(method).__doc__.split())
    (found,) = re.findall(r"by ([+-][\d.]+ \([^)]*\)) points \((\d+) seeds", doc)
    assert f"| {' | '.join(found)} |" in PAGES[method]


def dense(code):
    """The code without spaces, line breaks and trailing commas, which a formatter may move."""
    return re.sub(r",(?=[)\]}])", "", "".join(code.split()))


@pytest.mark.parametrize(("page", "file", "snippet"), SNIPPETS)
def test_a_snippet_stands_in_its_file(page, file, snippet):
    """Part after part, where a line "..." leaves lines out."""
    source, at = dense((ROOT / file).read_text()), 0
    for part in re.split(r"^ *\.\.\.\n", snippet, flags=re.M):
        at = source.find(dense(part), at)
        assert at >= 0, f"docs/{page}.md shows what {file} does not have:\n{part}"


@pytest.mark.parametrize("page", [name for name, text in PAGES.items() if ">>> " in text])
def test_the_toy_prints_what_the_page_shows(page):
    blocks, report = re.findall(r"```python\n(>>> .*?)```", PAGES[page], re.S), []
    toy = "\n".join(blocks)
    found = doctest.DocTestParser().get_doctest(toy, {}, page, f"docs/{page}.md", 0)
    assert PAGES[page].count("\n>>> ") == len(found.examples)  # a block of the toy begins with >>>
    assert doctest.DocTestRunner().run(found, out=report.append).failed == 0, "".join(report)


def test_the_code_of_the_page_about_python_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    loop, *whole_runs = re.findall(r"```python\n(.*?)```", PAGES["python"], re.S)
    names = {}
    exec(loop.replace("--rounds 10", "--rounds 1"), names)
    assert names["state"]["t"] == 1 and names["state"]["table"].shape[0] == 80
    monkeypatch.setattr(common.data, "load", lambda *args: make_tiny())
    learns = "--precision float32 --no-compare --clients 4 --dirichlet 100 --local-epochs 20"
    for block in whole_runs:
        exec(block.replace("--rounds 3", f"--rounds 3 {learns}"), names)
    digits, row = names["digits"], read_rows(tmp_path / "runs/first/seed1")[-1]
    right = (names["answers"] == digits.y[digits.test]).float().mean().item()
    assert right == pytest.approx(float(row["ood_accuracy"]), abs=1e-6)  # loaded again


def test_the_program_about_fediirs_limits_measures_the_disagreement(monkeypatch, capsys):
    """In round 1, on a tenth of the digits."""
    monkeypatch.setattr("common.glyphs.glyphs", lambda *n: drawn(*(count // 10 for count in n)))
    penalty.main(32, "all", 400, rounds=1)
    charged = float(re.search(r"charged: (\S+)", capsys.readouterr().out)[1])
    *_, clients, trainer = prepared(fediir, "--seed 400")
    q = sum(p.numel() for p in trainer.model.classifier.parameters())  # these come last
    one, two = (loss_and_gradient(trainer, trainer.initial, k)[1][-q:] for k in clients.train)
    distance = (one - two).square().sum() / 4  # of each from their mean
    assert charged == pytest.approx(50 / 2 * distance.item(), abs=0.001)


@pytest.mark.parametrize("method", METHODS)
def test_the_flags_on_a_page_are_accepted(method, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program, seen = importlib.import_module(method), []
    monkeypatch.setattr(program.compare, "run", lambda args, *rest, **more: seen.append(args))
    pages = PAGES[method] + PAGES.get(f"{method}_paper", "")
    commands = re.findall(r"`(--[a-z-]+ [^`]+|--no-[a-z-]+)`", pages)
    for words in commands:
        program.main(words.split())
    assert len(seen) == len(commands) >= 3


@pytest.mark.parametrize("method", METHODS)
def test_every_column_of_the_metrics_is_explained(method, start):
    flags = "--test-domain dark --clients 1 --width 0.1 --rounds 1 --local-epochs 1"
    flags += " --sample 1" * (method != "uefl")  # where all clients train
    folder = start(importlib.import_module(method), f"{flags} --no-compare")
    explained = " ".join(re.findall(r"^\| (`.*?) \|", PAGES["metrics"], re.M))
    names = {*re.findall(r"`(\w+)`", explained)}
    columns = {*read_rows(folder)[0], *MEASURES}
    assert columns <= names, "a column has no row in docs/metrics.md"


def anchors(text):
    """The anchors that GitHub makes of the headings."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


PLACES = "*.md", "docs/**/*.md", "results/**/*.md", "docs/*.ipynb"
LINKED = [page for glob in PLACES for page in ROOT.glob(glob)]


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_resolve(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if not link.startswith("http"):
            name, _, anchor = link.partition("#")
            target = page.parent / name if name else page
            assert target.exists(), f"{page} links to {link}"
            if target.suffix == ".md" and anchor:
                assert anchor in anchors(target.read_text()), f"{page} links to {link}"


def test_what_a_round_needs_does_not_depend_on_what_surrounds_a_run():
    for file in (ROOT / "common").glob("*.py"):
        assert "common.runner" not in file.read_text(), f"{file.name} imports from common/runner/"
