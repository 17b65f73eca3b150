import math
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.stats
import torch
import torch.nn as nn
import torch.nn.functional as F
from helpers import gradient_of, outcome, prepared, sgd_by_hand
from scipy.cluster.vq import kmeans2

import uefl
from common.chance import random_at
from common.evaluation import of_words
from common.train import get_weights, set_weights
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


@pytest.mark.parametrize("segments", [1, 3])
@pytest.mark.parametrize("mean", [0.0, 100.0, -1e4])
def test_each_segment_becomes_the_nearest_codeword_that_may_be_used(mean, segments, rng):
    """By brute force. Tokens and codewords from K-means have this mean; the first are Gaussian."""
    words = rng.normal(mean, 0.1, (20, 6 // segments)).astype(np.float32)
    words[:8] -= mean
    tokens = rng.normal(mean, 0.1, (4, 5, 6)).astype(np.float32)
    codebook, usable = ExtensibleCodebook(0, 6, segments, 0.3, 0.8), rng.random(20) < 0.7
    codebook.extend(torch.from_numpy(words))
    out, loss, index = codebook(torch.from_numpy(tokens), torch.from_numpy(usable))
    parts, squares = tokens.reshape(-1, words.shape[1]).astype(float), []
    for z, found in zip(parts, index.flatten().tolist(), strict=True):
        distances = ((words.astype(float) - z) ** 2).sum(1)
        assert usable[found] and distances[found] <= distances[usable].min() + 1e-5
        squares.append(distances[found])
    assert np.allclose(out.detach(), words[index].reshape(4, 5, 6), rtol=1e-6, atol=1e-6)
    assert loss.item() == pytest.approx(1.1 * np.sum(squares) / tokens.size, rel=1e-3)


@pytest.mark.parametrize("token_norm", [True, False])
def test_a_vector_is_one_token(token_norm):
    x, codebook = torch.randn(4, 6), ExtensibleCodebook(7, 6)
    model = uefl.UEFL(nn.Identity(), codebook, nn.Flatten(), token_norm)
    c, expected, _ = codebook((F.layer_norm(x, [6]) if token_norm else x)[:, None])
    logits, code_loss = model(x)
    assert torch.allclose(logits, c[:, 0], atol=1e-5)
    assert torch.allclose(code_loss, expected)


@pytest.mark.parametrize("size", [0, 5])
def test_tokens_in_bfloat16_meet_a_codebook_in_float32_also_under_autocast(size):
    torch.manual_seed(0)
    codebook, tokens = ExtensibleCodebook(size, 6, 2), torch.randn(4, 3, 6).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        found = codebook(tokens)
    for one, other in zip(found, codebook(tokens.float()), strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)


def new_codewords(features, size):
    """The codewords that a client with these features [N, 2] adds."""
    model = SimpleNamespace(encode=lambda x: x[:, None], codebook=ExtensibleCodebook(1, 2))
    batches = [(x, None) for x in features.split(25)]
    return uefl.client_codewords(model, batches, size, 0, 0, 0).tolist()


def test_new_codewords_are_the_centres_of_the_clients_clusters():
    clusters = torch.tensor([[0, 0], [9, 0], [0, 9]]) + torch.rand(20, 3, 2)
    assert np.allclose(
        sorted(new_codewords(clusters.flatten(0, 1), 3)), sorted(clusters.mean(0).tolist())
    )
    with warnings.catch_warnings(action="error"):
        for n in (1, 9):
            assert new_codewords(torch.tensor([[1.0, 2.0]] * n), 4) == [[1, 2]] * 4  # too few


# ---------------------------------------------------------------- uncertainty and threshold


def test_entropy_is_that_of_the_mean_over_passes(rng):
    logits = rng.standard_normal((4, 30, 9)) * rng.choice([0.1, 10, 1000], (4, 30, 1))
    p = torch.from_numpy(logits).softmax(2)  # of which some are 0
    assert np.allclose(predictive_entropy(p), scipy.stats.entropy(p.mean(0), axis=1), atol=1e-12)


WRONG = "p.log()", "p * torch.nan", "p + torch.tensor([2, -1, -1])", "p[0]"


@pytest.mark.parametrize("wrong", WRONG)
def test_entropy_refuses_what_is_no_distribution(wrong, rng):
    p = torch.from_numpy(rng.standard_normal((4, 30, 3))).softmax(2)
    assert predictive_entropy(p.half()).min() > 0  # rounding is no mistake
    with pytest.raises(ValueError, match="sum to 1"):
        predictive_entropy(eval(wrong, {"torch": torch, "p": p}))


def test_threshold_on_a_worked_example():
    entropies = torch.tensor([1.0, 1.25, 1.35, 2.0])
    assert uncertain(entropies, 0.3).tolist() == [False, False, True, True]
    assert not uncertain(entropies, math.inf).any()
    assert not uncertain(torch.zeros(3), 0.1).any()  # line 3: nobody grows in the first iteration
    with pytest.raises(ValueError, match="NaN"):
        uncertain(torch.tensor([1.0, torch.nan]), 0.3)


@pytest.mark.parametrize("usable", [1, 4])
def test_perplexity_counts_codewords_in_equal_use(usable):
    """Tokens that are spread evenly over four codewords, of which a client may use some."""
    ramp = torch.arange(4.0)[:, None].expand(4, 8)
    model = uefl.UEFL(nn.Identity(), ExtensibleCodebook(0, 8), nn.Flatten(), False)
    model.codebook.extend(ramp)
    batches = [(ramp, torch.arange(4))] * 2
    _, _, perplexity, _ = of_words(model, batches, torch.arange(4) < usable)
    assert perplexity.item() == pytest.approx(usable)


def test_uncertainty_is_the_entropy_of_the_mean_pass_with_the_dropout_of_its_round(start):
    _, _, clients, trainer = prepared(uefl, CUT + "--dropout 0.5")

    def of_clients(t, passes):
        trainer.model.passes, where = passes, (trainer.initial, clients.ids, clients.test, t)
        return trainer.map(uefl.client_uncertainty, *where, may_use=None)[0]

    assert of_clients(1, 50).mean() > of_clients(1, 1).mean()  # it is above the mean of entropies
    assert of_clients(1, 1).equal(of_clients(1, 1)) and not of_clients(1, 1).equal(of_clients(2, 1))


# ---------------------------------------------------------------- the server's side


@pytest.mark.parametrize(("dtype", "rel"), [(torch.float16, 1e-3), (torch.float64, 1e-6)])
def test_the_average_is_numpys_over_the_clients_that_use_a_weight(dtype, rel, rng):
    theta, *thetas = torch.from_numpy(rng.standard_normal((6, 40))).to(dtype)
    uses, thetas = torch.from_numpy(rng.random((5, 40)) < 0.6), torch.stack(thetas)
    sizes = torch.tensor([0, 70_000, 1, 2_000, 80_000])
    uses[1], uses[:, 7], uses[:, 8] = True, False, torch.arange(5) == 0
    found = average(theta, thetas, sizes, uses)
    assert found.dtype == dtype and found[7:9].equal(theta[7:9])  # no client with samples uses it
    used = np.ma.array(thetas.double(), mask=~uses)
    expected = np.ma.average(used, axis=0, weights=sizes.numpy())
    assert expected.mask.nonzero()[0].tolist() == [7, 8]
    assert np.ma.allclose(found.double().numpy(), expected, rtol=rel, atol=rel)


# ---------------------------------------------------------------- whole runs


def tokens_by_hand(trainer, samples):
    z = trainer.model.features(trainer.x[samples].float() / 127.5 - 1).flatten(2).mT
    return F.layer_norm(z, z.shape[-1:])


def losses_by_hand(args, trainer, samples, may_use):
    """Lines 12 to 16: logits, (z - c)^2 for each side that learns, and the whole loss."""
    model, z = trainer.model, tokens_by_hand(trainer, samples)
    words = model.codebook.codewords
    c = words[torch.cdist(z, words).masked_fill(~may_use, torch.inf).argmin(2)]
    logits = model.classifier((z + (c - z).detach()).mT)
    code_loss = args.commitment * (z - c.detach()).square().mean()
    code_loss = code_loss + args.beta * (z.detach() - c).square().mean()
    return logits, code_loss, F.cross_entropy(logits, trainer.y[samples]) + code_loss


def test_a_whole_run_is_algorithm_1_by_hand(finished):
    words = CUT.replace(SILOS, "--partition domain --clients 3")
    words += "--model cnn --width 0.125 --optimizer sgd --lr 0.03 --dropout 0 "
    run = finished(uefl, words)
    args, data, clients, trainer = run.args, run.data, run.clients, run.trainer
    model, theta, t, e = trainer.model, trainer.initial, 0, [0, 0, 0]
    may_use, rows, held = torch.ones(3, 4, dtype=torch.bool), run.rows, clients.train
    n = np.array([[len(samples)] for samples in held])

    def of_lines_12_to_16(trainer, theta, batch):
        set_weights(model, theta)
        *_, loss = losses_by_hand(args, trainer, batch, may_use[k])
        return loss, gradient_of(loss, model)

    for iteration, last in ((1, 2), (2, 3), (3, 4)):
        set_weights(model, theta)
        for k in [k for k in range(3) if e[k] > min(e)]:  # lines 8 to 10
            z = tokens_by_hand(trainer, held[k]).detach().flatten(0, 1).double().numpy()
            new, _ = kmeans2(z, 4, minit="++", rng=random_at(0, "codewords", t, k))
            model.codebook.extend(torch.from_numpy(new))
            own = (torch.arange(3) == k)[:, None].expand(3, 4)
            may_use = torch.cat([may_use, own], 1)
        theta = get_weights(model)
        while t < last:
            t += 1
            ends, losses = [], []
            for k in range(3):
                end, loss = sgd_by_hand(run, theta, t, k, of_lines_12_to_16)
                ends.append(end.numpy())
                losses.append(loss)
            weights = n * np.ones_like(ends)
            own = may_use.numpy().repeat(model.codebook.codewords.shape[1], 1)
            weights[:, : own.shape[1]] *= own
            theta = torch.from_numpy(np.average(ends, axis=0, weights=weights)).float()  # line 20
            set_weights(model, theta)
            e, right, code = [], [], []
            for k, samples in enumerate(clients.test):  # line 22
                with torch.no_grad():  # a graph would hold the old number of codewords
                    logits, code_loss, _ = losses_by_hand(args, trainer, samples, may_use[k])
                p = logits.softmax(1)
                e.append(scipy.stats.entropy(p, axis=1).mean())
                right.append((p.argmax(1) == data.y[samples]).float().mean().item())
                code.append(code_loss.item())
            columns = {
                "train_loss": np.mean(losses), "code_loss": np.mean(code),
                "mE": np.mean(e), "mA": np.mean(right), "accuracies": right, "uncertainties": e,
                "turned_accuracy": right[2], "turned_extended": may_use[2].sum() > 4,
                "codewords": may_use.sum(1), "iteration": iteration,
            }  # fmt: skip
            for column, numbers in columns.items():
                found = [*map(float, rows[t - 1][column].split())]
                assert np.allclose(found, numbers, atol=1e-4), column
    assert t == len(rows) == 4 and may_use.shape[1] > 4
    answers = model(data.x[data.test].float() / 127.5 - 1)[0].argmax(1)
    expected = (answers == data.y[data.test]).float().mean().item()
    assert float(rows[-1]["ood_accuracy"]) == pytest.approx(expected, abs=1e-5)
    assert torch.allclose(run.state["theta"], theta, atol=1e-4)


def test_an_infinite_threshold_never_extends_and_is_vq_fedavg(start):
    never = outcome(start(uefl, CUT + "--gamma 1e9"))
    assert never == outcome(start(uefl, CUT + "--out vq --iterations 1"))
