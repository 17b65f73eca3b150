"""Convex-hull selection: train the clients at the vertices of the hull of all clients' gradients.

Wu et al., Advocating for the Silent: Enhancing Federated Generalization for Non-Participating
Clients (arXiv 2310.07171), section IV-B2. The server keeps the latest g = w - w_i of each
participating client, which the paper calls its gradient. In each round it selects the vertices of
the convex hull of these points, because the gradients of clients that never train probably lie
inside the hull, or near it.

    Algorithm 2                                                          in the code
     1  before round 1 all participating clients train from w_0          federate
        and upload g_0^i
     2  for round t = 1 .. T                                             federate
     3      I_t = Convex Hull(table), by quickhull                       federate, hull_vertices
     5      for client i in I_t in parallel                              federate, trainer.train
     6          w_t^i = LocalSolver(w_t, S_i, eta)                       train.local_solver
     7          g_t^i = w_t - w_t^i                                      federate
     9      w_{t+1} = w_t - sum over I_t of alpha_i g_t^i                federate

For line 4 see minimax_select.py. Lines 8 and 10 only end a loop. M clients participate. Two choices
change the result most: the space of the hull (principal_components), and how many of its vertices
train (--sample). What else the paper leaves open stands beside the line in question, and the rest
in docs/convex_hull_select.md.

    python convex_hull_select.py
    python convex_hull_select.py --dataset cifar10
    python convex_hull_select.py --dataset cifar10 --selection interior        (table 1's ablation)
"""

from contextlib import suppress

import torch
from scipy.linalg import eigh
from scipy.spatial import ConvexHull
from torch import Tensor

from common import UserError, random_at, splits, train
from common.ranks import launch
from common.runner import flags
from common.runner.compare import compare
from common.runner.setup import prepare
from common.settings import RESNET, SMALL, WU


def lengths(g: Tensor) -> Tensor:
    """The lengths of the rows of g [M, P]: float64 [M]."""
    parts = g.detach().split(2**11, dim=1)  # in blocks, because a copy of g would be large
    return sum(part.double().square().sum(1) for part in parts).sqrt()


def usable_rows(g: Tensor) -> Tensor:
    """The rows of g [M, P] that have a direction, int64: those that are finite and not zero."""
    length = lengths(g)
    return torch.nonzero((length > 0) & torch.isfinite(length)).flatten()


def principal_components(g: Tensor, rows: Tensor, dim: int, scale: bool = False) -> Tensor:
    """These n rows of g [M, P] along their first principal components: float64 [n, up to dim], CPU.

    scale  first scales the rows to unit length; else the unit is the length of the longest row

    In n - 1 or more dimensions normally all n points are vertices, and quickhull cannot run in a
    million dimensions anyway. So we project, which decides who is a vertex. Section IV-B2 speaks of
    the stored gradients, section V of "cosine similarity to construct the convex hull".

    Fewer columns are returned if the rows span fewer dimensions. Components with very small
    variance count as rounding errors.
    """
    n, length = len(rows), lengths(g)[rows, None]
    unit = length if scale else length.max()
    gram = torch.zeros(n, n, dtype=torch.float64, device=g.device)
    for part in g.detach().split(2**11, dim=1):  # in blocks, because a copy of g would be large
        part = part[rows].double() / unit
        part = part - part.mean(0)
        gram += part @ part.T
    values, vectors = eigh(gram.cpu(), subset_by_index=[max(0, n - dim), n - 1])
    kept = values > 1e-12 * n  # smaller variances may come from the rounding of g to float32
    return torch.from_numpy(vectors[:, kept] * values[kept] ** 0.5).flip(1)  # the largest first


def vertices_of(points: Tensor) -> Tensor:
    """Which points [M, dim] are vertices of their convex hull, by quickhull: int64, ascending."""
    if points.shape[1] == 0:
        return torch.arange(len(points))[:1]
    if points.shape[1] == 1:
        return torch.stack([points[:, 0].argmin(), points[:, 0].argmax()]).sort().values
    return torch.from_numpy(ConvexHull(points.numpy()).vertices.astype("int64")).sort().values


def hull_vertices(g: Tensor, dim: int, scale: bool = False) -> Tensor:
    """Line 3: the clients on the hull, int64, ascending.

    g      the clients' updates [M, P]: weights before training minus weights after it, not weights
    dim    principal components in which the hull is built, 1 to 8
    scale  first scales the updates to unit length

    If the points span fewer dimensions, the hull is built in the dimensions that they span. Of
    several clients at one point, one is selected, and the first client if all share one point.
    Updates that are zero or not finite are never selected. Raises ValueError if g is not a matrix,
    if no row is usable, or if dim is not in 1 to 8.
    """
    if g.dim() != 2 or not len(g) or not 1 <= dim <= 8:
        raise ValueError(
            f"g must be [clients, parameters], not {tuple(g.shape)}; dim 1 to 8, not {dim}"
        )
    usable = usable_rows(g)
    if not len(usable):
        raise ValueError(f"none of the {len(g)} updates is usable: they are zero or not finite")
    vertices = vertices_of(principal_components(g, usable, dim, scale))
    return usable[vertices.to(usable.device)]


