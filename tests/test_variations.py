"""The variations: each diff in docs/variations/ applies to the code, and passes its checks there.

The checks of docs/variations/NAME.diff are the tests in tests/variations/NAME.py. They run in a
process of their own, on a patched copy of the code.
"""

import importlib
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

ROOT = Path(__file__).parent.parent
VARIATIONS = ROOT / "docs/variations"
NAMES = sorted(diff.stem for diff in VARIATIONS.glob("*.diff"))
TEXT = (VARIATIONS / "README.md").read_text()
SECTIONS = dict(re.findall(r"^## (\S+)\n(.*?)(?=^## |\Z)", TEXT, re.M | re.S))
LIBRARIES = ["torch", "torchvision", "scipy.cluster.vq", "scipy.spatial", "scipy.stats", "pytest"]
fresh = multiprocessing.get_context("forkserver")  # imports the slow libraries only once
fresh.set_forkserver_preload([*LIBRARIES, "matplotlib.backends.backend_agg"])


def check(tree: Path, name: str) -> None:
    """In a new process: exits with 0 if README's commands are accepted and all checks pass."""
    os.chdir(tree)
    sys.path.insert(0, str(tree))
    Figure.savefig = lambda self, file, **options: Path(file).touch()  # pictures take half the time
    with open("report", "w") as report, redirect_stdout(report):
        for method, words in re.findall(r"python (\w+)\.py(.*)", SECTIONS[name]):
            module = importlib.import_module(method)
            with patch.object(module, "compare") as compare:
                module.main(words.split())
                compare.assert_called_once()
        sys.exit(pytest.main([f"tests/variations/{name}.py", "-q", "-p", "no:cacheprovider"]))


@pytest.mark.parametrize("name", NAMES)
def test_a_variation_applies_and_passes_its_checks(name, tmp_path):
    tree = tmp_path / "tree"
    shutil.copytree(ROOT / "common", tree / "common", ignore=shutil.ignore_patterns("__pycache__"))
    (tree / "tests/variations").mkdir(parents=True)
    checks = [ROOT / "tests/variations" / f"{file}.py" for file in ("by_hand", name)]
    for file in [*ROOT.glob("*.py"), ROOT / "pytest.ini", ROOT / "tests/conftest.py", *checks]:
        shutil.copy(file, tree / file.relative_to(ROOT))
    alone = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tree.parent)}  # not in a repository
    diff = VARIATIONS / f"{name}.diff"
    git = subprocess.run(
        ["git", "apply", diff], cwd=tree, env=alone, capture_output=True, text=True
    )
    assert git.returncode == 0, f"docs/variations/{name}.diff no longer applies: {git.stderr}"
    process = fresh.Process(target=check, args=(tree, name))
    process.start()
    process.join()
    assert process.exitcode == 0, (tree / "report").read_text()


def test_each_variation_has_its_paragraph_and_its_checks():
    checks = {file.stem for file in (ROOT / "tests/variations").glob("*.py")} - {"by_hand"}
    assert set(SECTIONS) == set(NAMES) == checks
    assert all("    python " in text for text in SECTIONS.values()), "the command that uses it"
