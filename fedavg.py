"""FedAvg: the server averages what the selected clients learned.

McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017, and the
form in which Guo et al. (FedIIR, ICML 2023) write it beside their own method:

    Algorithm 1, FedAvg                                           in the code
    1  initialise theta^0                                         state["w"]
    2  for t = 1 .. T                                             args.rounds
    3      sample a subset C of the clients                       selected
    4      on each client c in C, in parallel
    5          theta_c = theta^{t-1}
    6          for k = 1 .. K: sample a mini-batch,               trainer.local_updates
    7              theta_c <- theta_c - eta_l grad R_c            args.lr
    8          Delta_c = theta_c - theta^{t-1}                    -updates[i]
    9      theta^t = theta^{t-1} + eta_g mean of Delta_c          args.server_lr; the mean's weights: alpha

This file is also the baseline of the others. Wu et al. (Advocating for the Silent) compare with three selections:
random, full (every participating client, every round) and power of choice (those on whose data the global model's
loss is largest; Cho et al. 2020), and with two weightings, by data size and equal.

Where the papers are silent or differ
- Weights. McMahan: n_k / n. Guo, line 9: equal. Default n_k / n; --weighting equal gives Guo's.
- A client's mini-batches are consecutive slices of a new random order of its samples in each epoch; the last one may
  be smaller. K is then E times the number of slices.
- Power of choice ranks all participating clients, as Wu et al. describe it (Cho et al. rank a random subset), by the
  loss on their training samples.
- Momentum, if any, starts from zero in each client in each round.
- Statistics of batch norm, in models that have it, are averaged like parameters.
- Accuracies: ID is that of the global model on the held-out samples of all participating clients together; OOD that on
  the standard test set (label skew: what all clients, silent ones too, would see together) or on the left-out domain.

    python fedavg.py
    python fedavg.py --dataset cifar10 --selection power_of_choice
    python fedavg.py --dataset path/to/PACS --test-domain sketch
"""

import torch
from torch import Tensor

from common import flags, plots, random_at, run, splits, train


def select_power_of_choice(participating: Tensor, losses: Tensor, k: int) -> Tensor:
    """The k participating clients [M] with the largest losses [M], in ascending order: int64 [k]; ties by client id."""
    return participating[torch.sort(losses, descending=True, stable=True).indices[:k].sort().values]


def aggregation_weights(sizes: Tensor, weighting: str) -> Tensor:
    """alpha [K] for clients with `sizes` [K] training samples: "size" gives n_k / n, "equal" 1 / K."""
    return sizes / sizes.sum() if weighting == "size" else torch.full_like(sizes, 1 / len(sizes))


# Wu et al., section V, where a paper uses the data set so; PACS and its like: Guo et al., table 3. Wu et al.
# tune the learning rate over {0.1, 0.01, 0.001} and do not say which won; the ones here are not tuned.
# 100 clients of which 40 participate, 10 of them a round, is what the flags default to.
WU = {"local_epochs": 5, "batch_size": 128, "lr": 0.1, "rounds": 200}
SETTINGS = {
    "glyphs": {**WU, "alpha": 0.1, "width": 0.5, "batch_size": 32, "lr": 0.05, "rounds": 25},
    **{name: {**WU, "alpha": 0.5} for name in ["mnist", "fmnist", "emnist", "gtsrb"]},
    "cifar10": {**WU, "alpha": 0.1},
    "cifar100": {**WU, "alpha": 0.03, "local_epochs": 3, "batch_size": 16, "lr": 0.01, "model": "resnet18"},
    "shakespeare": {**WU, "model": "charrnn"},
    "folder": {"model": "resnet18", "local_epochs": 1, "batch_size": 32, "lr": 2.5e-3, "rounds": 100},
}  # fmt: skip


def own_flags(add) -> None:
    add("--selection", choices=["random", "full", "power_of_choice"], default="random", help="line 3: who trains")
    add("--weighting", choices=["size", "equal"], default="size", help="line 9: n_k / n, or 1 / K")
    add("--server-lr", type=flags.positive, default=1.0, help="eta_g, the server's step size")


def without_effect(args) -> dict:
    return {"sample": args.selection == "full" and "--selection full takes everybody"}


def main(argv: list[str] | None = None) -> None:
    args = flags.parse(__doc__, SETTINGS, own_flags, argv, without_effect)
    data, clients, model, trainer = flags.prepare(args)
    log = run.Run(args, [], trainer)
    plots.partition(log.folder / "partition.png", data, clients)
    state = log.state or {"round": 0, "w": train.get_weights(model)}  # line 1

    for t in log.rounds(state, args.rounds):  # line 2
        if args.selection == "random":  # line 3
            selected = splits.draw(clients.participating, args.sample, random_at(args.seed, "select", t))
        elif args.selection == "power_of_choice":
            _, losses = trainer.evaluate(model, state["w"], [clients.train[k] for k in clients.participating])
            selected = select_power_of_choice(clients.participating, losses.cpu(), args.sample)
        else:
            selected = clients.participating
        selected, updates, losses = trainer.local_updates(
            model, state["w"], selected, clients.train, t, progress=log.tick
        )  # lines 4-8
        alpha = aggregation_weights(clients.sizes[selected], args.weighting).to(trainer.device)
        state["w"] = state["w"] - args.server_lr * alpha @ updates  # line 9
        log.log(t, alpha @ losses, selected, **run.id_and_ood(trainer, model, state["w"], clients))

    log.finish(state, model, state["w"])
    plots.accuracy_curves(log.folder / "curves.png", {"FedAvg": log.rows})
    log.report(f"fedavg on {data.name}, {args.selection} selection, weights by {args.weighting}")


if __name__ == "__main__":
    run.launch(main)
