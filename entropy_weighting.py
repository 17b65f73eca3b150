"""Entropy weighting: clients with many kinds of labels get a larger weight in the server's average.

Wu et al., Advocating for the Silent: Enhancing Federated Generalization for Non-Participating
Clients (arXiv 2310.07171), section IV-A (maximum entropy aggregation). A client's weight grows with
the entropy of its labels, because by theorem 1 a larger sum of alpha_i H_i lowers a bound on the
gap between the empirical risk and a risk in which rare samples count more. In the arXiv version
both are risks on participating clients, and remark 1 concludes that this helps unknown ones, too.
It gives no listing for this method, so the numbers of the lines are ours, and lines 4 and 5 are its
Algorithm 2's lines 5 to 7 and 9. p_i(y) is the share of label y, and M clients participate.

    Section IV-A
     1  H_i = -sum_y p_i(y) log p_i(y) from the labels of client i
     2  each client uploads H_i once, before round 1
     3  alpha_i = exp(H_i) / sum_j exp(H_j)  (14)
     4  in each round, selected clients train; g_i = w - w_i
     5  w <- w - sum over the selected clients of alpha_i g_i, alpha_i divided by their sum (ours)
     6  the objective that this raises: the sum of alpha_i H_i  (13), over selected clients (ours)

Not here: encrypted uploads of H_i, and the methods FedALRC and FedGAMMA of figures 8 and 9. Against
noisy clients docs/variations/ has IV-A's own remedies (clients of very large entropy leave;
similarity in place of entropy) and the other authors' of figure 7 (trimmed mean, total variation).
docs/wu_versions.md says what else the paper leaves open.

    python entropy_weighting.py
    python entropy_weighting.py --dataset cifar10
    python entropy_weighting.py --dataset cifar10 --weighting size           (table 2, also equal)

Without flags this takes 16 s on two cores, and shows that few generalists among many specialists
teach the model more if they count more: OOD accuracy rises by +44.7 (+35.8 to +53.7) points (5
seeds, 95 % interval). With CIFAR-10 a round takes 4 s on two cores with bfloat16, so both runs
together about half an hour.
"""

import torch
from torch import Tensor

from common import train
from common.chance import random_at, sample
from common.evaluation import evaluate
from common.runner import compare, flags, launch


def label_entropy(label_counts: Tensor) -> Tensor:
    """Counts of labels [M, C] -> the entropy of each row's distribution in nats, float64 [M].

    Raises ValueError if a row is empty, or a number is negative or not finite.
    """
    counts = torch.as_tensor(label_counts).double()
    total = counts.sum(1, keepdim=True)
    if not ((counts >= 0) & (total > 0) & (total < torch.inf)).all():
        raise ValueError("label_counts must be finite and not negative, with no empty row")
    return torch.special.entr(counts / total).sum(1)  # line 1


def entropy_weights(label_counts: Tensor) -> Tensor:
    """Equation 14: counts of labels [M, C] -> aggregation weights alpha, float64 [M], with sum 1.

    Against noise, section IV-A suggests the similarity of p_i to the uniform distribution in place
    of H_i. With -KL = H_i - log(C) the weights stay the same; with the cosine they change.

    Raises ValueError like label_entropy.
    """
    return torch.softmax(label_entropy(label_counts), 0)  # line 3


def aggregation_weights(by: str, label_counts: Tensor) -> Tensor:
    """alpha_i of the clients with these counts of labels [M, C]: float64 [M], with sum 1."""
    if by == "entropy":
        return entropy_weights(label_counts)
    return train.averaging_weights(by, label_counts.double().sum(1))  # n_i / n, or 1 / M


def federate(args, clients, trainer, t=0, w=None):
    """Section IV-A. Yields after each round the state to go on from, and what was measured."""
    label_counts = clients.label_counts[clients.ids]  # of the training labels, wrong ones included
    entropies = label_entropy(label_counts)  # line 1: in reality, each client computes its own
    if t == 0:
        trainer.count(clients.ids, numbers=1)  # line 2
    alphas = aggregation_weights(args.weighting, label_counts)  # line 3
    w = trainer.initial if w is None else w
    for t in range(t + 1, args.rounds + 1):
        # The paper does not say how clients are selected in a round: ours are drawn at random
        selected = sample(clients.ids, clients.per_round, random_at(args.seed, "select", t))
        w_i, losses = trainer.train(train.local_solver, w, selected, t)  # line 4: [K, P], [K]
        g = w - w_i  # line 4
        alpha = alphas[selected] / alphas[selected].sum()  # line 5, our reading
        w = w - alpha.to(g) @ g  # line 5
        objective = {"objective": alpha @ entropies[selected]}  # line 6
        yield {"t": t, "w": w}, evaluate(trainer, w, t, selected, losses) | objective


# The settings of section V, unless a line says otherwise. docs/wu_versions.md says what it leaves
# open, such as how many clients train in a round, and the rounds.
PAPER = dict(local_epochs=5, batch_size=128, lr=0.1, rounds=200, evaluate_every=5)
LARGE = PAPER | dict(model="resnet18", local_epochs=3, batch_size=16, lr=0.01)
SETTINGS = {
    # Ours: most of 40 clients of equal size hold one class, and the others hold all
    "glyphs": dict(
        partition="specialists", clients=40, width=0.25, local_epochs=5, batch_size=32, lr=0.1,
        rounds=20,
    ),
    "other": PAPER | dict(dirichlet=0.1),  # EMNIST-10, and our choice for the others
    "cifar10": PAPER | dict(dirichlet=0.05),
    "cifar100": LARGE | dict(dirichlet=0.03),  # figure 8
    "folder": LARGE | dict(dirichlet=0.09),  # NICO (figure 9), whose settings are akin to these
}  # fmt: skip
SMALL = flags.SMALL
EXAMPLE = dict(
    prediction=(
        "an update from a client with all classes helps everybody, and one from a client with one "
        "class does not, so the model learns more if clients with many classes count more"
    ),
    shows_in={"ood_accuracy": "above"},
)


def own_flags(add) -> None:
    by = ["entropy", "size", "equal"]
    add("--weighting", choices=by, default="entropy", help="equation 14, or n_i, or equal weights")


def main(argv: list[str] | None = None):
    args = flags.parse(__file__, __doc__, SETTINGS, SMALL, own_flags, argv)
    baselines = {"equal": {"weighting": "equal"}}
    return compare.run(args, federate, args.weighting, baselines, EXAMPLE)


if __name__ == "__main__":
    launch(main)
