"""Convex-hull selection: train those clients whose gradients are the vertices of the convex hull of all.

Wu et al., Advocating for the Silent: Enhancing Federated Generalization for Non-Participating Clients (arXiv
2310.07171), section IV-B2. The server keeps each participating client's latest g = w - w_i, and in each round selects
the vertices of these points' convex hull: what they span covers what clients that never train might send.

The lines are those of the work's earlier version (Federated Generalization via Information-Theoretic Distribution
Diversification), whose listing is complete; equations and sections are the later one's.

    Algorithm 2                                                          in the code
     1  before round 1 all participating clients train from w_0          server.available_rows()
        and upload g_0^i
     2  for round t = 1 .. T                                             args.rounds
     3      I_t = Convex Hull(table), by quickhull                       principal_components(), vertices_of()
     4      for client i in I_t in parallel
     5          w_t^i = LocalSolver(w_t, S_i, eta);  g_t^i = w_t - w_t^i  trainer.local_updates
     7      w_{t+1} = w_t - sum over I_t of alpha_i g_t^i                server.aggregate()
        the table keeps g_t^i for i in I_t                               server.upload(); it also keeps the rows'
                                                                         inner products, K M P new ones a round

Where the paper is silent (and these choices matter)
1. In which space. M points in general position are all vertices in M - 1 dimensions or more, and quickhull cannot run
   in a million: it is the projection that decides. So here: rows centred, and projected to their first --hull-dim
   principal components. --no-raw scales rows to unit length first, for the paper speaks of "cosine similarity to
   construct the convex hull"; it selected more clients and ended lower (results/wu, which has dimensions 2 to 6).
2. How many are selected follows from the dimension; --draw N selects N of the vertices at random, or all where there
   are fewer: take --draw 10 to compare with K = 10 of other methods. --sample does nothing here.
3. Fewer distinct points than a hull in --hull-dim dimensions needs, or all in a plane or on a line: the hull in the
   dimension that they span. Of clients with the same point one is selected; if all are the same, the first client.
4. alpha_i: the theory has 1/K, the experiments do not say; --weighting equal is the default.
5. Interior, table 1's ablation, draws as many clients that are no vertices as there are vertices, or all such clients
   where there are fewer. Where there are none, the run stops.
6. Clients that leave and come back ("client churn"): --churn is the probability with which each is away in a round.
   A client without a usable update (none yet, or all zeros) first trains from the current w to enter the table, and
   can be selected at once.
7. Noisy clients (figure 7): --label-noise with --trim, the trimmed mean, whose average has no weights. Of K selected
   it cuts int(trim K) at either end, and at least one.
8. Event-triggered uploads (section IV-B, "communication and computation cost"): with --event-threshold a selected
   client whose g moved by less than this share of its norm uploads nothing, and the server goes on with its old g.
9. The models ("a CNN", "an RNN"): McMahan et al.'s and LEAF's; a ResNet-18 has group norm. See common/models.py.
10. ID: the paper has the local test sets of the selected clients; here those of all that participate, a fifth of each
    client's samples (of text a tenth), which it does not train on.
11. Compared with (table 1): fedavg.py with --weighting equal and --selection random, full or power_of_choice. Not here:
    Active selection, of figures 8 and 9.

    python convex_hull_select.py
    python convex_hull_select.py --selection interior                                             (table 1's ablation)
    python convex_hull_select.py --dataset cifar10 --hull-dim 4
    python convex_hull_select.py --dataset cifar10 --alpha 0.09 --batch-size 16 --local-epochs 3 --lr 0.01 \\
        --label-noise 0.3 0.5 --trim 0.2                                            (figure 7; its noise is not given)
"""

import argparse

import torch
from scipy.spatial import ConvexHull
from torch import Tensor

from common import UserError, flags, plots, random_at, run, server, splits, train


def principal_components(products: Tensor, dim: int, scale: bool = False) -> Tensor:
    """Inner products [M, M] of gradients -> their coordinates along the first components, float64 [M, at most dim].

    scale  gradients to unit length first. There are fewer coordinates than dim where they span fewer dimensions.
    """
    gram = products.double()
    if scale:
        length = gram.diagonal().sqrt().clamp(min=1e-30)
        gram = gram / (length[:, None] * length)
    size = gram.diagonal().mean().item()
    gram = gram - gram.mean(0) - gram.mean(1, keepdim=True) + gram.mean()  # of the rows less their mean
    values, vectors = torch.linalg.eigh(gram)
    values, vectors = values.flip(0), vectors.flip(1)
    spanned = int((values > 1e-5 * size).sum())  # less is the rounding of inner products in float32
    return (vectors * values.clamp(min=0).sqrt())[:, : min(dim, spanned)]


def hull_vertices(gradients: Tensor, dim: int, scale: bool = False) -> Tensor:
    """Rows of gradients [M, P] that are vertices of the hull in `dim` principal components: ascending, int64.

    Line 3 in one call, for other projects; main() has the inner products already.
    """
    gradients = gradients.detach().cpu().double()
    return vertices_of(principal_components(gradients @ gradients.T, dim, scale))


