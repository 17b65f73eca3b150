"""FedAvg: the server averages what the selected clients have learned.

McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017. The line
numbers come from Algorithm 1 of Guo et al. (FedIIR, ICML 2023), which shows FedAvg and FedIIR in one listing. We
count all its 16 lines. Lines 12, 14 and 16 only end a loop, and lines 4 and 10 belong to FedIIR alone.

    Algorithm 1, FedAvg                                           in the code
     1  initialise theta^0                                        main
     2  for t = 1 .. T                                            main
     3      sample a subset C of the clients                      main, select_power_of_choice
     5      on each client c in C, in parallel                    main, trainer.local_updates
     6          theta_c = theta^{t-1}                             client_update
     7          for k = 1 .. K                                    client_update
     8              sample a mini-batch from its data             client_update, from `batches`
     9              g_c = grad R_c(theta_c)                       client_update
    11              theta_c <- theta_c - eta_l g_c                client_update
    13          Delta_c = theta_c - theta^{t-1}                   main, trainer.local_updates
    15      theta^t = theta^{t-1} + eta_g mean of Delta_c         main, aggregation_weights

The other methods are compared with this file. Wu et al. (Advocating for the Silent) compare with three ways to select
clients: random, full (all participating clients), and power of choice (those with the largest loss; Cho et al. 2020).
They also compare two weightings: by data size, and equal.

Where the papers are silent or differ
- Weights in line 15: McMahan et al. weight client c by n_c / n, its share of the samples of all selected clients. Guo
  et al. use 1 / |C|. The default is n_c / n (--weighting).
- In each epoch a client shuffles its samples and cuts them into batches. The last batch may be smaller. So K is the
  number of local epochs times the number of batches.
- `--selection by_size` draws clients with probabilities proportional to n_c (Li et al. 2020, On the Convergence of
  FedAvg on Non-IID Data, scheme I; here without replacement). It is a control for methods that prefer large clients.
- Power of choice ranks all participating clients by the loss on their training samples, as Wu et al. describe it.
  Cho et al. rank a random subset.
- Momentum starts from zero for each client in each round.
- Batch norm's statistics, in models that have them, are averaged like parameters.
- ID is the accuracy on the held-out samples of all participating clients. OOD is the accuracy on the standard test set.
  With label skew, this set has the labels of all clients. With --test-domain, OOD is measured on the domain left out.

    python fedavg.py
    python fedavg.py --dataset cifar10 --selection power_of_choice
    python fedavg.py --dataset path/to/PACS --test-domain sketch
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from common import flags, plots, random_at, run, splits, train


def select_power_of_choice(losses: Tensor, count: int) -> Tensor:
    """The `count` clients with the largest losses [M], in ascending order: int64 [count]. Ties go to the smaller id."""
    return losses.sort(descending=True, stable=True).indices[:count].sort().values


def aggregation_weights(sizes: Tensor, weighting: str) -> Tensor:
    """One weight per selected client, from their numbers of samples [K]:

    "size" gives n_c / n, "equal" gives 1 / K.
    """
    return sizes / sizes.sum() if weighting == "size" else torch.full_like(sizes, 1 / len(sizes))


def client_update(model, w, batches, optimizer, autocast):
    """Lines 6 to 12 for one client: trains `model` from w [P] on. Yields each batch's loss to the trainer."""
    train.set_weights(model, w)  # line 6
    for x, y in batches:  # lines 7, 8
        with autocast():
            loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()  # line 9
        optimizer.step()  # line 11
        yield loss


# Data sets that Wu et al. use have the settings of their section V. They tune the learning rate over {0.1, 0.01, 0.001}
# and name their choice, 0.01, only for figures 7 to 9. A folder has the settings for NICO (figure 9). The selections
# have the same defaults. The settings for glyphs and the 200 rounds are our choices. By default 40 of 100 clients
# participate (Wu et al.), and 10 train per round (our choice).
WU = {"local_epochs": 5, "batch_size": 128, "lr": 0.1, "rounds": 200}
# "small" is what --small changes: smaller settings of ours, for two cores without a GPU.
IMAGES = {"model": "cnn", "width": 0.25, "batch_size": 32, "lr": 0.05, "local_epochs": 5, "rounds": 20}
SETTINGS = {
    "glyphs": {**WU, "dirichlet": 0.1, "width": 0.5, "batch_size": 32, "lr": 0.05, "rounds": 25},
    **{name: {**WU, "dirichlet": 0.5} for name in ["mnist", "fmnist", "emnist", "gtsrb"]},
    "cifar10": {**WU, "dirichlet": 0.1},
    "cifar100": {**WU, "dirichlet": 0.03, "local_epochs": 3, "batch_size": 16, "lr": 0.01, "model": "resnet18"},
    "shakespeare": {**WU, "model": "charrnn"},
    "folder": {**WU, "dirichlet": 0.09, "local_epochs": 3, "batch_size": 16, "lr": 0.01, "model": "resnet18"},
    "small": {
        **dict.fromkeys(["mnist", "fmnist", "emnist", "gtsrb", "cifar10", "cifar100"], IMAGES),
        "folder": {**IMAGES, "dirichlet": 0.5, "image_size": 32, "clients": 12, "rounds": 30},
        "shakespeare": {"clients": 30, "sample": 4, "local_epochs": 1, "batch_size": 32, "lr": 0.8, "rounds": 15},
    },
}


def own_flags(add) -> None:
    kinds = ["random", "full", "power_of_choice", "by_size"]
    add("--selection", choices=kinds, default="random", help="line 3: who trains; by_size: probability n_c / n")
    add("--weighting", choices=["size", "equal"], default="size", help="line 15: n_c / n, or 1 / |C|")
    add("--server-lr", type=flags.positive, default=1.0, help="eta_g, the server's step size")


def main(argv: list[str] | None = None) -> None:
    full = {"sample": lambda args: args.selection == "full" and "--selection full takes all participating clients"}
    args = flags.parse(__doc__, SETTINGS, own_flags, argv, **full)
    data, clients, model, trainer = flags.prepare(args)
    log = run.Run(args, trainer, [])
    plots.partition(log.folder / "partition.png", data, clients)

    state = log.restore({"w": train.get_weights(model)})  # line 1
    for t in log.rounds(state, args.rounds):  # line 2
        if args.selection == "random":  # line 3
            selected = splits.draw(clients.ids, args.sample, random_at(args.seed, "select", t))
        elif args.selection == "by_size":
            sizes = clients.sizes[clients.ids]
            selected = splits.draw(clients.ids, args.sample, random_at(args.seed, "select", t), sizes)
        elif args.selection == "power_of_choice":
            _, losses = trainer.evaluate(model, state["w"], clients.train[: clients.participating])
            selected = select_power_of_choice(losses.cpu(), args.sample)
        else:
            selected = clients.ids
        selected, updates, losses = trainer.local_updates(
            client_update, model, state["w"], selected, clients.train, t
        )  # lines 5, 13: one row of `updates` per client with a usable upload, w - w_c = -Delta_c
        alpha = aggregation_weights(clients.sizes[selected], args.weighting).to(updates)
        state["w"] = state["w"] - args.server_lr * alpha @ updates  # line 15
        log.log(alpha @ losses, selected, **log.evaluate(model, state["w"], clients, selected))

    log.finish(state, model, state["w"])
    plots.accuracy_curves(log.folder / "curves.png", {log.name: log.rows})
    log.report(f"{data.name}, {args.selection} selection, weights by {args.weighting}")


if __name__ == "__main__":
    run.launch(main)
