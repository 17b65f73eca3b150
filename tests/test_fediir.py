import csv
import math

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from test_fedavg import rows

import fedavg
import fediir
from common import UserError
from common.models import Classifier
from common.train import get_weights
from fediir import alignment, classifier_gradient, fediir_loss, moving_average

CUT = (
    "--model convnet --width 0.1 --test-domain dark --clients 4 --sample 2 --local-epochs 1 "
    "--batch-size 10 --lr 0.05 --momentum 0 --rounds 4 --device cpu "
)


@pytest.fixture
def small():
    """A smooth model in float64 with a classifier of two layers, and a batch for it."""
    torch.manual_seed(0)
    model = Classifier(
        nn.Sequential(nn.Linear(4, 5), nn.Tanh()), nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    ).double()
    return model, torch.randn(7, 4, dtype=torch.float64), torch.randint(0, 3, (7,))


def test_the_local_gradient_is_that_of_finite_differences(small):
    model, x, y = small
    parameters = list(model.parameters())
    g = torch.randn(sum(p.numel() for p in model.classifier.parameters()), dtype=torch.float64)
    gradient = torch.autograd.grad(fediir_loss(model, x, y, g, 3.0), parameters)
    without = torch.autograd.grad(F.cross_entropy(model(x), y), parameters)
    for p, exact, plain in zip(parameters, gradient, without, strict=True):
        assert not torch.allclose(exact, plain, atol=1e-4), "the penalty reaches every parameter"
        for i in range(0, p.numel(), 3):
            losses = []
            for step in (1e-5, -1e-5):
                with torch.no_grad():
                    p.view(-1)[i] += step
                losses.append(fediir_loss(model, x, y, g, 3.0).item())
                with torch.no_grad():
                    p.view(-1)[i] -= step
            assert exact.view(-1)[i].item() == pytest.approx((losses[0] - losses[1]) / 2e-5, rel=1e-5, abs=1e-8)


def test_the_classifiers_gradient_has_the_closed_form_of_softmax_regression():
    torch.manual_seed(0)
    model = Classifier(nn.Linear(4, 5), nn.Linear(5, 3)).double()
    x, y = torch.randn(7, 4, dtype=torch.float64), torch.randint(0, 3, (7,))
    z = model.features(x)
    residual = (z @ model.classifier.weight.T + model.classifier.bias).softmax(1) - F.one_hot(y, 3)
    closed = torch.cat([(residual.T @ z / 7).flatten(), residual.mean(0)])
    gradient, risk = classifier_gradient(model, x, y)
    assert torch.allclose(gradient, closed) and risk.item() == pytest.approx(F.cross_entropy(model(x), y).item())
    penalty = fediir_loss(model, x, y, torch.zeros(18, dtype=torch.float64), 0.5) - risk
    assert penalty.item() == pytest.approx(0.25 * closed.square().sum().item())


def test_the_penalty_is_nil_where_gradients_are_aligned_and_grows_with_the_gap(small):
    model, x, y = small
    own, risk = classifier_gradient(model, x, y)
    direction = F.normalize(torch.randn_like(own), dim=0)
    penalties = [(fediir_loss(model, x, y, own + gap * direction, 2.0) - risk).item() for gap in (0.0, 0.5, 1.0)]
    assert penalties == pytest.approx([0.0, 0.25, 1.0])


def test_training_on_the_penalty_aligns_gradients(small):
    model, x, y = small
    other = classifier_gradient(model, torch.randn_like(x), y)[0]
    before = (classifier_gradient(model, x, y)[0] - other).norm()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(50):
        optimizer.zero_grad()
        (fediir_loss(model, x, y, other, 10.0) - F.cross_entropy(model(x), y)).backward()
        optimizer.step()
    assert (classifier_gradient(model, x, y)[0] - other).norm() < 0.5 * before


def test_no_backward_pass_goes_through_the_features(small):
    model, x, y = small
    model.features.register_full_backward_hook(lambda *_: pytest.fail("went through"))
    classifier_gradient(model, x.requires_grad_(), y)


def test_the_mean_of_equal_clients_gradients_is_the_gradient_of_their_pooled_risk(tiny, trainer):
    model = Classifier(nn.Flatten(), nn.Linear(64, 3))
    w, halves = get_weights(model), [tiny.train[:60], tiny.train[60:]]
    gradients, risks = fediir.client_gradients(trainer, model, w, [*halves, tiny.train.repeat(20)])
    pooled = F.cross_entropy(model(trainer.batch(tiny.train)), trainer.y[tiny.train])
    pooled_gradient = torch.cat([g.flatten() for g in torch.autograd.grad(pooled, list(model.parameters()))])
    assert torch.allclose(gradients[:2].mean(0), pooled_gradient, atol=1e-6)
    assert torch.allclose(gradients[2], pooled_gradient, atol=1e-6), "also where the samples need several chunks"
    assert risks[2].item() == pytest.approx(pooled.item(), rel=1e-5)


