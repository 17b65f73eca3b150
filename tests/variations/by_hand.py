"""What the checks of several variations share."""

import torch

from common.runner import flags
from common.runner.setup import assemble
from common.train import Trainer, get_weights


def prepared(method, words, **options):
    """Data, clients, model, trainer and the weights before training, of a run with these flags."""
    words = [*words.split(), "--out", "hand", "--device", "cpu", "--precision", "float32"]
    own = method.SETTINGS, method.SMALL, method.own_flags
    args = flags.parse(method.__file__, "By hand.", *own, words)
    args.seed = 0
    data, clients, model = assemble(args, **options)
    trainer = Trainer(data, clients, torch.device("cpu"), args)
    return data, clients, model, trainer, get_weights(model)


def kept(folder):
    """What the run in this folder keeps for its next round."""
    return torch.load(folder / "checkpoint.pt")["state"]


def selections(rows):
    """The clients selected in each round."""
    return [[int(k) for k in row["selected"].split()] for row in rows]


def poison(monkeypatch, client):
    """From now on the images of this client are NaN, so its uploads are never finite."""
    batches = Trainer._batches

    def poisoned(self, k, t, total):
        for x, y in batches(self, k, t, total):
            yield x * (torch.nan if k == client else 1), y

    monkeypatch.setattr(Trainer, "_batches", poisoned)
