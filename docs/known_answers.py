"""Checks your own function: python docs/known_answers.py fediir my_project.losses:penalty

This calls the function penalty of my_project/losses.py with what docs/known_answers.json gives, and
says of each number whether it is right, which mistake gives it, or how it differs. See
docs/known_answers.md. Exit codes: 0 if all is right, 1 if not, 2 if the function cannot be called.
"""

import importlib
import json
import sys
import traceback
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn

ANSWERS = json.loads(Path(__file__).with_suffix(".json").read_text())


def tensor(given):
    return torch.tensor(given, dtype=torch.float64)


def linear(weight, bias=None):
    """A linear layer with these weights."""
    layer = nn.Linear(len(weight[0]), len(weight), bias is not None).double()
    layer.weight.data = tensor(weight)
    if bias:
        layer.bias.data = tensor(bias)
    return layer


# ---------------------------------------------------------------- how a function is called


def fedavg(f, given):
    clients = [(tensor(x), torch.tensor(y)) for x, y in given["clients"]]
    flags = given["selected"], given["lr"], given["epochs"]
    return {
        "averages": f(tensor(given["w"]), clients, *flags, 0.0),
        "averages with momentum": f(tensor(given["w"]), clients, *flags, given["momentum"]),
    }


def entropy(f, given):
    counts = torch.tensor(given["counts"])
    return {"alpha": f(counts), "alpha of the selected": f(counts[given["selected"]])}


def minimax(f, given):
    return {
        f"{name}, k = {k}": sorted(f(tensor(table["g"]), k))
        for name, table in given.items()
        for k in table["k"]
    }


def hull(f, given):
    found = {}
    for name, table in given.items():
        g = table["g"]
        for dim in table["dims"]:
            rows = [g[i] for i in f(tensor(g), dim)]
            found[f"{name}, dim {dim}"] = sorted({g.index(row) for row in rows})  # any equal row
    return found


def fediir(f, given):
    features, classifier = linear(given["features"]), linear(given["weight"], given["bias"])
    x, y = tensor(given["x"]), torch.tensor(given["y"])
    loss = f(features, classifier, x, y, tensor(given["global_gradient"]), given["gamma"])
    loss.backward()
    return {
        "loss": loss,
        "gradient by features": features.weight.grad,
        "gradient by weight": classifier.weight.grad,
        "gradient by bias": classifier.bias.grad,
    }


def fediir_gradient(f, given):
    classifier = linear(given["weight"], given["bias"])
    found = [f(classifier, tensor(z), torch.tensor(y)) for z, y in given["clients"]]
    return {"R": [risk for risk, _ in found], "g": [gradient for _, gradient in found]}


def fediir_average(f, given):
    gradients = tensor(given["gradients"])
    return {"g~": f([scale * gradients for scale in given["scales"]], given["ema"])}


def uefl(f, given):
    words, tokens = tensor(given["codewords"]), tensor(given["tokens"]).requires_grad_()
    codebook = f(len(words), tokens.shape[2], given["segments"])
    codebook.codewords.data = words
    out, loss, indices = codebook(tokens, torch.tensor(given["may_use"]))
    ((tensor(given["task"]) * out).sum() + loss).backward()
    return {
        "indices": indices,
        "out": out,
        "L_code": loss,
        "gradient by tokens": tokens.grad,
        "gradient by codewords": codebook.codewords.grad,
    }


def uefl_entropy(f, given):
    return {"entropies": f(tensor(given["passes"]).softmax(2))}


def uefl_extended(f, given):
    return {"extended": f(tensor(given["entropies"]), given["gamma"])}


def uefl_average(f, given):
    sizes, uses = torch.tensor(given["sizes"]), torch.tensor(given["uses"])
    return {"theta": f(tensor(given["theta"]), tensor(given["thetas"]), sizes, uses)}


# ---------------------------------------------------------------- what is said of the numbers


