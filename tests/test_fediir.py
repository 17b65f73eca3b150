from types import SimpleNamespace

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from helpers import gradient_of, logits_by_hand, sgd_by_hand

import fediir
from common import UserError
from common.chance import random_at, sample
from common.models import Classifier
from common.train import get_weights, set_weights
from fediir import client_gradient, fediir_loss, risk_and_gradient

CUT = "--model convnet --width 0.1 --test-domain dark --clients 4 --sample 2 --local-epochs 1 "
CUT += "--batch-size 10 --lr 0.05 --momentum 0 --rounds 4 --optimizer sgd --evaluate-every 1 "


@pytest.fixture
def small():
    """A smooth model in float64 with a classifier of two layers, and a batch for it."""
    torch.manual_seed(0)
    model = Classifier(
        nn.Sequential(nn.Linear(4, 5), nn.Tanh()),
        nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)),
    ).double()
    return model, torch.randn(7, 4, dtype=torch.float64), torch.randint(0, 3, (7,))


def loss_of(model, x, y, global_gradient, gamma):
    return fediir_loss(model.features, model.classifier, x, y, global_gradient, gamma)


# ---------------------------------------------------------------- the pieces that people copy


def test_the_local_gradient_is_that_of_finite_differences(small):
    model, x, y = small
    g = torch.randn(sum(p.numel() for p in model.classifier.parameters()), dtype=torch.float64)
    theta = get_weights(model)

    def loss_at(theta):
        set_weights(model, theta)
        return loss_of(model, x, y, g, 3.0)

    exact = gradient_of(loss_at(theta), model)
    plain = gradient_of(F.cross_entropy(model(x), y), model)
    for i in range(0, len(theta), 3):
        step = 1e-5 * F.one_hot(torch.tensor(i), len(theta))
        expected = (loss_at(theta + step) - loss_at(theta - step)).item() / 2e-5
        assert exact[i].item() == pytest.approx(expected, rel=1e-5, abs=1e-8)
    assert ((exact - plain).abs() > 1e-8).all()  # the penalty reaches every parameter


@pytest.mark.parametrize("damage", ["dropout", "batch norm", "a shared layer"])
def test_a_model_whose_lines_4_and_10_are_two_functions_is_refused(monkeypatch, damage):
    def build(*given):
        shared = nn.Linear(8, 8)
        parts = [nn.Flatten(), nn.Linear(64, 8), shared, nn.Tanh()]
        more = {"dropout": nn.Dropout(0.5), "batch norm": nn.BatchNorm1d(8)}.get(damage)
        head = [shared] if damage == "a shared layer" else [nn.Identity()]
        return Classifier(nn.Sequential(*parts, more or nn.Identity()), nn.Sequential(*head, last))

    last, args = nn.Linear(8, 3), SimpleNamespace(model="mine")
    monkeypatch.setattr(fediir.compare, "build_model", build)
    with pytest.raises(UserError, match="--model mine has another gradient in training"):
        fediir.build_model(args, (1, 8, 8), 3)
    damage = "nothing"
    assert fediir.build_model(args, (1, 8, 8), 3).classifier[1] is last


def test_frozen_parameters_do_not_count_and_unused_ones_have_a_gradient_of_zero(small):
    model, x, y = small
    first, last = model.classifier[0], model.classifier[2]
    first.requires_grad_(False)
    loss = F.cross_entropy(model(x), y)
    trained = torch.cat([g.flatten() for g in torch.autograd.grad(loss, [last.weight, last.bias])])
    model.classifier.register_parameter("unused", nn.Parameter(torch.ones(2).double()))
    trained = torch.cat([torch.zeros(2), trained])  # it comes first
    g = torch.randn(2 + 6 * 3 + 3, dtype=torch.float64)
    expected = loss + (trained - g).square().sum()
    assert loss_of(model, x, y, g, 2.0).item() == pytest.approx(expected.item())
    model.classifier.requires_grad_(False)
    with pytest.raises(ValueError, match="all weights of the classifier are frozen"):
        loss_of(model, x, y, g, 2.0)


@pytest.mark.parametrize("graph", [True, False])
def test_under_autocast_gradients_are_in_full_precision(small, graph):
    model, x, y = small
    z = model.features(x).detach().bfloat16()
    classifier = model.classifier.float()
    risk, gradient = risk_and_gradient(classifier, z.float(), y)
    with torch.autocast("cpu", torch.bfloat16):
        again, found = risk_and_gradient(classifier, z, y, graph)
    assert found.dtype == torch.float32 and torch.equal(found, gradient) and risk == again
    assert found.requires_grad == graph


# ---------------------------------------------------------------- what a client does


def test_the_mean_of_equal_clients_gradients_is_that_of_their_pooled_risk(tiny, trainer):
    trainer.chunk = 7  # so that the samples need several batches
    samples = [tiny.train[:60], tiny.train[60:]]
    [found] = trainer.map(client_gradient, trainer.initial, torch.arange(2), samples, 1)
    _, gradient = gradient_by_hand(trainer, trainer.initial, tiny.train)
    assert torch.allclose(found.mean(0), gradient, atol=1e-6)


# ---------------------------------------------------------------- whole runs


def gradient_by_hand(trainer, theta, samples, graph=False):
    """The risk, and its gradient for the classifier."""
    risk = F.cross_entropy(logits_by_hand(trainer, theta, samples), trainer.y[samples])
    parameters = list(trainer.model.classifier.parameters())
    parts = torch.autograd.grad(risk, parameters, create_graph=graph)
    return risk, torch.cat([part.flatten() for part in parts])


def test_three_rounds_are_algorithm_1_by_hand(finished):
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
