"""Clients whose uploads are no good, and a server that survives them."""

import pytest
import torch

import convex_hull_select
import entropy_weighting
import fedavg
import fediir
import minimax_select
import uefl
from common import UserError, run
from common.train import Trainer, get_weights

SKEWED = (
    "--model cnn --width 0.25 --clients 10 --participating 10 --partition iid --local-epochs 3 --lr 0.3 --rounds 12 "
)
DOMAINS = "--width 0.125 --clients 10 --local-epochs 3 "
LEARN = {
    fedavg: SKEWED + "--rounds 12 --sample 5",
    entropy_weighting: SKEWED + "--rounds 12 --sample 5",
    minimax_select: SKEWED + "--rounds 12 --sample 5 --churn 0.2",
    convex_hull_select: SKEWED + "--rounds 12 --hull-dim 2 --churn 0.2",
    fediir: DOMAINS + "--model convnet --test-domain dark --sample 5 --rounds 12 --no-compare",
    uefl: DOMAINS + "--model resblocks --partition domain --lr 0.01 --codebook-size 8 --segments 1 --rounds 6 "
    "--sample 5 --later-rounds 3 --iterations 2 --no-compare",
}


@pytest.fixture
def poison(monkeypatch):
    """poison(client, value): from now on what this client learns is this value, wherever it trains."""
    train = Trainer._train

    def poison_client(bad, value):
        def poisoned(self, model, samples, round, client, *args):
            loss = train(self, model, samples, round, client, *args)
            if client in bad:
                with torch.no_grad():
                    next(model.parameters()).view(-1)[0] = value
            return loss

        monkeypatch.setattr(Trainer, "_train", poisoned)

    return poison_client


@pytest.mark.parametrize("method", LEARN)
def test_one_client_in_ten_that_returns_nan_costs_little(start, method, poison, capsys):
    folder = start(method, LEARN[method] + " --out clean")
    poison([3], torch.nan)
    start(method, LEARN[method] + " --out poisoned")
    clean, poisoned = (run.read_metrics(folder / name / "metrics.csv") for name in ("clean", "poisoned"))
    assert float(clean[-1]["id_accuracy"]) > 0.9, "there is something to lose"
    assert float(poisoned[-1]["id_accuracy"]) >= float(clean[-1]["id_accuracy"]) - 0.02
    left_out = sum(int(row["left_out"]) for row in poisoned)
    assert left_out > 0 == sum(int(row["left_out"]) for row in clean)
    assert f"{left_out} uploads were not finite and left out" in capsys.readouterr().out
    assert all("3" not in row["selected"].split() for row in poisoned)


def test_a_classifier_gradient_that_is_nan_is_left_out(start, monkeypatch):
    gradients = fediir.client_gradients

    def poisoned(trainer, model, w, samples):
        found, risks = gradients(trainer, model, w, samples)
        if len(samples) == 5:  # those of the selected, not those of all
            found[0] = torch.nan
        return found, risks

    monkeypatch.setattr(fediir, "client_gradients", poisoned)
    rows = run.read_metrics(start(fediir, LEARN[fediir] + " --out run") / "run/metrics.csv")
    assert {row["left_out"] for row in rows} == {"1"} and {len(row["selected"].split()) for row in rows} == {4}
    assert float(rows[-1]["id_accuracy"]) > 0.9


def test_nobodys_upload_can_be_used(start, poison):
    poison(range(10), torch.inf)
    for method in (fedavg, minimax_select):
        with pytest.raises(UserError, match="lower --lr"):
            start(method, f"{LEARN[method]} --out {method.__name__}")


def test_who_is_left_out(tiny, trainer, poison):
    poison([1], torch.nan)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 3))
    samples = list(tiny.train.split(40))
    who, updates, losses = trainer.local_updates(model, get_weights(model), torch.tensor([0, 1, 2]), samples, 1)
    assert who.tolist() == [0, 2] and len(updates) == len(losses) == 2 and trainer.left_out == 1
    alone = trainer.local_updates(model, get_weights(model), torch.tensor([2]), samples, 1)[1]
    assert updates.isfinite().all() and alone.isfinite().all()


GLYPHS = "--clients 10 --participating 10 --partition iid --local-epochs 2 --width 0.5 --rounds 8 "
FONTS = "--clients 10 --no-compare "
LEARN_GLYPHS = {
    **dict.fromkeys([fedavg, entropy_weighting, minimax_select], GLYPHS + "--sample 5"),
    convex_hull_select: GLYPHS + "--hull-dim 2",
    fediir: FONTS + "--sample 5 --rounds 12 --validate-every 1",
    uefl: FONTS
    + "--partition iid --participating 10 --sample 5 --local-epochs 3 --rounds 5 --later-rounds 3 --iterations 2",
}


@pytest.mark.soak
@pytest.mark.parametrize("method", LEARN_GLYPHS)
def test_on_glyphs_a_client_that_returns_nan_costs_at_most_two_points(method, poison, tmp_path, monkeypatch):
    accuracy = {}
    for name in ("clean", "poisoned"):
        if name == "poisoned":
            poison([3], torch.nan)
        monkeypatch.setattr("sys.argv", [f"{method.__name__}.py"])
        method.main([*LEARN_GLYPHS[method].split(), "--out", str(tmp_path / name)])
        rows = run.read_metrics(tmp_path / name / "metrics.csv")
        accuracy[name] = sum(float(row["id_accuracy"]) for row in rows[-3:]) / 3
    print(f"{method.__name__}: {accuracy['clean']:.3f} clean, {accuracy['poisoned']:.3f} with one client in ten NaN")
    assert accuracy["poisoned"] >= accuracy["clean"] - 0.02
