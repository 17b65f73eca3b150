"""FedAvg: the server averages what the selected clients have learned.

McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017. The lines are
those of Guo et al. (FedIIR, ICML 2023), whose listing holds FedAvg and FedIIR: it counts every line, and lines 4 and 10
belong to FedIIR alone.

    Algorithm 1, FedAvg                                           in the code
     1  initialise theta^0                                        main
     2  for t = 1 .. T                                            main
     3      sample a subset C of the clients                      select_power_of_choice, or at random, or all
     5      on each client c in C, in parallel                    trainer.local_updates
     6          theta_c = theta^{t-1}                             client_update
     7          for k = 1 .. K                                    client_update
     8              sample a mini-batch from its data             client_update
     9              g_c = grad R_c(theta_c)                       client_update
    11              theta_c <- theta_c - eta_l g_c                client_update
    13          Delta_c = theta_c - theta^{t-1}                   trainer.local_updates; row c of `updates` is -Delta_c
    15      theta^t = theta^{t-1} + eta_g mean of Delta_c         main; aggregation_weights gives the mean's weights

This file is also the baseline of the other methods. Wu et al. (Advocating for the Silent) compare with three
selections: random, full (every participating client in every round) and power of choice (the clients with the largest
loss; Cho et al. 2020), and with two weightings: by data size and equal.

Where the papers are silent or differ
- Weights in line 15: McMahan et al. have n_k / n, Guo et al. have 1 / C. The default is n_k / n (--weighting).
- A client's mini-batches are slices of a new random order of its samples in each epoch. The last one may be smaller.
- Power of choice ranks all participating clients by the loss on their training samples, as Wu et al. describe it.
  Cho et al. rank a random subset.
- Momentum, if any, starts from zero in each client in each round.
- Batch norm's statistics, in models that have them, are averaged like parameters.
- ID is the accuracy on the held-out samples of all participating clients. OOD is the accuracy on the standard test set
  (with label skew: the labels of all clients together), or on the domain left out.

    python fedavg.py
    python fedavg.py --dataset cifar10 --selection power_of_choice
    python fedavg.py --dataset path/to/PACS --test-domain sketch
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from common import flags, plots, random_at, run, splits, train


def select_power_of_choice(losses: Tensor, k: int) -> Tensor:
    """The k clients with the largest losses [M], in ascending order: int64 [k]. Ties go to the smaller id."""
    return losses.sort(descending=True, stable=True).indices[:k].sort().values


def aggregation_weights(sizes: Tensor, weighting: str) -> Tensor:
    """alpha [K] for clients with `sizes` [K] training samples: "size" gives n_k / n, "equal" gives 1 / K."""
    return sizes / sizes.sum() if weighting == "size" else torch.full_like(sizes, 1 / len(sizes))


def client_update(model, w, batches, optimizer, autocast):
    """Lines 6 to 12 for one client: trains `model` from w [P] on. Yields each batch's loss."""
    train.set_weights(model, w)  # line 6
    for x, y in batches:  # lines 7, 8
        with autocast():
            loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()  # line 9
        optimizer.step()  # line 11
        yield loss


# Wu et al., section V, if they use the data set; PACS and similar folders: Guo et al., table 3. Wu et al. tune the
# learning rate over {0.1, 0.01, 0.001} and do not say which one they chose; ours is not tuned. As in Wu et al., 40 of
# 100 clients participate by default. That 10 of them are selected per round is our choice.
WU = {"local_epochs": 5, "batch_size": 128, "lr": 0.1, "rounds": 200}
SETTINGS = {
    "glyphs": {**WU, "dirichlet": 0.1, "width": 0.5, "batch_size": 32, "lr": 0.05, "rounds": 25},
    **{name: {**WU, "dirichlet": 0.5} for name in ["mnist", "fmnist", "emnist", "gtsrb"]},
    "cifar10": {**WU, "dirichlet": 0.1},
    "cifar100": {**WU, "dirichlet": 0.03, "local_epochs": 3, "batch_size": 16, "lr": 0.01, "model": "resnet18"},
    "shakespeare": {**WU, "model": "charrnn"},
    "folder": {"model": "resnet18", "local_epochs": 1, "batch_size": 32, "lr": 2.5e-3, "rounds": 100},
}


def own_flags(add) -> None:
    add("--selection", choices=["random", "full", "power_of_choice"], default="random", help="line 3: who trains")
    add("--weighting", choices=["size", "equal"], default="size", help="line 15: n_k / n, or 1 / K")
    add("--server-lr", type=flags.positive, default=1.0, help="eta_g, the server's step size")


def main(argv: list[str] | None = None) -> None:
    full = {"sample": lambda args: args.selection == "full" and "--selection full takes everybody"}
    args = flags.parse(__doc__, SETTINGS, own_flags, argv, **full)
    data, clients, model, trainer = flags.prepare(args)
    log = run.Run(args, trainer, [])
    plots.partition(log.folder / "partition.png", data, clients)

    state = log.restore({"w": train.get_weights(model)})  # line 1
    for t in log.rounds(state, args.rounds):  # line 2
        selected = clients.ids  # line 3
        if args.selection == "random":
            selected = splits.draw(clients.ids, args.sample, random_at(args.seed, "select", t))
        elif args.selection == "power_of_choice":
            _, losses = trainer.evaluate(model, state["w"], clients.train[: clients.participating])
            selected = select_power_of_choice(losses.cpu(), args.sample)
        selected, updates, losses = trainer.local_updates(
            client_update, model, state["w"], selected, clients.train, t
        )  # lines 5, 13
        alpha = aggregation_weights(clients.sizes[selected], args.weighting).to(updates)
        state["w"] = state["w"] - args.server_lr * alpha @ updates  # line 15
        log.log(alpha @ losses, selected, **log.evaluate(model, state["w"], clients))

    log.finish(state, model, state["w"])
    plots.accuracy_curves(log.folder / "curves.png", {log.name: log.rows})
    log.report(f"{data.name}, {args.selection} selection, weights by {args.weighting}")


if __name__ == "__main__":
    run.launch(main)
