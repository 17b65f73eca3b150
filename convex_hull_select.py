"""Convex-hull selection: train those clients whose gradients are the corners of all.

Wu et al., Advocating for the Silent: Enhancing Federated Generalization for Non-Participating Clients, section IV-B2.
The server keeps each participating client's latest g = w - w_i, and in each round selects the vertices of these
points' convex hull: what they span covers what clients that never train might send.

    Algorithm 2                                                          in the code
     1  before round 1 all participating clients train from w_0          newcomers
        and upload g_0^i
     2  for round t = 1 .. T                                             args.rounds
     3      I_t = Convex Hull(table), by quickhull                       hull_vertices()
     4      for client i in I_t in parallel
     5          w_t^i = LocalSolver(w_t, S_i, eta);  g_t^i = w_t - w_t^i  trainer.local_updates
     7      w_{t+1} = w_t - sum over I_t of alpha_i g_t^i                server.aggregate()
        the table keeps g_t^i for i in I_t                               state["table"]

Where the paper is silent, and what it does not say decides much
1. In which space. M points in general position are all vertices in M - 1 dimensions or more, and quickhull cannot run
   in a million. The paper speaks of "cosine similarity to construct the convex hull". So here: rows scaled to unit
   length (--raw: as they are), centred, and projected to their first --hull-dim principal components.
2. How many are selected follows from the dimension; --draw N draws N of the vertices at random instead.
3. Fewer distinct points than a hull in --hull-dim dimensions needs, or all in a plane or on a line: the hull in the
   dimension that they span. Of clients with the same point one is selected; if all are the same, the first client.
4. alpha_i: the theory has 1/K, the experiments do not say; --weighting equal is the default.
5. Interior, table 1's ablation, draws as many clients strictly inside the hull as the hull has vertices, or all inside
   where there are fewer.
6. Clients that leave and come back ("client churn"): --churn is the probability with which each is away in a round.
   Who was never there before trains once from the current w to enter the table, and can be selected at once.
7. Noisy clients (figure 7): --trim, the trimmed mean, whose average has no weights.

    python convex_hull_select.py
    python convex_hull_select.py --selection interior                                             (table 1's ablation)
    python convex_hull_select.py --dataset cifar10 --hull-dim 4
"""

import torch
import torch.nn.functional as F
from scipy.spatial import ConvexHull
from torch import Tensor

from common import UserError, flags, plots, random_at, run, server, splits, train


def principal_components(gradients: Tensor, dim: int, scale: bool = True) -> Tensor:
    """Gradients [M, P] -> their coordinates along the first components, float64 [M, at most dim], by the Gram matrix.

    scale  rows to unit length first. There are fewer coordinates than dim where the rows span fewer dimensions.
    """
    x = F.normalize(gradients) if scale else gradients
    x = x - x.mean(0)
    values, vectors = torch.linalg.eigh((x @ x.T).double().cpu())
    values, vectors = values.flip(0), vectors.flip(1)
    spanned = int((values > 1e-6 * values[0].clamp(min=1e-30)).sum()) if values[0] > 1e-12 else 0
    return (vectors * values.clamp(min=0).sqrt())[:, : min(dim, spanned)]


def hull_vertices(gradients: Tensor, dim: int, scale: bool = True) -> Tensor:
    """Rows of gradients [M, P] that are vertices of the hull in `dim` principal components: ascending, int64."""
    points = principal_components(gradients, dim, scale)
    if points.shape[1] == 0:
        return torch.tensor([0])
    if points.shape[1] == 1:
        return torch.stack([points[:, 0].argmin(), points[:, 0].argmax()]).sort().values
    return torch.from_numpy(ConvexHull(points.numpy()).vertices.astype("int64")).sort().values


