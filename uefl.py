"""UEFL: a client about whose data the model is more uncertain gets codewords of its own.

Zhang, Cao and Liu, Uncertainty-Based Extensible Codebook for Discrete Federated Learning in
Heterogeneous Data Silos, ICML 2025 (arXiv 2402.18888). An encoder f_E turns an image into tokens z,
f_D replaces each token by the nearest codeword c of a codebook, and a classifier f_C reads c. A
silo is a client, and sg(a) means that no gradient flows through a.

    Algorithm 1, its statements, without the ends of branches and loops
     1  sample K data silos as clients
     2  initialise theta, and a codebook of v codewords, at random
     3  e_k = 0
     4  repeat
     5      for each round t = 1, 2, ...
     6          broadcast theta
     7          for all K clients in parallel
     8              if e_k > (1 + gamma) min_j e_j
     9                  K-means-initialise another v codewords
    10                  v_k <- v_k + v
    12              z = f_E(x)
    13              c = the nearest of v_k codewords (equation 4)
    14              p = f_C(c)
    15              L_code = ||sg(c) - z||^2 + beta ||c - sg(z)||^2
    16              L_task = cross-entropy
    17              theta_k <- theta_k - eta grad (L_code + L_task)
    19          clients return theta_k
    20          theta <- sum of n_k / n theta_k
    22      e_k = -sum p log p, the uncertainty (equation 6)
    23      reduce the number of rounds
    24  until e_k <= (1 + gamma) min_j e_j for all k (equation 7)

    python uefl.py
    python uefl.py --dataset cifar10 --pretrained   (table 1; docs/uefl_paper.md has the others)

Without flags this takes about two minutes on two cores. Codewords of their own raise the turned
silos' accuracy by +6.8 (+5.5 to +8.1) points (12 seeds, 95 % interval), but FedAvg has 6.1 more.
With CIFAR-10 the first 40 rounds took an H100 two hours. We expect eight of a GPU with a quarter of
its speed, one to five days of two cores, and nine times that for all 120 with both baselines.
"""

import warnings
from argparse import BooleanOptionalAction

import torch
import torch.nn as nn
import torch.nn.functional as F
from scipy.cluster.vq import kmeans2
from torch import Tensor

from common import UserError, models, train
from common.chance import random_at, seeded
from common.evaluation import evaluate_silos
from common.ranks import say_once
from common.runner import compare, flags, launch


class UEFL(nn.Module):
    """Encoder, codebook and classifier; with a codebook of size 0 FedAvg's, with normed tokens."""

    precision = "float32"  # see models.Classifier

    def __init__(self, features, codebook, classifier, token_norm, passes=20):
        super().__init__()
        self.codebook = codebook  # the first attribute, so theta begins with the codewords
        self.features, self.classifier = features, classifier
        self.token_norm, self.passes = token_norm, passes

    def encode(self, x):
        """x -> tokens [N, l, d]: l = h w of a map [N, d, h, w], and 1 of a vector."""
        with models.in_precision(self, x):
            z = self.features(x).float()  # line 12
        z = z.reshape(*z.shape[:2], -1).mT
        # Ours: tokens after ReLUs point in similar directions, and would use few codewords
        return F.layer_norm(z, z.shape[-1:]) if self.token_norm else z

    def forward(self, x, may_use=None):
        """p = f_C(f_D(f_E(x))) (equation 1): x -> logits [N, C] and L_code."""
        c, code_loss, _ = self.codebook(self.encode(x), may_use)
        with models.in_precision(self, x):
            logits = self.classifier(c.mT).float()  # line 14, before p = softmax(logits)
        return logits, code_loss

    def mc_dropout(self, c):
        """T passes of f_C with dropout on (section 3.4): codewords c [N, l, d] -> p [T, N, C]."""
        self.classifier.train()
        return torch.stack([self.classifier(c.mT).float().softmax(1) for _ in range(self.passes)])


