"""The trained model of any run, in one line."""

import json
from argparse import Namespace
from importlib import import_module
from pathlib import Path

import torch
import torch.nn as nn

from common import UserError, first_line
from common.runner.setup import build_model


def load(folder: str | Path) -> nn.Module:
    """The model of the run in this folder, with the weights of model.pt, in evaluation mode.

    With --pretrained, the file of those weights must still be there. Raises UserError if the folder
    has no model.
    """
    try:
        about = json.loads((Path(folder) / "args.json").read_text())
        args, shape, classes = Namespace(**about["flags"]), about["shape"], about["classes"]
        weights = torch.load(Path(folder) / "model.pt", map_location="cpu", weights_only=True)
    except (OSError, ValueError, KeyError, TypeError) as e:
        why = first_line(e)
        raise UserError(f"{folder} has no model; name a run, like NAME/seed1 ({why})") from e
    build = getattr(import_module(args.method), "build_model", build_model)  # UEFL has its own
    model = build(args, tuple(shape), len(classes))
    for name, tensor in model.state_dict(keep_vars=True).items():
        tensor.data = weights[name]  # UEFL's codebook grows
    return model.eval()
