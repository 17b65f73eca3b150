import math
import warnings
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.stats
import torch
import torch.nn as nn
import torch.nn.functional as F
from helpers import kept, outcome, prepared, read_rows
from scipy.cluster.vq import kmeans2

import fedavg
import uefl
from common import random_at
from common.train import Trainer, get_weights, set_weights
from uefl import ExtensibleCodebook, average, predictive_entropy, uncertain

SILOS = "--silos 2 1 --silo-size 20"
CUT = f"--model resblocks --width 0.01 --rotate 0 90 {SILOS} --local-epochs 2 --batch-size 10 "
CUT += "--lr 0.003 --codebook-size 4 --segments 1 --gamma 0 --rounds 2 --later-rounds 1 "
CUT += "--iterations 3 --no-compare "


@pytest.fixture
def start(start, monkeypatch, tiny):
    """As in conftest.py, but with the tiny data set's two domains under the names of two angles."""
    tiny.domains = ["0", "90"]
    monkeypatch.setattr("common.data.load", lambda name, *args: tiny)
    return start


# ---------------------------------------------------------------- the codebook


def forward_by_hand(model, x, may_use):
    """Equations 1, 4 and 5, in numpy's float64, one segment after the other."""
    z = model.features(x).detach().numpy()
    z = z.reshape(*z.shape[:2], -1).transpose(0, 2, 1)  # [N, l, d]
    if model.token_norm:
        z = (z - z.mean(2, keepdims=True)) / np.sqrt(z.var(2, keepdims=True) + 1e-5)
    words = model.codebook.codewords.detach().numpy()[may_use]
    size, c, squares = words.shape[1], np.empty_like(z), []
    for n, place, first in product(range(len(z)), range(z.shape[1]), range(0, z.shape[2], size)):
        at = n, place, slice(first, first + size)
        c[at] = min(words, key=lambda word: ((z[at] - word) ** 2).sum())
        squares += [*(z[at] - c[at]) ** 2]
    weight, bias = (p.detach().numpy() for p in model.classifier[1].parameters())
    logits = c.transpose(0, 2, 1).reshape(len(z), -1) @ weight.T + bias
    return logits, (model.codebook.commitment + model.codebook.beta) * np.mean(squares)


@pytest.mark.parametrize("token_norm", [True, False])
@pytest.mark.parametrize("segments", [1, 3])
@pytest.mark.parametrize("maps", [True, False])
def test_forward_is_equations_1_4_and_5_by_hand(token_norm, segments, maps):
    torch.manual_seed(0)
    encoder = (
        nn.Conv2d(2, 6, 3, stride=2) if maps else nn.Sequential(nn.Flatten(), nn.Linear(98, 6))
    )
    classifier = nn.Sequential(nn.Flatten(), nn.Linear(54 if maps else 6, 3))
    codebook = ExtensibleCodebook(7, 6, segments, commitment=0.3, beta=0.8)
    model = uefl.UEFL(encoder, codebook, classifier, token_norm).double()
    x, some = torch.randn(4, 2, 7, 7).double(), torch.tensor([True, False] * 3 + [True])
    for may in (some, None):
        logits, code_loss = model(x, may)
        expected, loss = forward_by_hand(model, x, [True] * 7 if may is None else may.numpy())
        assert np.allclose(logits.detach(), expected) and code_loss.item() == pytest.approx(loss)
    without = uefl.UEFL(encoder, ExtensibleCodebook(0, 6), classifier, False).double()
    logits, code_loss = without(x)
    assert torch.equal(logits, classifier(encoder(x)).float()) and code_loss == 0, "FedAvg's model"


def test_gradients_pass_straight_through_and_the_two_losses_pull_on_their_own_side():
    torch.manual_seed(0)
    codebook = ExtensibleCodebook(5, 6, 2, commitment=0.3, beta=0.7)
    tokens, upstream = torch.randn(4, 3, 6, requires_grad=True), torch.randn(4, 3, 6)
    both = [tokens, codebook.codewords]
    output, loss, index = codebook(tokens)
    to_tokens, to_codewords = torch.autograd.grad(
        (output * upstream).sum(), both, allow_unused=True, retain_graph=True
    )
    assert torch.equal(to_tokens, upstream)
    assert to_codewords is None or not to_codewords.any()

    to_tokens, to_codewords = torch.autograd.grad(loss, both)
    z, which = tokens.detach().reshape(-1, 3), index.flatten()
    pull = 2 * (z - codebook.codewords.detach()[which]) / z.numel()
    assert torch.allclose(to_tokens.reshape(-1, 3), 0.3 * pull, atol=1e-6)
    expected = torch.stack([-0.7 * pull[which == v].sum(0) for v in range(5)])
    assert torch.allclose(to_codewords, expected, atol=1e-6)


