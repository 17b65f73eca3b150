import pytest
import torch

from common.chance import random_at, shuffled
from common.evaluation import evaluate
from common.train import local_solver, set_weights


def test_the_model_is_tested_in_four_ways(trainer, tiny):
    """By hand, for batches of 15 images of one class."""
    by_class = [tiny.test[tiny.y[tiny.test] == c][:15] for c in range(3)]
    ood = torch.cat(by_class)
    trainer.clients.tests["ood"], trainer.chunk, ids = ood, 15, trainer.clients.ids
    thetas, losses = trainer.train(local_solver, trainer.initial, ids, 1)
    theta, model = thetas.mean(0), trainer.model
    row = evaluate(trainer, theta, 1, ids, losses)

    def right(samples):
        answers = model(trainer.batch(samples)[0]).argmax(1)
        return (answers == tiny.y[samples]).float().mean().item()

    set_weights(model, theta)
    model.eval()
    expected = [right(ood)]
    for part in model.features:
        if isinstance(part, torch.nn.BatchNorm2d):
            part.reset_running_stats()
    expected.append(right(ood))
    model.train()
    for batches in (shuffled(ood, random_at(0, "mixed")).split(15), by_class):
        expected.append(sum(map(right, batches)) / 3)
    assert row["accuracies"].tolist() == pytest.approx(expected)
    assert row["ood_accuracy"] == pytest.approx(expected[0])
    assert len({*expected}) > 2, expected
