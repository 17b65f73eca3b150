import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.stats
import torch
import torch.nn.functional as F
from helpers import gradient_of, outcome, prepared, sgd_by_hand
from scipy.cluster.vq import kmeans2

import uefl
from common.chance import random_at
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


def test_each_segment_becomes_the_nearest_codeword_that_may_be_used(rng):
    """By brute force. Tokens and codewords from K-means are large; the first are Gaussian."""
    words = rng.normal(-1e4, 0.1, (20, 2)).astype(np.float32)
    words[:8] += 1e4
    tokens = rng.normal(-1e4, 0.1, (4, 5, 6)).astype(np.float32)
    codebook, usable = ExtensibleCodebook(0, 6, segments=3), rng.random(20) < 0.7
    codebook.extend(torch.from_numpy(words))
    out, _, index = codebook(torch.from_numpy(tokens), torch.from_numpy(usable))
    parts = tokens.reshape(-1, 2).astype(float)
    for z, found in zip(parts, index.flatten().tolist(), strict=True):
        distances = ((words.astype(float) - z) ** 2).sum(1)
        assert usable[found] and distances[found] <= distances[usable].min() + 1e-5
    assert np.allclose(out.detach(), words[index].reshape(4, 5, 6), rtol=1e-6, atol=1e-6)


def test_a_client_with_equal_segments_adds_equal_codewords_without_a_warning():
    model = SimpleNamespace(encode=lambda x: x[:, None], codebook=ExtensibleCodebook(1, 2))
    batches = [(torch.tensor([[1.0, 2.0]]), None)] * 3
    with warnings.catch_warnings(action="error"):
        found = uefl.client_codewords(model, batches, 4, 0, 0, 0)
    assert found.tolist() == [[1, 2]] * 4


# ---------------------------------------------------------------- uncertainty and threshold


def test_what_is_no_distribution_or_no_number_is_refused(rng):
    p = torch.from_numpy(rng.standard_normal((4, 30, 3))).softmax(2)
    assert predictive_entropy(p.half()).min() > 0  # rounding is no mistake
    assert predictive_entropy(torch.eye(3)[None]).tolist() == [0, 0, 0]  # and 0 log 0 is 0
    for wrong in (p.log(), p * torch.nan, p[0]):
        with pytest.raises(ValueError, match="sum to 1"):
            predictive_entropy(wrong)
    with pytest.raises(ValueError, match="NaN"):
        uncertain(torch.tensor([1.0, torch.nan]), 0.3)


def test_uncertainty_is_the_entropy_of_the_mean_pass_with_the_dropout_of_its_round(start):
    _, _, clients, trainer = prepared(uefl, CUT + "--dropout 0.5")

    def of_clients(t, passes):
        trainer.model.passes, where = passes, (trainer.initial, clients.ids, clients.test, t)
        return trainer.map(uefl.client_uncertainty, *where, may_use=None)[0]

    assert of_clients(1, 50).mean() > of_clients(1, 1).mean()  # it is above the mean of entropies
    assert of_clients(1, 1).equal(of_clients(1, 1)) and not of_clients(1, 1).equal(of_clients(2, 1))


# ---------------------------------------------------------------- the server's side


def test_the_average_of_many_samples_fits_into_float16(rng):
    theta, *thetas = torch.from_numpy(rng.standard_normal((4, 40))).half()
    sizes, thetas = torch.tensor([70_000, 2_000, 80_000]), torch.stack(thetas)
    found = average(theta, thetas, sizes, torch.ones(3, 40, dtype=torch.bool))
    expected = np.average(thetas.double(), axis=0, weights=sizes)
    assert found.dtype == torch.float16 and np.allclose(found, expected, atol=1e-3)


# ---------------------------------------------------------------- whole runs


def tokens_by_hand(trainer, samples):
    z = trainer.model.features(trainer.x[samples].float() / 127.5 - 1).flatten(2).mT
    return F.layer_norm(z, z.shape[-1:])


def losses_by_hand(args, trainer, samples, may_use):
    """Lines 12 to 16: logits, (z - c)^2 for each side that learns, indices, and the whole loss."""
    model, z = trainer.model, tokens_by_hand(trainer, samples)
    words = model.codebook.codewords
    indices = torch.cdist(z, words).masked_fill(~may_use, torch.inf).argmin(2)
    c = words[indices]
    logits = model.classifier((z + (c - z).detach()).mT)
    code_loss = args.commitment * (z - c.detach()).square().mean()
    code_loss = code_loss + args.beta * (z.detach() - c).square().mean()
    return logits, code_loss, indices, F.cross_entropy(logits, trainer.y[samples]) + code_loss


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
            e, right, code, perplexities = [], [], [], []
            for k, samples in enumerate(clients.test):  # line 22
                with torch.no_grad():
                    logits, code_loss, words, _ = losses_by_hand(args, trainer, samples, may_use[k])
                perplexities.append(np.exp(scipy.stats.entropy(words.flatten().bincount())))
                p = logits.softmax(1)
                e.append(scipy.stats.entropy(p, axis=1).mean())
                right.append((p.argmax(1) == data.y[samples]).float().mean().item())
                code.append(code_loss.item())
            columns = {
                "train_loss": np.mean(losses), "code_loss": np.mean(code),
                "mE": np.mean(e), "mA": np.mean(right), "mP": np.mean(perplexities),
                "accuracies": right, "uncertainties": e,
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
