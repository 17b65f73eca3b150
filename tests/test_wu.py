"""Entropy weighting, minimax and convex-hull selection (Wu et al.), and FedAvg, by hand."""

import importlib

import numpy as np
import pytest
import scipy.stats
import torch
from helpers import largest_by_scipy, loss_and_gradient, sgd_by_hand
from known import is_vertex
from torch.nn.functional import normalize

from common.chance import random_at, sample
from common.train import local_solver
from convex_hull_select import hull_vertices
from entropy_weighting import entropy_weights
from minimax_select import minimax_clients

CUT = "--model cnn --width 0.125 --local-epochs 1 --clients 8 --participating 6 --dirichlet 0.5 "
CUT += "--partition dirichlet --rounds 3 --lr 0.1 --batch-size 8 --no-compare --sample 2 "


def normal(rng, *shape):
    return torch.from_numpy(rng.standard_normal(shape)).float()


# ---------------------------------------------------------------- entropy weighting


def test_label_counts_that_are_none_are_refused():
    for wrong in ([0.0, 0], [1, torch.nan], [3, -1]):
        with pytest.raises(ValueError, match="label_counts"):
            entropy_weights(torch.tensor([[1, 2], wrong]))


# ---------------------------------------------------------------- minimax selection


@pytest.mark.parametrize("select", [minimax_clients, hull_vertices])
def test_updates_that_are_not_finite_and_other_shapes_and_numbers_are_refused(select, rng):
    g = normal(rng, 6, 5000)
    for wrong, number in ((g[0], 1), (g, 0), (g, 9)):
        with pytest.raises(ValueError, match="g must be"):
            select(wrong, number)
    for value in (torch.nan, torch.inf):  # zero ends a run below
        g[4, 7] = value
        with pytest.raises(ValueError, match="an update is zero or not finite"):
            select(g, 2)


# ---------------------------------------------------------------- convex-hull selection


def exact_hull(g, dim):
    """The vertices in the first principal components, in float64."""
    g = g.double().numpy()
    u, s, _ = np.linalg.svd(g - g.mean(0), full_matrices=False)
    points = (u * s)[:, :dim]
    return [i for i in range(len(points)) if is_vertex(points, i)]


def test_rounding_makes_no_vertices(rng):
    """In float32, too, points that are the same, on a line or in a plane must stay that."""
    directions = normal(rng, 2, 100_000)
    lengths = torch.from_numpy(rng.uniform(0.5, 2, (40, 1))).float()
    one = lengths * directions[0]
    assert hull_vertices(one, 3, scale=True).tolist() == [0]  # all of one direction
    ends = [lengths.argmin().item(), lengths.argmax().item()]
    assert hull_vertices(one, 3).tolist() == sorted(ends)  # on a line
    plane = rng.standard_normal((40, 2))
    found = hull_vertices((torch.from_numpy(plane) @ directions.double()).float(), 3)
    assert found.tolist() == [i for i in range(40) if is_vertex(plane, i)]


OF_TYPES = "float16 1, bfloat16 1e30, float32 1e30, float32 1e-30, float64 1e30, float64 1e-100"


@pytest.mark.parametrize("of_type", OF_TYPES.split(", "))
def test_selections_are_right_for_any_type_and_length(of_type, rng):
    """Squared lengths need not fit into the type of the updates, nor these into float32."""
    dtype, unit = of_type.split()
    g = normal(rng, 12, 400).double()
    g[5] *= 50_000 / g[5].norm()
    g = (float(unit) * g).to(getattr(torch, dtype))
    exact, held = g.double() / float(unit), g.clone().requires_grad_()
    worst = largest_by_scipy(exact).round(6)  # two that are each other's nearest are a tie
    for largest, sign in ((False, 1), (True, -1)):
        nearest = (sign * worst).argsort(kind="stable")
        assert minimax_clients(held, 4, largest).tolist() == sorted(nearest[:4])
    assert hull_vertices(held, 2).tolist() == exact_hull(exact, 2)
    assert hull_vertices(held, 3, scale=True).tolist() == exact_hull(normalize(exact), 3)


# ---------------------------------------------------------------- whole runs


