"""Entropy weighting: the server listens most to clients that hold all kinds of labels.

Wu et al., Advocating for the Silent: Enhancing Federated Generalization for Non-Participating Clients (arXiv
2310.07171), section IV-A (maximum entropy aggregation). A client's weight in the average grows with the entropy of its
labels, which lowers an upper bound on the gap between how well the model serves clients that train and clients that
never do.

    Section IV-A                                                         in the code
    H_i = -sum_y p_i(y) log p_i(y), p_i the labels of client i           label_entropy()
    alpha_i = exp(H_i) / sum_j exp(H_j)                    (14)          entropy_weights()
    each client uploads H_i once, before round 1                         entropies
    in each round: select, train, w <- w - sum alpha_i g_i               alpha, once more over the selected
    raises sum alpha_i H_i                                 (13)          the column objective, over the selected

Against noisy labels, which look like entropy, the paper names remedies; --label-noise makes the noise:
    a total-variation norm penalty in each local objective (figure 7)                          --tv
    expelling clients of extremely large entropy                                               --expel
    similarity to the uniform label distribution in the place of entropy                       --weighting cosine
    a Byzantine-robust average (paired with the selections: minimax_select.py, convex_hull_select.py)
Not here: the detection of noisy clients by others' methods, uploading H_i under encryption, and, of figures 8 and 9,
FedALRC and FedGAMMA.

Where the paper is silent
1. Selected clients: their weights are divided by their sum. Which are selected: --sample at random.
2. H_i is that of a client's training samples, in nats, after label noise, which the client cannot see.
3. Which similarity: the cosine between label distribution and uniform distribution, put where H_i is in (14). With
   KL(p_i || uniform) = log C - H_i instead, exp(-KL) gives the very weights of (14).
4. How many are expelled: the share --expel of the participating clients, those of largest entropy.
5. Label noise: a Bernoulli draw decides whether a client is noisy; then each training label turns, with the flip rate
   as probability, into one of the others, all equally likely. Held-out samples keep their true labels. How many are
   noisy, the flip rate and lambda are not given, nor is the penalty's form: here lambda ||w_i - w||_1 over parameters.
6. The models ("a CNN"): McMahan et al.'s; a ResNet-18 has group norm. See common/models.py.
7. ID: the paper has the local test sets of the selected clients; here those of all that participate, a fifth of each
   client's samples, which it does not train on.
8. Where only labels are skewed, p_i is all that differs between clients; other shifts need another estimate of entropy.

    python entropy_weighting.py
    python entropy_weighting.py --weighting size                                          (table 2; equal is the third)
    python entropy_weighting.py --dataset cifar10
    python entropy_weighting.py --dataset cifar10 --alpha 0.09 --batch-size 16 --local-epochs 3 --lr 0.01 \\
        --label-noise 0.3 0.5 --tv 1e-4                                                                    (figure 7)
"""

from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from common import UserError, flags, plots, random_at, run, splits, train


def label_entropy(label_counts: Tensor) -> Tensor:
    """Counts of labels [M, C], each row with at least one -> the entropy of each row's distribution in nats [M]."""
    p = label_counts / label_counts.sum(1, keepdim=True)
    return -torch.xlogy(p, p).sum(1)


def entropy_weights(label_counts: Tensor) -> Tensor:
    """Equation 14: counts of labels [M, C] -> aggregation weights alpha [M], which sum to 1."""
    return torch.softmax(label_entropy(label_counts), 0)


def cosine_weights(label_counts: Tensor) -> Tensor:
    """As entropy_weights, with the cosine between label and uniform distribution in the place of the entropy."""
    counts = label_counts.float()
    return torch.softmax(F.cosine_similarity(counts, torch.ones_like(counts)), 0)


def total_variation_loss(model: nn.Module, x: Tensor, y: Tensor, start: list[Tensor], weight: float) -> Tensor:
    """Cross-entropy + weight * ||w_i - w||_1, `start` holding w as one tensor a parameter (buffers may follow)."""
    distance = sum((p - s).abs().sum() for p, s in zip(model.parameters(), start, strict=False))
    return F.cross_entropy(model(x), y) + weight * distance


