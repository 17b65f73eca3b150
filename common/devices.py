"""On which device a run computes, in which precision, and with which random numbers."""

import random
from contextlib import contextmanager

import numpy as np
import torch

from common import UserError, first_line, models, random_at, ranks


def set_up(device, precision, model):
    """The device and the precision that these names, or `auto`, mean here.

    Sets what holds for the whole program, too: one thread if launch() runs it, each rank's GPU, and
    the choices of cuDNN.

    device     with `auto` (a GPU if there is one) or `cuda`, each rank has one
    precision  `auto` takes bfloat16 if the hardware multiplies in it, else float32. On a GPU it
               takes float32 for the models of models.OWN, too: they are so small that starting a
               kernel takes longer than its work, and each cast to bfloat16 is a kernel. In float32,
               a GPU's convolutions round their factors to 10 bits, as is PyTorch's default

    Raises UserError if the device does not exist.
    """
    if ranks.may_fork:  # threads do not survive a fork, and would change the last digits
        torch.set_num_threads(1)
    found = _device(device)
    on_gpu = found.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(found)
        torch.backends.cudnn.deterministic = True  # a resumed run must end with the same bytes
    if precision == "auto":
        if on_gpu:
            fast = model not in models.OWN and torch.cuda.is_bf16_supported(False)
        else:
            can = torch.cpu.get_capabilities()
            fast = can.get("avx512_bf16") or can.get("amx_bf16")
        precision = "bfloat16" if fast else "float32"
    return found, precision


def _device(name):
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and ranks.COUNT > 1:
        name = f"cuda:{ranks.LOCAL_RANK}"
    try:
        device = torch.ones(1, device=name).device  # cuda becomes cuda:0
        if device.type not in ("cpu", "cuda"):
            raise RuntimeError("only cpu and cuda were tried")
    except (RuntimeError, AssertionError) as e:
        raise UserError(f"--device {name} cannot be used ({first_line(e)}): choose cpu") from e
    return device


def seed_all(seed, purpose, *where):
    """Starts the global generators of random, numpy and torch at this address (see random_at).

    Nothing in this project draws from the first two, but a line that somebody adds may do so.
    """
    rng = random_at(seed, purpose, *where)
    torch.manual_seed(int(rng.integers(2**63)))
    random.seed(int(rng.integers(2**63)))
    np.random.seed(rng.integers(2**32, size=4))


@contextmanager
def seeded(device, seed, purpose, *where):
    """Inside, the global generators start at this address, and afterwards they go on as before."""
    of_random, of_numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        seed_all(seed, purpose, *where)
        try:
            yield
        finally:
            random.setstate(of_random)
            np.random.set_state(of_numpy)