def array(found):
    """Numbers, tensors, and lists of them, in float64. None, as JSON has for no number, is NaN."""
    if isinstance(found, list | tuple):
        return np.array([array(part) for part in found])
    if isinstance(found, torch.Tensor):
        found = found.detach().cpu().double().numpy()
    return np.array(found, float)


def equal(found, expected, tolerance):
    found, expected = array(found), array(expected)
    same_shape = found.shape == expected.shape
    return same_shape and np.allclose(found, expected, rtol=0, atol=tolerance, equal_nan=True)


def text(numbers):
    """A few numbers as they are, or the shape of many."""
    few = numbers.size <= 8
    return " ".join(f"{x:.6g}" for x in numbers.flat) if few else f"shape {[*numbers.shape]}"


def difference(found, right):
    """How these numbers differ from the right ones, in one line."""
    if found is None:
        return "None: nothing was returned, or no gradient comes here"
    found, right = array(found), array(right)
    if found.shape != right.shape or right.size <= 8:
        return f"{text(found)} instead of {text(right)}"
    at = np.unravel_index(np.abs(found - right).argmax(), right.shape)  # NaN counts as the largest
    line = f"{found[at]:.6g} instead of {right[at]:.6g}, at {[int(i) for i in at]}"
    ratio = (found * right).sum() / (right * right).sum()
    if np.allclose(found, ratio * right):
        line += f", and all are {ratio:.6g} times the right ones"
    return line


def verdict(entry, found):
    """A line for each number. If one mistake explains all of them, no other one is named.

    By chance a mistake gives some of the clients that another one selects. So one that explains
    only some of the selections, whose tolerance is 0, is not named.
    """
    right, tolerance = entry["answers"], entry["tolerance"]
    known = {"right": {}, **entry["choices"], **entry["wrong"]}
    gives = {}
    for name in right:
        numbers = {what: (right | changed)[name] for what, changed in known.items()}
        gives[name] = [w for w in known if equal(found[name], numbers[w], tolerance)]
    explains_all = set.intersection(*map(set, gives.values()))
    lines = []
    for name, those in gives.items():
        if "right" in those:
            says = "right"
        elif named := [w for w in those if w in explains_all] or those * (tolerance > 0):
            choice = named[0] in entry["choices"]
            start = "right, by another choice: " if choice else "wrong: this is the number "
            says = start + ", or ".join(named)
        else:
            says = f"wrong: {difference(found[name], right[name])}"
        lines.append(f"{name}: {says}")
    return lines


def check(name, place):
    """The verdict on module:function, for the entry of this name."""
    module, _, function = place.partition(":")
    sys.path.insert(0, "")  # modules are found from where the command runs
    f, entry = getattr(importlib.import_module(module), function), ANSWERS[name]
    return verdict(entry, globals()[name](f, entry["given"]))


def refuse(message):
    print(f"known_answers.py: {message}", file=sys.stderr)
    sys.exit(2)


def main():
    if len(sys.argv) != 3 or sys.argv[1] not in ANSWERS or ":" not in sys.argv[2]:
        refuse(f"give one of {', '.join(ANSWERS)}, and module:function")
    _, name, place = sys.argv
    entry = ANSWERS[name]
    try:
        lines = check(name, place)
    except Exception as e:
        says = f"{type(e).__name__}: {e}".splitlines()[0]
        file = getattr(sys.modules.get(place.partition(":")[0]), "__file__", None)
        frames = [f for f in traceback.extract_tb(e.__traceback__) if f.filename == file]
        line = f", line {frames[-1].lineno}" if frames else ""
        refuse(f"{place}{line}: {says}: it is called as {entry['call']}")
    print("\n".join(lines))
    print(f"What this assumes: {entry['choice']}")
    wrong = any(": wrong: " in line for line in lines)
    if wrong:
        print(f"It was called as {entry['call']}. The steps to the right numbers, in their order:")
        for step, numbers in entry["steps"].items():
            print(f"  {step}: {json.dumps(numbers):.100}")
    sys.exit(wrong)


if __name__ == "__main__":
    main()
