"""What takes minutes: runs that are killed, and a disk that fills up.

pytest -m soak
"""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from helpers import outcome
from ranks import CALLS, child

import fedavg

pytestmark = pytest.mark.soak
KILLS = 20


def outcomes(folder):
    """Of a run and its baselines, by name."""
    return {run.name: outcome(run) for run in folder.iterdir()}


def ranks_of(pid):
    """The process ids of the ranks that this process has forked by now."""
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True).stdout
    return [*map(int, found.split())]


def works(pid):
    """Whether this process runs. One that has ended is a zombie, "Z", until it is joined."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")")[-1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("method", CALLS)
def test_killed_at_any_moment_it_ends_with_the_same_bytes(method, tmp_path):
    """Each start has 1 to 3 processes, and a kill or a SIGTERM hits any one of them."""
    flags = f"{CALLS[method]} --rounds 30 "
    flags += "--later-rounds 10 " if "--later-rounds" in flags else ""
    began = time.monotonic()
    child(method, flags + "--out whole/run", tmp_path).join()
    took, expected = time.monotonic() - began, outcomes(tmp_path / "whole")

    draw, folder, kills = random.Random(0), tmp_path / "cut/run", 0
    while kills < KILLS or folder.exists():
        more = f"--out cut/run --resume --processes {draw.randint(1, 3)}"
        process = child(method, flags + more, tmp_path)
        process.join(draw.uniform(0, took / 2) if kills < KILLS else None)
        if process.is_alive():
            ranks = ranks_of(process.pid)
            victim = draw.choice([process.pid, *ranks])
            with contextlib.suppress(ProcessLookupError):  # a rank that has just come to its end
                os.kill(victim, draw.choice([signal.SIGKILL, signal.SIGTERM]))
            process.join(5)
            time.sleep(0.1)
            left = [rank for rank in ranks if works(rank)]
            assert not process.is_alive() and not left, (process, left)
            kills += 1
        elif process.exitcode == 0:
            assert outcomes(folder.parent) == expected
            shutil.rmtree(folder.parent)
        said = (tmp_path / "err").read_text()
        assert process.exitcode in (0, 1, 130, -9) and "Traceback" not in said, said


@pytest.mark.parametrize("size", [8, 16, 24, 32, 40])
def test_a_full_disk_ends_the_run_and_resume_goes_on(tmp_path, size):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", disk]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small disk takes root")
    try:
        child(fedavg, f"{CALLS[fedavg]} --out whole", tmp_path).join()
        full = child(fedavg, f"{CALLS[fedavg]} --out {disk}/run", tmp_path)
        full.join()
        said = (tmp_path / "err").read_text()
        assert full.exitcode == 1 and "Traceback" not in said
        assert said.splitlines()[-1].startswith("fedavg.py: ")
        subprocess.run(["mount", "-o", "remount,size=50m", disk], check=True)
        again = child(fedavg, f"--resume {disk}/run", tmp_path)
        again.join()
        assert again.exitcode == 0 and outcome(disk / "run") == outcome(tmp_path / "whole")
    finally:
        subprocess.run(["umount", disk], check=True)