# Section V: 100 clients of which 40 participate; table 2: 5 local epochs, batches of 128, alpha; figure 8: CIFAR-100;
# figure 9: NICO, for a folder of images. The rest is ours: 10 selected a round, 200 rounds, table 2's learning rate
# (the paper tunes it over 0.1, 0.01 and 0.001 and does not say which won), glyphs, alpha of data sets not in the paper.
PAPER = {"local_epochs": 5, "batch_size": 128, "lr": 0.1, "rounds": 200}
SETTINGS = {
    "glyphs": {**PAPER, "alpha": 0.05, "width": 0.5, "batch_size": 32, "lr": 0.05, "rounds": 25},
    **{name: {**PAPER, "alpha": 0.1} for name in ["mnist", "fmnist", "emnist", "gtsrb"]},
    "cifar10": {**PAPER, "alpha": 0.05},
    "cifar100": {**PAPER, "alpha": 0.03, "local_epochs": 3, "batch_size": 16, "lr": 0.01, "model": "resnet18"},
    "shakespeare": {**PAPER, "model": "charrnn"},
    "folder": {**PAPER, "alpha": 0.09, "local_epochs": 3, "batch_size": 16, "lr": 0.01, "model": "resnet18"},
}  # fmt: skip


def own_flags(add) -> None:
    kinds = ["entropy", "cosine", "size", "equal"]
    add("--weighting", choices=kinds, default="entropy", help="alpha of equation 14, or one of the others")
    add("--tv", type=flags.at_least(0, float), default=0.0, help="lambda of the total-variation penalty")
    add("--expel", type=flags.at_least(0, float, 0.99), default=0.0, help="share of clients expelled for their entropy")


def main(argv: list[str] | None = None) -> None:
    args = flags.parse(__doc__, SETTINGS, own_flags, argv)
    data, clients, model, trainer = flags.prepare(args)
    counts = splits.label_counts(data, clients.train)
    entropies = label_entropy(counts)
    participating = clients.participating[entropies[clients.participating].argsort(stable=True)]
    expelled = int(args.expel * len(participating) + 1e-9)
    if args.expel and not expelled:
        raise UserError(f"--expel {args.expel} of {len(participating)} clients expels nobody: raise it")
    participating = participating[: len(participating) - expelled].sort().values
    if args.sample > len(participating):
        raise UserError(
            f"--sample {args.sample}: only {len(participating)} clients are left after --expel {args.expel}"
        )
    alphas = {
        "entropy": entropy_weights(counts), "cosine": cosine_weights(counts), "size": clients.sizes,
        "equal": torch.ones(len(counts)),
    }  # fmt: skip

    log = run.Run(args, ["objective"], trainer)
    plots.partition(log.folder / "partition.png", data, clients)
    shown = {name: alphas[name][participating] / alphas[name][participating].sum() for name in alphas}
    plots.label_weights(log.folder / "weights.png", counts[participating], entropies[participating], shown)
    state = log.state or {"round": 0, "w": train.get_weights(model)}
    for t in log.rounds(state, args.rounds):
        selected = splits.draw(participating, args.sample, random_at(args.seed, "select", t))
        start = train.unflatten(model, state["w"])
        loss = partial(total_variation_loss, start=start, weight=args.tv) if args.tv else train.cross_entropy
        selected, updates, losses = trainer.local_updates(
            model, state["w"], selected, clients.train, t, loss, progress=log.tick
        )
        alpha = alphas[args.weighting][selected] / alphas[args.weighting][selected].sum()  # equation 14
        state["w"] = state["w"] - alpha.to(trainer.device) @ updates
        objective = (alpha * entropies[selected]).sum().item()  # equation 13
        accuracies = run.id_and_ood(trainer, model, state["w"], clients)
        log.log(t, alpha.to(trainer.device) @ losses, selected, objective=objective, **accuracies)

    log.finish(state, model, state["w"])
    plots.accuracy_curves(log.folder / "curves.png", {args.weighting: log.rows})
    log.report(f"entropy_weighting on {data.name}, weights by {args.weighting}")


if __name__ == "__main__":
    run.launch(main)
