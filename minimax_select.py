"""Minimax selection: train those clients whose gradients look least like anybody else's.

Wu et al., Advocating for the Silent: Enhancing Federated Generalization for Non-Participating Clients (arXiv
2310.07171), section IV-B1. The server keeps each participating client's latest g = w - w_i, and in each round selects
the K whose nearest neighbour among the others, by cosine similarity, is farthest away.

The lines are those of the work's earlier version (Federated Generalization via Information-Theoretic Distribution
Diversification), whose listing is complete; equations and sections are the later one's.

    Algorithm 2, with Algorithm 1 in line 3                              in the code
     1  before round 1 all participating clients train from w_0          server.available_rows()
        and upload g_0^i
     2  for round t = 1 .. T                                             args.rounds
     3      I_t = MinimaxSim(table, K):                                  minimax_select()
                S*_i = max over j != i of cos(g^i, g^j)
                the K clients of the smallest S*_i         (16)
     4      for client i in I_t in parallel
     5          w_t^i = LocalSolver(w_t, S_i, eta);  g_t^i = w_t - w_t^i  trainer.local_updates
     7      w_{t+1} = w_t - sum over I_t of alpha_i g_t^i                server.aggregate()
        the table keeps g_t^i for i in I_t                               server.upload(); it also keeps the rows'
                                                                         inner products, K M P new ones a round

Where the paper is silent or unclear
1. K: Algorithm 1's loop, `while |I| <= K`, ends with K + 1 clients; equation 16 has K, and so has this.
2. Equation 16 asks for the set of K clients with the least sum of S*_i. The K smallest S*_i are that set: exact.
3. Ties go to the smaller client id.
4. alpha_i: the theory has 1/K, the experiments do not say; --weighting equal is the default.
5. Event-triggered uploads (section IV-B, "communication and computation cost"): with --event-threshold a selected
   client whose g moved by less than this share of its norm uploads nothing, and the server goes on with its old g.
6. Clients that leave and come back ("client churn"): --churn is the probability with which each is away in a round.
   A client without a usable update (none yet, or all zeros) first trains from the current w to enter the table, and
   can be selected at once.
   S* is taken among those present; where fewer than K are, all of them train.
7. Noisy clients (figure 7): --label-noise with --trim, the trimmed mean, whose average has no weights. Of K selected
   it cuts int(trim K) at either end, and at least one.
8. The models ("a CNN", "an RNN"): McMahan et al.'s and LEAF's; a ResNet-18 has group norm. See common/models.py.
9. ID: the paper has the local test sets of the selected clients; here those of all that participate, a fifth of each
   client's samples (of text a tenth), which it does not train on.
10. Compared with (table 1): fedavg.py with --weighting equal and --selection random, full or power_of_choice. Not here:
    Active selection, of figures 8 and 9.

    python minimax_select.py
    python minimax_select.py --selection maxsim                                    (table 1's ablation, the opposite)
    python minimax_select.py --dataset cifar10
    python minimax_select.py --dataset shakespeare
    python minimax_select.py --dataset cifar10 --alpha 0.09 --batch-size 16 --local-epochs 3 --lr 0.01 \\
        --label-noise 0.3 0.5 --trim 0.2                                            (figure 7; its noise is not given)
"""

import torch
from torch import Tensor

from common import flags, plots, run, server, train


def nearest(similarity: Tensor) -> Tensor:
    """S*_i = max over j != i of similarity [M, M] -> [M]."""
    alone = torch.eye(len(similarity), dtype=torch.bool, device=similarity.device)
    return similarity.masked_fill(alone, -torch.inf).amax(1)


def minimax_select(similarity: Tensor, k: int) -> Tensor:
    """The k clients whose largest similarity [M, M] to another is smallest, in ascending order: int64 [k].

    Equation 16 and Algorithm 1. Ties go to the smaller index.
    """
    return nearest(similarity).sort(stable=True).indices[:k].sort().values


def maxsim_select(similarity: Tensor, k: int) -> Tensor:
    """The opposite of minimax_select: the k clients whose largest similarity to another is largest."""
    return nearest(similarity).sort(descending=True, stable=True).indices[:k].sort().values


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
    add("--selection", choices=["minimax", "maxsim"], default="minimax", help="line 3, or its opposite")
    server.table_flags(add)


def main(argv: list[str] | None = None) -> None:
    args = flags.parse(__doc__, SETTINGS, own_flags, argv, server.without_effect)
    data, clients, model, trainer = flags.prepare(args)
    everyone, weights = clients.participating, server.base_weights(args.weighting, data, clients)
    w = train.get_weights(model)
    table = server.empty_table(len(everyone), w, args)
    log = run.Run(args, ["uploads"], trainer)
    plots.partition(log.folder / "partition.png", data, clients)
    state = log.state or {"round": 0, "w": w, **table}
    select = minimax_select if args.selection == "minimax" else maxsim_select

    for t in log.rounds(state, args.rounds):  # line 2
        here = server.available_rows(state, t, args, log, trainer, model, clients)  # line 1
        similarity = server.cosines(state["products"][here][:, here].cpu())
        chosen = here[select(similarity, args.sample)]  # line 3
        selected, updates, losses = trainer.local_updates(
            model, state["w"], everyone[chosen], clients.train, t, progress=log.tick
        )  # lines 4-6
        alpha = weights[selected] / weights[selected].sum()
        rows = torch.searchsorted(everyone, selected)
        updates = server.upload(state, rows, updates, args)  # the table keeps them
        state["w"] = state["w"] - server.aggregate(updates, alpha, args.trim)  # line 7
        accuracies = run.id_and_ood(trainer, model, state["w"], clients)
        log.log(t, alpha.to(losses) @ losses, selected, uploads=state["uploads"], **accuracies)

    log.finish(state, model, state["w"])
    plots.accuracy_curves(log.folder / "curves.png", {args.selection: log.rows})
    selections = [[everyone.tolist().index(int(k)) for k in row["selected"].split()] for row in log.rows]
    plots.similarity(log.folder / "similarity.png", server.cosines(state["products"]), selections, everyone)
    log.report(f"minimax_select on {data.name}, {args.selection}; {state['uploads']} uploads")


if __name__ == "__main__":
    run.launch(main)