class ExtensibleCodebook(nn.Module):
    """Replaces each segment of a token by the nearest codeword that the client may use.

    size              v, codewords at the start; with 0, tokens are returned as they are
    dim, segments     d, the channels of a token, and s, the parts that it is cut into; s divides d
    commitment, beta  the weights of ||sg(c) - z||^2 and of ||c - sg(z)||^2
    codewords         the only parameter, [V, d / s]
    """

    def __init__(self, size, dim, segments=1, commitment=0.25, beta=1.0):
        super().__init__()
        if dim % segments:
            raise ValueError(f"tokens of {dim} channels cannot be cut into {segments} segments")
        self.commitment, self.beta = commitment, beta
        self.codewords = nn.Parameter(torch.randn(size, dim // segments))  # line 2, a Gaussian

    def forward(self, tokens, may_use=None):
        """Tokens [N, l, d] -> codewords [N, l, d], L_code (equation 5), their indices [N, l, s].

        may_use  bool [V], what this client may use; by default all. A ValueError if it is nothing
        """
        v, tokens = len(self.codewords), tokens.to(self.codewords.dtype)
        if may_use is None:
            may_use = tokens.new_ones(v).bool()
        usable = may_use.nonzero().flatten()
        if not v:
            return tokens, tokens.new_zeros(()), usable
        if may_use.dtype != torch.bool or may_use.shape != (v,) or not len(usable):
            raise ValueError(f"may_use must be bool [{v}] with at least one True")
        z = tokens.reshape(-1, self.codewords.shape[1])
        exact = "donot_use_mm_for_euclid_dist"  # else distances of close, long vectors are 0
        distances = torch.cdist(z, self.codewords[usable], compute_mode=exact)
        indices = usable[distances.argmin(1)]  # line 13, equation 4
        c = self.codewords[indices]
        # As in the authors' code both are means, with weights 0.25 and 1. The paper has sums, with
        # 1 and beta, and no value for beta, which in VQ-VAE is the weight of the first
        loss = self.commitment * F.mse_loss(z, c.detach())  # line 15: z comes to c
        loss = loss + self.beta * F.mse_loss(c, z.detach())  # line 15: c comes to z
        # As in VQ-VAE, the task's gradient for c goes to z; codewords learn from L_code alone
        straight_through = z + (c - z).detach()
        return straight_through.view(tokens.shape), loss, indices.view(*tokens.shape[:-1], -1)

    def extend(self, codewords):
        """Adds codewords [v, d / s], as a new parameter, so the optimizer must be made anew."""
        self.codewords = nn.Parameter(torch.cat([self.codewords, codewords.to(self.codewords)]))


def client_update(model, batches, optimizer, may_use):
    """Lines 12 to 17 for one client, where `model` has the weights theta. Returns the mean loss."""
    losses = []
    for x, y in batches:
        logits, code_loss = model(x, may_use)  # see UEFL.forward for lines 12 to 15
        task_loss = F.cross_entropy(logits, y)  # line 16
        loss = code_loss + task_loss
        optimizer.zero_grad()
        loss.backward()  # line 17
        optimizer.step()  # line 17: eta is --lr, for Adam as in the authors' code
        losses.append(loss.detach())
    return torch.stack(losses).mean()


def average(theta: Tensor, thetas: Tensor, sizes: Tensor, uses: Tensor) -> Tensor:
    """Line 20: each weight is averaged over the clients that use it, by n_k.

    theta   the server's weights [P]; one that no client with samples uses stays as it is
    thetas  the clients' weights after training [K, P]
    sizes   n_k [K]
    uses    bool [K, P]; "the clients that utilize" a codeword (section 3.2): those that may use it
    """
    n = sizes.to(theta.device).float()[:, None] * uses  # float16 would end at 65,504 samples
    mean = (n * thetas).sum(0) / n.sum(0)  # line 20, also for the statistics of batch norm
    return torch.where(n.sum(0) > 0, mean, theta).to(theta)


def predictive_entropy(p: Tensor) -> Tensor:
    """Equation 6: probabilities p of T passes [T, N, C] -> the entropy of their mean, in nats [N].

    The paper's line 22 lacks the minus sign. Raises ValueError if a row is no distribution.
    """
    if p.dim() != 3 or not ((p >= 0).all() and ((p.sum(-1) - 1).abs() <= 0.01).all()):  # or NaN
        raise ValueError("p must be [passes, samples, classes], and each row sum to 1")
    return torch.special.entr(p.mean(0)).sum(-1)  # line 22


def uncertain(entropies: Tensor, gamma: float) -> Tensor:
    """Equation 7: is a client's entropy above (1 + gamma) times the smallest? [K] -> bool [K].

    Section 3.4 also tried the mean in place of the smallest. Raises ValueError for NaN.
    """
    if entropies.isnan().any():
        raise ValueError("an entropy is NaN, which is neither above the threshold nor below")
    return entropies > (1 + gamma) * entropies.min()


@torch.no_grad()
def client_uncertainty(model, batches, may_use):
    """Line 22 for one client: e_k, the mean entropy of its test images, without their labels."""
    entropies = []
    for x, _ in batches:
        c, *_ = model.codebook(model.encode(x), may_use)
        entropies.append(predictive_entropy(model.mc_dropout(c)))  # line 22
    return torch.cat(entropies).mean()


@torch.no_grad()
def client_codewords(model, batches, size, seed, t, k):
    """Line 9 for one client: k-means++ and ten steps on all its segments, [size, d / s]."""
    width, rng = model.codebook.codewords.shape[1], random_at(seed, "codewords", t, k)
    segments = torch.cat([model.encode(x).reshape(-1, width) for x, _ in batches])
    with warnings.catch_warnings(action="ignore"):  # if segments are few or equal, so are codewords
        centroids, _ = kmeans2(segments.cpu().double().numpy(), size, minit="++", rng=rng)  # line 9
    return torch.from_numpy(centroids)


def federate(args, clients, trainer, t=0, iteration=1, theta=None, may_use=None, e=None):
    """Algorithm 1. Yields after each round the state to go on from, and what was measured.

    In the listing, lines 8 to 10 stand in the loop over rounds, while sections 3.1 and 3.2 add
    codewords once per iteration, as we do. Each uncertain client gets v of its own, as we read
    section 3.1, so line 20 averages only the first v codewords over several clients.

    may_use  the codewords that each client may use, bool [K, V]: v_k in row k
    e        e_k at the end of the iteration before [K]
    """
    ids = clients.ids  # line 1: those that train, whose images splits.silos() has drawn
    if t == 0:
        theta = trainer.initial  # line 2, with the codewords: see build_model()
        may_use = theta.new_ones(len(ids), args.codebook_size).bool()
        e = torch.zeros(len(ids))  # line 3
    codebook = trainer.model.codebook
    width = codebook.codewords.shape[1]
    codebook.codewords.data = theta.new_zeros(may_use.shape[1], width)  # as many as theta has
    for iteration in range(iteration, args.iterations + 1):  # line 4
        last = args.rounds + (iteration - 1) * args.later_rounds  # line 23: later ones may be fewer
        growing = ids[uncertain(e, args.gamma).cpu()]  # line 8: at first nobody, as e_k = 0
        if len(growing) and t == last - args.later_rounds:  # not amid an iteration, if resumed
            [words] = trainer.map(  # line 9: [new, v, d / s]
                client_codewords, theta, growing, clients.train, t, {"k": ids.tolist()},
                size=args.codebook_size, seed=args.seed, t=t,
            )  # fmt: skip
            trainer.count(growing, 1, words[0].numel())
            train.set_weights(trainer.model, theta)
            codebook.extend(words.flatten(0, 1))  # line 9
            theta = train.get_weights(trainer.model)
            owns = ids[:, None] == growing.repeat_interleave(args.codebook_size)  # [K, new v]
            may_use = torch.cat([may_use, owns.to(may_use.device)], dim=1)  # line 10
        # theta begins with the codewords. A client uses those it may, and all that follows: [K, P]
        uses = may_use.repeat_interleave(width, 1)
        uses = F.pad(uses, (0, len(theta) - uses.shape[1]), value=True)
        own = {"may_use": may_use}
        for t in range(t + 1, last + 1):  # line 5
            # Lines 6, 7, 19: theta goes to all clients; their weights [K, P] and losses [K] return
            thetas, losses = trainer.train(client_update, theta, ids, t, own, sent=uses.sum(1))
            theta = average(theta, thetas, clients.sizes[ids], uses)  # line 20
            if t == last:
                [e] = trainer.map(client_uncertainty, theta, ids, clients.test, t, own)  # line 22
            row = evaluate_silos(trainer, theta, t, losses, may_use, args, is_due=t == last)
            state = {"t": t, "iteration": iteration, "theta": theta, "may_use": may_use, "e": e}
            yield state, row | {"iteration": iteration}
        if not uncertain(e, args.gamma).any():  # line 24
            say_once(f"\nround {t}: no silo is above the threshold, so nobody would get codewords")
            return


def build_model(args, shape, classes):
    """Line 2: UEFL's model with the layers of a model of common/models.py."""
    base = models.build(
        args.model, shape, classes, args.width, args.dropout, args.pretrained, pooled=False
    )
    if not any(isinstance(layer, nn.Dropout) for layer in base.classifier):
        raise UserError(f"--model {args.model} has no dropout, so passes are equal: choose another")
    if base.dim % args.segments:
        raise UserError(f"--segments {args.segments} does not divide a token's {base.dim} channels")
    with seeded(torch.device("cpu"), args.seed, "codebook"):
        codebook = ExtensibleCodebook(
            args.codebook_size, base.dim, args.segments, args.commitment, args.beta
        )
    return UEFL(base.features, codebook, base.classifier, args.token_norm, args.passes)


# The settings of section 4, unless a line says otherwise. docs/uefl_paper.md says where they differ
# from the authors' code, and what the paper leaves open. Glyphs, with table 13's silos, are ours.
PAPER = dict(
    partition="silos", rotate=[0, -50, 120], silos=[3, 3, 3], codebook_size=64, gamma=0.1,
    model="resblocks", precision="float32", rounds=40, later_rounds=20,  # 40: appendix H, CIFAR-10
    optimizer="adam", lr=1e-4, batch_size=1024, local_epochs=20,  # the authors' code
)  # fmt: skip
SETTINGS = {
    "glyphs": PAPER | dict(
        silos=[3, 1, 1], silo_size=1000, model="cnn", width=0.25, codebook_size=6, commitment=0.02,
        gamma=0.3, lr=3e-3, batch_size=32, local_epochs=3, rounds=6, later_rounds=6, iterations=3,
    ),
    "other": PAPER,
    "mnist": PAPER | dict(codebook_size=32, gamma=0.3),
    "gtsrb": PAPER | dict(model="vgg16"),
    "cifar10": PAPER | dict(model="vgg16", gamma=0.2),
    "cifar100": PAPER | dict(model="vgg16", silo_size=4000, segments=4),
    "folder": PAPER | dict(model="resnet18", partition="domain", rotate=None),
}  # fmt: skip
QUICK = dict(
    model="resblocks", width=0.0625, segments=8, commitment=0.1, lr=1e-3, batch_size=32,
    local_epochs=4, rounds=5, later_rounds=2, iterations=3, silo_size=500, gamma=0.05,
)  # fmt: skip
SMALL = {  # ours
    "other": QUICK,
    "cifar10": QUICK | dict(gamma=0.02),
    "cifar100": QUICK | dict(gamma=0.02),
    "folder": QUICK | dict(image_size=32, local_epochs=2, gamma=0.1),
}
EXAMPLE = dict(
    prediction="turned silos are least certain, so they get codewords, and beat a static codebook",
    shows_in={"turned_extended": "above", "turned_accuracy": "above"},
)


def own_flags(add) -> None:
    whole, number = flags.within(int, 1), flags.within(float, 0)
    size, share = flags.within(int, 0, 10**6), flags.within(float, 0, 0.99)
    add("--codebook-size", type=size, help="v, per extension; 0: FedAvg (--rounds)")
    add("--segments", type=whole, default=1, help="s, parts of a token with a codeword each")
    add("--gamma", type=number, help="equation 7; larger: fewer clients are extended")
    add("--iterations", type=whole, default=5, help="at most; with 1 nobody is extended")
    add("--later-rounds", type=whole, help="of iterations after the first (--rounds)")
    add("--commitment", type=number, default=0.25, help="weight of ||sg(c) - z||^2")
    add("--beta", type=number, default=1.0, help="weight of ||c - sg(z)||^2")
    add("--token-norm", action=BooleanOptionalAction, default=True, help="layer norm of tokens")
    add("--dropout", type=share, default=0.1, help="probability of both dropout layers")
    add("--passes", type=whole, default=20, help="T, forward passes to measure uncertainty")


def main(argv: list[str] | None = None):
    args = flags.parse(__file__, __doc__, SETTINGS, SMALL, own_flags, argv)
    label = "UEFL"  # both baselines get as many rounds as it has taken
    baselines = {"static": {"iterations": 1}, "FedAvg": {"codebook_size": 0, "iterations": 1}}
    if not args.codebook_size:
        label, args.iterations = "FedAvg", 1  # nobody is extended, so both baselines are the same
    if args.sample:
        raise UserError("--sample: in UEFL all clients train in each round; see --participating")
    return compare.run(args, federate, label, baselines, EXAMPLE, build_model)


if __name__ == "__main__":
    launch(main)
