"""The three methods of Wu et al.: entropy weighting, minimax selection, convex-hull selection."""

from itertools import combinations

import numpy as np
import pytest
import scipy.stats
import torch
from helpers import kept, largest_by_numpy, poison, prepared, read_rows, selections, sgd_by_hand
from scipy.optimize import linprog
from scipy.spatial import ConvexHull

import convex_hull_select
import entropy_weighting
import fedavg
import minimax_select
from common import UserError, random_at
from common.splits import draw
from convex_hull_select import hull_vertices, principal_components
from entropy_weighting import entropy_weights, label_entropy
from minimax_select import minimax_clients

CUT = "--model cnn --width 0.125 --local-epochs 1 --clients 8 --participating 6 --dirichlet 0.5 "
CUT += "--partition dirichlet --rounds 3 --lr 0.1 --batch-size 32 --no-compare "
METHODS = {  # the hull has at most 6 vertices
    entropy_weighting: "--sample 2 ",
    minimax_select: "--sample 2 ",
    convex_hull_select: "--sample 6 --hull-dim 2 ",
}


def normal(rng, *shape):
    return torch.from_numpy(rng.standard_normal(shape)).float()


# ---------------------------------------------------------------- entropy weighting


def test_minus_kl_to_the_uniform_gives_the_same_weights(rng):
    counts = torch.from_numpy(rng.integers(1, 50, (6, 10)))
    kl = [scipy.stats.entropy(row, np.ones(10)) for row in counts.numpy()]
    assert torch.allclose(torch.softmax(-torch.tensor(kl), 0), entropy_weights(counts))


@pytest.mark.parametrize(("dtype", "most"), [(torch.uint8, 200), (torch.float64, 1e300)])
def test_entropy_of_counts_of_any_size_and_type(dtype, most, rng):
    counts = torch.from_numpy(rng.random((7, 12)) ** 8 * most).to(dtype)
    counts[:, 0], counts[0, 1:] = 1, 0  # an entropy of zero, too
    h = [scipy.stats.entropy(row) for row in counts.double().numpy()]
    assert np.allclose(label_entropy(counts), h, rtol=1e-12) and min(h) == 0


def test_label_counts_that_are_none_are_refused():
    for wrong in ([0.0, 0], [1, torch.nan], [1, torch.inf], [3, -1], [-1, -1]):
        counts = [[1, 2], wrong]
        with pytest.raises(ValueError, match="label_counts"):
            entropy_weights(torch.tensor(counts))


# ---------------------------------------------------------------- minimax selection


def test_minimax_minimises_equation_16_over_all_subsets(rng):
    m = 8
    g = normal(rng, m, 5) * torch.arange(1, m + 1)[:, None]
    worst = largest_by_numpy(g).round(6)  # two clients that are each other's nearest are a tie
    for k in range(1, m + 1):
        subsets = combinations(range(m), k)
        best = min(subsets, key=lambda subset: worst[list(subset)].sum().round(5))
        assert minimax_clients(g, k).tolist() == list(best)


def test_minimax_tells_nearly_parallel_updates_apart(rng):
    g = 1 + 1e-3 * normal(rng, 20, 5000)  # 1 - cosine is about 1e-6
    best = largest_by_numpy(g.double()).argsort(kind="stable")
    assert minimax_clients(g, 5).tolist() == sorted(best[:5])


def test_maxsim_is_the_mirror(rng):
    for _ in range(10):
        g = normal(rng, 9, 4)
        largest = np.argsort(-largest_by_numpy(g).round(6), kind="stable")
        assert minimax_clients(g, 5, largest=True).tolist() == sorted(largest[:5])


def test_of_two_clients_that_are_each_others_nearest_the_smaller_id_is_selected(rng, monkeypatch):
    """Some processors round a . b and b . a of a matrix product differently, so here all do."""
    exact = torch.Tensor.__matmul__

    def rounded(a, b):
        product = exact(a, b)
        return product * (1 + 1e-7 * torch.randn_like(product))

    torch.manual_seed(0)
    monkeypatch.setattr(torch.Tensor, "__matmul__", rounded)
    for _ in range(100):
        g = normal(rng, 8, 30)
        worst = largest_by_numpy(g)
        order = worst.argsort(kind="stable").tolist()
        if worst[order[0]] == worst[order[1]]:
            assert minimax_clients(g, 1).tolist() == order[:1]


@pytest.mark.parametrize("scale", [1e-15, 1e-3, 1e15])
def test_selections_do_not_depend_on_the_unit_of_the_updates(scale, rng):
    g = normal(rng, 20, 30) * torch.from_numpy(rng.uniform(0.5, 2, (20, 1))).float()
    assert torch.equal(minimax_clients(g * scale, 5), minimax_clients(g, 5))
    for unit in (True, False):
        assert torch.equal(hull_vertices(g * scale, 2, unit), hull_vertices(g, 2, unit))


