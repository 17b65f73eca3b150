import csv
import math
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_fedavg import rows

import fedavg
import uefl
from common import flags, random_at
from common.train import get_weights
from uefl import ExtensibleCodebook, predictive_entropy, uncertain

SILOS = "--silos 2 1 --silo-size 20"
CUT = (
    f"--model resblocks --width 0.01 --rotate 0 90 {SILOS} --local-epochs 2 --batch-size 10 "
    "--lr 0.003 --codebook-size 4 --segments 1 --gamma 0 --rounds 2 --later-rounds 1 --iterations 3 "
    "--device cpu --precision float32 --out run "
)


@pytest.fixture
def start(start, monkeypatch, tiny):
    """As in conftest.py, but with the tiny data set's two domains under the names of two angles."""
    tiny.domains = ["0", "90"]
    monkeypatch.setattr("common.data.load", lambda name, *args: tiny)
    return start


@pytest.fixture
def prepared(start):
    """What main() prepares, and a model that is two rounds old."""

    def prepare(more="", cut=CUT):
        args = flags.parse(uefl.__doc__, uefl.SETTINGS, uefl.own_flags, (cut + more).split())
        data, clients, _, trainer = flags.prepare(args, dropout=args.dropout)
        bases = [flags.initial_model(args, data, trainer.device, m, dropout=args.dropout) for m in range(args.ensemble)]
        model, w = uefl.build(args, trainer, bases, clients.train[0])
        allowed = torch.ones(len(clients.train), args.codebook_size, dtype=torch.bool)
        return args, trainer, model, {"round": 1, "iteration": 0, "w": w, "allowed": allowed}, clients

    return prepare


# ------------------------------------------------------------------------------------------------- the quantiser


@pytest.mark.parametrize("segments", [1, 2, 4])
def test_each_segment_becomes_the_nearest_codeword_that_is_allowed(segments):
    torch.manual_seed(0)
    codebook = ExtensibleCodebook(7, 8, segments)
    codebook.use(torch.tensor([True, False, True, True, False, True, True]))
    tokens = torch.randn(3, 5, 8)
    output, loss, index = codebook(tokens)
    assert index.shape == (3, 5, segments)
    size, squares = 8 // segments, []
    for n in range(3):
        for place in range(5):
            for s in range(segments):
                z = tokens[n, place, s * size : (s + 1) * size]
                distances = [(z - c).square().sum().item() for c in codebook.codewords]
                best = min((v for v in range(7) if codebook.allowed[v]), key=distances.__getitem__)
                assert index[n, place, s] == best
                assert torch.allclose(output[n, place, s * size : (s + 1) * size], codebook.codewords[best], atol=1e-6)
                squares.append(distances[best])
    assert loss.item() == pytest.approx((0.25 + 1.0) * np.mean(squares) / size, rel=1e-5)


def test_gradients_pass_straight_through_and_the_two_losses_pull_on_their_own_side():
    torch.manual_seed(0)
    codebook = ExtensibleCodebook(5, 6, 2, commitment=0.3, beta=0.7)
    tokens, upstream = torch.randn(4, 3, 6, requires_grad=True), torch.randn(4, 3, 6)
    output, _, _ = codebook(tokens)
    to_tokens, to_codewords = torch.autograd.grad(
        (output * upstream).sum(), [tokens, codebook.codewords], allow_unused=True
    )
    assert torch.equal(to_tokens, upstream)
    assert to_codewords is None or not to_codewords.any()

    _, loss, index = codebook(tokens)
    to_tokens, to_codewords = torch.autograd.grad(loss, [tokens, codebook.codewords])
    z, which = tokens.detach().reshape(-1, 3), index.flatten()
    difference = z - codebook.codewords.detach()[which]
    assert torch.allclose(to_tokens.reshape(-1, 3), 0.3 * 2 * difference / z.numel(), atol=1e-6)
    expected = torch.stack([-0.7 * 2 * difference[which == v].sum(0) / z.numel() for v in range(5)])
    assert torch.allclose(to_codewords, expected, atol=1e-6)


def test_a_codebook_of_size_0_passes_tokens_as_they_are():
    tokens = torch.randn(2, 3, 4)
    output, loss, _ = ExtensibleCodebook(0, 4)(tokens)
    assert torch.equal(output, tokens) and loss == 0


def test_segments_must_divide_the_channels():
    with pytest.raises(ValueError, match="3 segments"):
        ExtensibleCodebook(4, 8, 3)


def test_kmeans_codewords_are_the_centroids_of_the_features():
    torch.manual_seed(0)
    centres = torch.tensor([[10.0, 0, 0, 0], [0, 10, 0, 0], [0, 0, -10, 0]])
    tokens = (centres[:, None] + torch.randn(3, 50, 4)).reshape(10, 15, 4)
    codebook = ExtensibleCodebook(2, 4)
    before = codebook.codewords.detach().clone()
    codebook.extend(3, tokens, random_at(0, "test"))
    assert codebook.codewords.shape == (5, 4) and codebook.allowed.tolist() == [True] * 5
    assert torch.equal(codebook.codewords[:2], before)
    means = tokens.reshape(3, 50, 4).mean(1)
    found = codebook.codewords[2:]
    nearest = torch.cdist(means, found).argmin(1)
    assert sorted(nearest.tolist()) == [0, 1, 2]
    assert torch.allclose(found[nearest], means, atol=1e-5)


