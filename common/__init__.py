"""What the six methods share. The first lines of each module say what it is for."""

import sys
from zipfile import ZipFile, is_zipfile

import torch

if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11):
    print(f"torch {torch.__version__} is too old: install 2.11 or newer", file=sys.stderr)
    sys.exit(2)


class UserError(Exception):
    """A user's mistake. The message is one line: what is wrong, and what to do about it."""


class RunError(UserError):
    """One run cannot go on: it diverged, or its files are damaged. Runs with other seeds can."""


def first_line(error):
    """One line for an error of another library: its class and the first line of its message."""
    return f"{type(error).__name__}: {error}".splitlines()[0].rstrip(": ")


def few(names):
    """The first of these names, for a message."""
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


def one_of(name, options):
    """The same name. Raises UserError if it is none of these options."""
    if name not in options:
        raise UserError(f"{name!r} is none of {', '.join(options)}")
    return name


def check_tensor(name, value, dtype, dims):
    """Raises UserError if this is no tensor of this type with so many dimensions."""
    if not isinstance(value, torch.Tensor) or (value.dtype, value.dim()) != (dtype, dims):
        found = type(value).__name__
        if isinstance(value, torch.Tensor):
            found = f"{value.dtype} {[*value.shape]}"
        raise UserError(f"{name} must be a {dims}-dimensional tensor of {dtype}, not {found}")


def load_tensors(file, device="cpu"):
    """What torch.save has written. It runs no code of the file.

    Raises OSError if a checksum is wrong, at which torch.load does not look.
    """
    if is_zipfile(file) and ZipFile(file).testzip():
        raise OSError("it is damaged")
    return torch.load(file, device, weights_only=True)
