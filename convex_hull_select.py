"""Convex-hull selection: train the clients at the vertices of the convex hull of all clients' gradients.

Wu et al., Advocating for the Silent: Enhancing Federated Generalization for Non-Participating Clients (arXiv
2310.07171), section IV-B2. The server keeps each participating client's latest g = w - w_i, which the paper calls its
gradient. In each round it selects the vertices of the convex hull of these points. The idea: gradients of clients that
never train probably lie inside the hull, or near it.

    Algorithm 2                                                          in the code
     1  before round 1 all participating clients train from w_0          main, at the start of round 1
        and upload g_0^i
     2  for round t = 1 .. T                                             main
     3      I_t = Convex Hull(table), by quickhull                       main, principal_components, vertices_of
     5      for client i in I_t in parallel                              main, trainer.local_updates
     6          w_t^i = LocalSolver(w_t, S_i, eta)                       train.local_solver
     7          g_t^i = w_t - w_t^i                                      main, trainer.local_updates
        (section IV-B: the table keeps g_t^i for i in I_t)               GradientTable.put
     9      w_{t+1} = w_t - sum over I_t of alpha_i g_t^i                main, server.aggregate

For line 4 see minimax_select.py.

Where the paper is silent (choices 1 and 2 change the result most)
1. The space of the hull. In M - 1 or more dimensions, normally all M points are vertices. Also, quickhull cannot run
   in a million dimensions. So we project first, and the projection decides which clients are vertices. We centre the
   gradients and keep their first --hull-dim principal components. With --no-raw, each gradient is first scaled to
   length 1, because the paper speaks of "cosine similarity to construct the convex hull". See results/wu for both.
2. How many clients are selected: as many as the hull has vertices. --draw N draws at most N of them at random.
3. If the points span fewer than --hull-dim dimensions, the hull is built in the dimensions that they span. If several
   clients share a point, one of them is selected. If all share one point, the first client is selected.
4. alpha_i: the theory uses 1/K, and the experiments do not say. The default is --weighting equal.
5. Interior, table 1's ablation, draws from the clients that are not vertices. It draws as many as there are vertices
   (at most N with --draw N), or all if there are fewer. The run stops if there are none. Two controls are ours: they
   train as many clients as there are vertices, drawn from all (random), or those with the most samples (largest).
6. Clients that leave and come back ("client churn"): --churn is the probability that a client is away in a round. A
   present client with no g in the table (or with a zero or non-finite one) trains from the current w and enters the
   table. It can be selected in the same round.
7. Noisy clients (figure 7): --label-noise with --trim, the trimmed mean. For each parameter it drops the int(trim K)
   smallest and largest values, at least one of each. The trimmed mean ignores --weighting.
8. Event-triggered uploads (section IV-B, "communication and computation cost"): with --event-threshold, a selected
   client uploads nothing if ||new g - old g|| is less than the threshold times ||old g||. The server then uses the old
   g.
9. The models: "a CNN" is from McMahan et al., "an RNN" from LEAF. ResNet-18 has group norm. See common/models.py.
10. ID: the paper tests on the local test sets of the selected clients (`id_selected` in metrics.csv). Our ID uses all
    participating clients. A local test set is a fifth of the client's samples (a tenth with --partition domain or
    speaker).
11. The method assumes that two clients' gradients are less similar if their labels differ more. Each run checks this:
    `correlation` in metrics.csv is the rank correlation of similarity and divergence. assumption.png shows the pairs.
12. The baselines of table 1: fedavg.py with --weighting equal and --selection random, full or power_of_choice. On
    glyphs and CIFAR-10 this method prefers clients with many samples (results/wu). There --selection by_size is a fair
    baseline, too. Active selection (figures 8 and 9) is not here.

    python convex_hull_select.py
    python convex_hull_select.py --selection interior                                             (table 1's ablation)
    python convex_hull_select.py --dataset cifar10 --hull-dim 4
    python convex_hull_select.py --dataset cifar10 --dirichlet 0.09 --batch-size 16 --local-epochs 3 --lr 0.01 \\
        --label-noise 0.3 0.5 --trim 0.2                                            (figure 7; its noise is not given)
"""

import argparse

import torch
import torch.nn.functional as F
from scipy.spatial import ConvexHull
from torch import Tensor

from common import UserError, flags, plots, random_at, run, server, splits, train