def federate(args):
    """Algorithm 2 with these flags."""
    clients, model, trainer, run = prepare(args)
    if run.state:
        w, table = run.state["w"], run.state["table"]
    else:
        w = train.get_weights(model)
        table = train.new_table(clients.participating, len(w), trainer.device)
        # The first uploads only fill the table. They come in groups, because all of them at once
        # would take as much memory as the table.
        for ids in clients.ids.split(clients.sample):
            with suppress(UserError):  # if no upload of the group is finite, its rows stay zero
                trained, ws, _ = trainer.train(train.local_solver, model, w, ids, 0)  # line 1
                table[trained] = w - ws  # line 1

    for t in run.rounds(args.rounds):  # line 2
        usable = usable_rows(table).cpu()
        if not len(usable):
            raise UserError("all updates are zero or infinite: change --lr")
        vertices = hull_vertices(table, args.hull_dim, args.unit_length).cpu()  # line 3
        # Table 1 also has clients inside the hull, and random ones, without their number. So that
        # only the choice differs, as many of them train as there are vertices, or all if fewer.
        inside = usable[~torch.isin(usable, vertices)]
        possible = {"hull": vertices, "interior": inside, "random": usable}[args.selection]
        if not len(possible):
            raise UserError(f"round {t}: no client lies inside the hull; lower --hull-dim")
        # In the paper all vertices train; --sample, the most that may, is ours
        count = min(args.sample or len(vertices), len(vertices), len(possible))
        selected = splits.draw(possible, count, random_at(args.seed, "select", t))  # line 3: I_t
        # Ids [k], weights [k, P], losses [k] of the clients whose upload is finite
        trained, ws, losses = trainer.train(train.local_solver, model, w, selected, t)  # lines 5, 6
        g = w - ws  # line 7, with the statistics of batch norm, if the model has any
        table[trained] = g  # section IV-B; the rows of the other clients stay
        n = clients.sizes[trained].to(g)
        if args.weighting == "equal":  # 1 / |I_t| as in the theory; the experiments do not say
            n = torch.ones_like(n)
        alpha = n / n.sum()
        w = w - alpha @ g  # line 9
        measures = trainer.evaluate(model, w, trained) if run.evaluate_now else {}
        measures |= {"train_loss": alpha @ losses, "vertices": len(vertices)}
        run.record(t, {"w": w, "table": table}, selected=trained, **measures)

    usable = usable_rows(table)
    points = principal_components(table, usable, args.hull_dim, args.unit_length)
    run.draw("hull", usable.cpu(), points, usable.cpu()[vertices_of(points)])
    return run.finish(model, w)


# The example on glyphs is ours: three of 80 clients of equal size hold a rare class each. It takes
# few local steps, in float32, so that rounding moves a run less than another seed does. The other
# settings follow section V, and common/settings.py says what we chose where it is silent. WU: lr
# 0.1, 5 local epochs, batches of 128. RESNET: 0.01, 3 and 16.
RARE = {
    "partition": "rare", "clients": 80, "hull_dim": 4, "width": 0.25, "local_epochs": 2,
    "batch_size": 30, "lr": 0.2, "rounds": 100, "evaluate_every": 5, "precision": "float32",
}  # fmt: skip
SETTINGS = {
    "glyphs": {**WU, **RARE},
    "other": {**WU, "dirichlet": 0.5},
    "cifar10": {**WU, "dirichlet": 0.1},
    "cifar100": {**RESNET, "dirichlet": 0.03},
    "folder": {**RESNET, "dirichlet": 0.09},
}


def own_flags(add) -> None:
    kinds, by = ["hull", "interior", "random"], ["equal", "size"]
    dim = flags.within(int, 1, 8)
    # Unit length is not the default, because with it the selection was not better than random, on
    # glyphs with clients of unequal sizes and on CIFAR-10 with equal ones (see results/)
    add("--selection", choices=kinds, default="hull", help="line 3, or as many, chosen otherwise")
    add("--hull-dim", type=dim, default=3, help="principal components in which the hull is built")
    add("--unit-length", action="store_true", help="first scale the gradients to length 1")
    add("--weighting", choices=by, default="equal", help="line 9: alpha_i is 1 / K or n_i / n")


def main(argv: list[str] | None = None):
    args = flags.parse(__file__, __doc__, SETTINGS, SMALL, own_flags, argv)
    baselines = {"random": {"selection": "random"}}
    prediction = (
        "nobody is like a client whose class only it has, so its update is a vertex of the hull: "
        "hull selection trains these clients more often than random selection does, and the model "
        "knows their classes better"
    )
    shows_in = {"rare_selected": "above", "rare_accuracy": "above", "ood_accuracy": "above"}
    return compare(args, federate, args.selection, baselines, prediction, shows_in)


if __name__ == "__main__":
    launch(main)
