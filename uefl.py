"""UEFL: a client about whose data the model is more uncertain gets codewords of its own.

Zhang, Cao and Liu, Uncertainty-Based Extensible Codebook for Discrete Federated Learning in
Heterogeneous Data Silos (arXiv 2402.18888). An encoder f_E turns an image into tokens z, f_D
replaces each token by the nearest codeword c of a codebook, and a classifier f_C reads c. A silo is
a client, and sg(a) means that no gradient flows through a. Choices of ours stand at their lines.

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
    python uefl.py --dataset mnist --silos 3 1 1                   (table 13; MNIST is our reading)
    python uefl.py --dataset cifar10 --pretrained                                       (table 1)
    python uefl.py --dataset fmnist --partition dirichlet --clients 10 --participating 10
                                                                  (table 12; ten clients are ours)
    python uefl.py --dataset mnist --test-domain 75 --rotate 0 15 30 45 60 75 \\
        --model resnet18 --pretrained                                                   (table 2)

Without flags this takes a minute on two cores, and shows that the turned silos get codewords of
their own, and gain accuracy by them. With CIFAR-10 it takes days on two cores, and with --small
minutes.
"""

import warnings
from argparse import BooleanOptionalAction

import torch
import torch.nn as nn
import torch.nn.functional as F
from scipy.cluster.vq import kmeans2
from torch import Tensor

from common import UserError, devices, models, random_at, train
from common.runner import compare, flags, launch, plots