def principal_components(products: Tensor, dim: int, scale: bool = False) -> Tensor:
    """Inner products [M, M] of updates -> coordinates along their first principal components, float64 [M, up to dim].

    scale  first scales the updates to unit length

    Fewer columns are returned if the updates span fewer dimensions. Components with very small variance count as
    rounding errors.
    """
    gram = products.double()
    if scale:
        length = gram.diagonal().sqrt().clamp(min=1e-30)
        gram = gram / (length[:, None] * length)
    size = gram.diagonal().mean().item()
    gram = gram - gram.mean(0) - gram.mean(1, keepdim=True) + gram.mean()  # products of the centred updates
    values, vectors = torch.linalg.eigh(gram)
    values, vectors = values.flip(0), vectors.flip(1)
    spanned = int((values > 1e-5 * size).sum())  # smaller values are the rounding of float32
    return (vectors * values.clamp(min=0).sqrt())[:, : min(dim, spanned)]


def vertices_of(points: Tensor) -> Tensor:
    """The indices of the points [M, dim] that are vertices of their convex hull, by quickhull: int64, ascending."""
    if points.shape[1] == 0:
        return torch.arange(len(points))[:1]
    if points.shape[1] == 1:
        return torch.stack([points[:, 0].argmin(), points[:, 0].argmax()]).sort().values
    return torch.from_numpy(ConvexHull(points.numpy()).vertices.astype("int64")).sort().values


def hull_vertices(updates: Tensor, dim: int, scale: bool = False) -> Tensor:
    """Line 3 for other projects: the clients on the hull, from their updates [M, P].

    An update is the weights before training minus the weights after it. Do not pass weights.

    dim    principal components in which the hull is built, 1 to 8
    scale  first scales the updates to unit length

    Updates that are zero or not finite are never selected. Returns rows of `updates`, int64, ascending, on the device
    of `updates`. Raises ValueError if `updates` is not a matrix, if no row is usable, or if dim is not in 1 to 8.
    """
    if updates.dim() != 2 or not 1 <= dim <= 8:
        raise ValueError(f"updates must be [clients, parameters], not {tuple(updates.shape)}; dim 1 to 8, not {dim}")
    length = updates.double().norm(dim=1)
    usable = torch.nonzero((length > 0) & torch.isfinite(length)).flatten()
    if not len(usable):
        raise ValueError(f"none of the {len(updates)} updates is usable: they are zero or not finite")
    rows = updates[usable].double()
    rows = F.normalize(rows) if scale else rows
    rows = rows - rows.mean(0)  # centre before the products: a large mean would make them imprecise
    return usable[vertices_of(principal_components((rows @ rows.T).cpu(), dim)).to(usable.device)]


def candidates(selection: str, vertices: Tensor, sizes: Tensor) -> Tensor:
    """Line 3 and its controls: the clients to choose from, int64, ascending, as indices into `sizes`.

    selection  hull: the vertices; interior: the clients that are no vertices; random: all clients; largest: the
               clients with the most samples, as many as there are vertices
    vertices   int64, indices into `sizes`
    sizes      n_i of each client
    """
    everybody = torch.arange(len(sizes))
    if selection == "interior":
        return everybody[torch.isin(everybody, vertices, invert=True)]
    if selection == "largest":
        return sizes.sort(descending=True, stable=True).indices[: len(vertices)].sort().values
    return vertices if selection == "hull" else everybody


# Local epochs and batch size: section V. Dirichlet alpha: table 1 if the paper uses the data set, else our choice.
# cifar100 has the settings of figure 8. A folder has the settings for NICO (figure 9). The paper tunes the learning
# rate over {0.1, 0.01, 0.001} and names its choice, 0.01, only for figures 7 to 9. Elsewhere we use 0.1, the best one
# for random selection on CIFAR-10 (results/wu). The 200 rounds and the settings for glyphs are our choices.
# By default 40 of 100 clients participate, as in the paper.
PAPER = {"local_epochs": 5, "batch_size": 128, "lr": 0.1, "rounds": 200}
# "small" is what --small changes: smaller settings of ours, for two cores without a GPU.
IMAGES = {"model": "cnn", "width": 0.25, "batch_size": 32, "lr": 0.05, "local_epochs": 5, "rounds": 20}
SETTINGS = {
    "glyphs": {**PAPER, "dirichlet": 0.1, "width": 0.5, "batch_size": 32, "lr": 0.05, "rounds": 25},
    **{name: {**PAPER, "dirichlet": 0.5} for name in ["mnist", "fmnist", "emnist", "gtsrb"]},
    "cifar10": {**PAPER, "dirichlet": 0.1},
    "cifar100": {**PAPER, "dirichlet": 0.03, "local_epochs": 3, "batch_size": 16, "lr": 0.01, "model": "resnet18"},
    "shakespeare": {**PAPER, "model": "charrnn"},
    "folder": {**PAPER, "dirichlet": 0.09, "local_epochs": 3, "batch_size": 16, "lr": 0.01, "model": "resnet18"},
    "small": {
        **dict.fromkeys(["mnist", "fmnist", "emnist", "gtsrb", "cifar10", "cifar100"], IMAGES),
        "folder": {**IMAGES, "dirichlet": 0.5, "image_size": 32, "clients": 12, "rounds": 30},
        "shakespeare": {"clients": 30, "local_epochs": 1, "batch_size": 32, "lr": 0.8, "rounds": 15},
    },
}


