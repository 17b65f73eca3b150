"""Minimax selection: train those clients whose gradients look least like anybody else's.

Wu et al., Advocating for the Silent: Enhancing Federated Generalization for Non-Participating Clients, section IV-B1.
The server keeps each participating client's latest g = w - w_i, and in each round selects the K whose nearest
neighbour among the others, by cosine similarity, is farthest away.

    Algorithm 2, with Algorithm 1 in line 3                              in the code
     1  before round 1 all participating clients train from w_0          newcomers
        and upload g_0^i
     2  for round t = 1 .. T                                             args.rounds
     3      I_t = MinimaxSim(table, K):                                  minimax_select()
                S*_i = max over j != i of cos(g^i, g^j)
                the K clients of the smallest S*_i         (16)
     4      for client i in I_t in parallel
     5          w_t^i = LocalSolver(w_t, S_i, eta);  g_t^i = w_t - w_t^i  trainer.local_updates
     7      w_{t+1} = w_t - sum over I_t of alpha_i g_t^i                server.aggregate()
        the table keeps g_t^i for i in I_t                               state["table"], update_similarity()

Where the paper is silent or unclear
1. K: Algorithm 1's loop, `while |I| <= K`, ends with K + 1 clients; equation 16 has K, and so has this.
2. Equation 16 asks for the set of K clients with the least sum of S*_i. The K smallest S*_i are that set: exact.
3. Ties go to the smaller client id.
4. alpha_i: the theory has 1/K, the experiments do not say; --weighting equal is the default.
5. Event-triggered uploads (section IV-B, "communication and computation cost"): with --event-threshold a selected
   client whose g moved by less than this share of its norm uploads nothing, and the server goes on with its old g.
6. Clients that leave and come back ("client churn"): --churn is the probability with which each is away in a round.
   Who was never there before trains once from the current w to enter the table, and can be selected at once.
7. Noisy clients (figure 7): --trim, the trimmed mean, whose average has no weights.

    python minimax_select.py
    python minimax_select.py --selection maxsim                                    (table 1's ablation, the opposite)
    python minimax_select.py --dataset cifar10
    python minimax_select.py --dataset shakespeare
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from common import flags, plots, random_at, run, server, train


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


def update_similarity(similarity: Tensor, gradients: Tensor, changed: Tensor) -> None:
    """Brings the cosines [M, M] between gradients [M, P] up to date after the rows `changed` [K]: K M P products."""
    cosines = F.normalize(gradients[changed]) @ F.normalize(gradients).T
    similarity[changed] = cosines
    similarity[:, changed] = cosines.T


# Section V, table 1, with 100 clients of which 40 participate; K = 10 is ours. The paper tunes the learning rate over
# {0.1, 0.01, 0.001} and does not say which won.
PAPER = {"local_epochs": 5, "batch_size": 128, "lr": 0.1, "rounds": 200}
SETTINGS = {
    "glyphs": {**PAPER, "alpha": 0.1, "batch_size": 32, "lr": 0.05, "rounds": 25},
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
    add("--selection", choices=["minimax", "maxsim"], default="minimax", help="line 3, or its opposite")
    add("--weighting", choices=["equal", "size", "entropy"], default="equal", help="alpha of line 7")
    add("--event-threshold", type=flags.at_least(0, float), default=0.0, help="relative change under which no upload")
    add("--churn", type=flags.at_least(0, float, 0.99), default=0.0, help="probability to be away in a round")
    add("--trim", type=flags.at_least(0, float, 0.49), default=0.0, help="share cut at both ends: the trimmed mean")


def main(argv: list[str] | None = None) -> None:
    args = flags.parse(__doc__, SETTINGS, own_flags, argv)
    data, clients, model, trainer = flags.prepare(args)
    everyone, weights = clients.participating, server.base_weights(args.weighting, data, clients)
    log = run.Run(args, ["uploads"], trainer.device)
    plots.partition(log.folder / "partition.png", data, clients)
    w = train.get_weights(model)
    m, device = len(everyone), trainer.device
    state = log.state or {
        "round": 0, "w": w, "table": torch.zeros(m, len(w), device=device), "uploads": 0,
        "similarity": torch.zeros(m, m, device=device), "seen": torch.zeros(m, dtype=torch.bool),
        "times_selected": torch.zeros(m, dtype=torch.long),
    }  # fmt: skip
    select = minimax_select if args.selection == "minimax" else maxsim_select

    def upload(rows: Tensor, updates: Tensor) -> None:
        state["table"][rows] = updates
        update_similarity(state["similarity"], state["table"], rows)
        state["uploads"] += len(rows)

    for t in log.rounds(state, args.rounds):  # line 2
        here = server.present(torch.arange(m), args.churn, random_at(args.seed, "churn", t))
        newcomers = here[~state["seen"][here]]
        if len(newcomers):  # line 1
            updates, _ = trainer.local_updates(model, state["w"], everyone[newcomers].tolist(), clients.train, 0)
            upload(newcomers, updates)
            state["seen"][newcomers] = True
        chosen = here[select(state["similarity"][here][:, here], args.sample).cpu()]  # line 3
        selected = everyone[chosen]
        updates, losses = trainer.local_updates(
            model, state["w"], selected.tolist(), clients.train, t, progress=log.tick
        )  # lines 4-6
        old = state["table"][chosen]
        moved = ((updates - old).norm(dim=1) >= args.event_threshold * old.norm(dim=1)).cpu()
        upload(chosen[moved], updates[moved])
        alpha = weights[selected] / weights[selected].sum()
        state["w"] = state["w"] - server.aggregate(state["table"][chosen], alpha, args.trim)  # line 7
        state["times_selected"][chosen] += 1
        accuracies = run.id_and_ood(trainer, model, state["w"], clients)
        log.log(t, losses.mean(), selected, uploads=state["uploads"], **accuracies)

    log.finish(state, model, state["w"])
    plots.accuracy_curves(log.folder / "curves.png", {args.selection: log.rows})
    last = [everyone.tolist().index(int(k)) for k in log.rows[-1]["selected"].split()]
    plots.similarity(log.folder / "similarity.png", state["similarity"], last, state["times_selected"], everyone)
    log.report(f"minimax_select on {data.name}, {args.selection}; {state['uploads']} uploads")


if __name__ == "__main__":
    run.launch(main)