# ------------------------------------------------------------------------------------- uncertainty and threshold


def test_entropy_is_that_of_the_mean_over_passes():
    passes = torch.tensor([[[0.9, 0.1], [1.0, 0.0]], [[0.1, 0.9], [1.0, 0.0]]])
    assert predictive_entropy(passes).tolist() == pytest.approx([math.log(2), 0.0])
    a, b = (0.9 + 0.6) / 2, (0.1 + 0.4) / 2
    worked = predictive_entropy(torch.tensor([[[0.9, 0.1]], [[0.6, 0.4]]]))
    assert worked.item() == pytest.approx(-a * math.log(a) - b * math.log(b))


def test_threshold_on_a_worked_example():
    entropies = torch.tensor([1.0, 1.25, 1.35, 2.0])
    assert uncertain(entropies, 0.3).tolist() == [False, False, True, True]
    assert uncertain(entropies, 0.3, "mean").tolist() == [False, False, False, True]
    assert not uncertain(entropies, float("inf")).any()


def test_perplexity_counts_codewords_in_equal_use():
    assert uefl.perplexity(torch.tensor([0, 2, 4, 6]).repeat(5), 8).item() == pytest.approx(4)
    assert uefl.perplexity(torch.zeros(9, dtype=torch.long), 8).item() == pytest.approx(1)


def test_without_dropout_the_uncertainty_is_the_softmaxs_own_entropy_and_with_it_passes_differ(prepared):
    args, trainer, model, state, clients = prepared("--dropout 0 --passes 3")
    found = uefl.assess(args, trainer, model, state, clients)
    for k, entropy in enumerate(found["uncertainties"]):
        p = trainer.predict(model, state["w"][0], clients.test[k]).softmax(1)
        assert entropy == pytest.approx(-(p * p.log()).sum(1).mean().item(), rel=1e-5)
    _, _, model, _, _ = prepared("--dropout 0.5")
    one, two, many = (
        uefl.assess(args_of, trainer, model, state, clients)["uncertainties"]
        for args_of in (prepared(f"--dropout 0.5 --passes {t}")[0] for t in (1, 2, 50))
    )
    assert one != two and two != many
    assert np.mean(many) > np.mean(one), "the entropy of a mean is above the mean of entropies"


def test_a_deep_ensemble_averages_its_members(prepared):
    args, trainer, model, state, clients = prepared("--ensemble 3")
    assert len(state["w"]) == 3 and not torch.equal(state["w"][0], state["w"][1])
    found = uefl.assess(args, trainer, model, state, clients)
    p = torch.stack([trainer.predict(model, w, clients.test[0]).softmax(1) for w in state["w"]]).mean(0)
    assert found["uncertainties"][0] == pytest.approx(-(p * p.log()).sum(1).mean().item(), rel=1e-5)


# ------------------------------------------------------------------------------------------- the server's side


def test_codewords_are_averaged_over_the_clients_that_may_use_them(prepared):
    _, _, model, state, _ = prepared()
    w, sizes = state["w"][0], torch.tensor([10.0, 30.0])
    updates = torch.randn(2, len(w))
    allowed = torch.tensor([[True, True, False, False], [True, False, True, False]])
    model.codebook.codewords.data.zero_()
    new = uefl.average(model, w, updates, sizes, allowed)
    at = uefl.train.span(model, "codebook.codewords")
    moved, (a, b) = (w - new)[at].view(4, -1), updates[:, at].view(2, 4, -1)
    assert torch.allclose(moved[0], 0.25 * a[0] + 0.75 * b[0], atol=1e-6)
    assert torch.allclose(moved[1], a[1], atol=1e-6) and torch.allclose(moved[2], b[2], atol=1e-6)
    assert not moved[3].any()
    rest = torch.ones(len(w), dtype=torch.bool)
    rest[at] = False
    assert torch.allclose((w - new)[rest], (0.25 * updates[0] + 0.75 * updates[1])[rest], atol=1e-5)
    everybody = uefl.average(model, w, updates, sizes, torch.ones_like(allowed))
    assert torch.allclose(everybody, w - 0.25 * updates[0] - 0.75 * updates[1], atol=1e-5)


def test_an_extension_belongs_to_one_client_and_changes_nothing_else(prepared):
    args, trainer, model, state, clients = prepared()
    before, old = state["w"][0].clone(), get_weights(model)
    at = uefl.train.span(model, "codebook.codewords")
    uefl.extend(args, trainer, model, state, clients, 1)
    assert state["allowed"].tolist() == [[True] * 4 + [k == 1] * 4 for k in range(3)]
    grown = uefl.train.span(model, "codebook.codewords")
    after = state["w"][0]
    assert torch.equal(after[grown][: at.stop - at.start], before[at])
    assert torch.equal(after[: grown.start], before[: at.start]) and torch.equal(after[grown.stop :], before[at.stop :])
    assert len(old) < len(after) == len(get_weights(model))
    model.codebook.use(state["allowed"][1])
    z = trainer.predict(model, after, clients.train[1], model.encode).reshape(-1, 8)
    nearest = torch.cdist(z, model.codebook.codewords[4:]).argmin(1)
    for v in nearest.unique():
        assert torch.allclose(model.codebook.codewords[4 + v], z[nearest == v].mean(0), atol=0.2), "near its centroid"


