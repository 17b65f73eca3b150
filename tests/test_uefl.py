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
from common.train import get_weights, set_weights
from uefl import ExtensibleCodebook, average_codewords, kmeans_codewords, predictive_entropy, uncertain

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
    """What main() prepares: the model before training, and the state that belongs to it."""

    def prepare(more="", cut=CUT):
        args = flags.parse(uefl.__doc__, uefl.SETTINGS, uefl.own_flags, (cut + more).split())
        args.dropout = args.dropout if args.ensemble == 1 else 0.0
        data, clients, _, trainer = flags.prepare(args, dropout=args.dropout)
        members = []
        for m in range(args.ensemble):
            base = flags.initial_model(args, data, trainer.device, m, dropout=args.dropout)
            book = ExtensibleCodebook(args.codebook_size, 8, args.segments, args.commitment, args.beta)
            members.append(uefl.UEFL(base.features, book, base.classifier, args.token_norm))
        model = members[0] if len(members) == 1 else uefl.Ensemble(members)
        allowed = torch.ones(clients.participating, args.codebook_size, dtype=torch.bool)
        return args, trainer, model, {"w": get_weights(model), "allowed": allowed}, clients

    return prepare


def evaluate(trainer, model, state, clients, passes):
    """Each client's uncertainty, accuracy and perplexity, [K, 3]."""
    each = {"allowed": state["allowed"]}
    return trainer.map_clients(
        uefl.client_evaluation, model, state["w"], clients.ids, clients.test, 1, each=each, passes=passes
    )


def probabilities(trainer, model, state, samples, client=0):
    """Softmax of the model without dropout, by hand."""
    set_weights(model, state["w"])
    model.eval()
    c, _, _ = model.codebook(model.encode(trainer.batch(samples)[0]), state["allowed"][client])
    return model.classify(c).softmax(1)


# ------------------------------------------------------------------------------------------------- the quantiser


@pytest.mark.parametrize("segments", [1, 2, 4])
def test_each_segment_becomes_the_nearest_codeword_that_is_allowed(segments):
    torch.manual_seed(0)
    codebook = ExtensibleCodebook(7, 8, segments)
    allowed = torch.tensor([True, False, True, True, False, True, True])
    tokens = torch.randn(3, 5, 8)
    output, loss, index = codebook(tokens, allowed)
    assert index.shape == (3, 5, segments)
    size, squares = 8 // segments, []
    for n in range(3):
        for place in range(5):
            for s in range(segments):
                z = tokens[n, place, s * size : (s + 1) * size]
                distances = [(z - c).square().sum().item() for c in codebook.codewords]
                best = min((v for v in range(7) if allowed[v]), key=distances.__getitem__)
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
    tokens = (centres[:, None] + torch.randn(3, 50, 4)).reshape(150, 4)
    found = kmeans_codewords(tokens, 3, random_at(0, "test")).float()
    means = tokens.reshape(3, 50, 4).mean(1)
    nearest = torch.cdist(means, found).argmin(1)
    assert sorted(nearest.tolist()) == [0, 1, 2]
    assert torch.allclose(found[nearest], means, atol=1e-5)


def test_kmeans_of_fewer_distinct_features_than_codewords_is_quiet(recwarn):
    found = kmeans_codewords(torch.tensor([[1.0, 2.0]]).repeat(9, 1), 4, random_at(0, "test"))
    assert found.shape == (4, 2) and torch.isfinite(found).all() and not recwarn.list


def test_a_codebook_grows_under_the_same_optimizer_and_loads_again():
    torch.manual_seed(0)
    codebook = ExtensibleCodebook(2, 4)
    optimizer = torch.optim.SGD(codebook.parameters(), lr=1.0)
    before = codebook.codewords.detach().clone()
    codebook.extend(torch.full((3, 4), 9.0, dtype=torch.float64))
    assert codebook.codewords.shape == (5, 4) and torch.equal(codebook.codewords[:2], before)
    _, loss, index = codebook(torch.full((1, 1, 4), 8.0))
    loss.backward()
    optimizer.step()
    assert index.item() >= 2 and not torch.equal(codebook.codewords[index.item()], torch.full((4,), 9.0))
    assert list(codebook.state_dict()) == ["codewords"], "who may use what is the server's, and stays out of the upload"
    again = ExtensibleCodebook(2, 4)
    again.load_state_dict(codebook.state_dict())
    assert torch.equal(again.codewords, codebook.codewords)
    assert again.codewords.data_ptr() != codebook.codewords.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_a_codebook_works_in_other_precisions(dtype):
    torch.manual_seed(0)
    codebook, tokens = ExtensibleCodebook(5, 4), torch.randn(2, 3, 4)
    expected = codebook(tokens)[2]
    output, loss, index = codebook.to(dtype)(tokens.to(dtype))
    assert output.dtype == loss.dtype == dtype and torch.equal(index, expected)


