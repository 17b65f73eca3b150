"""What several tests need: tiny data, the flags and the outcome of a run, and training by hand."""

import csv
import functools
import re
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from scipy.spatial.distance import cdist

import common.data
from common.chance import random_at
from common.data import Dataset
from common.runner import compare, flags, runs
from common.train import Trainer, set_weights

ROOT = Path(__file__).parent.parent
METHODS = compare.METHODS

drawn = functools.cache(common.data.glyphs)


def make_tiny():
    """Noisy 8x8 images of three classes: the bright quarter. The second domain is darker."""
    rng, n = np.random.default_rng(0), 180
    y, domain = rng.integers(0, 3, n), np.arange(n) % 2
    x = rng.integers(0, 60, (n, 1, 8, 8))
    for i in range(n):
        top, left = divmod(int(y[i]), 2)
        x[i, 0, top * 4 :, left * 4 :][:4, :4] += 180 - 100 * domain[i]
    return Dataset(
        "tiny", torch.from_numpy(x).to(torch.uint8), torch.from_numpy(y), torch.arange(120),
        torch.arange(120, n), ["a", "b", "c"], torch.from_numpy(domain), ["light", "dark"],
    )  # fmt: skip


def ten_classes(n=6000, n_test=700):
    """Empty images with ten labels, of which some are rarer than others, and two domains."""
    rng = np.random.default_rng(1)
    y = torch.from_numpy(rng.choice(10, n + n_test, p=np.arange(10, 20) / 145))
    domain = torch.from_numpy(rng.integers(0, 2, n + n_test))
    train, test = torch.arange(n), torch.arange(n, n + n_test)
    x = torch.zeros(n + n_test, 1, 1, 1, dtype=torch.uint8)
    return Dataset("ten", x, y, train, test, list("0123456789"), domain, ["light", "dark"])


def sort_images(root, folders):
    """Ten different images in each folder of this text; one that ends with / stays empty.

    A word with an ending is one image. In the i-th folder, red is 30 i.
    """
    rng = np.random.default_rng(0)
    for i, place in enumerate(folders.split(", ")):
        names = [place] if Path(place).suffix else [f"{place}/{i}.png" for i in range(10)]
        (root / names[0]).parent.mkdir(parents=True, exist_ok=True)
        for name in [] if place.endswith("/") else names:
            pixels = rng.integers(0, 255, (8, 8, 3), np.uint8)
            pixels[..., 0] = 30 * i
            Image.fromarray(pixels).save(root / name)
    return root


# ---------------------------------------------------------------- what a run begins with


def parsed(method, words):
    """The flags of one run of this method, as the fixture `start` would run it."""
    return flags.defaults(method, f"--device cpu --precision float32 {words}")


def prepared(method, words):
    """The flags, the data, the clients and the trainer of a run."""
    args = parsed(method, words)
    data = common.data.load(args.dataset)
    build = getattr(method, "build_model", compare.build_model)
    clients, model = compare.assemble(args, data, build)
    trainer = Trainer(data, clients, model, local=compare.local_training(args), seed=args.seed)
    return args, data, clients, trainer


def in_each_round(action, patch=setattr):
    """From now on, action(run, t) comes before round t of a run is recorded."""
    record = runs.Run.record

    def both(run, state, row):
        action(run, state["t"])
        record(run, state, row)

    patch(runs.Run, "record", both)


def save_each_round(patch=setattr):
    """From now on, each round leaves a checkpoint, and not only one in half a minute."""
    in_each_round(lambda run, t: vars(run).update(save_at=0.0), patch)


# ---------------------------------------------------------------- what a run leaves


def read_rows(folder):
    """The rows of metrics.csv in this folder. All values are strings."""
    with open(folder / "metrics.csv", newline="") as f:
        return list(csv.DictReader(f))


def selections(rows):
    """The clients selected in each round."""
    return [[int(k) for k in row["selected"].split()] for row in rows]


def kept(folder):
    """The state in a run's checkpoint."""
    return torch.load(folder / "checkpoint.pt")["state"]


def outcome(folder):
    """What a run leaves, without the seconds that it took: its models and its rows of metrics."""
    rows = read_rows(folder)
    for row in rows:
        del row["seconds"]
    models = sorted({*folder.glob("*.pt")} - {folder / "checkpoint.pt"})
    return [file.read_bytes() for file in models], rows


def lines_of(said):
    """The lines on stderr, without progress bars, which come late, and a run's set-up."""
    lines = said.replace("\r", "\n").splitlines()
    return [line for line in lines if line.strip() and not re.search(r"%\||, processes: \d", line)]


# ---------------------------------------------------------------- training by hand


def loss_by_hand(trainer, theta, samples):
    """The mean cross-entropy of these samples."""
    set_weights(trainer.model, theta)
    logits = trainer.model(trainer.x[samples].float() / 127.5 - 1)
    return F.cross_entropy(logits, trainer.y[samples])


def loss_and_gradient(trainer, theta, samples):
    """The same, and its gradient for all weights."""
    loss = loss_by_hand(trainer, theta, samples)
    return loss, gradient_of(loss, trainer.model)


def gradient_of(loss, model, graph=False):
    parts = torch.autograd.grad(loss, list(model.parameters()), create_graph=graph)
    return torch.cat([part.flatten() for part in parts])


def sgd_by_hand(run, theta, t, k, gradient=loss_and_gradient):
    """Local training by its definition: v <- momentum v + grad, theta -= lr v, or Adam's step.

    Weight decay adds a multiple of theta to grad, and lr falls from round to round. Returns client
    k's theta at the end of round t, and the mean loss of its steps.

    run       what the fixture `finished` returns
    gradient  gradient(trainer, theta, batch) returns the loss and grad
    """
    args, samples, rng = run.args, run.clients.train[k], random_at(run.args.seed, "batches", t, k)
    lr = args.lr * args.lr_decay ** max(0, t - 1)
    v, squares, losses = 0, 0, []
    for _ in range(args.local_epochs):
        order = samples[torch.from_numpy(rng.permutation(len(samples)))]
        for batch in order.split(args.batch_size):
            loss, grad = gradient(run.trainer, theta, batch)
            losses.append(loss.item())
            grad = grad + args.weight_decay * theta
            if args.optimizer == "adam":
                v = 0.9 * v + 0.1 * grad
                squares = 0.999 * squares + 0.001 * grad * grad
                root = (squares / (1 - 0.999 ** len(losses))).sqrt()
                theta = theta - lr * v / (1 - 0.9 ** len(losses)) / (root + 1e-8)
            else:
                v = args.momentum * v + grad
                theta = theta - lr * v
    return theta.detach(), np.mean(losses)


def largest_by_scipy(updates):
    """S*_i of Wu et al.: each client's largest cosine with another client, in float64."""
    cosines = 1 - cdist(updates, updates, "cosine")
    np.fill_diagonal(cosines, -9)
    return cosines.max(1)