def test_moving_average_on_a_worked_sequence():
    g = torch.zeros(2)
    for now in ([1.0, 0.0], [1.0, 10.0], [0.0, 0.0]):
        g = moving_average(g, torch.tensor(now), 0.9)
    assert torch.allclose(g, torch.tensor([0.1 * 0.9 * 0.9 + 0.1 * 0.9, 0.9]))


def test_alignment_is_the_cosine():
    found = alignment(torch.tensor([[1.0, 0.0], [5.0, 5.0], [-2.0, 0.0]]))
    half = math.sqrt(0.5)
    assert torch.allclose(found, torch.tensor([[1, half, -1], [half, 1, -half], [-1, -half, 1]]))


def test_gamma_0_is_fedavg(start):
    folder = start(fediir, CUT + "--gamma 0 --no-compare --validate-every 1 --out fediir")
    start(fedavg, CUT + "--partition domain --weighting equal --out fedavg")
    mine, theirs = (torch.load(folder / name / "checkpoint.pt")["w"] for name in ("fediir", "fedavg"))
    assert torch.equal(mine, theirs)
    for column in ("train_loss", "id_accuracy", "ood_accuracy", "selected"):
        assert [r[column] for r in rows(folder / "fediir")] == [r[column] for r in rows(folder / "fedavg")]


def test_the_chosen_model_is_the_first_with_the_best_validation_accuracy(start, capsys):
    folder = start(fediir, CUT + "--validate-every 1 --out run --rounds 6 --gamma 0.1") / "run"
    found = rows(folder)
    validation = [float(r["id_accuracy"]) for r in found]
    best = validation.index(max(validation))
    state = torch.load(folder / "checkpoint.pt")
    assert state["chosen"]["round"] == best + 1
    table = capsys.readouterr().out
    assert f"{float(found[best]['ood_accuracy']):.4f}" in table and "FedAvg" in table
    saved = torch.load(folder / "model.pt")
    assert torch.equal(torch.cat([t.flatten() for t in saved.values()]), state["best_w"])
    assert {f.name for f in folder.iterdir()} >= {"curves.png", "alignment.png", "partition.png", "fedavg"}
    for r in found:
        assert 0 < float(r["penalty_share"]) < 1 and float(r["gradient_spread"]) > 0


def test_each_domain_is_left_out_in_turn(start, capsys):
    folder = start(fediir, CUT + "--test-domain all --no-compare --out all --rounds 1") / "all"
    accuracies = []
    for domain in ("light", "dark"):
        with open(folder / domain / "metrics.csv", newline="") as f:
            accuracies.append(float(next(csv.DictReader(f))["ood_accuracy"]))
    assert f"{sum(accuracies) / 2:.4f}" in capsys.readouterr().out.splitlines()[-2]


def test_all_domains_go_on_where_they_stopped(start, start_and_stop):
    folder = start(fediir, CUT + "--test-domain all --no-compare --out whole")
    start_and_stop(fediir, CUT + "--test-domain all --no-compare --out cut", 2, "dark")
    start(fediir, "--resume cut")
    for name in ("light/model.pt", "dark/model.pt"):
        assert (folder / "cut" / name).read_bytes() == (folder / "whole" / name).read_bytes()


def test_a_domain_must_be_named(start):
    with pytest.raises(UserError, match="--test-domain is missing"):
        start(fediir, "--dataset shakespeare --model charrnn")


def test_a_run_that_was_stopped_goes_on_to_the_same_end(start, start_and_stop):
    folder = start(fediir, CUT + "--out whole")
    start_and_stop(fediir, CUT + "--out cut", 3, "cut")
    start(fediir, "--resume cut")
    for name in ("model.pt", "fedavg/model.pt"):
        assert (folder / "cut" / name).read_bytes() == (folder / "whole" / name).read_bytes()


def test_it_is_validated_now_and_then_and_after_the_last_round(start):
    found = rows(start(fediir, CUT + "--rounds 5 --validate-every 2 --no-compare --out run") / "run")
    assert [r["round"] for r in found if r["id_accuracy"]] == ["2", "4", "5"]
    assert all(bool(r["id_accuracy"]) == bool(r["ood_accuracy"]) for r in found)
