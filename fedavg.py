"""FedAvg: the server averages what the selected clients have learned.

McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS
2017. The lines are those of Algorithm 1 of Guo et al. (FedIIR, ICML 2023), which lists FedAvg and
FedIIR together. We count "Initialize" as line 1; lines 4 and 10 belong to FedIIR, and lines 12, 14
and 16 only end a loop.

    Algorithm 1, FedAvg                                             in the code
     1  initialise theta^0                                          federate
     2  for t = 1 .. T                                              federate
     3      sample a subset C of the clients                        select, power_of_choice
     5      on each client c in C, in parallel                      federate, trainer.train
     6          theta_c = theta^{t-1}                               client_update
     7          for each local step                                 client_update
     8              sample a mini-batch from its data               client_update, from `batches`
     9              g_c = grad R_c(theta_c)                         client_update
    11              theta_c <- theta_c - eta_l g_c                  client_update
    13          Delta_c = theta_c - theta^{t-1}                     federate
    15      theta^t = theta^{t-1} + eta_g sum of alpha_c Delta_c    federate

alpha_c is n_c / n (McMahan et al., our default) or 1 / |C| (Guo et al., --weighting equal).

The paper calls the number of local steps K, which in this project is the number of selected clients
(--sample). The other five files change a few of these lines. docs/fedavg.md explains the method.

    python fedavg.py
    python fedavg.py --dataset cifar10 --selection power_of_choice
    python fedavg.py --dataset path/to/PACS --test-domain sketch
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from common import random_at, splits, train
from common.ranks import launch
from common.runner import flags
from common.runner.compare import compare
from common.runner.setup import prepare
from common.settings import RESNET, SMALL, WU


def power_of_choice(losses: Tensor, k: int) -> Tensor:
    """The k clients with the largest losses [M]: int64 [k], ascending. In a tie, the smaller id."""
    return losses.sort(descending=True, stable=True).indices[:k].sort().values


def select(args, clients, trainer, model, theta: Tensor, t: int) -> Tensor:
    """The clients that train in round t (line 3): int64 [--sample], ascending.

    Wu et al. compare with two more selections: all M participating clients (--sample M), and power
    of choice. They describe this as "the largest loss values in the current round", so we rank all
    participating clients by their mean loss on their training samples. Cho et al. 2020, who
    invented it, rank a random subset.

    by_size is a control for methods that prefer large clients: probabilities proportional to n_c,
    without replacement. Use it with --weighting equal, or size counts twice. Scheme I of Li et al.
    2020 (On the Convergence of FedAvg on Non-IID Data) has equal weights, too, but draws with
    replacement.
    """
    if args.selection == "power_of_choice":
        _, losses, *_ = trainer.measure(model, theta, clients.train[: clients.participating])
        return power_of_choice(losses, clients.sample)
    sizes = clients.sizes[clients.ids] if args.selection == "by_size" else None
    return splits.draw(clients.ids, clients.sample, random_at(args.seed, "select", t), sizes)


def client_update(model, theta, batches, optimizer, autocast):
    """Lines 6 to 11 on one client: trains `model` from theta [P] on. Returns the mean loss.

    batches    in each local epoch the client's samples in a new order, cut into (x, y); the last
               batch may be smaller, so the steps are the epochs times the batches
    optimizer  new for each client in each round, so momentum starts from zero
    """
    train.set_weights(model, theta)  # line 6
    total, samples = 0.0, 0
    for x, y in batches:  # lines 7, 8
        with autocast():
            loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()  # line 9
        optimizer.step()  # line 11
        total += len(y) * loss.detach()
        samples += len(y)
    return total / samples


def federate(args):
    """Algorithm 1 with these flags."""
    clients, model, trainer, run = prepare(args)
    theta = run.state.get("theta", train.get_weights(model))  # line 1, or of a resumed run
    for t in run.rounds(args.rounds):  # line 2
        selected = select(args, clients, trainer, model, theta, t)  # line 3
        # Line 5: ids [k], weights [k, P], losses [k] of the clients whose upload is finite
        trained, thetas, losses = trainer.train(client_update, model, theta, selected, t)
        deltas = thetas - theta  # line 13; with the statistics of batch norm, if there are any
        n = clients.sizes[trained].to(theta)  # McMahan et al. weight by n_c / n,
        if args.weighting == "equal":
            n = torch.ones_like(n)  # and Guo et al. by 1 / |C|
        alpha = n / n.sum()
        theta = theta + args.server_lr * alpha @ deltas  # line 15
        measures = trainer.evaluate(model, theta, trained) if run.evaluate_now else {}
        run.record(t, {"theta": theta}, selected=trained, train_loss=alpha @ losses, **measures)
    return run.finish(model, theta)


# The example on glyphs is ours. The other settings follow section V of Wu et al., and
# common/settings.py says what we chose where it is silent. WU: lr 0.1, 5 local epochs, batches of
# 128. RESNET: 0.01, 3 and 16.
SETTINGS = {
    "glyphs": {**WU, "dirichlet": 0.1, "width": 0.25, "batch_size": 32, "rounds": 20},
    "other": {**WU, "dirichlet": 0.5},
    "cifar10": {**WU, "dirichlet": 0.1},
    "cifar100": {**RESNET, "dirichlet": 0.03},
    "folder": {**RESNET, "dirichlet": 0.09},
}


def own_flags(add) -> None:
    kinds, by = ["random", "power_of_choice", "by_size"], ["size", "equal"]
    add("--selection", choices=kinds, default="random", help="line 3; by_size: probability n_c / n")
    add("--weighting", choices=by, default="size", help="line 15: n_c / n, or 1 / |C|")
    add("--server-lr", type=flags.positive, default=1.0, help="eta_g, the server's step size")
    add(
        "--held-out",
        type=flags.within(float, 0, 0.9),
        help="share of its samples that a client is tested on; with 0, ID is not measured"
        " (default: 0.2, or 0.1 with --partition domain)",
    )


def main(argv: list[str] | None = None):
    args = flags.parse(__file__, __doc__, SETTINGS, SMALL, own_flags, argv)
    label = "FedAvg" if args.selection == "random" else args.selection
    baselines = {"FedAvg": {"selection": "random"}}
    if label == "FedAvg" and args.partition == "dirichlet":
        baselines = {"alpha 1.0": {"dirichlet": 1.0}, "alpha 100.0": {"dirichlet": 100.0}}
    prediction = (
        "if the clients' labels have little in common, because alpha is small, their updates "
        "contradict each other, and the model is worse for the clients that never train"
    )
    return compare(args, federate, label, baselines, prediction, {"ood_accuracy": "below"})


if __name__ == "__main__":
    launch(main)
