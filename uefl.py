"""UEFL: if the model is uncertain about a client's data, this client gets codewords of its own.

Zhang, Cao and Liu, Uncertainty-Based Extensible Codebook for Discrete Federated Learning in
Heterogeneous Data Silos (arXiv 2402.18888). An encoder f_E turns an image into tokens z, f_D
replaces each token by the nearest codeword c of a codebook, and a classifier f_C reads c. A silo is
a client, and sg(a) means that no gradient flows through a. docs/uefl.md lists all choices of ours.

    Algorithm 1, its statements, without the ends of branches and loops  in the code
     1  sample K data silos as clients                                  build
     2  initialise theta, and a codebook of v codewords, at random      ExtensibleCodebook, federate
     3  e_k = 0                                                         federate
     4  repeat                                                          federate
     5      for each round t = 1, 2, ...                                federate
     6          broadcast theta                                         client_update
     7          for all K clients in parallel                           federate
     8              if e_k > (1 + gamma) min_j e_j                      uncertain, federate
     9                  K-means-initialise another v codewords          client_codewords, federate
    10                  v_k <- v_k + v                                  extend, federate
    12              z = f_E(x)                                          UEFL
    13              c = the nearest of v_k codewords (equation 4)       ExtensibleCodebook
    14              p = f_C(c)                                          UEFL
    15              L_code = ||sg(c) - z||^2 + beta ||c - sg(z)||^2     ExtensibleCodebook
    16              L_task = cross-entropy                              client_update
    17              theta_k <- theta_k - eta grad (L_code + L_task)     client_update
    19          clients return theta_k                                  federate
    20          theta <- sum of n_k / n theta_k                         average_codewords, federate
    22      e_k = -sum p log p, the uncertainty (equation 6)            predictive_entropy, federate
    23      reduce the number of rounds                                 federate
    24  until e_k <= (1 + gamma) min_j e_j for all k (equation 7)       uncertain, federate

    python uefl.py
    python uefl.py --dataset mnist --silos 3 1 1                   (table 13; MNIST is our reading)
    python uefl.py --dataset cifar10 --pretrained                                       (table 1)
    python uefl.py --dataset fmnist --partition dirichlet --clients 10 --participating 10 \\
        --sample 10                                                                    (table 12)
    python uefl.py --dataset mnist --test-domain 75 --rotate 0 15 30 45 60 75 \\
        --model resnet18 --pretrained                                                   (table 2)
"""

import warnings
from argparse import BooleanOptionalAction

import torch
import torch.nn as nn
import torch.nn.functional as F
from scipy.cluster.vq import kmeans2
from torch import Tensor

from common import UserError, random_at, splits, train
from common.devices import seeded
from common.ranks import launch
from common.runner import flags
from common.runner.compare import compare
from common.runner.setup import prepare


def build(args):
    """Lines 1 and 2: clients, model, trainer and run."""
    clients, base, trainer, run = prepare(args, dropout=args.dropout)  # line 1
    if not any(isinstance(layer, nn.Dropout) for layer in base.classifier):
        raise UserError(f"--model {args.model} has no dropout, so passes are equal: choose another")
    if base.dim % args.segments:
        raise UserError(f"--segments {args.segments} does not divide a token's {base.dim} channels")
    with seeded(torch.device("cpu"), args.seed, "codebook"):
        model = build_model(args, base)
    return clients, model.to(trainer.device), trainer, run


def build_model(args, base):
    """Line 2: UEFL's model with the layers of a model of common/models.py."""
    sizes = args.codebook_size, base.dim, args.segments
    codebook = ExtensibleCodebook(*sizes, args.commitment, args.beta)
    return UEFL(base.features, codebook, base.classifier, args.token_norm)