def own_flags(add) -> None:
    add(
        "--selection",
        choices=["hull", "interior", "random", "largest"],
        default="hull",
        help="line 3, its ablation, or a control that trains as many clients as the hull has vertices",
    )
    add("--hull-dim", type=flags.at_least(1, int, 8), default=3, help="principal components in which the hull is built")
    add("--raw", action=argparse.BooleanOptionalAction, default=True, help="--no-raw scales gradients to length 1")
    add("--draw", type=flags.at_least(1), metavar="N", help="train at most N of the selected clients, drawn at random")
    server.table_flags(add)


def main(argv: list[str] | None = None) -> None:
    hull_decides = {"sample": lambda args: "the hull sets the number of clients; use --draw to take fewer"}
    args = flags.parse(__doc__, SETTINGS, own_flags, argv, **hull_decides)
    data, clients, model, trainer = flags.prepare(args)
    if (args.draw or 1) > clients.participating:
        raise UserError(f"--draw {args.draw}: only {clients.participating} clients participate")
    weights = server.base_weights(args.weighting, data, clients)
    log = run.Run(args, trainer, ["uploads", "vertices", "correlation", "present", "points"])
    plots.partition(log.folder / "partition.png", data, clients)
    divergence = server.label_divergence(splits.label_counts(data, clients.train[: clients.participating]))

    w = train.get_weights(model)
    table = server.GradientTable.empty(
        clients.participating, args.sketch or len(w), trainer.device, sketched=args.sketch > 0
    )
    state = log.restore({"w": w, "table": vars(table)})
    table = server.GradientTable(**state["table"])
    for t in log.rounds(state, args.rounds):  # line 2
        present = server.present(clients.ids, args.churn, random_at(args.seed, "churn", t))
        for newcomers in table.missing(present).split(args.sample):  # line 1: in round 1 all present clients, in parts
            joined, updates, _ = trainer.local_updates(
                train.local_solver, model, state["w"], newcomers, clients.train, 0, needed=0
            )
            table.put(joined, updates)
        present = table.known(present)
        if not len(present):
            raise UserError(
                "all updates are zero or not finite: lower --lr if they are not finite, raise it if they are zero"
            )

        cosines = table.cosines(present).cpu()  # for the log: before this round changes the table
        # the picture needs two coordinates in any case
        points = principal_components(table.products[present][:, present].cpu(), max(2, args.hull_dim), not args.raw)
        vertices = vertices_of(points[:, : args.hull_dim])  # line 3
        possible = candidates(args.selection, vertices, clients.sizes[present])
        if not len(possible):
            raise UserError(f"round {t}: no client lies inside the hull; lower --hull-dim")
        count = min(args.draw or len(vertices), len(possible))
        selected = present[splits.draw(possible, count, random_at(args.seed, "select", t))]  # line 3: I_t
        selected, updates, losses = trainer.local_updates(
            train.local_solver, model, state["w"], selected, clients.train, t
        )  # lines 5, 6, 7: one row of `updates` per client with a usable upload, g_i = w - w_i
        updates = table.put(selected, updates, args.event_threshold)  # section IV-B
        state["w"] = state["w"] - server.aggregate(updates, weights[selected], args.trim)  # line 9
        loss = server.aggregate(losses[:, None], weights[selected], 0).squeeze()
        plane = F.pad(points[:, :2], (0, 2 - points[:, :2].shape[1]))
        correlation = server.rank_correlation(cosines, divergence[present][:, present])
        measures = log.evaluate(model, state["w"], clients, selected)
        log.log(loss, selected, uploads=table.uploads.sum(), vertices=len(vertices), correlation=correlation,
                present=present, points=plane.flatten(), **measures)  # fmt: skip

    log.finish(state, model, state["w"])
    plots.accuracy_curves(log.folder / "curves.png", {log.name: log.rows})
    plots.hull_animation(log.folder / "hull.gif", log.rows, args.hull_dim)
    plots.assumption(log.folder / "assumption.png", table.cosines(clients.ids).cpu(), divergence, log.rows)
    log.report(f"{data.name}, {args.selection} in {args.hull_dim} dimensions")


if __name__ == "__main__":
    run.launch(main)