@pytest.mark.parametrize("mean", [0.0, 100.0, -1e4])
def test_the_nearest_codeword_is_found_far_from_zero(mean, rng):
    """Tokens and codewords from K-means have this mean, but the first codewords are Gaussian."""
    words = rng.normal(mean, 0.1, (48, 8))
    words[:8] = rng.standard_normal((8, 8))
    tokens = torch.from_numpy(rng.normal(mean, 0.1, (5, 50, 16))).float()
    codebook, may_use = ExtensibleCodebook(0, 16, 2), torch.from_numpy(rng.random(48) < 0.7)
    codebook.extend(torch.from_numpy(words))
    _, _, index = codebook(tokens, may_use)
    c = codebook.codewords.detach().double()
    distance = (tokens.double().view(-1, 1, 8) - c).norm(dim=2)
    distance[:, ~may_use] = torch.inf
    found = distance.gather(1, index.view(-1, 1)).flatten()
    assert (found <= distance.amin(1) + 1e-3).all()  # float32's error at 1e4


def test_after_an_extension_ones_old_sgd_steps_as_a_new_one():
    """The gradient of the smaller codebook is gone; the graph of its loss is, too."""
    torch.manual_seed(0)
    tokens, codebook = torch.randn(4, 3, 6), ExtensibleCodebook(5, 6)
    old = torch.optim.SGD(codebook.parameters(), lr=0.1)
    codebook(tokens)[1].backward()
    codebook.extend(torch.randn(2, 6))
    old.step()
    before = codebook.codewords.detach().clone()
    gradient = torch.autograd.grad(codebook(tokens)[1], codebook.codewords)[0]
    codebook(tokens)[1].backward()
    old.step()
    assert torch.allclose(codebook.codewords, before - 0.1 * gradient) and gradient.any()


@pytest.mark.parametrize("size", [0, 5])
def test_tokens_in_bfloat16_meet_a_codebook_in_float32(size):
    torch.manual_seed(0)
    codebook, tokens = ExtensibleCodebook(size, 6, 2), torch.randn(4, 3, 6).bfloat16()
    held, exact = tokens.clone().requires_grad_(), tokens.float().requires_grad_()
    for z in (held, exact):
        out, loss, _ = codebook(z)
        (out.sum() + loss).backward()
    for found, expected in zip(codebook(held), codebook(exact), strict=True):
        assert found.dtype == expected.dtype and torch.equal(found, expected)
    assert torch.equal(held.grad, exact.grad.bfloat16())


def test_without_a_codebook_a_run_in_bfloat16_ends(start):
    args, data, clients, trainer = prepared(uefl, CUT + "--codebook-size 0 --iterations 1")
    trainer = Trainer(data, clients, trainer.model, precision="bfloat16")
    *_, (state, row) = uefl.federate(args, clients, trainer, {})
    assert state["theta"].dtype == torch.float32 and row["mE"] > 0 and "ood_accuracy" not in row


@pytest.mark.parametrize("n", [1, 9])
def test_fewer_distinct_features_than_codewords_give_equal_codewords_and_no_warning(n):
    model = SimpleNamespace(encode=lambda x: x[:, None], codebook=ExtensibleCodebook(1, 2))
    batches = [(torch.tensor([[1.0, 2.0]]).repeat(n, 1), None)]
    with warnings.catch_warnings(action="error"):
        found = uefl.client_codewords(model, batches, 4, random_at(0, "test"))
    assert found.view(4, 2).tolist() == [[1, 2]] * 4


# ---------------------------------------------------------------- uncertainty and threshold


def test_entropy_is_that_of_the_mean_over_passes(rng):
    passes = torch.tensor([[[0.9, 0.1], [1.0, 0.0]], [[0.1, 0.9], [1.0, 0.0]]])
    assert predictive_entropy(passes).tolist() == pytest.approx([math.log(2), 0.0])
    logits = rng.standard_normal((4, 30, 9)) * rng.choice([0.1, 10, 1000], (4, 30, 1))
    p = torch.from_numpy(logits).softmax(2)  # of which some are 0
    assert np.allclose(predictive_entropy(p), scipy.stats.entropy(p.mean(0), axis=1), atol=1e-12)


@pytest.mark.parametrize("wrong", ["logits", "counts", "weights that sum to 1", "nan"])
def test_entropy_refuses_what_is_no_distribution(wrong, rng):
    x = torch.from_numpy(rng.integers(1, 9, (4, 30, 3))).float()
    wrongs = {"logits": x.softmax(2).log(), "counts": x}
    wrongs["nan"] = torch.where(x == 1, torch.nan, x.softmax(2))
    wrongs["weights that sum to 1"] = torch.cat([x, 1 - x.sum(2, keepdim=True)], 2)
    with pytest.raises(ValueError, match="sum to 1"):
        predictive_entropy(wrongs[wrong])
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        assert predictive_entropy(x.to(dtype).softmax(2)).min() > 0, "rounding is no mistake"