def test_updates_without_a_direction_are_never_selected(rng):
    g, others = 1 + 0.3 * normal(rng, 6, 50), torch.tensor([0, 1, 2, 3, 5])
    for value in (0, torch.nan, torch.inf):
        g[4] = value
        assert torch.equal(minimax_clients(g, 2), others[minimax_clients(g[others], 2)])
        assert torch.equal(hull_vertices(g, 3), others[hull_vertices(g[others], 3)])


# ---------------------------------------------------------------- convex-hull selection


def is_vertex(points, i):
    """Whether no convex combination of the others is point i: a linear program has no solution."""
    others = np.delete(points, i, 0)
    a, b = np.vstack([others.T, np.ones(len(others))]), np.append(points[i], 1)
    return linprog(np.zeros(len(others)), A_eq=a, b_eq=b, bounds=(0, None)).status == 2


@pytest.mark.parametrize("dim", [2, 3])
@pytest.mark.parametrize("scale", [True, False])
def test_vertices_are_those_of_the_linear_program(dim, scale, rng):
    g = normal(rng, 25, 40).double()
    rows = torch.nn.functional.normalize(g) if scale else g
    _, _, axes = torch.linalg.svd(rows - rows.mean(0), full_matrices=False)
    points = (rows @ axes[:dim].T).numpy()
    assert hull_vertices(g, dim, scale).tolist() == [i for i in range(25) if is_vertex(points, i)]


def test_components_keep_the_distances_of_points_that_span_no_more(rng):
    flat = normal(rng, 8, 2) @ normal(rng, 2, 30)
    points = principal_components(flat, torch.arange(8), 5) * flat.norm(dim=1).max()
    assert points.shape == (8, 2)
    assert torch.allclose(torch.cdist(points, points).float(), torch.cdist(flat, flat), atol=1e-3)


def test_degenerate_tables():
    same, triangle = torch.ones(5, 4), torch.eye(3)
    line = torch.arange(1.0, 6.0)[:, None] * torch.tensor([[1.0, 2.0, 3.0]])
    assert hull_vertices(same, 3).tolist() == [0]
    assert hull_vertices(line[[2, 0, 4, 1, 3]], 3).tolist() == [1, 2]
    assert hull_vertices(triangle, 3).tolist() == [0, 1, 2]
    assert hull_vertices(torch.cat([triangle, torch.full((1, 3), 1 / 3)]), 2).tolist() == [0, 1, 2]


@pytest.mark.parametrize("weights", [1000, 100_000])
def test_rounding_makes_no_vertices(rng, weights):
    """In float32, too, points that are the same, on a line or in a plane must stay that."""
    directions = normal(rng, 3, weights)
    lengths = torch.from_numpy(rng.uniform(0.5, 2, (40, 1))).float()
    one, two = lengths * directions[:1], lengths * directions[torch.arange(40) % 2]
    assert len(hull_vertices(one, 3, scale=True)) == 1, "all of one direction"
    assert len(hull_vertices(two, 3, scale=True)) == 2, "two directions"
    plane, axes = rng.standard_normal((40, 2)), directions[:2].double()
    exact = ConvexHull(plane @ torch.linalg.cholesky(axes @ axes.T).numpy())
    found = hull_vertices((torch.from_numpy(plane) @ axes).float(), 3)
    assert found.tolist() == sorted(exact.vertices)


def exact_hull(g, dim):
    """The vertices in the first principal components, in float64."""
    g = g.double().numpy()
    u, s, _ = np.linalg.svd(g - g.mean(0), full_matrices=False)
    return sorted(ConvexHull((u * s)[:, :dim]).vertices.tolist())


@pytest.mark.parametrize("spread", [1e-2, 1e-4])
def test_a_large_common_part_changes_no_vertices(spread, rng):
    """As in w - g, weights after training, whose hull is that of g mirrored and shifted."""
    g, w = spread * normal(rng, 40, 5000), normal(rng, 5000)
    for dim in (2, 3):
        vertices = hull_vertices(g, dim).tolist()
        assert hull_vertices(w - g, dim).tolist() == exact_hull(w - g, dim) == vertices
    unit = torch.nn.functional.normalize((w - g).double())
    assert hull_vertices(w - g, 3, scale=True).tolist() == exact_hull(unit, 3)


