"""What takes minutes and is no part of CI: runs that are killed, a disk that fills up, files that are garbage.

pytest -m soak -s          # hypothesis, for the last of them, comes with: pip install hypothesis
"""

import argparse
import contextlib
import io
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import torch
from conftest import read_rows
from PIL import Image
from ranks import CALLS, child

import fedavg
from common import UserError, runs
from common.data import image_folder

pytestmark = pytest.mark.soak
HERE, KILLS = Path(__file__).parent, 20


def outcome(folder):
    rows = [{c: v for c, v in row.items() if c != "seconds"} for row in read_rows(folder)]
    return (folder / "model.pt").read_bytes(), rows


def outcomes(folder):
    """Of a run and its baselines, by name."""
    return {run.name: outcome(run) for run in folder.iterdir()}


def helpers_of(pid: int) -> list[int]:
    """The process ids of the helpers that this process has forked by now."""
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True).stdout
    return [int(helper) for helper in found.split()]


def works(pid: int) -> bool:
    """Whether this process exists. One that has ended, and whose end nobody has asked for yet, is a zombie, "Z"."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")")[-1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("method", CALLS)
def test_killed_at_any_moment_it_ends_with_the_same_bytes(method, tmp_path):
    """Each start has 1 to 3 processes, and a kill hits any one of them."""
    flags = [*CALLS[method].split(), "--rounds", "30"]
    flags += ["--later-rounds", "10"] if "--later-rounds" in flags else []
    began = time.monotonic()
    child(method, [*flags, "--out", "whole/run"], tmp_path).join()
    took, expected = time.monotonic() - began, outcomes(tmp_path / "whole")

    draw, kills, of_helpers, slowest, ends, folder = random.Random(0), 0, 0, 0.0, 0, tmp_path / "cut/run"
    while kills < KILLS or folder.exists():
        known = (folder / "args.json").exists()
        if not known:
            shutil.rmtree(folder.parent, ignore_errors=True)
        start = ["--resume", "cut/run"] if known else [*flags, "--out", "cut/run"]
        process = child(method, [*start, "--processes", str(draw.randint(1, 3))], tmp_path)
        process.join(draw.uniform(0, took / 2) if kills < KILLS else None)
        if process.is_alive():
            helpers = helpers_of(process.pid)
            victim = draw.choice([process.pid, *helpers])
            with contextlib.suppress(ProcessLookupError):  # a helper that has just come to its end
                os.kill(victim, signal.SIGKILL)
            began = time.monotonic()
            process.join(5)
            slowest = max(slowest, time.monotonic() - began)
            time.sleep(0.1)
            left = [helper for helper in helpers if works(helper)]
            assert not process.is_alive() and not left, (process, left)
            kills, of_helpers = kills + 1, of_helpers + (victim != process.pid)
        elif process.exitcode == 0:
            assert outcomes(folder.parent) == expected
            ends += 1
            shutil.rmtree(folder.parent)
        said = (tmp_path / "err").read_text()
        assert process.exitcode in (0, 1, -9) and "Traceback" not in said, said
        assert said.count(f"{method.__name__}.py: ") == said.count("killed by signal 9"), said
    print(f"{method.__name__}: {kills} kills, {of_helpers} of them of helpers, the slowest end after {slowest:.1f} s, "
          f"{ends} runs brought to their end, 0 differences")  # fmt: skip


@pytest.mark.parametrize("size", [8, 16, 24, 32, 40, 48, 64, 96])
def test_a_full_disk_ends_the_run_and_resume_goes_on(tmp_path, size):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("mounting a small disk takes root")
    try:
        flags = CALLS[fedavg].split()
        child(fedavg, [*flags, "--out", "whole"], tmp_path).join()
        full = child(fedavg, [*flags, "--out", str(disk / "run")], tmp_path)
        full.join()
        said = (tmp_path / "err").read_text().splitlines()[-1]
        assert full.exitcode == 1 and said.startswith("fedavg.py: ") and "Traceback" not in said
        print(f"disk of {size} kB: {said.replace(str(tmp_path), '')}")
        subprocess.run(["mount", "-o", "remount,size=50m", disk], check=True)
        again = child(fedavg, ["--resume", str(disk / "run")], tmp_path)
        again.join()
        assert again.exitcode == 0 and outcome(disk / "run") == outcome(tmp_path / "whole")
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_rank_that_dies_ends_the_run_and_its_checkpoint_is_good(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    env = {"PYTHONPATH": f"{HERE.parent}:{HERE}", "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    with open(tmp_path / "said", "w") as said:
        both = subprocess.Popen(
            [*torchrun, HERE / "ranks.py", tmp_path, "fedavg", "--rounds", "100000"], env=env, stderr=said
        )
    try:
        while not (tmp_path / "fedavg/checkpoint.pt").exists():
            assert both.poll() is None, (tmp_path / "said").read_text()
            time.sleep(0.1)
        ranks = subprocess.run(["pgrep", "-P", str(both.pid)], capture_output=True, text=True).stdout.split()
        began = time.monotonic()
        os.kill(int(ranks[-1]), signal.SIGKILL)
        assert both.wait(60) != 0 and "SIGKILL" in (tmp_path / "said").read_text()
        print(f"a rank died: the run ended after {time.monotonic() - began:.0f} s")
    finally:
        both.kill()
    state = torch.load(tmp_path / "fedavg/checkpoint.pt")["state"]
    assert state["round"] >= 1 and state["w"].isfinite().all()


def fuzz(read, strategy, seconds):
    """Calls read(example) for so many seconds; anything but success or UserError is a failure."""
    hypothesis = pytest.importorskip("hypothesis")
    found, until = {"read": 0, "refused": 0}, time.monotonic() + seconds

    @hypothesis.settings(
        max_examples=300, deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck)
    )
    @hypothesis.given(strategy)
    def once(example):
        try:
            read(example)
            found["read"] += 1
        except UserError:
            found["refused"] += 1

    while time.monotonic() < until:
        once()
    print(f"{read.__name__}: {found}")
    assert min(found.values()) > 0


def torn(whole):
    """Strategy: this file with bytes changed, cut off or put in, or no such file at all."""
    st = pytest.importorskip("hypothesis.strategies")
    places = st.lists(st.tuples(st.integers(0, len(whole)), st.binary(max_size=8)), max_size=4)

    def tear(cuts_and_end):
        cuts, end = cuts_and_end
        torn_file = bytearray(whole[:end])
        for at, what in cuts:
            torn_file[at : at + len(what)] = what
        return bytes(torn_file)

    return st.one_of(st.tuples(places, st.integers(0, len(whole)) | st.just(len(whole))).map(tear), st.binary())


SECONDS = 120


def test_image_folders_that_are_garbage(tmp_path):
    picture = io.BytesIO()
    Image.new("RGB", (9, 7), (200, 30, 30)).save(picture, "png")
    (tmp_path / "pets/a/cat").mkdir(parents=True)

    def read_images(content):
        (tmp_path / "pets/a/cat/1.png").write_bytes(content)
        image_folder(tmp_path / "pets", 8)

    fuzz(read_images, torn(picture.getvalue()), SECONDS)


def test_checkpoints_that_are_garbage(tmp_path):
    """Only the bytes that were written are read. All others are refused, whatever they look like."""
    about = {"version": runs.VERSION, "data": 7, "flags": {"lr": 0.1}}
    run = runs.Run.__new__(runs.Run)
    run.about, run.trainer, run.rows = about, argparse.Namespace(device="cpu"), [{"round": 3}]
    run.folder = tmp_path
    run.save({"round": 3, "w": torch.arange(9.0)})
    whole = (tmp_path / "checkpoint.pt").read_bytes()
    assert zipfile.is_zipfile(tmp_path / "checkpoint.pt")

    def read_checkpoint(content):
        (tmp_path / "checkpoint.pt").write_bytes(content)
        assert run._read(tmp_path / "checkpoint.pt")["state"]["w"].tolist() == list(range(9)) and content == whole

    fuzz(read_checkpoint, torn(whole), SECONDS)
