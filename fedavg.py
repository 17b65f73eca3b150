"""FedAvg: the server averages what the selected clients have learned.

McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS
2017. The numbers of the lines are ours. P_k are the n_k samples of client k.

    Algorithm 1, FederatedAveraging
     1  initialise w_0
     2  for each round t = 1, 2, ...
     3      S_t = a random set of m clients
     4      for each client k in S_t, in parallel
     5          w_{t+1}^k = ClientUpdate(k, w_t)
     6      w_{t+1} = sum over S_t of n_k / m_t w_{t+1}^k
    ClientUpdate(k, w)
     7  split P_k into batches of size B
     8  for each local epoch from 1 to E
     9      for each batch b
    10          w <- w - eta grad loss(w; b)
    11  return w to the server

m_t is the number of samples of the clients in S_t, as in the erratum of the paper's fourth version
(arXiv 1602.05629). Our K is the paper's m, and M clients participate. The other five files build on
these lines. docs/fedavg.md explains the method.

    python fedavg.py
    python fedavg.py --dataset cifar10 --selection power_of_choice
    python fedavg.py --dataset path/to/PACS --test-domain sketch

Without flags this takes 20 s on two cores, and shows what label skew does to the model: with alpha
0.1 in place of 1, OOD accuracy changes by -22.8 (-31.1 to -14.6) points (5 seeds, 95 % interval).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from common import train
from common.chance import random_at, sample
from common.evaluation import evaluate
from common.runner import compare, flags, launch


def power_of_choice(losses: Tensor, k: int) -> Tensor:
    """The k clients with the largest losses [M]: int64 [k], ascending. In a tie, the smaller id."""
    return losses.sort(descending=True, stable=True).indices[:k].sort().values


def select(args, clients, trainer, w: Tensor, t: int) -> Tensor:
    """The clients that train in round t (line 3): int64 [K], ascending.

    Two of Wu et al.'s further baselines: all M participating clients (--sample M), and power of
    choice. They describe this as "the largest loss values in the current round", so we rank all
    participating clients by their mean loss on their training samples. Cho et al. 2020, who
    invented it, rank a random subset.

    by_size is a control for methods that prefer large clients: probabilities proportional to n_k,
    without replacement. Use it with --weighting equal, or size counts twice. Scheme I of Li et al.
    2020 (On the Convergence of FedAvg on Non-IID Data) has equal weights, too, but draws with
    replacement.
    """
    if args.selection == "power_of_choice":
        held = clients.train[: clients.participating]
        losses, _ = trainer.predict(w, torch.cat(held))
        of_clients = losses.split([len(samples) for samples in held])
        means = torch.stack([of_client.mean() for of_client in of_clients])
        selected = power_of_choice(means, clients.per_round)
        trainer.count(clients.ids, passes=1, numbers=1)  # all send a loss
        others = clients.ids[~torch.isin(clients.ids, selected)]
        trainer.count(others, numbers=len(w))  # who will not train gets w for it alone
        return selected
    by = clients.sizes[clients.ids] if args.selection == "by_size" else None
    return sample(clients.ids, clients.per_round, random_at(args.seed, "select", t), by)


def client_update(model, batches, optimizer):
    """ClientUpdate(k, w): trains `model`, which has the weights w. Returns its steps' mean loss.

    batches    (x, y), for each local epoch the client's samples in a new random order; the paper
               splits them into batches once
    optimizer  new for each client in each round
    """
    losses = []
    for x, y in batches:  # lines 7, 8, 9
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()  # line 10
        losses.append(loss.detach())
    return torch.stack(losses).mean()  # line 11: the trainer reads the weights from the model


def federate(args, clients, trainer, t=0, w=None):
    """Algorithm 1. Yields after each round the state to go on from, and what was measured.

    The state is what this function takes behind the trainer: federate(args, clients, trainer,
    **state) goes on. What a round needs is in the state. What it draws comes from random_at, or
    from the global generators of torch, numpy or Python inside that round. A run proves this in its
    second round.
    """
    w = trainer.initial if w is None else w  # line 1
    for t in range(t + 1, args.rounds + 1):  # line 2
        selected = select(args, clients, trainer, w, t)  # line 3
        w_k, losses = trainer.train(client_update, w, selected, t)  # lines 4, 5: [K, P], [K]
        alpha = train.averaging_weights(args.weighting, clients.sizes[selected]).to(w)
        w = alpha @ w_k  # line 6, also for the statistics of batch norm
        yield {"t": t, "w": w}, evaluate(trainer, w, t, selected, losses)


# The settings of Wu et al., section V, unless a line says otherwise. docs/wu_versions.md says what
# they leave open, such as how many clients train in a round, and the rounds.
PAPER = dict(local_epochs=5, batch_size=128, lr=0.1, rounds=200, evaluate_every=5)
LARGE = PAPER | dict(model="resnet18", local_epochs=3, batch_size=16, lr=0.01)
SETTINGS = {
    # Ours, an example of label skew
    "glyphs": dict(dirichlet=0.1, width=0.25, local_epochs=5, batch_size=32, lr=0.1, rounds=20),
    "other": PAPER | dict(dirichlet=0.5),  # EMNIST-10, and our choice for the others
    "cifar10": PAPER | dict(dirichlet=0.1),
    "cifar100": LARGE | dict(dirichlet=0.03),  # figure 8
    "folder": LARGE | dict(dirichlet=0.09),  # NICO (figure 9), whose settings are akin to these
}  # fmt: skip
SMALL = flags.SMALL
EXAMPLE = dict(
    prediction=(
        "if the clients' labels have little in common, because alpha is small, their updates "
        "contradict each other, and the model is worse for the clients that never train"
    ),
    shows_in={"ood_accuracy": "below", "unseen_accuracy": "below", "unseen_worst": "below"},
)


def own_flags(add) -> None:
    kinds, by = ["random", "power_of_choice", "by_size"], ["size", "equal"]
    share, by_size = flags.within(float, 0, 0.9), "probability n_k / n, so take --weighting equal"
    add("--selection", choices=kinds, default="random", help=f"line 3; by_size: {by_size}")
    add("--weighting", choices=by, default="size", help="line 6: n_k / m_t, or 1 / K")
    add("--held-out", type=share, help="share of its samples that a client is tested on; with 0, ID"
        " is not measured (default: 0.2, or 0.1 with --partition domain)")  # fmt: skip


def main(argv: list[str] | None = None):
    args = flags.parse(__file__, __doc__, SETTINGS, SMALL, own_flags, argv)
    label = "FedAvg" if args.selection == "random" else args.selection
    baselines = {"FedAvg": {"selection": "random"}}
    if label == "FedAvg" and args.partition == "dirichlet":
        baselines = {"alpha 1.0": {"dirichlet": 1.0}, "alpha 100.0": {"dirichlet": 100.0}}
    return compare.run(args, federate, label, baselines, EXAMPLE)


if __name__ == "__main__":
    launch(main)
