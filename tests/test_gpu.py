"""These tests need a GPU: `pytest tests/test_gpu.py`. Among the other tests they are skipped."""

import subprocess
import sys

import pytest
import torch
from helpers import ROOT
from ranks import CALLS

from common.devices import set_up
from common.models import build
from common.train import LocalTraining, Trainer, local_solver

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


@pytest.mark.parametrize("name", ["cnn", "convnet", "resblocks"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_training_on_a_gpu_is_training_on_a_cpu(tiny, trainer, name, optimizer, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    local, deltas = LocalTraining(1, 16, 0.01, optimizer), []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        model = build(name, (1, 8, 8), 3, width=0.125)
        there = Trainer(tiny, trainer.clients, model, device, local)
        thetas, _ = there.train(local_solver, there.initial, torch.tensor([0]), 1)
        deltas.append((thetas - there.initial).cpu())
    error = (deltas[0] - deltas[1]).norm() / deltas[0].norm()
    assert error < (1e-4 if optimizer == "sgd" else 1e-2)  # Adam divides by rounding errors


@pytest.mark.parametrize("method", CALLS)
def test_a_run_on_a_gpu(start, method):
    folder = start(method, f"{CALLS[method]} --no-compare --device cuda")
    assert (folder / "model.pt").exists()
    start(method, "--resume run --device cuda")


def test_several_processes_share_a_gpu(tmp_path):
    """In programs of their own, because a process that has used a GPU cannot fork."""
    models = []
    for n in (1, 3):
        words = f"--rounds 2 --width 0.125 --no-compare --device cuda --processes {n} --out"
        program = [sys.executable, "fedavg.py", *words.split(), tmp_path / str(n)]
        subprocess.run(program, cwd=ROOT, check=True)
        models.append((tmp_path / str(n) / "model.pt").read_bytes())
    assert models[0] == models[1]


def test_auto_takes_the_gpu_and_the_precision_of_its_hardware():
    device, precision = set_up("auto", "auto", "resnet18")
    fast = torch.cuda.is_bf16_supported(False)
    assert (device.type, precision) == ("cuda", "bfloat16" if fast else "float32")