def selected_by_hand(run, w, table, t):
    """The selection's line for two of six clients, or for a hull in two dimensions."""
    args, clients, everybody = run.args, run.clients, torch.arange(6)
    by = getattr(args, "selection", "random")
    rng = random_at(args.seed, "select", t)
    if "hull_dim" in args:
        corners = exact_hull(normalize(table.double()) if args.unit_length else table, 2)
        others = [k for k in range(6) if k not in corners]
        possible = {"hull": corners, "interior": others, "random": range(6)}[by]
        count = min(args.sample, len(corners), len(possible))
        return sample(torch.tensor(possible), count, rng).tolist()
    if by in ("random", "by_size"):
        sizes = clients.sizes[:6] if by == "by_size" else None
        return sample(everybody, 2, rng, sizes).tolist()
    if by == "power_of_choice":
        losses = [loss_and_gradient(run.trainer, w, clients.train[k])[0] for k in everybody]
        score = -torch.stack(losses).detach().numpy()
    else:
        score = largest_by_scipy(table).round(6) * (-1 if by == "maxsim" else 1)
    return sorted(score.argsort(kind="stable")[:2].tolist())


BATCH_NORM = "--model resblocks --width 0.01 --lr 0.01 --batch-size 32"
VARIANTS = f"""
fedavg --weighting size
fedavg --weighting equal --momentum 0.9
fedavg --selection by_size
fedavg --selection power_of_choice --held-out 0
fedavg --weight-decay 0.3 --lr-decay 0.5
fedavg --weight-decay 0.3 --lr-decay 0.5 --optimizer adam --lr 0.01
entropy_weighting
entropy_weighting --weighting equal
minimax_select
minimax_select --selection random
minimax_select --selection maxsim --weighting size --momentum 0.9
minimax_select {BATCH_NORM}
convex_hull_select --hull-dim 2 --sample 6
convex_hull_select --hull-dim 2 --sample 6 --unit-length --weighting size --seed 1
convex_hull_select --hull-dim 2 --sample 6 {BATCH_NORM}
convex_hull_select --hull-dim 2 --sample 3
convex_hull_select --hull-dim 2 --sample 6 --selection interior
convex_hull_select --hull-dim 2 --sample 6 --selection random
"""


@pytest.mark.parametrize("variant", VARIANTS.strip().splitlines())
def test_three_rounds_are_the_paper_by_hand(finished, variant):
    """The statistics of batch norm move the model, and select nobody.

    Without held-out samples there is no ID.
    """
    name, _, flags = variant.partition(" ")
    run = finished(importlib.import_module(name), CUT + flags)
    data, trainer, w = run.data, run.trainer, run.trainer.initial
    counts = [data.y[samples].bincount() for samples in run.clients.train]
    h = np.array([scipy.stats.entropy(of_client) for of_client in counts])
    n = np.array([of_client.sum() for of_client in counts])
    weights = {"entropy": np.exp(h), "size": n, "equal": np.ones(8)}[run.args.weighting]

    def trained(t, k):
        if BATCH_NORM in variant:  # statistics have no gradient
            ends, losses = trainer.train(local_solver, w, torch.tensor([k]), t)
            return ends[0], losses.item()
        return sgd_by_hand(run, w, t, k)

    table = torch.zeros(6, len(w))
    if "table" in run.state:
        table = torch.stack([w - trained(0, k)[0] for k in range(6)])  # line 1
    for t, row in enumerate(run.rows, 1):
        selected = selected_by_hand(run, w, table[:, : trainer.parameters], t)
        assert run.selected[t - 1] == selected
        ends, losses = zip(*[trained(t, k) for k in selected])
        table[selected] = w - torch.stack(ends)
        alpha = weights[selected] / weights[selected].sum()
        w = w - torch.from_numpy(alpha).float() @ table[selected]
        assert float(row["train_loss"]) == pytest.approx(np.mean(losses), rel=1e-4)
        if "objective" in row:
            assert float(row["objective"]) == pytest.approx(alpha @ h[selected], rel=1e-4)
    assert t == 3 and torch.allclose(run.state["w"], w, atol=1e-5)
    if "table" in run.state:
        assert torch.allclose(run.state["table"], table[:, : trainer.parameters], atol=1e-5)
    answers = trainer.predict(w, data.test)[1]
    right = (answers == data.y[data.test]).double().mean()
    assert float(row["ood_accuracy"]) == pytest.approx(right.item(), abs=1e-5)
    measures_id = any(column.startswith("id_") for column in row)
    assert measures_id == ("--held-out 0" not in variant)


ENDS = {
    "minimax_select --lr 1e-12": "an update is zero or not finite: change --lr",
    "convex_hull_select --lr 1e-12": "an update is zero or not finite: change --lr",
    "convex_hull_select --hull-dim 8 --selection interior": "no client lies inside the hull: lower",
}


@pytest.mark.parametrize("variant", ENDS)
def test_a_round_without_a_selection_ends_the_run_in_one_line(start, launched, variant):
    name, _, flags = variant.partition(" ")
    *_, last = launched(importlib.import_module(name), CUT + flags, start)[1]
    assert last.startswith(f"{name}.py: run: round 1: {ENDS[variant]}")