def test_threshold_on_a_worked_example():
    entropies = torch.tensor([1.0, 1.25, 1.35, 2.0])
    assert uncertain(entropies, 0.3).tolist() == [False, False, True, True]
    assert not uncertain(entropies, math.inf).any()
    assert not uncertain(torch.zeros(3), 0.1).any(), "line 3: nobody grows in the first iteration"


def test_perplexity_counts_codewords_in_equal_use():
    """Tokens that are spread evenly over four codewords, which may all be used, or only one."""
    ramp = torch.arange(4.0)[:, None].expand(4, 8)
    model = uefl.UEFL(nn.Identity(), ExtensibleCodebook(0, 8), nn.Flatten(), False)
    model.codebook.extend(ramp)
    batches = [(ramp, torch.arange(4))] * 2
    for may_use, perplexity in ((None, 4), (torch.arange(4) == 2, 1)):
        found = uefl.client_evaluation(model, batches, 1, may_use)
        assert found[1].item() == pytest.approx(perplexity)


def test_with_dropout_the_uncertainty_is_the_entropy_of_the_mean_pass(start):
    _, _, clients, trainer = prepared(uefl, CUT + "--dropout 0.5")
    of_clients = uefl.client_evaluation, trainer.initial, clients.ids, clients.test, 1
    one, many = (trainer.map(*of_clients, passes=n)[0] for n in (1, 50))
    assert many.mean() > one.mean(), "it is above the mean of entropies"


def test_the_dropout_of_an_evaluation_is_that_of_its_round(start):
    words = CUT + "--iterations 1"
    folder, (args, _, clients, trainer) = start(uefl, words), prepared(uefl, words)
    row, state = read_rows(folder)[-1], kept(folder)
    of_run = args, clients, trainer, state["theta"], state["may_use"]
    before, same = (uefl.evaluate(*of_run, t, torch.zeros(3), 2)["mE"].item() for t in (1, 2))
    assert f"{same:.6g}" == row["mE"] != f"{before:.6g}"


# ---------------------------------------------------------------- the server's side


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_average_is_numpys_over_the_clients_that_use_a_weight(dtype, rng):
    theta, *thetas = torch.from_numpy(rng.standard_normal((6, 40))).to(dtype)
    thetas, sizes = torch.stack(thetas), torch.from_numpy(rng.integers(1, 90, 5))
    uses = torch.from_numpy(rng.random((5, 40)) < 0.6)
    uses[:, 7] = False
    found = average(theta, thetas, sizes, uses)
    assert found.dtype == dtype and found[7] == theta[7]
    for p in {*range(40)} - {7}:
        k = uses[:, p]
        assert found[p].item() == pytest.approx(
            np.average(thetas[k, p], weights=sizes[k]), rel=1e-5
        )


def test_a_client_uses_all_weights_but_the_codewords_of_others():
    """The weights of codeword v are v, and all other weights, and the statistics, are 0."""
    encoder = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4))
    model = uefl.UEFL(encoder, ExtensibleCodebook(3, 4, 2), nn.Linear(4, 2), True)
    set_weights(model, 0 * get_weights(model))
    model.codebook.codewords.data += torch.tensor([[1.0], [2.0], [3.0]])
    theta, may_use = get_weights(model).tolist(), torch.tensor([[True, False, True], [True] * 3])
    expected = [[not v or own[int(v) - 1].item() for v in theta] for own in may_use]
    assert model.uses(may_use).tolist() == expected and {*theta} == {0, 1, 2, 3}


# ---------------------------------------------------------------- whole runs


def training_by_hand(args, data, model, theta, may_use, samples, t, k):
    """Lines 12 to 17 by their definition, with plain gradient steps."""
    rng, losses = random_at(0, "batches", t, k), []
    for _ in range(args.local_epochs):
        order = samples[torch.from_numpy(rng.permutation(len(samples)))]
        for batch in order.split(args.batch_size):
            set_weights(model, theta)
            z, words = tokens_by_hand(model, data, batch), model.codebook.codewords
            distance = torch.cdist(z, words).masked_fill(~may_use, torch.inf)
            c = words[distance.argmin(2)]
            logits = model.classifier((z + (c - z).detach()).mT)
            loss = F.cross_entropy(logits, data.y[batch])
            loss = loss + args.commitment * (z - c.detach()).square().mean()
            loss = loss + args.beta * (z.detach() - c).square().mean()
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            theta = theta - args.lr * torch.cat([g.flatten() for g in gradients])
            losses.append(loss.item())
    return theta, np.mean(losses)