# Section V, table 1, with 100 clients of which 40 participate. The paper tunes the learning rate over
# {0.1, 0.01, 0.001} and does not say which won.
PAPER = {"local_epochs": 5, "batch_size": 128, "lr": 0.1, "rounds": 200}
SETTINGS = {
    "glyphs": {**PAPER, "alpha": 0.1, "batch_size": 32, "lr": 0.05, "rounds": 20},
    "mnist": {**PAPER, "alpha": 0.5},
    "fmnist": {**PAPER, "alpha": 0.5},
    "emnist": {**PAPER, "alpha": 0.5},
    "cifar10": {**PAPER, "alpha": 0.1},
    "cifar100": {**PAPER, "alpha": 0.03, "local_epochs": 3, "batch_size": 16, "lr": 0.01, "model": "resnet18"},
    "gtsrb": {**PAPER, "alpha": 0.5},
    "shakespeare": {**PAPER, "model": "charrnn"},
    "folder": {**PAPER, "alpha": 0.09, "local_epochs": 3, "batch_size": 16, "lr": 0.01, "model": "resnet18"},
}  # fmt: skip


def own_flags(add) -> None:
    add("--selection", choices=["hull", "interior"], default="hull", help="line 3, or its ablation")
    add("--hull-dim", type=flags.at_least(1), default=3, help="principal components in which the hull is built")
    add("--raw", action="store_true", help="do not scale gradients to unit length first")
    add("--draw", type=flags.at_least(1), metavar="N", help="draw N of the vertices at random (default: all of them)")
    add("--weighting", choices=["equal", "size", "entropy"], default="equal", help="alpha of line 7")
    add("--churn", type=flags.at_least(0, float, 0.99), default=0.0, help="probability to be away in a round")
    add("--trim", type=flags.at_least(0, float, 0.49), default=0.0, help="share cut at both ends: the trimmed mean")


def main(argv: list[str] | None = None) -> None:
    args = flags.parse(__doc__, SETTINGS, own_flags, argv)
    data, clients, model, trainer = flags.prepare(args)
    everyone, weights = clients.participating, server.base_weights(args.weighting, data, clients)
    log = run.Run(args, ["vertices"], trainer.device)
    plots.partition(log.folder / "partition.png", data, clients)
    w, m = train.get_weights(model), len(everyone)
    state = log.state or {
        "round": 0, "w": w, "table": torch.zeros(m, len(w), device=trainer.device),
        "seen": torch.zeros(m, dtype=torch.bool), "frames": {},
    }  # fmt: skip

    for t in log.rounds(state, args.rounds):  # line 2
        here = server.present(torch.arange(m), args.churn, random_at(args.seed, "churn", t))
        newcomers = here[~state["seen"][here]]
        if len(newcomers):  # line 1
            new = everyone[newcomers].tolist()
            state["table"][newcomers], _ = trainer.local_updates(model, state["w"], new, clients.train, 0)
            state["seen"][newcomers] = True
        vertices = hull_vertices(state["table"][here], args.hull_dim, not args.raw)  # line 3
        rng = random_at(args.seed, "select", t)
        if args.selection == "hull":
            among, count = vertices, args.draw or len(vertices)
        else:
            among, count = torch.arange(len(here)), args.draw or len(vertices)
            among = among[~torch.isin(among, vertices)]
            if not len(among):
                raise UserError(f"round {t}: no client lies inside the hull; lower --hull-dim")
        chosen = here[splits.draw(among, min(count, len(among)), rng)]
        if t in (1, args.rounds):  # the picture's two frames
            plane = principal_components(state["table"][here], 2, not args.raw)
            state["frames"][t] = {"points": plane, "selected": torch.isin(here, chosen), "ids": everyone[here]}
        selected = everyone[chosen]
        updates, losses = trainer.local_updates(
            model, state["w"], selected.tolist(), clients.train, t, progress=log.tick
        )  # lines 4-6
        state["table"][chosen] = updates
        alpha = weights[selected] / weights[selected].sum()
        state["w"] = state["w"] - server.aggregate(updates, alpha, args.trim)  # line 7
        accuracies = run.id_and_ood(trainer, model, state["w"], clients)
        log.log(t, losses.mean(), selected, vertices=len(vertices), **accuracies)

    log.finish(state, model, state["w"])
    plots.accuracy_curves(log.folder / "curves.png", {args.selection: log.rows})
    plots.hulls(log.folder / "hull.png", state["frames"])
    log.report(f"convex_hull_select on {data.name}, {args.selection} in {args.hull_dim} dimensions")


if __name__ == "__main__":
    run.launch(main)