class UEFL(nn.Module):
    """Encoder, codebook and classifier, without a codebook FedAvg's.

    token_norm  a layer norm without parameters follows the encoder, in FedAvg, too. It is ours:
                tokens after ReLUs point in similar directions, and would use few codewords
    """

    def __init__(self, features: nn.Module, codebook, classifier: nn.Module, token_norm: bool):
        super().__init__()
        self.codebook = codebook  # the first attribute, so that theta begins with the codewords
        self.features, self.classifier, self.token_norm = features, classifier, token_norm

    def encode(self, x: Tensor) -> Tensor:
        """x -> tokens [N, l, d]: h w of them from a feature map [N, d, h, w], one from a vector."""
        z = self.features(x)  # line 12
        z = z.flatten(2).mT if z.dim() == 4 else z.unsqueeze(1)
        return F.layer_norm(z, z.shape[-1:]) if self.token_norm else z

    def forward(self, x: Tensor, allowed: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """p = f_C(f_D(f_E(x))) (equation 1): x -> logits [N, C] and L_code."""
        c, code_loss, _ = self.codebook(self.encode(x), allowed)
        return self.classifier(c.mT), code_loss  # line 14; the classifier expects channels first


class ExtensibleCodebook(nn.Module):
    """Replaces each segment of a token by the nearest codeword that the client may use.

    size              v, codewords at the start; with 0, tokens are returned unchanged, with L_code
                      0 and no indices
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
        self, tokens: Tensor, allowed: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens [N, l, d] -> codewords [N, l, d], L_code (equation 5), their indices [N, l, s].

        allowed  bool [V], the codewords that this client may use; by default all

        The backward pass copies the gradient from the output to the tokens. Raises ValueError for a
        wrong `allowed`.
        """
        v = len(self.codewords)
        if not v:
            return tokens, tokens.new_zeros(()), tokens.new_zeros(0, dtype=torch.long)
        if allowed is None:
            allowed = torch.ones(v, dtype=torch.bool, device=tokens.device)
        usable = allowed.nonzero().flatten()
        if allowed.dtype != torch.bool or allowed.shape != (v,) or not len(usable):
            raise ValueError(f"allowed must be bool [{v}] with at least one True")
        with torch.autocast(tokens.device.type, enabled=False):
            z = tokens.to(self.codewords.dtype).reshape(-1, self.codewords.shape[1])
            with torch.no_grad():  # |z - c|^2 = |z|^2 - 2 z.c + |c|^2, without the first term
                centre = z.mean(0)  # the new origin, so that large numbers do not cancel
                words = self.codewords[usable] - centre
                distances = torch.addmm((words**2).sum(1), z - centre, words.T, alpha=-2)
                indices = usable[distances.argmin(1)]  # line 13, equation 4
            c = self.codewords[indices]
            # As in the authors' code, both terms are means and have a weight; the paper's are sums,
            # and only beta is a weight
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


def client_update(model, theta, batches, optimizer, autocast, allowed):
    """Lines 6 and 12 to 17 for one client: trains `model` from theta [P] on.

    Returns the mean loss.
    """
    train.set_weights(model, theta)  # line 6
    total, samples = 0.0, 0
    for x, y in batches:
        with autocast():
            logits, code_loss = model(x, allowed)
            task_loss = F.cross_entropy(logits, y)  # line 16
            loss = code_loss + task_loss
        optimizer.zero_grad()
        loss.backward()  # line 17
        optimizer.step()  # line 17
        total += len(y) * loss.detach()
        samples += len(y)
    return total / samples


def average_codewords(before: Tensor, codewords: Tensor, sizes: Tensor, allowed: Tensor) -> Tensor:
    """Line 20 for codewords [V, d / s]: each is averaged over the clients that may use it, by n_k.

    before     the server's codewords [V, d / s], which stay as they are if no client may use them
    codewords  the clients' codewords after training [K, V, d / s]
    sizes      n_k, numbers of any type [K]
    allowed    bool [K, V], true if client k may use codeword v

    Section 3.2 has "the clients that utilize" it, by which we understand those that may use it.
    """
    codewords = torch.where(allowed[:, :, None], codewords, 0)  # 0 times NaN would be NaN
    exact = torch.promote_types(codewords.dtype, torch.float32)
    weights = sizes.to(exact)[:, None] * allowed
    total = weights.sum(0)[:, None]
    mean = torch.einsum("kv,kvd->vd", weights, codewords.to(exact)) / total  # line 20
    return torch.where(total > 0, mean.to(before), before)


def predictive_entropy(probabilities: Tensor) -> Tensor:
    """Equation 6: probabilities of T passes [T, N, C] -> the entropy of their mean, in nats [N].

    Line 22 lacks the minus sign. NaN stays NaN. Raises ValueError if a row is no distribution.
    """
    p = probabilities
    if p.dim() != 3 or (p < 0).any() or ((p.sum(-1) - 1).abs() > 0.01).any():
        raise ValueError("probabilities must be [passes, samples, classes], and each row sum to 1")
    return torch.special.entr(p.mean(0)).sum(-1)  # line 22


@torch.no_grad()
def client_evaluation(model, batches, autocast, passes, allowed=None):
    """Line 22 for one client: its uncertainty e_k, and for the log perplexity and answers.

    e_k is the mean entropy of the held-out samples, which is our choice, and needs no labels. The
    answers, how many samples of class i are called j, are those of the mean probabilities of the
    same T passes with dropout, while the other methods' files switch dropout off. Only the
    classifier has dropout, so encoder and codebook run once for all passes. The perplexity is
    exp(entropy) of how often each codeword is used. Returns [2 + C C].
    """
    model.classifier.train()  # so that dropout stays on
    entropies, answers, indices = [], 0, []
    for x, y in batches:
        with autocast():
            c, _, index = model.codebook(model.encode(x), allowed)  # once for all passes
            logits = torch.stack([model.classifier(c.mT) for _ in range(passes)])
        p = logits.float().softmax(2)  # [passes, N, C]
        entropies.append(predictive_entropy(p))
        answers = answers + train.confusion(y, p.mean(0).argmax(1), p.shape[2])
        indices.append(index.flatten())
    usage = torch.bincount(torch.cat(indices)).float()
    perplexity = torch.special.entr(usage / usage.sum()).sum().exp()
    return torch.hstack([torch.cat(entropies).mean(), perplexity, answers.flatten()])


def evaluate(args, clients, trainer, model, theta, allowed, t):
    """Line 22: returns the uncertainties e [K], and a dict, the columns of metrics.csv."""
    results = trainer.map(
        client_evaluation, model, theta, clients.ids, clients.test, t, {"allowed": allowed},
        passes=args.passes,
    )  # fmt: skip
    e, perplexities, shape = results[:, 0], results[:, 1], (trainer.classes, trainer.classes)
    of_clients = results[:, 2:].long().unflatten(1, shape)
    accuracies, answers = train.accuracy(of_clients), of_clients.sum(0)
    measures = {
        "uncertainties": e, "accuracies": accuracies, "codewords": allowed.sum(1),
        "id_accuracy": train.accuracy(answers), "mA": accuracies.mean(), "mE": e.mean(),
    }  # fmt: skip
    if args.codebook_size:
        measures["mP"] = perplexities.mean()
    turned = [k for k in range(len(e)) if clients.groups[k] != clients.groups[0]]
    if args.rotate and turned:  # the example's silos whose angle is not the first one's
        extended = allowed[turned].sum(1) > args.codebook_size
        measures["turned_accuracy"] = accuracies[turned].mean()
        measures["turned_extended"] = extended.float().mean()
    if "ood" in clients.tests:  # a domain that no client has, so with all codewords
        pieces = clients.tests["ood"].split(1000)
        ids = torch.arange(len(pieces))
        results = trainer.map(client_evaluation, model, theta, ids, pieces, t, passes=args.passes)
        answers = results[:, 2:].long().sum(0).view(shape)
        measures["ood_accuracy"] = train.accuracy(answers)
    return e, {**measures, "confusion": answers}


def uncertain(entropies: Tensor, gamma: float) -> Tensor:
    """Equation 7: is a client's entropy above (1 + gamma) times the smallest? [K] -> bool [K].

    For a client whose entropy is NaN the answer is no.
    """
    return entropies > (1 + gamma) * entropies.nan_to_num(torch.inf).min()  # lines 8, 24


@torch.no_grad()
def client_codewords(model, batches, autocast, size, rng):
    """Line 9 for one client: K-means centroids of all its segments, [size, d / s] as a vector."""
    width = model.codebook.codewords.shape[1]
    with autocast():
        segments = torch.cat([model.encode(x).reshape(-1, width) for x, _ in batches]).double()
    with warnings.catch_warnings(action="ignore"):  # if segments are few or equal, so are codewords
        # k-means++ and ten steps, on the segments of all training samples
        centroids, _ = kmeans2(segments.cpu().numpy(), size, minit="++", rng=rng)  # line 9
    return torch.from_numpy(centroids).to(segments.device, torch.float32).flatten()


def extend(args, clients, trainer, model, theta, allowed, grown, t):
    """Lines 9 and 10: new codewords for each of the clients `grown`. Returns theta and allowed.

    Only this client may use them, as we read section 3.1, while 3.2 speaks of "the clients that
    utilize" a codeword. Line 10 adds v of them, and so do we, while tables 11, 14 and 16 double the
    codebook.
    """
    rngs = [random_at(args.seed, "codewords", t, k) for k in clients.ids.tolist()]
    new = trainer.map(
        client_codewords, model, theta, grown, clients.train, t, {"rng": rngs},
        size=args.codebook_size,
    )  # fmt: skip
    train.set_weights(model, theta)
    model.codebook.extend(new.view(-1, model.codebook.codewords.shape[1]))
    own = clients.ids[:, None] == grown.repeat_interleave(args.codebook_size)
    allowed = torch.cat([allowed, own.to(allowed.device)], dim=1)  # line 10
    return train.get_weights(model), allowed


def federate(args):
    """Algorithm 1 with these flags.

    In the listing, lines 8 to 10 stand in the loop over rounds, while sections 3.1 and 3.2 add
    codewords once per iteration, as we do: at its end, for the clients that are uncertain then.
    """
    clients, model, trainer, run = build(args)
    theta = run.state.get("theta", train.get_weights(model))  # line 2, or of a resumed run
    e = run.state.get("e", torch.zeros(clients.participating))  # line 3
    # All clients may use the first codewords
    first = theta.new_ones(clients.participating, args.codebook_size, dtype=torch.bool)
    allowed = run.state.get("allowed", first)
    # A resumed run's theta has more codewords than the model was built with
    size, width = model.codebook.codewords.shape
    model.codebook.extend(torch.zeros(allowed.shape[1] - size, width))

    for iteration in range(run.state.get("iteration", 1), args.iterations + 1):  # line 4
        last = args.rounds + (iteration - 1) * args.later_rounds  # line 23: later ones are shorter
        for t in run.rounds(last):  # line 5
            rng = random_at(args.seed, "select", t)
            # All silos, as in the paper, unless --sample or another --partition says otherwise
            selected = splits.draw(clients.ids, clients.sample, rng)
            # Lines 7, 19: ids [k], weights [k, P], losses [k] of the clients whose upload is finite
            trained, thetas, losses = trainer.train(
                client_update, model, theta, selected, t, {"allowed": allowed}
            )
            n = clients.sizes[trained].to(theta)
            alpha = n / n.sum()
            cut = model.codebook.codewords.numel()  # theta begins with the codewords: see UEFL
            before, after = theta[:cut].view(-1, width), thetas[:, :cut].unflatten(1, (-1, width))
            theta = alpha @ thetas  # line 20, also for the statistics of batch norm
            theta[:cut] = average_codewords(before, after, n, allowed[trained]).flatten()  # line 20

            loss = alpha @ losses
            measures = {}
            if run.evaluate_now:  # as in the last round of an iteration, whose e counts
                e, measures = evaluate(args, clients, trainer, model, theta, allowed, t)  # line 22
            state = {"theta": theta, "e": e, "allowed": allowed, "iteration": iteration}
            run.record(t, state, selected=trained, train_loss=loss, iteration=iteration, **measures)
        if not args.codebook_size or iteration == args.iterations:
            break
        grown = clients.ids[uncertain(e, args.gamma).cpu()]  # line 8
        if not len(grown):  # line 24
            print(f"{args.name}: training ends, because no client is above the threshold")
            break
        # Lines 9, 10
        theta, allowed = extend(args, clients, trainer, model, theta, allowed, grown, run.t)
    if args.codebook_size:
        run.draw("uncertainties", args.gamma)
    return run.finish(model, theta)


# fmt: off
# The example on glyphs is ours, with silos as in table 13. In the paper VGG16 and ResNet-18 are
# pretrained, here with --pretrained only. VGG16 has the batch norm that table 11's count implies.
PAPER = {
    "partition": "silos", "rotate": [0, -50, 120], "silos": [3, 3, 3],  # section 4
    "codebook_size": 64, "gamma": 0.1,  # section 4
    "rounds": 40,  # appendix H
    "later_rounds": 20,  # section 4
    "model": "resblocks",  # section 4
    # The authors' code. Adam starts anew in each round, which is our choice
    "optimizer": "adam", "lr": 1e-4, "batch_size": 1024, "local_epochs": 20,
    "precision": "tf32",  # on a CPU float32, in which all our results were measured
}
GLYPHS = {
    "silos": [3, 1, 1], "silo_size": 1000, "model": "cnn", "width": 0.25, "codebook_size": 6,
    "commitment": 0.02, "gamma": 0.3, "lr": 3e-3, "batch_size": 32, "local_epochs": 3, "rounds": 6,
    "later_rounds": 6, "iterations": 3,
}
SETTINGS = {
    "glyphs": {**PAPER, **GLYPHS},
    "other": PAPER,
    "mnist": {**PAPER, "codebook_size": 32, "gamma": 0.3},
    "gtsrb": {**PAPER, "model": "vgg16"},
    "cifar10": {**PAPER, "model": "vgg16", "gamma": 0.2},
    "cifar100": {**PAPER, "model": "vgg16", "silo_size": 4000, "segments": 4},
    "folder": {**PAPER, "model": "resnet18", "partition": "domain", "rotate": None},
}
QUICK = {
    "model": "resblocks", "width": 0.0625, "segments": 8, "commitment": 0.1, "lr": 1e-3,
    "batch_size": 32, "local_epochs": 4, "rounds": 5, "later_rounds": 2, "iterations": 3,
    "silo_size": 500, "gamma": 0.05,
}
SMALL = {
    "other": QUICK,
    "cifar10": {**QUICK, "gamma": 0.02},
    "cifar100": {**QUICK, "gamma": 0.02},
    "folder": {**QUICK, "image_size": 32, "local_epochs": 2, "gamma": 0.1},
}
# fmt: on


def own_flags(add) -> None:
    whole, number = flags.within(int, 1), flags.within(float, 0)
    size = flags.within(int, 0)
    add("--codebook-size", type=size, default=64, help="v, per extension; 0: FedAvg")
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
    label, baselines = "FedAvg", {}
    if args.codebook_size:
        # compare() gives both baselines as many rounds as UEFL has taken
        label, baselines = "UEFL", {"static": {"iterations": 1}, "FedAvg": {"codebook_size": 0}}
    prediction = (
        "the model is least certain about the turned silos, so they get codewords of their own, "
        "and gain accuracy over a codebook that is not extended"
    )
    shows_in = {"turned_extended": "above", "turned_accuracy": "above"}
    return compare(args, federate, label, baselines, prediction, shows_in)


if __name__ == "__main__":
    launch(main)
