"""Minimax selection: train the clients whose gradients are unlike every other client's gradient.

Wu et al., Advocating for the Silent: Enhancing Federated Generalization for Non-Participating
Clients (arXiv 2310.07171), section IV-B1. The server keeps the latest g = w - w_i of each
participating client, which the paper calls its gradient. In each round it looks up every client's
most similar other client, and selects the K clients for which this largest cosine similarity is
smallest, since nobody else can stand in for them.

    Algorithm 2                                                          in the code
     1  before round 1 all participating clients train from w_0          federate
        and upload g_0^i
     2  for round t = 1 .. T                                             federate
     4      I_t = MinimaxSim(table, K)                                   federate, minimax_clients
     5      for client i in I_t in parallel                              federate, trainer.train
     6          w_t^i = LocalSolver(w_t, S_i, eta)                       train.local_solver
     7          g_t^i = w_t - w_t^i                                      federate
     9      w_{t+1} = w_t - sum over I_t of alpha_i g_t^i                federate

Algorithm 1 is MinimaxSim. Its lines 2 to 5 compare the rows of the table, which are g_t^i there,
and g_s^i in Algorithm 2: cosines. Lines 6 to 9 look up S*_i = max over j != i of cos(g^i, g^j):
largest_similarity. Lines 10 to 16 take the clients with the smallest S*_i: minimax_clients. Line 3
of Algorithm 2 is convex_hull_select.py; lines 8 and 10 only end a loop. What the paper leaves open
stands beside the line in question, and the rest in docs/minimax_select.md.

    python minimax_select.py
    python minimax_select.py --dataset cifar10
    python minimax_select.py --dataset cifar10 --selection maxsim              (table 1's ablation)
"""

from contextlib import suppress

import torch
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


def cosines(g: Tensor) -> Tensor:
    """Algorithm 1, lines 2 to 5: the cosines S_ij of the rows of g [M, P], float64 [M, M].

    They are symmetric, and NaN for rows without a direction.
    """
    length = lengths(g)[:, None]
    similarity = torch.zeros(len(g), len(g), dtype=torch.float64, device=g.device)
    for part in g.detach().split(2**11, dim=1):  # in blocks, because a copy of g would be large
        part = part.double() / length
        similarity += part @ part.T
    return (similarity + similarity.T) / 2  # so that ties are ties, in spite of rounding


def largest_similarity(similarity: Tensor) -> Tensor:
    """S*_i = max over j != i of similarity [M, M]: [M] (Algorithm 1, lines 6 to 9)."""
    itself = torch.eye(len(similarity), dtype=torch.bool, device=similarity.device)
    return similarity.masked_fill(itself, -torch.inf).amax(1)


def minimax_clients(g: Tensor, k: int, largest: bool = False) -> Tensor:
    """The k clients with the smallest S*_i (equation 16): int64 [k], ascending.

    g        the clients' updates [M, P]: weights before training minus weights after it, so do not
             pass weights
    largest  takes the largest S*_i instead, which is MaxSim

    Algorithm 1, lines 10 to 16, differs in two ways. Its loop `while |I| <= K` ends with K + 1
    clients. And line 14 removes the value S*_i, so if two clients share it, being each other's most
    similar one, only one is selected. We follow equation 16. Ties go to the smaller index.
    Updates that are zero or not finite are never selected. Raises ValueError if g is not a matrix,
    or has fewer than k usable rows.
    """
    if g.dim() != 2 or not len(g):
        raise ValueError(f"g must be [clients, parameters], not {tuple(g.shape)}")
    usable = usable_rows(g)
    if not 1 <= k <= len(usable):
        raise ValueError(f"k = {k}: choose between 1 and the {len(usable)} usable updates")
    score = largest_similarity(cosines(g)[usable][:, usable])
    return usable[score.sort(stable=True, descending=largest).indices[:k]].sort().values


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
        k = min(clients.sample, len(usable))
        if k == 0:
            raise UserError("all updates are zero or infinite: change --lr")
        if args.selection == "random":
            selected = splits.draw(usable, k, random_at(args.seed, "select", t))
        else:
            selected = minimax_clients(table, k, largest=args.selection == "maxsim").cpu()  # line 4
        # Ids [k], weights [k, P], losses [k] of the clients whose upload is finite
        trained, ws, losses = trainer.train(train.local_solver, model, w, selected, t)  # lines 5, 6
        g = w - ws  # line 7, with the statistics of batch norm, if the model has any
        table[trained] = g  # section IV-B; the rows of the other clients stay
        n = clients.sizes[trained].to(g)
        if args.weighting == "equal":  # 1 / K as in the theory; the experiments do not say
            n = torch.ones_like(n)
        alpha = n / n.sum()
        w = w - alpha @ g  # line 9
        measures = trainer.evaluate(model, w, trained) if run.evaluate_now else {}
        measures["train_loss"] = alpha @ losses
        run.record(t, {"w": w, "table": table}, selected=trained, **measures)
    run.draw("similarity", cosines(table).cpu())
    return run.finish(model, w)


# The example on glyphs is ours: three of 80 clients of equal size hold a rare class each. It takes
# few local steps, in float32, so that rounding moves a run less than another seed does. The other
# settings follow section V, and common/settings.py says what we chose where it is silent. WU: lr
# 0.1, 5 local epochs, batches of 128. RESNET: 0.01, 3 and 16.
RARE = {
    "partition": "rare", "clients": 80, "sample": 10, "width": 0.25, "local_epochs": 2,
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
    kinds, by = ["minimax", "maxsim", "random"], ["equal", "size"]
    add("--selection", choices=kinds, default="minimax", help="line 4, or in another way")
    add("--weighting", choices=by, default="equal", help="line 9: alpha_i is 1 / K or n_i / n")


def main(argv: list[str] | None = None):
    args = flags.parse(__file__, __doc__, SETTINGS, SMALL, own_flags, argv)
    # Table 1's others: fedavg.py --weighting equal, with --selection power_of_choice or --sample M
    baselines = {"random": {"selection": "random"}}
    prediction = (
        "nobody is like a client whose class only it has, so minimax selection trains these "
        "clients more often than random selection does, and the model knows their classes better"
    )
    shows_in = {"rare_selected": "above", "rare_accuracy": "above", "ood_accuracy": "above"}
    return compare(args, federate, args.selection, baselines, prediction, shows_in)


if __name__ == "__main__":
    launch(main)