def tokens_by_hand(model, data, samples):
    z = model.features(data.x[samples].float() / 127.5 - 1).flatten(2).mT
    return F.layer_norm(z, z.shape[-1:])


def test_a_whole_run_is_algorithm_1_by_hand(start):
    words = CUT.replace(SILOS, "--partition domain --clients 3")
    words += "--model cnn --width 0.125 --optimizer sgd --lr 0.03 --dropout 0 "
    folder = start(uefl, words)
    args, data, clients, trainer = prepared(uefl, words)
    model, theta, t = trainer.model, trainer.initial, 0
    may_use, rows, held = torch.ones(3, 4, dtype=torch.bool), read_rows(folder), clients.train
    n = np.array([len(samples) for samples in held])
    for iteration in (1, 2, 3):
        uncertain_clients = [k for k in range(3) if iteration > 1 and e[k] > min(e)]  # noqa: F821
        set_weights(model, theta)
        for k in uncertain_clients:  # lines 8 to 10
            z = tokens_by_hand(model, data, held[k]).detach().flatten(0, 1).double().numpy()
            new, _ = kmeans2(z, 4, minit="++", rng=random_at(0, "codewords", t, k))
            model.codebook.extend(torch.from_numpy(new))
            own = (torch.arange(3) == k)[:, None].expand(3, 4)
            may_use = torch.cat([may_use, own], 1)
        theta = get_weights(model)
        for _ in range(2 if iteration == 1 else 1):
            t += 1
            both = [
                training_by_hand(args, data, model, theta, may_use[k], held[k], t, k)
                for k in range(3)
            ]
            ends = torch.stack([end for end, _ in both]).detach()
            theta = torch.from_numpy(np.average(ends, axis=0, weights=n)).float()
            d = model.codebook.codewords.shape[1]
            for v in range(may_use.shape[1]):  # line 20
                users, at = may_use[:, v], slice(v * d, (v + 1) * d)
                mean = np.average(ends[users, at], axis=0, weights=n[users])
                theta[at] = torch.from_numpy(mean)
            set_weights(model, theta)
            e, right, code = [], [], []
            for k, samples in enumerate(clients.test):  # line 22
                with torch.no_grad():  # a graph would hold the old number of codewords
                    logits, code_loss = model(data.x[samples].float() / 127.5 - 1, may_use[k])
                p = logits.softmax(1)
                e.append(scipy.stats.entropy(p, axis=1).mean())
                right.append((p.argmax(1) == data.y[samples]).float().mean().item())
                code.append(code_loss.item())
            row = rows[t - 1]
            columns = {
                "train_loss": np.mean([loss for _, loss in both]), "code_loss": np.mean(code),
                "mE": np.mean(e), "mA": np.mean(right), "worst_tenth": min(right),
                "id_accuracy": np.average(right, weights=[*map(len, clients.test)]),
                "turned_accuracy": right[2], "turned_extended": float(may_use[2].sum() > 4),
            }  # fmt: skip
            assert {c: float(row[c]) for c in columns} == pytest.approx(columns, abs=1e-4)
            lists = {"accuracies": right, "uncertainties": e, "codewords": may_use.sum(1).tolist()}
            for column, numbers in lists.items():
                assert [*map(float, row[column].split())] == pytest.approx(numbers, abs=1e-4)
            assert row["iteration"] == str(iteration)
    assert t == len(rows) == 4 and may_use.shape[1] > 4
    answers = model(data.x[data.test].float() / 127.5 - 1)[0].argmax(1)
    expected, *_ = np.histogram2d(data.y[data.test], answers, 3, [[0, 3], [0, 3]])
    found = np.genfromtxt(folder / "confusion.csv", delimiter=",", skip_header=1)[:, 1:]
    assert (found == expected).all()
    assert float(row["ood_accuracy"]) == pytest.approx(np.trace(expected) / 60, abs=1e-5)
    assert torch.allclose(kept(folder)["theta"], theta, atol=1e-4)


def test_an_infinite_threshold_never_extends_and_is_vq_fedavg(start):
    never = outcome(start(uefl, CUT + "--gamma 1e9"))
    assert never == outcome(start(uefl, CUT + "--out vq --iterations 1"))


def test_without_a_codebook_it_is_fedavg(start):
    same = "--model resblocks --width 0.01 --rotate 0 90 --partition domain --local-epochs 2 "
    same += "--batch-size 10 --rounds 3 --no-compare --participating 2 --lr 0.1 "
    plain = "--codebook-size 0 --no-token-norm --dropout 0 --optimizer sgd --out uefl"
    mine, theirs = (
        read_rows(start(uefl, same + plain)),
        read_rows(start(fedavg, same + "--sample 2")),
    )
    for column in ("train_loss", "id_accuracy", "ood_accuracy"):
        assert [row[column] for row in mine] == [row[column] for row in theirs]
