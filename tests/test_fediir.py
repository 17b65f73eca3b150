from types import SimpleNamespace

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from helpers import gradient_of, loss_by_hand, sgd_by_hand

import fediir
from common import UserError
from common.chance import random_at, sample
from common.models import Classifier
from fediir import client_gradient, risk_and_gradient

CUT = "--model convnet --width 0.1 --test-domain dark --clients 4 --sample 2 --local-epochs 1 "
CUT += "--batch-size 10 --lr 0.05 --momentum 0 --rounds 4 --optimizer sgd --evaluate-every 1 "


@pytest.fixture
def small():
    """A classifier of two layers, features for it, and labels."""
    torch.manual_seed(0)
    classifier = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    return classifier, torch.randn(7, 5), torch.randint(0, 3, (7,))


# ---------------------------------------------------------------- the pieces that people copy


def test_a_model_whose_parts_share_a_layer_is_refused(monkeypatch):
    """And one with batch norm is among the mistakes in test_run.py."""
    shared = nn.Linear(8, 8)
    features = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), shared)
    model = Classifier(features, nn.Sequential(shared, nn.Linear(8, 3)))
    monkeypatch.setattr(fediir.compare, "build_model", lambda *given: model)
    with pytest.raises(UserError, match="--model mine has another gradient in training"):
        fediir.build_model(SimpleNamespace(model="mine"), (1, 8, 8), 3)


def test_frozen_parameters_do_not_count_and_unused_ones_have_a_gradient_of_zero(small):
    classifier, z, y = small
    first, last = classifier[0], classifier[2]
    first.requires_grad_(False)
    expected = torch.autograd.grad(F.cross_entropy(classifier(z), y), [last.weight, last.bias])
    classifier.register_parameter("unused", nn.Parameter(torch.ones(2)))  # it comes first
    _, found = risk_and_gradient(classifier, z, y)
    assert torch.equal(found, torch.cat([torch.zeros(2), *map(torch.flatten, expected)]))
    classifier.requires_grad_(False)
    with pytest.raises(ValueError, match="all weights of the classifier are frozen"):
        risk_and_gradient(classifier, z, y)


def test_under_autocast_gradients_are_in_full_precision(small):
    classifier, z, y = small
    z = z.bfloat16()
    risk, gradient = risk_and_gradient(classifier, z.float(), y)
    with torch.autocast("cpu", torch.bfloat16):
        again, found = risk_and_gradient(classifier, z, y)
    assert found.dtype == torch.float32 and torch.equal(found, gradient) and risk == again


# ---------------------------------------------------------------- whole runs


def gradient_by_hand(trainer, theta, samples, graph=False):
    """The risk, and its gradient for the classifier."""
    risk = loss_by_hand(trainer, theta, samples)
    return risk, gradient_of(risk, trainer.model.classifier, graph)


def test_three_rounds_are_algorithm_1_by_hand(finished, monkeypatch):
    """A client's samples fit into one batch, so line 4 gets them in pieces."""

    def in_pieces(model, batches):
        [(x, y)] = batches
        return client_gradient(model, zip(x.split(7), y.split(7)))

    monkeypatch.setattr(fediir, "client_gradient", in_pieces)
    words = CUT + "--rounds 3 --gamma 2 --ema 0.7 --server-lr 0.8 --no-compare"
    run, g = finished(fediir, words), 0.0
    clients, trainer, theta = run.clients, run.trainer, run.trainer.initial

    def of_line_10(trainer, theta, batch):
        risk, gradient = gradient_by_hand(trainer, theta, batch, graph=True)
        loss = risk + run.args.gamma / 2 * (gradient - g).square().sum()
        return loss, gradient_of(loss, trainer.model)

    for t, row in enumerate(run.rows, 1):
        selected = sample(clients.ids, 2, random_at(0, "select", t)).tolist()
        found = [gradient_by_hand(trainer, theta, clients.train[k])[1] for k in selected]
        mean = sum(found) / 2
        g = 0.7 * g + 0.3 * mean
        one, two = (sgd_by_hand(run, theta, t, k, of_line_10) for k in selected)
        theta = theta + 0.8 * ((one[0] + two[0]) / 2 - theta)
        spread = sum((gradient - mean).square().sum().item() for gradient in found) / 2
        assert run.selected[t - 1] == selected
        assert float(row["gradient_spread"]) == pytest.approx(spread, rel=1e-3)
        assert float(row["train_loss"]) == pytest.approx((one[1] + two[1]) / 2, rel=1e-4)
    assert t == 3 and torch.allclose(run.state["theta"], theta, atol=1e-5)
    assert torch.allclose(run.state["global_gradient"], g, atol=1e-5)
