"""On which device a run computes, in which precision, with which memory and random numbers."""

import ctypes
import os
from contextlib import contextmanager

import torch

from common import UserError, first_line, random_at, ranks

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h


def keep_freed_memory() -> None:
    """Stops glibc from returning freed memory, so that each batch reuses the last one's buffers.

    On CIFAR-10 with batches of 128, the system took 2, 3 and 2 s of a run with it, and 16, 2 and
    25 s without it, beside 30 to 38 s of the program itself.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    sizes = (1 << 30, 1 << 25)  # old versions refuse the first
    if mallopt and any(mallopt(M_MMAP_THRESHOLD, size) for size in sizes):
        mallopt(M_TRIM_THRESHOLD, 1 << 30)


def pick_device(name: str) -> torch.device:
    """The device of this name. With `auto` (a GPU if there is one) or `cuda`, each rank has one.

    Raises UserError if the device does not exist.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if ranks.COUNT > 1 and name == "cuda":
        name = f"cuda:{ranks.RANK % max(1, torch.cuda.device_count())}"
    try:
        device = torch.ones(1, device=name).device  # cuda becomes cuda:0
        if device.type not in ("cpu", "cuda"):
            raise RuntimeError("only cpu and cuda were tried")
    except (RuntimeError, AssertionError) as e:
        why = first_line(e)[:120]
        raise UserError(f"--device {name} cannot be used ({why}): choose auto or cpu") from e
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cudnn.deterministic = True  # a resumed run must end with the same bytes
        torch.backends.cudnn.allow_tf32 = False  # float32 means float32
    return device


def pick_precision(name: str, device: torch.device) -> str:
    """`auto` means bfloat16 if the hardware multiplies in bfloat16, else float32."""
    if name != "auto":
        return name
    if device.type == "cuda":
        has_it = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        can = torch.cpu.get_capabilities()
        has_it = can.get("avx512_bf16") or can.get("amx_bf16")
    return "bfloat16" if has_it else "float32"


@contextmanager
def seeded(device: torch.device, seed: int, purpose: str, *where: int):
    """Inside, torch's global generators, for dropout and initialisation, start at this address."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(int(random_at(seed, purpose, *where).integers(2**63)))
        yield
