"""Entropy weighting: clients with many kinds of labels get a larger weight in the server's average.

Wu et al., Advocating for the Silent: Enhancing Federated Generalization for Non-Participating
Clients (arXiv 2310.07171), section IV-A (maximum entropy aggregation). A client's weight grows with
the entropy of its labels, because by theorem 1 a larger sum of alpha_i H_i lowers a bound on the
gap between the empirical risk and a risk in which rare samples count more. Both are risks on
participating clients, and the paper hopes that this helps those that never train, too. The paper
gives no listing for this method, so the numbers of the lines are ours. p_i(y) is the share of label
y, and M clients participate.

    Section IV-A                                                         in the code
     1  H_i = -sum_y p_i(y) log p_i(y) from the labels of client i       label_entropy
     2  each client uploads H_i once, before round 1                     federate
     3  alpha_i = exp(H_i) / sum_j exp(H_j)  (14)                        entropy_weights
     4  in each round, selected clients train; g_i = w - w_i             federate, local_solver
     5  w <- w - sum over the selected clients of alpha_i g_i, with      federate
        the alpha_i divided by their sum
     6  the objective that this raises: the sum of alpha_i H_i  (13),    federate, `objective`
        here over the clients of the round

Not here: other authors' detection of noisy clients, encrypted uploads of H_i, and the methods
FedALRC and FedGAMMA of figures 8 and 9. docs/variations/ has the paper's remedies for noisy clients
(figure 7). common/settings.py says where the paper's experiments are silent.

    python entropy_weighting.py
    python entropy_weighting.py --dataset cifar10
    python entropy_weighting.py --dataset cifar10 --weighting size           (table 2, also equal)
"""

import torch
from torch import Tensor

from common import random_at, splits, train
from common.ranks import launch
from common.runner import flags
from common.runner.compare import compare
from common.runner.setup import prepare
from common.settings import RESNET, SMALL, WU


def label_entropy(label_counts: Tensor) -> Tensor:
    """Counts of labels [M, C] -> the entropy of each row's distribution in nats, float64 [M].

    Raises ValueError if a row is empty, or a number is negative or not finite.
    """
    counts = label_counts.double()
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


def federate(args):
    """Section IV-A with these flags."""
    clients, model, trainer, run = prepare(args)
    # A client knows its training labels only, wrong ones included, which usually raise H_i
    counts = splits.label_counts(run.data, clients.train)[: clients.participating]
    entropies = label_entropy(counts)  # line 2: in reality, each client uploads its own
    sizes = counts.sum(1)
    alphas = {
        "entropy": entropy_weights(counts),
        "equal": torch.full_like(sizes, 1 / len(sizes)),
        "size": sizes / sizes.sum(),
    }
    w = run.state.get("w", train.get_weights(model))
    for t in run.rounds(args.rounds):
        # The paper does not say how clients are selected in a round: ours are drawn at random
        selected = splits.draw(clients.ids, clients.sample, random_at(args.seed, "select", t))
        # Line 4: ids [k], weights [k, P], losses [k] of the clients whose upload is finite
        trained, ws, losses = trainer.train(train.local_solver, model, w, selected, t)
        g = w - ws  # line 4
        alpha = alphas[args.weighting][trained]
        alpha = alpha / alpha.sum()  # line 5, our reading: the weights of a round have the sum 1
        w = w - alpha.to(g) @ g  # line 5
        objective = alpha.double() @ entropies[trained]  # line 6
        measures = trainer.evaluate(model, w, trained) if run.evaluate_now else {}
        measures |= {"train_loss": alpha.to(g) @ losses, "objective": objective}
        run.record(t, {"w": w}, selected=trained, **measures)
    run.draw("weights", counts, entropies, alphas)
    return run.finish(model, w)


# The example on glyphs is ours: most of 40 clients of equal size hold one class, and the others
# hold all. The other settings follow section V, and common/settings.py says what we chose where it
# is silent. WU: lr 0.1, 5 local epochs, batches of 128. RESNET: 0.01, 3 and 16.
SPECIALISTS = {
    "partition": "specialists", "clients": 40, "width": 0.25, "batch_size": 32, "rounds": 20,
}  # fmt: skip
SETTINGS = {
    "glyphs": {**WU, **SPECIALISTS},
    "other": {**WU, "dirichlet": 0.1},
    "cifar10": {**WU, "dirichlet": 0.05},
    "cifar100": {**RESNET, "dirichlet": 0.03},
    "folder": {**RESNET, "dirichlet": 0.09},
}


def own_flags(add) -> None:
    by = ["entropy", "size", "equal"]
    add("--weighting", choices=by, default="entropy", help="equation 14, or n_i, or equal weights")


def main(argv: list[str] | None = None):
    args = flags.parse(__file__, __doc__, SETTINGS, SMALL, own_flags, argv)
    baselines = {"equal": {"weighting": "equal"}}
    prediction = (
        "an update from a client with all classes helps everybody, and one from a client with one "
        "class does not, so the model learns more if clients with many classes count more"
    )
    return compare(args, federate, args.weighting, baselines, prediction, {"ood_accuracy": "above"})


if __name__ == "__main__":
    launch(main)