def test_clients_above_the_threshold_are_extended_and_the_run_tells_so(start, capsys):
    folder = start(uefl, CUT) / "run"
    found = rows(folder)
    ends = list({r["iteration"]: r for r in found}.values())
    assert [int(r["round"]) for r in ends] == [2, 3, 4]
    for before, after in pairwise(ends):
        entropies = np.array([float(u) for u in before["uncertainties"].split()])
        grown = np.array([int(v) for v in before["codewords"].split()]) + 4 * (entropies > entropies.min())
        assert [int(v) for v in after["codewords"].split()] == grown.tolist()
    for r in found:
        assert float(r["mA"]) == pytest.approx(np.mean([float(a) for a in r["accuracies"].split()]), abs=1e-5)
        assert float(r["mE"]) == pytest.approx(np.mean([float(u) for u in r["uncertainties"].split()]), abs=1e-5)
    with open(folder / "fedavg" / "metrics.csv", newline="") as f:
        assert len(list(csv.DictReader(f))) == len(found), "FedAvg trains for as many rounds"
    assert {f.name for f in folder.iterdir()} >= {"curves.png", "partition.png", "uncertainty.png", "codebook.png"}
    table = capsys.readouterr().out
    assert "UEFL" in table and "FedAvg" in table


def test_an_infinite_threshold_never_extends_and_is_vq_fedavg(start):
    folder = start(uefl, CUT + "--gamma 1e30 --no-compare")
    assert {r["codewords"] for r in rows(folder / "run")} == {"4 4 4"}
    start(uefl, CUT.replace("--out run", "--out vq") + "--iterations 1 --no-compare")
    assert (folder / "run" / "model.pt").read_bytes() == (folder / "vq" / "model.pt").read_bytes()


def test_without_a_codebook_it_is_fedavg(start):
    same = (
        "--model resblocks --width 0.01 --rotate 0 90 --partition domain --local-epochs 2 --batch-size 10 --rounds 3 "
    )
    folder = start(uefl, same + "--codebook-size 0 --dropout 0 --optimizer sgd --lr 0.1 --out uefl")
    start(fedavg, same + "--lr 0.1 --out fedavg")
    mine, theirs = rows(folder / "uefl"), rows(folder / "fedavg")
    for column in ("train_loss", "id_accuracy", "ood_accuracy"):
        assert [r[column] for r in mine] == [r[column] for r in theirs]


@pytest.mark.parametrize(
    ("ablation", "has_ood"),
    [
        ("--init gaussian", False),
        ("--reference mean", False),
        ("--ensemble 2", False),
        ("--no-token-norm --segments 4", False),
        ("--iterations 1 --codebook-size 12", False),
        ("--test-domain 90", True),
        ("--partition dirichlet --alpha 1 --clients 4 --participating 4 --sample 2", True),
    ],
)
def test_ablations_run(start, ablation, has_ood):
    cut = CUT.replace(SILOS, "") if has_ood else CUT
    found = rows(start(uefl, cut + "--no-compare " + ablation) / "run")
    for row in found:
        assert 0 <= float(row["mA"]) <= 1 and float(row["mE"]) > 0
        assert 1 <= float(row["mP"]) <= max(int(v) for v in row["codewords"].split())
        assert bool(row["ood_accuracy"]) == has_ood


def test_a_domain_that_never_trained_sees_all_codewords_or_only_shared_ones(prepared):
    outcome = {}
    for which in ("all", "shared"):
        args, trainer, model, state, clients = prepared(
            f"--partition domain --test-domain 90 --clients 3 --unseen-codewords {which}", CUT.replace(SILOS, "")
        )
        uefl.extend(args, trainer, model, state, clients, 0)
        uefl.assess(args, trainer, model, state, clients)
        outcome[which] = model.codebook.allowed.tolist()
    assert outcome == {"all": [True] * 8, "shared": [True] * 4 + [False] * 4}


def test_token_norm_gives_tokens_the_length_of_gaussian_codewords(prepared):
    _, trainer, model, _, clients = prepared()
    z = model.eval().encode(trainer.batch(clients.train[0]))
    assert torch.allclose(z.square().mean(-1), torch.ones(z.shape[:2]), atol=1e-2)
    _, _, plain, _, _ = prepared("--no-token-norm")
    raw = plain.eval().encode(trainer.batch(clients.train[0]))
    assert (raw >= 0).all(), "which is why their directions are alike"
    assert F.cosine_similarity(raw[0], raw[1], dim=-1).mean() > F.cosine_similarity(z[0], z[1], dim=-1).mean()