@pytest.mark.parametrize("allowed", [[False, False], [1, 0], [True]])
def test_a_wrong_choice_of_codewords_is_refused(allowed):
    with pytest.raises(ValueError, match=r"bool \[2\]"):
        ExtensibleCodebook(2, 4)(torch.randn(1, 1, 4), torch.tensor(allowed))


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
    assert not uncertain(entropies, float("inf")).any()
    assert not uncertain(torch.zeros(3), 0.1).any(), "line 3: nobody is extended in the first iteration"


def test_perplexity_counts_codewords_in_equal_use(prepared):
    """Two clients: the tokens of one are spread evenly over its four codewords, those of the other are all alike."""
    _, trainer, model, state, clients = prepared()
    model.encode = lambda x: torch.arange(4.0).repeat(len(x))[: len(x), None, None].expand(-1, 1, 8)
    with torch.no_grad():
        model.codebook.codewords.copy_(torch.arange(4.0)[:, None].expand(4, 8))
    state["w"] = get_weights(model)
    four = [samples[: len(samples) // 4 * 4] for samples in clients.test]
    found = trainer.map_clients(
        uefl.client_evaluation, model, state["w"], clients.ids, four, each={"allowed": state["allowed"]}, passes=1
    )
    assert found[0, 2].item() == pytest.approx(4)
    one = {"allowed": torch.eye(4, dtype=torch.bool)[:3]}
    found = trainer.map_clients(uefl.client_evaluation, model, state["w"], clients.ids, four, each=one, passes=1)
    assert found[:, 2].tolist() == pytest.approx([1, 1, 1])


def test_without_dropout_the_uncertainty_is_the_softmaxs_own_entropy_and_with_it_passes_differ(prepared):
    _, trainer, model, state, clients = prepared("--dropout 0")
    for k, (entropy, accuracy, _) in enumerate(evaluate(trainer, model, state, clients, 3).tolist()):
        p = probabilities(trainer, model, state, clients.test[k])
        assert entropy == pytest.approx(-(p * p.log()).sum(1).mean().item(), rel=1e-5)
        assert accuracy == pytest.approx((p.argmax(1) == trainer.y[clients.test[k]]).float().mean().item())
    _, trainer, model, state, clients = prepared("--dropout 0.5")
    one, two, many = (evaluate(trainer, model, state, clients, t)[:, 0] for t in (1, 2, 50))
    assert not torch.equal(one, two) and not torch.equal(two, many)
    assert many.mean() > one.mean(), "the entropy of a mean is above the mean of entropies"


def test_a_deep_ensemble_averages_its_members(prepared):
    _, trainer, model, state, clients = prepared("--ensemble 3")
    found = evaluate(trainer, model, state, clients, 1)
    single = [{"w": get_weights(member), "allowed": state["allowed"]} for member in model.members]
    assert not torch.equal(single[0]["w"], single[1]["w"])
    each = [probabilities(trainer, m, s, clients.test[0]) for m, s in zip(model.members, single, strict=True)]
    p = torch.stack(each).mean(0)
    set_weights(model, state["w"])
    assert found[0, 0].item() == pytest.approx(-(p * p.log()).sum(1).mean().item(), rel=1e-5)
    assert found[0, 1].item() == pytest.approx((p.argmax(1) == trainer.y[clients.test[0]]).float().mean().item())


def test_members_of_an_ensemble_learn_as_if_they_were_alone(prepared):
    _, trainer, model, state, clients = prepared("--ensemble 2")
    each = {"allowed": state["allowed"]}
    together = trainer.local_updates(
        uefl.client_update, model, state["w"], clients.ids[:1], clients.train, 1, each=each
    )
    moved, sizes = together[1][0], [len(get_weights(member)) for member in model.members]
    set_weights(model, state["w"])
    for m, member in enumerate(model.members):
        w = get_weights(member)
        alone = trainer.local_updates(uefl.client_update, member, w, clients.ids[:1], clients.train, 1, each=each)[1][0]
        of_member = torch.cat(
            [
                moved[start : start + p.numel()]
                for (name, p), start in zip(model.named_parameters(), offsets(model), strict=True)
                if name.startswith(f"members.{m}.")
            ]
        )
        n = len(of_member)
        assert sizes[m] >= n
        close = torch.isclose(of_member, alone[:n], rtol=0.05, atol=2e-4)
        assert close.float().mean() > 0.95, "Adam sees the factor 1/2 of the loss only where gradients are near 1e-8"


def offsets(model):
    """Where each parameter starts in w."""
    return np.cumsum([0, *(p.numel() for p in model.parameters())])[:-1].tolist()


# ------------------------------------------------------------------------------------------- the server's side


def where_codewords_are(model):
    names = [name for name, _ in model.named_parameters()]
    start = offsets(model)[names.index("codebook.codewords")]
    return slice(start, start + model.codebook.codewords.numel())


def test_codewords_are_averaged_over_the_clients_that_may_use_them(prepared):
    _, _, model, state, _ = prepared()
    w, sizes = state["w"], torch.tensor([10.0, 30.0])
    updates = torch.randn(2, len(w))
    allowed = torch.tensor([[True, True, False, False], [True, False, True, False]])
    new = uefl.average(model, w, updates, sizes, allowed)
    at = where_codewords_are(model)
    moved, (a, b) = (w - new)[at].view(4, -1), updates[:, at].view(2, 4, -1)
    assert torch.allclose(moved[0], 0.25 * a[0] + 0.75 * b[0], atol=1e-5)
    assert torch.allclose(moved[1], a[1], atol=1e-5) and torch.allclose(moved[2], b[2], atol=1e-5)
    assert not moved[3].any()
    rest = torch.ones(len(w), dtype=torch.bool)
    rest[at] = False
    assert torch.allclose((w - new)[rest], (0.25 * updates[0] + 0.75 * updates[1])[rest], atol=1e-5)
    everybody = uefl.average(model, w, updates, sizes, torch.ones_like(allowed))
    assert torch.allclose(everybody, w - 0.25 * updates[0] - 0.75 * updates[1], atol=1e-5)


def test_average_codewords_on_a_worked_example():
    before = torch.tensor([[0.0], [7.0], [8.0]])
    codewords = torch.tensor([[[1.0], [2.0], [9.0]], [[5.0], [6.0], [9.0]]])
    allowed = torch.tensor([[True, False, False], [True, True, False]])
    found = average_codewords(before, codewords, torch.tensor([1.0, 3.0]), allowed)
    assert found.flatten().tolist() == [4.0, 6.0, 8.0]


def test_an_extension_belongs_to_one_client_and_changes_nothing_else(prepared):
    _, trainer, model, state, clients = prepared()
    before, at = state["w"].clone(), where_codewords_are(model)
    each = {"rng": {1: random_at(0, "test")}}
    codewords = trainer.map_clients(
        uefl.client_codewords, model, before, torch.tensor([1]), clients.train, each=each, size=4, kind="kmeans"
    )
    uefl.extend(model, state, torch.tensor([1]), codewords)
    assert state["allowed"].tolist() == [[True] * 4 + [k == 1] * 4 for k in range(3)]
    grown, after = where_codewords_are(model), state["w"]
    assert torch.equal(after[grown][: at.stop - at.start], before[at])
    assert torch.equal(after[: grown.start], before[: at.start]) and torch.equal(after[grown.stop :], before[at.stop :])
    assert len(before) < len(after) == len(get_weights(model))
    z = model.eval().encode(trainer.batch(clients.train[1])[0]).reshape(-1, 8)
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
    assert {f.name for f in folder.iterdir()} >= {"curves.png", "partition.png", "uncertainty.png"}
    table = capsys.readouterr().out
    assert "UEFL" in table and "FedAvg" in table


def test_an_infinite_threshold_never_extends_and_is_vq_fedavg(start):
    folder = start(uefl, CUT + "--gamma 1e30 --no-compare")
    assert {r["codewords"] for r in rows(folder / "run")} == {"4 4 4"}
    start(uefl, CUT.replace("--out run", "--out vq") + "--iterations 1 --no-compare")
    assert (folder / "run" / "model.pt").read_bytes() == (folder / "vq" / "model.pt").read_bytes()


def test_private_codebooks_of_a_single_client_are_the_shared_one(start):
    one = CUT.replace("2 1", "1 0") + "--no-compare "
    folder = start(uefl, one)
    start(uefl, one.replace("--out run", "--out private") + "--codebooks private")
    assert (folder / "run" / "model.pt").read_bytes() == (folder / "private" / "model.pt").read_bytes()


def test_private_codewords_are_never_averaged_and_the_newest_replace_the_earlier(start, monkeypatch):
    seen, average = [], uefl.average_codewords

    def watched(before, codewords, sizes, allowed):
        after = average(before, codewords, sizes, allowed)
        for v, owner in enumerate(allowed.float().argmax(0).tolist()):
            assert allowed[:, v].sum() <= 1, "a codeword has one owner at most"
            assert torch.allclose(after[v], codewords[owner, v] if allowed[owner, v] else before[v])
        seen.append(allowed)
        return after

    monkeypatch.setattr(uefl, "average_codewords", watched)
    found = rows(start(uefl, CUT + "--no-compare --codebooks private") / "run")
    assert [r["codewords"] for r in found] == ["4 4 4"] * 2 + ["8 8 8"] * 2, "certain clients get codewords, too"
    assert [allowed.shape[1] for allowed in seen] == [12, 12, 24, 36]
    assert not seen[-1][:, 12:24].any() and seen[-1][:, 24:].sum() == 12


def test_without_a_codebook_it_is_fedavg(start):
    same = (
        "--model resblocks --width 0.01 --rotate 0 90 --partition domain --local-epochs 2 --batch-size 10 --rounds 3 "
    )
    folder = start(uefl, same + "--codebook-size 0 --no-token-norm --dropout 0 --optimizer sgd --lr 0.1 --out uefl")
    start(fedavg, same + "--lr 0.1 --out fedavg")
    mine, theirs = rows(folder / "uefl"), rows(folder / "fedavg")
    for column in ("train_loss", "id_accuracy", "ood_accuracy"):
        assert [r[column] for r in mine] == [r[column] for r in theirs]


@pytest.mark.parametrize(
    ("ablation", "has_ood"),
    [
        ("--init gaussian", False),
        ("--ensemble 2", False),
        ("--ensemble 2 --codebooks private", False),
        ("--no-token-norm --segments 4", False),
        ("--iterations 1 --codebook-size 12", False),
        ("--test-domain 90", True),
        ("--partition dirichlet --dirichlet 1 --clients 4 --participating 4 --sample 2", True),
    ],
)
def test_ablations_run(start, ablation, has_ood):
    cut = CUT.replace(SILOS, "") if has_ood else CUT
    found = rows(start(uefl, cut + "--no-compare " + ablation) / "run")
    for row in found:
        assert 0 <= float(row["mA"]) <= 1 and float(row["mE"]) > 0
        assert 1 <= float(row["mP"]) <= max(int(v) for v in row["codewords"].split())
        assert bool(row["ood_accuracy"]) == has_ood


def test_a_domain_that_never_trained_may_use_all_codewords(start, monkeypatch):
    seen, evaluation = [], uefl.client_evaluation

    def watched(model, batches, autocast, allowed, passes):
        seen.append(allowed.tolist())
        return evaluation(model, batches, autocast, allowed, passes)

    monkeypatch.setattr(uefl, "client_evaluation", watched)
    cut = CUT.replace(SILOS, "") + "--partition domain --test-domain 90 --clients 3 --no-compare"
    found = rows(start(uefl, cut) / "run")
    of_last_round = seen[-4:]  # three clients, and the domain left out
    assert len(of_last_round[0]) > 4 and sum(map(all, of_last_round)) == 1
    assert all(row["ood_accuracy"] for row in found)


def test_token_norm_gives_tokens_the_length_of_gaussian_codewords(prepared):
    _, trainer, model, _, clients = prepared()
    z = model.eval().encode(trainer.batch(clients.train[0])[0])
    assert torch.allclose(z.square().mean(-1), torch.ones(z.shape[:2]), atol=1e-2)
    _, _, plain, _, _ = prepared("--no-token-norm")
    raw = plain.eval().encode(trainer.batch(clients.train[0])[0])
    assert (raw >= 0).all(), "which is why their directions are alike"
    assert F.cosine_similarity(raw[0], raw[1], dim=-1).mean() > F.cosine_similarity(z[0], z[1], dim=-1).mean()
