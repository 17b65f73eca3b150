"""The variations: each diff in docs/variations/ applies to the code, and passes its checks there.

The checks of docs/variations/NAME.diff are the tests in tests/variations/NAME.py. They run in a
process of their own, on a patched copy of the code. Of the diffs in results/controls/, whose
results are recorded, we only see that they apply.
"""

import compileall
import importlib
import io
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from unittest.mock import patch

import pytest
from matplotlib.figure import Figure

ROOT = Path(__file__).parent.parent  # not from helpers, which imports the code before it is patched
VARIATIONS, CONTROLS = ROOT / "docs/variations", ROOT / "results/controls"
NAMES = sorted(diff.stem for diff in VARIATIONS.glob("*.diff"))
TEXT = (VARIATIONS / "README.md").read_text()
SECTIONS = dict(re.findall(r"^## (\S+)\n(.*?)(?=^## |\Z)", TEXT, re.M | re.S))
LIBRARIES = ["torch", "torchvision", "scipy.cluster.vq", "scipy.spatial", "scipy.stats", "pytest"]
fresh = multiprocessing.get_context("forkserver")  # imports the slow libraries only once
fresh.set_forkserver_preload([*LIBRARIES, "matplotlib.backends.backend_agg"])


def apply(diff, tree):
    """Applies the diff to a copy of the code in this folder: git's complaint, or ""."""
    shutil.copytree(ROOT / "common", tree / "common", ignore=shutil.ignore_patterns("__pycache__"))
    for file in ROOT.glob("*.py"):
        shutil.copy(file, tree)
    alone = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tree.parent)}  # this is no repository
    command = ["git", "apply", diff]
    return subprocess.run(command, cwd=tree, env=alone, capture_output=True, text=True).stderr


def check(name, tree):
    """In a new process: what went wrong with README's commands or with the checks, or ""."""
    if complaint := apply(VARIATIONS / f"{name}.diff", tree):
        return f"docs/variations/{name}.diff no longer applies: {complaint}"
    (tree / "tests/variations").mkdir(parents=True)
    tests = [ROOT / f"tests/{file}.py" for file in ("conftest", "helpers", f"variations/{name}")]
    for file in [ROOT / "pytest.ini", *tests]:
        shutil.copy(file, tree / file.relative_to(ROOT))
    os.chdir(tree)
    sys.path.insert(0, str(tree))
    Figure.savefig = lambda self, file, **options: Path(file).touch()  # pictures take half the time
    with redirect_stdout(io.StringIO()) as report:
        for method, words in re.findall(r"python (\w+)\.py(.*)", SECTIONS[name]):
            module = importlib.import_module(method)
            with patch.object(module.compare, "run") as run:
                module.main(words.split())
                run.assert_called_once()
        code = pytest.main([f"tests/variations/{name}.py", "-q", "-p", "no:cacheprovider"])
    return report.getvalue() if code else ""


@pytest.fixture(scope="module")
def checks(tmp_path_factory):
    """What check() returns, by name. Two variations are checked at a time."""
    with fresh.Pool(2, maxtasksperchild=1) as pool:
        yield {
            name: pool.apply_async(check, (name, tmp_path_factory.mktemp(name))) for name in NAMES
        }


@pytest.mark.parametrize("name", NAMES)
def test_a_variation_applies_and_passes_its_checks(checks, name):
    wrong = checks[name].get()
    assert not wrong, wrong


def test_each_variation_has_its_paragraph_and_its_checks():
    checks = {file.stem for file in (ROOT / "tests/variations").glob("*.py")}
    assert set(SECTIONS) == set(NAMES) == checks
    assert all("    python " in text for text in SECTIONS.values())  # the command that uses it


@pytest.mark.parametrize("diff", sorted(CONTROLS.glob("*.diff")), ids=lambda diff: diff.stem)
def test_a_control_applies_and_has_its_paragraph(diff, tmp_path):
    assert not apply(diff, tmp_path)
    assert compileall.compile_dir(tmp_path, quiet=1)
    assert f"## {diff.stem}\n" in (CONTROLS / "README.md").read_text()
