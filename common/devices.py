"""On which device a run computes, and in which precision."""

import torch

from common import UserError, first_line, models, ranks


def set_up(device, precision, model):
    """The device and the precision that these names, or `auto`, mean here.

    Sets what holds for the whole program, too: one thread if launch() runs it, each rank's GPU, and
    the choices of cuDNN.

    device     with `auto` (a GPU if there is one) or `cuda`, the ranks share the GPUs evenly
    precision  `auto` takes bfloat16 if the hardware multiplies in it, else float32. On a GPU it
               takes float32 for the models of models.OWN, too: most are so small that starting a
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
    gpus = torch.cuda.device_count()
    if name == "auto":
        name = "cuda" if gpus else "cpu"
    if name.startswith("cuda") and not gpus:
        raise UserError(f"--device {name}: no GPU was found: choose cpu")
    if name == "cuda":  # ranks may share one
        name = f"cuda:{ranks.LOCAL_RANK % gpus}"
    try:
        device = torch.ones(1, device=name).device
        if device.type not in ("cpu", "cuda"):
            raise RuntimeError("only cpu and cuda were tried")
    except (RuntimeError, AssertionError) as e:
        raise UserError(f"--device {name} cannot be used ({first_line(e)}): choose cpu") from e
    return device