@pytest.mark.parametrize(
    ("dtype", "unit"),
    [(torch.float16, 1), (torch.bfloat16, 1e30), (torch.float32, 1e30), (torch.float32, 1e-30),
     (torch.float64, 1e30), (torch.float64, 1e-100)],
)  # fmt: skip
def test_selections_are_right_for_any_type_and_length(dtype, unit, rng):
    """Squared lengths need not fit into the type of the updates, nor these into float32."""
    g = normal(rng, 12, 400).double()
    g[5] *= 50_000 / g[5].norm()
    g = (unit * g).to(dtype)
    best = largest_by_numpy(g.double() / unit).round(6).argsort(kind="stable")
    assert minimax_clients(g, 4).tolist() == sorted(best[:4])
    assert hull_vertices(g, 2).tolist() == exact_hull(g.double() / unit, 2)
    scaled = torch.nn.functional.normalize(g.double() / unit)
    assert hull_vertices(g, 2, scale=True).tolist() == exact_hull(scaled, 2)


def test_updates_that_require_gradients_are_selected_alike(rng):
    g = normal(rng, 10, 30)
    held = g.clone().requires_grad_()
    assert torch.equal(minimax_clients(held, 3), minimax_clients(g, 3))
    assert torch.equal(hull_vertices(held, 2), hull_vertices(g, 2))


MANY = CUT + "--clients 11 --participating 11 --sample 11 --hull-dim 2 "


def test_random_trains_as_many_clients_as_the_hull_has_vertices(start):
    for row in read_rows(start(convex_hull_select, f"{MANY} --selection random")):
        assert len(row["selected"].split()) == int(row["vertices"]) < 11


def test_interior_is_what_is_not_a_vertex(start):
    hull, inside = (
        read_rows(start(convex_hull_select, f"{MANY} --rounds 1 --selection {kind} --out {kind}"))[
            0
        ]
        for kind in ("hull", "interior")
    )
    assert not {*hull["selected"].split()} & {*inside["selected"].split()}
    assert len(hull["selected"].split()) == int(hull["vertices"]) == int(inside["vertices"])
    full = MANY + "--hull-dim 8 --participating 8 --sample 8 --selection interior --out full"
    with pytest.raises(UserError, match="no client lies inside the hull"):
        start(convex_hull_select, full)


# ---------------------------------------------------------------- whole runs


def selected_by_hand(method, table, t):
    """Line 3 or 4 for two clients, or for a hull in two dimensions."""
    if method is entropy_weighting:
        return draw(torch.arange(6), 2, random_at(0, "select", t)).tolist()
    if method is minimax_select:
        return sorted(largest_by_numpy(table).round(6).argsort(kind="stable")[:2].tolist())
    return exact_hull(table, 2)


@pytest.mark.parametrize("method", METHODS)
def test_three_rounds_are_the_paper_by_hand(start, method):
    words = f"{CUT} {METHODS[method]}"
    folder = start(method, words)
    data, clients, model, trainer, w = prepared(method, words)
    labels = [data.y[samples].bincount() for samples in clients.train]
    h = torch.tensor([scipy.stats.entropy(count) for count in labels]).float()

    def update(t, k):
        return w - sgd_by_hand(trainer.args, data, model, w, clients.train[k], t, k)

    table = torch.stack([update(0, k) for k in range(6)])  # line 1
    for t, row in enumerate(read_rows(folder), 1):
        selected = selected_by_hand(method, table, t)
        assert row["selected"] == " ".join(map(str, selected))
        for k in selected:
            table[k] = update(t, k)
        alpha = torch.full((len(selected),), 1 / len(selected))
        if method is entropy_weighting:
            alpha = h[selected].exp() / h[selected].exp().sum()
            assert float(row["objective"]) == pytest.approx((alpha @ h[selected]).item(), rel=1e-4)
        w = w - alpha @ table[selected]
    assert t == 3 and torch.allclose(kept(folder)["w"], w, atol=1e-5)
    if method is not entropy_weighting:
        assert torch.allclose(kept(folder)["table"], table, atol=1e-5)


def test_with_everybody_selected_and_equal_weights_all_are_fedavg(start):
    everyone = CUT + "--weighting equal "
    expected = kept(start(fedavg, everyone + "--sample 6"))["theta"]
    for method in METHODS:
        more = "--hull-dim 5" if method is convex_hull_select else ""
        found = kept(start(method, f"{everyone} --sample 6 {more} --out {method.__name__}"))["w"]
        assert torch.allclose(found, expected, atol=1e-6)


def test_their_random_baseline_is_fedavg(start):
    both = CUT + "--sample 2 --weighting equal "
    expected = kept(start(fedavg, both))["theta"]
    found = kept(start(minimax_select, both + "--selection random --out random"))["w"]
    assert torch.allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("method", [minimax_select, convex_hull_select])
def test_a_client_whose_uploads_are_never_finite_is_left_out(start, monkeypatch, method):
    """In line 1 the clients train five at a time, so client 5 is alone."""
    poison(monkeypatch, 5)
    rows = read_rows(start(method, f"{CUT} --sample 5 --rounds 2"))
    assert len(rows) == 2 and not any(5 in selected for selected in selections(rows))