def vertices_of(points: Tensor) -> Tensor:
    """Which of the points [M, dim] are vertices of their convex hull, by quickhull: ascending, int64."""
    if points.shape[1] == 0:
        return torch.tensor([0])
    if points.shape[1] == 1:
        return torch.stack([points[:, 0].argmin(), points[:, 0].argmax()]).sort().values
    return torch.from_numpy(ConvexHull(points.numpy()).vertices.astype("int64")).sort().values


def interior(m: int, vertices: Tensor) -> Tensor:
    """Which of m points are none of the vertices: ascending, int64."""
    return torch.nonzero(torch.isin(torch.arange(m), vertices, invert=True)).flatten()


# Section V: 100 clients of which 40 participate; table 1: 5 local epochs, batches of 128, alpha; figure 8: CIFAR-100;
# figure 9: NICO, for a folder of images. The rest is ours: 10 selected a round, 200 rounds, table 1's learning rate
# (the paper tunes it over 0.1, 0.01 and 0.001 and does not say which won), glyphs, alpha of data sets not in the paper.
PAPER = {"local_epochs": 5, "batch_size": 128, "lr": 0.1, "rounds": 200}
SETTINGS = {
    "glyphs": {**PAPER, "alpha": 0.1, "width": 0.5, "batch_size": 32, "lr": 0.05, "rounds": 25},
    **{name: {**PAPER, "alpha": 0.5} for name in ["mnist", "fmnist", "emnist", "gtsrb"]},
    "cifar10": {**PAPER, "alpha": 0.1},
    "cifar100": {**PAPER, "alpha": 0.03, "local_epochs": 3, "batch_size": 16, "lr": 0.01, "model": "resnet18"},
    "shakespeare": {**PAPER, "model": "charrnn"},
    "folder": {**PAPER, "alpha": 0.09, "local_epochs": 3, "batch_size": 16, "lr": 0.01, "model": "resnet18"},
}  # fmt: skip


def own_flags(add) -> None:
    add("--selection", choices=["hull", "interior"], default="hull", help="line 3, or its ablation")
    add("--hull-dim", type=flags.at_least(1, int, 8), default=3, help="principal components in which the hull is built")
    add("--raw", action=argparse.BooleanOptionalAction, default=True, help="gradients as they are, or of unit length")
    add("--draw", type=flags.at_least(1), metavar="N", help="train N of the vertices (or interior), drawn at random")
    server.table_flags(add)


def without_effect(args) -> dict:
    return {**server.without_effect(args), "sample": "the hull says how many are selected; --draw takes fewer"}


def main(argv: list[str] | None = None) -> None:
    args = flags.parse(__doc__, SETTINGS, own_flags, argv, without_effect)
    args.sample = None  # the hull decides
    data, clients, model, trainer = flags.prepare(args)
    if (args.draw or 1) > len(clients.participating):
        raise UserError(f"--draw {args.draw}: only {len(clients.participating)} clients participate")
    everyone, weights = clients.participating, server.base_weights(args.weighting, data, clients)
    w = train.get_weights(model)
    table = server.empty_table(len(everyone), w, args)
    log = run.Run(args, ["vertices", "uploads"], trainer)
    plots.partition(log.folder / "partition.png", data, clients)
    state = log.state or {"round": 0, "w": w, "points": torch.empty(0, 5, dtype=torch.float64), **table}
    state["points"] = state["points"].cpu()  # a checkpoint comes back on the device

    for t in log.rounds(state, args.rounds):  # line 2
        here = server.available_rows(state, t, args, log, trainer, model, clients)  # line 1
        products = state["products"][here][:, here].cpu()
        components = principal_components(products, max(2, args.hull_dim), not args.raw)
        vertices = vertices_of(components[:, : args.hull_dim])  # line 3
        candidates = vertices if args.selection == "hull" else interior(len(here), vertices)
        if not len(candidates):
            raise UserError(f"round {t}: no client lies inside the hull; lower --hull-dim")
        count = min(args.draw or len(vertices), len(candidates))
        chosen = here[splits.draw(candidates, count, random_at(args.seed, "select", t))]
        frame = plots.hull_points(t, everyone[here], components, torch.isin(here, chosen))
        state["points"] = torch.cat([state["points"], frame])
        selected, updates, losses = trainer.local_updates(
            model, state["w"], everyone[chosen], clients.train, t, progress=log.tick
        )  # lines 4-6
        alpha = weights[selected] / weights[selected].sum()
        rows = torch.searchsorted(everyone, selected)
        updates = server.upload(state, rows, updates, args)  # the table keeps them
        state["w"] = state["w"] - server.aggregate(updates, alpha, args.trim)  # line 7
        accuracies = run.id_and_ood(trainer, model, state["w"], clients)
        log.log(t, alpha.to(losses) @ losses, selected, vertices=len(vertices), uploads=state["uploads"], **accuracies)

    log.finish(state, model, state["w"])
    plots.accuracy_curves(log.folder / "curves.png", {args.selection: log.rows})
    run.write_points(log.folder / "points.csv", state["points"])
    plots.hull_animation(log.folder / "hull.gif", state["points"], log.rows, args.hull_dim)
    log.report(f"convex_hull_select on {data.name}, {args.selection} in {args.hull_dim} dimensions")


if __name__ == "__main__":
    run.launch(main)
