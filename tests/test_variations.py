"""The diffs: each applies to the code, where its page's commands run and its checks pass.

The checks of NAME.diff are the tests in tests/variations/NAME.py. All this is in a process of its
own, on a patched copy of the code. What a control's diff of one line does can be read in it.
"""

import importlib
import io
import multiprocessing
import os
import re
import runpy
import shutil
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from matplotlib.figure import Figure

ROOT = Path(__file__).parent.parent  # not from helpers, which imports the code before it is patched
VARIATIONS, CONTROLS = ROOT / "docs/variations", ROOT / "results/controls"
DIFFS = {diff.stem: diff for place in (VARIATIONS, CONTROLS) for diff in place.glob("*.diff")}
TEXT = "".join((place / "README.md").read_text() for place in (VARIATIONS, CONTROLS))
SECTIONS = dict(re.findall(r"^## (\S+)\n(.*?)(?=^#|\Z)", TEXT, re.M | re.S))
SLOW = ["torch", "torchvision", "scipy.stats", "matplotlib.backends.backend_agg", "pytest"]
fresh = multiprocessing.get_context("forkserver")
fresh.set_forkserver_preload(SLOW)  # imports these only once


def apply(name, tree):
    """Applies this diff to a copy of the code in this folder."""
    left_out = shutil.ignore_patterns(".*", "runs", "data", "__pycache__")
    shutil.copytree(ROOT, tree, ignore=left_out, dirs_exist_ok=True)
    alone = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tree.parent)}  # this is no repository
    subprocess.run(["git", "apply", DIFFS[name]], cwd=tree, env=alone, check=True)


def check(name, tree):
    """In a new process: runs the commands, for two rounds. Says what fails in the checks, or ""."""
    os.chdir(tree)
    sys.path.insert(0, str(tree))
    torch.set_num_threads(1)  # as launch() does, with which the page's commands begin
    Figure.savefig = lambda self, file, **options: Path(file).touch()  # pictures take half the time
    compare = importlib.import_module("common.runner.compare")
    run, short = compare.run, dict(rounds=2, later_rounds=1, local_steps=1, local_epochs=None)
    short |= dict(width=0.1, silo_size=100, seeds=[0], compare=False, device="cpu")

    def run_briefly(args, *rest):
        if args.dataset != "shakespeare":  # which its checks replace
            name = args.dataset if args.dataset == "colours" else "glyphs"
            run(compare.changed(args, dataset=name, **short), *rest)

    for new, old in re.findall(r"    patch -o (\S+) (\S+) ", SECTIONS[name]):
        subprocess.run(["patch", "-o", new, ROOT / old, DIFFS[name]], check=True)
        assert Path(new).read_text() == Path(old).read_text()
    with redirect_stdout(io.StringIO()) as report:
        with patch.object(compare, "run", run_briefly):
            for command in re.findall(r"    python (.*)", SECTIONS[name]):
                command = command.replace("-m results.report", "results/report.py")
                file, *sys.argv[1:] = command.split()
                runpy.run_path(str(tree / file))["main"]()
        checks = f"tests/variations/{name}.py"
        code = Path(checks).exists() and pytest.main([checks, "-q", "-p", "no:cacheprovider"])
    return report.getvalue() if code else ""


@pytest.mark.parametrize("name", sorted(DIFFS))
def test_a_diff_applies_and_does_what_its_page_says(name, tmp_path):
    apply(name, tmp_path)
    with ProcessPoolExecutor(1, fresh) as process:  # raises an error if the process dies
        wrong = process.submit(check, name, tmp_path).result()
    assert not wrong, wrong


def test_each_diff_has_its_paragraph_and_each_variation_its_checks():
    checks = {file.stem for file in (ROOT / "tests/variations").glob("*.py")}
    assert {*SECTIONS} == {*DIFFS} and {diff.stem for diff in VARIATIONS.glob("*.diff")} <= checks
    assert all("    python " in text for text in SECTIONS.values())  # the command that uses it