class UEFL(nn.Module):
    """Encoder, codebook and classifier. With a codebook of size 0, it is FedAvg's model.

    token_norm  a layer norm without parameters follows the encoder, in FedAvg, too. It is ours:
                tokens after ReLUs point in similar directions, and would use few codewords
    """

    def __init__(self, features: nn.Module, codebook, classifier: nn.Module, token_norm: bool):
        super().__init__()
        self.codebook = codebook  # the first attribute, so that theta begins with the codewords
        self.features, self.classifier, self.token_norm = features, classifier, token_norm

    def encode(self, x: Tensor) -> Tensor:
        """x -> tokens [N, l, d]: h w of them from a feature map [N, d, h, w], one from a vector."""
        z = self.features(x).to(self.codebook.codewords.dtype)  # line 12; bfloat16 under autocast
        z = z.flatten(2).mT if z.dim() == 4 else z.unsqueeze(1)
        return F.layer_norm(z, z.shape[-1:]) if self.token_norm else z

    def forward(self, x: Tensor, may_use: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """p = f_C(f_D(f_E(x))) (equation 1): x -> logits [N, C] and L_code."""
        c, code_loss, _ = self.codebook(self.encode(x), may_use)
        return self.classifier(c.mT).float(), code_loss  # line 14; channels come first, as in a map

    def uses(self, may_use: Tensor) -> Tensor:
        """Which weights of theta each client uses, bool [K, P]: all but the others' codewords.

        may_use  bool [K, V]
        """
        words = may_use.repeat_interleave(self.codebook.codewords.shape[1], 1)
        weights = sum(t.numel() for t in train.weights_of(self))
        return F.pad(words, (0, weights - words.shape[1]), value=True)


class ExtensibleCodebook(nn.Module):
    """Replaces each segment of a token by the nearest codeword that the client may use.

    size              v, codewords at the start; with 0, tokens are returned unchanged, but in the
                      codewords' type, with L_code 0 and no indices
    dim, segments     d, the channels of a token, and s, the parts that it is cut into; s divides d
    commitment, beta  weights of ||sg(c) - z||^2, which pulls tokens to codewords, and of
                      ||c - sg(z)||^2, which pulls codewords to tokens
    codewords         the only parameter, [V, d / s]
    """

    def __init__(
        self, size: int, dim: int, segments: int = 1, commitment: float = 0.25, beta: float = 1.0
    ):
        super().__init__()
        if dim % segments:
            raise ValueError(f"tokens of {dim} channels cannot be cut into {segments} segments")
        self.segments, self.commitment, self.beta = segments, commitment, beta
        self.codewords = nn.Parameter(torch.randn(size, dim // segments))  # line 2, a Gaussian

    def forward(
        self, tokens: Tensor, may_use: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens [N, l, d] -> codewords [N, l, d], L_code (equation 5), their indices [N, l, s].

        may_use  bool [V], the codewords that this client may use; by default all

        The backward pass copies the gradient from the output to the tokens. Raises ValueError for a
        wrong `may_use`.
        """
        v, tokens = len(self.codewords), tokens.to(self.codewords.dtype)
        if not v:
            return tokens, tokens.new_zeros(()), tokens.new_zeros(0, dtype=torch.long)
        if may_use is None:
            may_use = torch.ones(v, dtype=torch.bool, device=tokens.device)
        usable = may_use.nonzero().flatten()
        if may_use.dtype != torch.bool or may_use.shape != (v,) or not len(usable):
            raise ValueError(f"may_use must be bool [{v}] with at least one True")
        with torch.autocast(tokens.device.type, enabled=False):
            z = tokens.reshape(-1, self.codewords.shape[1])
            exact = "donot_use_mm_for_euclid_dist"  # of large, nearly equal numbers, too
            distances = torch.cdist(z, self.codewords[usable], compute_mode=exact)
            indices = usable[distances.argmin(1)]  # line 13, equation 4
            c = self.codewords[indices]
            # Both are means, and the first has a weight of 0.25, as in the authors' code. The paper
            # has sums, and beta, without a value, for the second
            loss = self.commitment * F.mse_loss(z, c.detach())  # line 15: z comes to c
            loss = loss + self.beta * F.mse_loss(c, z.detach())  # line 15: c comes to z
            # As in VQ-VAE, the task's gradient for c goes to z; codewords learn from L_code alone
            straight_through = z + (c - z).detach()
        indices = indices.view(*tokens.shape[:-1], self.segments)
        return straight_through.view(tokens.shape), loss, indices

    @torch.no_grad()
    def extend(self, codewords: Tensor) -> None:
        """Adds codewords [v, d / s]. An optimizer like Adam must be made anew afterwards."""
        self.codewords.data = torch.cat([self.codewords, codewords.to(self.codewords)])
        self.codewords.grad = None  # it has the old shape

    @torch.no_grad()
    def resize(self, size: int) -> None:
        """Makes room for this many codewords, which are zero until set_weights() writes them."""
        self.codewords.data = self.codewords.new_zeros(size, self.codewords.shape[1])


def client_update(model, batches, optimizer, may_use):
    """Lines 6 and 12 to 17 for one client: trains `model` from theta [P] on.

    Returns the mean loss.
    """
    losses = []
    for x, y in batches:
        logits, code_loss = model(x, may_use)
        task_loss = F.cross_entropy(logits, y)  # line 16
        loss = code_loss + task_loss
        optimizer.zero_grad()
        loss.backward()  # line 17
        optimizer.step()  # line 17, by Adam, as in the authors' code
        losses.append(loss.detach())
    return torch.stack(losses).mean()


def average(theta: Tensor, thetas: Tensor, sizes: Tensor, uses: Tensor) -> Tensor:
    """Line 20: each weight is averaged over the clients that use it, by n_k.

    theta   the server's weights [P]; one that no client uses stays as it is
    thetas  the clients' weights after training [K, P]
    sizes   n_k [K]
    uses    bool [K, P], true if client k uses this weight

    Section 3.2 has "the clients that utilize" a codeword: we take those that may use it.
    """
    n = sizes.to(theta)[:, None] * uses
    mean = (n * thetas).sum(0) / n.sum(0)  # line 20, also for the statistics of batch norm
    return torch.where(uses.any(0), mean, theta)


def predictive_entropy(probabilities: Tensor) -> Tensor:
    """Equation 6: probabilities of T passes [T, N, C] -> the entropy of their mean, in nats [N].

    The paper's line 22 lacks the minus sign. Raises ValueError if a row is no distribution.
    """
    p = probabilities
    if p.dim() != 3 or not ((p >= 0).all() and ((p.sum(-1) - 1).abs() <= 0.01).all()):  # or NaN
        raise ValueError("probabilities must be [passes, samples, classes], and each row sum to 1")
    return torch.special.entr(p.mean(0)).sum(-1)  # line 22


def uncertain(entropies: Tensor, gamma: float) -> Tensor:
    """Equation 7: is a client's entropy above (1 + gamma) times the smallest? [K] -> bool [K].

    Section 3.4 also tried the mean in place of the smallest.
    """
    return entropies > (1 + gamma) * entropies.min()  # lines 8, 24


@torch.no_grad()
def client_evaluation(model, batches, passes, may_use=None):
    """Line 22 for one client: its uncertainty e_k, perplexity, L_code, and confusion [C, C].

    e_k is the mean entropy of the held-out samples, as in the authors' code, without labels. The
    confusion is that of the mean probabilities of the same T passes with dropout, while the other
    methods' files switch dropout off. Only the classifier has dropout, so encoder and codebook run
    once for all passes. The paper does not define perplexity: as in the authors' code, it is
    exp(entropy) of how often a codeword is used.
    """
    model.classifier.train()  # so that dropout stays on
    entropies, code_losses, indices, answers = [], [], [], 0
    for x, y in batches:
        c, code_loss, index = model.codebook(model.encode(x), may_use)  # once for all passes
        p = torch.stack([model.classifier(c.mT).float().softmax(1) for _ in range(passes)])
        entropies.append(predictive_entropy(p))
        code_losses.append(code_loss.expand(len(y)))
        indices.append(index.flatten())
        answers = answers + train.confusion(y, p.mean(0).argmax(1), p.shape[2])
    usage = torch.bincount(torch.cat(indices)).float()
    perplexity = torch.special.entr(usage / usage.sum()).sum().exp()
    return torch.cat(entropies).mean(), perplexity, torch.cat(code_losses).mean(), answers


def evaluate(args, clients, trainer, theta, may_use, t, losses, last):
    """What is to be seen after round t, by column of metrics.csv; line 22: uncertainties e [K].

    losses  of training [K]
    last    the last round of this iteration, which is evaluated in any case
    """
    row = {"selected": clients.ids, "train_loss": losses.mean(), **trainer.cost()}
    if t != last and not trainer.is_due(t):
        return row
    e, perplexities, code_losses, answers = trainer.map(
        client_evaluation, theta, clients.ids, clients.test, t, {"may_use": may_use},
        passes=args.passes,
    )  # fmt: skip
    accuracies = train.accuracy(answers)
    row |= {
        "uncertainties": e.cpu(), "accuracies": accuracies, "codewords": may_use.sum(1),
        "worst_tenth": train.worst_tenth(accuracies), "id_accuracy": train.accuracy(answers.sum(0)),
        "mA": accuracies.mean(), "mE": e.mean(), "confusion": answers.sum(0),
    }  # fmt: skip
    if args.codebook_size:
        row |= {"mP": perplexities.mean(), "code_loss": code_losses.mean()}
    turned = [k for k in range(len(e)) if clients.groups[k] != clients.groups[0]]
    if args.rotate and turned:  # the example's silos whose angle is not the first one's
        extended = may_use[turned].sum(1) > args.codebook_size
        row["turned_accuracy"] = accuracies[turned].mean()
        row["turned_extended"] = extended.float().mean()
    if "ood" in clients.tests:  # a domain that no client has, so with all codewords
        pieces = clients.tests["ood"].split(1000)
        ids = torch.arange(len(pieces))
        *_, answers = trainer.map(client_evaluation, theta, ids, pieces, t, passes=args.passes)
        confusion = answers.sum(0)
        row |= {"ood_accuracy": train.accuracy(confusion), "confusion": confusion}
    return row


@torch.no_grad()
def client_codewords(model, batches, size, rng):
    """Line 9 for one client: K-means centroids of all its segments, [size, d / s]."""
    width = model.codebook.codewords.shape[1]
    segments = torch.cat([model.encode(x).reshape(-1, width) for x, _ in batches]).double()
    with warnings.catch_warnings(action="ignore"):  # if segments are few or equal, so are codewords
        # k-means++ and ten steps, on the segments of all training samples
        centroids, _ = kmeans2(segments.cpu().numpy(), size, minit="++", rng=rng)  # line 9
    return torch.from_numpy(centroids).to(segments.device, torch.float32)


def extend(args, clients, trainer, theta, may_use, uncertain_clients, t):
    """Lines 9 and 10: new codewords for each uncertain client. Returns theta and may_use.

    Only this client may use them, as we read section 3.1, while 3.2 speaks of "the clients that
    utilize" a codeword. Line 10 adds v of them, and so do we, while tables 11, 14 and 16 double the
    codebook.
    """
    rngs = [random_at(args.seed, "codewords", t, k) for k in clients.ids.tolist()]
    [words] = trainer.map(
        client_codewords, theta, uncertain_clients, clients.train, t, {"rng": rngs},
        size=args.codebook_size,
    )  # fmt: skip
    train.set_weights(trainer.model, theta)
    trainer.model.codebook.extend(words.flatten(0, 1))
    owns = clients.ids[:, None] == uncertain_clients.repeat_interleave(args.codebook_size)
    may_use = torch.cat([may_use, owns.to(may_use.device)], dim=1)  # line 10
    return train.get_weights(trainer.model), may_use


def initialise(args, clients, trainer, state):
    """Line 2: theta [P], and the codewords that each client may use, bool [K, V]: the first v.

    Or those of the state, for which the model then has as many codewords.
    """
    all_clients = trainer.initial.new_ones(clients.participating, args.codebook_size)
    may_use = state.get("may_use", all_clients.bool())
    trainer.model.codebook.resize(may_use.shape[1])
    return state.get("theta", trainer.initial), may_use


def federate(args, clients, trainer, state):
    """Algorithm 1. Yields after each round the state to go on from, and what was measured.

    In the listing, lines 8 to 10 stand in the loop over rounds, while sections 3.1 and 3.2 add
    codewords once per iteration, as we do: at its end, for the clients that are uncertain then.

    state  {} at the start, or what was yielded last
    """
    n = clients.sizes[clients.ids]  # line 1: all silos are clients, with n_k samples
    theta, may_use = initialise(args, clients, trainer, state)  # line 2
    t, e = state.get("t", 0), state.get("e", torch.zeros(len(n))).cpu()  # line 3
    for iteration in range(state.get("iteration", 1), args.iterations + 1):  # line 4
        last = args.rounds + (iteration - 1) * args.later_rounds  # line 23: later ones may be fewer
        for t in range(t + 1, last + 1):  # line 5
            # Lines 6, 7, 19: [K, P], [K]
            thetas, losses = trainer.train(
                client_update, theta, clients.ids, t, {"may_use": may_use}
            )
            theta = average(theta, thetas, n, trainer.model.uses(may_use))  # line 20
            row = evaluate(args, clients, trainer, theta, may_use, t, losses, last)
            e = row.get("uncertainties", e)  # line 22
            state = {"t": t, "theta": theta, "may_use": may_use, "e": e, "iteration": iteration}
            yield state, row | {"iteration": iteration}
        uncertain_clients = clients.ids[uncertain(e, args.gamma)]  # line 8
        if not len(uncertain_clients) or iteration == args.iterations:  # line 24
            return
        # Lines 9, 10
        theta, may_use = extend(args, clients, trainer, theta, may_use, uncertain_clients, t)


def build_model(args, shape, classes):
    """Lines 1 and 2: UEFL's model with the layers of a model of common/models.py."""
    more = args.pretrained
    base = models.build(args.model, shape, classes, args.width, args.dropout, more, pooled=False)
    if not any(isinstance(layer, nn.Dropout) for layer in base.classifier):
        raise UserError(f"--model {args.model} has no dropout, so passes are equal: choose another")
    if base.dim % args.segments:
        raise UserError(f"--segments {args.segments} does not divide a token's {base.dim} channels")
    with devices.seeded(torch.device("cpu"), args.seed, "codebook"):
        codebook = ExtensibleCodebook(
            args.codebook_size, base.dim, args.segments, args.commitment, args.beta
        )
    return UEFL(base.features, codebook, base.classifier, args.token_norm)


# The example on glyphs is ours, with silos as in table 13. In the paper VGG16 and ResNet-18 are
# pretrained, here with --pretrained only. VGG16 has the batch norm that table 11's count implies.
PAPER = dict(
    partition="silos", rotate=[0, -50, 120], silos=[3, 3, 3],  # section 4
    codebook_size=64, gamma=0.1,  # section 4
    rounds=40,  # appendix H, for CIFAR-10; the authors' README has 20 or 30
    later_rounds=20,  # section 4
    model="resblocks",  # section 4
    # The authors' code; the paper names local epochs only in appendix F: 5, in 44 rounds without
    # dropout on CIFAR-100. Adam starts anew in each round, which is our choice
    optimizer="adam", lr=1e-4, batch_size=1024, local_epochs=20,
    precision="tf32",  # on a CPU float32, in which all our results were measured
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
    # Four segments of 64 words; appendix L takes 32 words with them
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


def own_flags(add) -> None:
    whole, number = flags.within(int, 1), flags.within(float, 0)
    size = flags.within(int, 0, 10**6)
    add("--codebook-size", type=size, default=64, help="v, per extension; 0: FedAvg (--rounds)")
    add("--segments", type=whole, default=1, help="s, parts of a token with a codeword each")
    add("--gamma", type=number, default=0.1, help="equation 7; larger: fewer clients are extended")
    add("--iterations", type=whole, default=5, help="at most; with 1 nobody is extended")
    add("--later-rounds", type=whole, default=20, help="of iterations after the first (--rounds)")
    add("--commitment", type=number, default=0.25, help="weight of ||sg(c) - z||^2")
    add("--beta", type=number, default=1.0, help="weight of ||c - sg(z)||^2")
    add("--token-norm", action=BooleanOptionalAction, default=True, help="layer norm of tokens")
    add(
        "--dropout",
        type=flags.within(float, 0, 0.99),
        default=0.1,
        help="probability of both dropout layers",
    )
    add("--passes", type=whole, default=20, help="T, forward passes to measure uncertainty")


def main(argv: list[str] | None = None):
    args = flags.parse(__file__, __doc__, SETTINGS, SMALL, own_flags, argv)
    label = "UEFL"  # both baselines get as many rounds as UEFL has taken
    baselines = {"static": {"iterations": 1}, "FedAvg": {"codebook_size": 0, "iterations": 1}}
    if not args.codebook_size:
        label, baselines, args.iterations = "FedAvg", {}, 1  # nobody is extended
    if args.sample:
        raise UserError("--sample: in UEFL all clients train in each round; see --participating")
    prediction = (
        "the model is least certain about the turned silos, so they get codewords of their own, "
        "and gain accuracy over a codebook that is not extended"
    )
    shows_in = {"turned_extended": "above", "turned_accuracy": "above"}
    return compare.run(
        args, federate, label, baselines, prediction, shows_in, build_model, plots.uncertainties
    )


if __name__ == "__main__":
    launch(main)
