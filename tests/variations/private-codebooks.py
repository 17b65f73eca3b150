import torch
from helpers import kept, prepared, read_rows

import uefl
from common import splits
from common.devices import seeded
from common.train import get_weights

CUT = "--model resblocks --width 0.01 --rotate 0 90 --partition silos --silos 2 1 --silo-size 20 "
CUT += "--local-epochs 2 --batch-size 10 --lr 0.003 --codebook-size 4 --segments 1 --gamma 0 "
CUT += "--rounds 2 --later-rounds 1 --no-compare "


def test_codewords_are_never_averaged_and_the_newest_replace_the_earlier(start, monkeypatch):
    seen, average = [], uefl.average_codewords

    def watched(before, codewords, sizes, allowed):
        after = average(before, codewords, sizes, allowed)
        for v, owner in enumerate(allowed.float().argmax(0).tolist()):
            assert allowed[:, v].sum() <= 1, "a codeword has one owner at most"
            expected = codewords[owner, v] if allowed[owner, v] else before[v]
            assert torch.allclose(after[v], expected)
        seen.append(allowed)
        return after

    monkeypatch.setattr(uefl, "average_codewords", watched)
    rows = read_rows(start(uefl, CUT + "--iterations 3"))
    assert [row["codewords"] for row in rows] == ["4 4 4"] * 2 + ["8 8 8"] * 2, "certain ones, too"
    assert [allowed.shape[1] for allowed in seen] == [12, 12, 24, 36]
    assert not seen[-1][:, 12:24].any() and seen[-1][:, 24:].sum() == 12


def test_ood_uses_no_codeword_that_was_replaced(start, monkeypatch):
    """The OOD set comes last, after the second extension has replaced the first."""
    deal = splits.deal

    def with_ood(data, args):
        clients = deal(data, args)
        clients.tests["ood"] = data.test
        return clients

    monkeypatch.setattr(splits, "deal", with_ood)
    evaluated, evaluation = [], uefl.client_evaluation

    def spy(model, batches, autocast, passes, allowed=None):
        evaluated.append(allowed)
        return evaluation(model, batches, autocast, passes, allowed)

    monkeypatch.setattr(uefl, "client_evaluation", spy)
    rows = read_rows(start(uefl, CUT + "--iterations 3"))
    assert float(rows[-1]["ood_accuracy"]) >= 0
    assert evaluated[-1].tolist() == [True] * 12 + [False] * 12 + [True] * 12


def test_each_client_trains_its_own_copy_of_the_first_codebook(start):
    """The first round by hand: a client's codewords are those that it has trained alone."""
    words = CUT + "--iterations 1 --rounds 1 "
    found = kept(start(uefl, words))["theta"]
    _, clients, base, trainer, _ = prepared(uefl, words, dropout=0.1)
    with seeded(torch.device("cpu"), 0, "codebook"):
        codebook = uefl.ExtensibleCodebook(4, 8, 1, trainer.args.commitment, trainer.args.beta)
    model = uefl.UEFL(base.features, codebook, base.classifier, True)
    theta, each = get_weights(model), {"allowed": torch.ones(3, 4, dtype=torch.bool)}
    ends = trainer.train(uefl.client_update, model, theta, clients.ids, 1, each)[1]
    words = ends[:, : 4 * 8]
    assert torch.allclose(found, torch.cat([words.flatten(), ends[:, 32:].mean(0)]), atol=1e-5)
    assert not torch.allclose(words[0], words[1], atol=1e-3), "the copies go different ways"
