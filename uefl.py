"""UEFL: if the model is uncertain about a client's data, this client gets additional codewords of its own.

Zhang, Cao and Liu, Uncertainty-Based Extensible Codebook for Discrete Federated Learning in Heterogeneous Data Silos
(arXiv 2402.18888). An encoder f_E turns an image into tokens. The codebook replaces each token by its nearest
codeword. A classifier f_C reads the codewords. A silo is a client. sg(a) means that no gradient flows through a.

    Algorithm 1, counting every line of its listing                      in the code
     1  sample K data silos as clients                                   main, flags.prepare
     2  initialise theta, and a codebook of v codewords, at random       build
     3  e_k = 0                                                          federate
     4  repeat                                                           federate
     5      for each round t = 1, 2, ...                                 federate
     6          broadcast theta                                          federate, client_update
     7          for all K clients in parallel                            federate, trainer.local_updates
     8              if e_k > (1 + gamma) min_j e_j                       federate, uncertain
     9                  K-means-initialise another v codewords           client_codewords, kmeans_codewords, extend
    10                  v_k <- v_k + v                                   extend
    12              z = f_E(x)                                           client_update, UEFL.encode
    13              c = the nearest of v_k codewords (equation 4)        client_update, ExtensibleCodebook
    14              p = f_C(c)                                           client_update, UEFL.classify
    15              L_code = ||sg(c) - z||^2 + beta ||c - sg(z)||^2      client_update, ExtensibleCodebook
    16              L_task = cross-entropy                               client_update
    17              theta_k <- theta_k - eta grad (L_code + L_task)      client_update
    19          clients return theta_k                                   federate, trainer.local_updates
    20          theta <- sum of n_k / n theta_k                          average, average_codewords
    22      e_k = -sum p log p, the uncertainty (equation 6)             evaluate, client_evaluation, predictive_entropy
    23      reduce the number of rounds                                  federate
    24  until e_k <= (1 + gamma) min_j e_j for all k (equation 7)        federate

Where the paper is silent or unclear
 1. In the listing, lines 8 to 10 stand in the loop over rounds. Sections 3.1 and 3.2 add codewords once per iteration.
    We follow the sections: an iteration (lines 4 to 24) ends with the codewords for the next one. There are at most
    --iterations. All clients train in each round, unless --sample says otherwise.
 2. New codewords belong to one client (section 3.1: "exclusively accessible to the corresponding heterogeneous
    clients"). Line 10 adds v, while tables 11, 14 and 16 double v_k. We follow line 10.
 3. Line 20 for codewords (section 3.2): each is averaged over the clients that may use it, with weights n_k.
 4. e_k is the mean entropy over the client's held-out samples. It needs no labels. The held-out samples of a silo come
    from the test set, if there is one. mA, mE and mP are means over clients of accuracy, e_k and perplexity. The
    perplexity is exp(entropy) of how often each codeword is used. Accuracy is measured on the mean probabilities of all
    passes.
 5. The Gaussian that initialises the codewords is the standard one. After ReLUs, tokens point in similar directions,
    and few codewords are used. So a layer norm without parameters follows the encoder, in FedAvg too. The paper does
    not have it; --no-token-norm removes it from both. See results/uefl.
 6. Line 15: the first term has the weight --commitment 0.25, the second --beta 1. Both are means over all numbers, as
    in the authors' code.
 7. Dropout (section 3.4) stands before each linear layer of the classifier. So the encoder runs once for all passes.
 8. Samples of a domain that is left out (--test-domain) may use all codewords.
 9. Adam, learning rate, batch size and local epochs come from the authors' code. 40 rounds in the first iteration,
    then 20 in each (section 4 and appendix H, for CIFAR-10). The paper's VGG16 and ResNet-18 are pretrained
    (--pretrained).

Where the authors' code differs
- The server never averages codewords. At each extension all clients get new codewords by K-means, which replace
  their earlier additions. So the model is personalised. --codebooks private does this. A fair baseline for it is
  another personalised model, not FedAvg.
- Other parameters have equal weights 1/K.
- The threshold uses the mean uncertainty, and does not change after iteration 1.
- The second dropout comes after the last layer. Dropout is off in the evaluation, so all 20 passes are equal.

    python uefl.py
    python uefl.py --dataset cifar10 --pretrained
    python uefl.py --dataset mnist --silos 3 1 1                                                          (table 13)
    python uefl.py --dataset mnist --rotate 0 15 30 45 60 75 --test-domain 75                              (table 2)
    python uefl.py --dataset fmnist --partition dirichlet --clients 10 --participating 10 --sample 10     (table 12)
"""

import argparse
import copy
import warnings

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from scipy.cluster.vq import kmeans2
from torch import Tensor

from common import UserError, flags, plots, random_at, run, splits, train


class ExtensibleCodebook(nn.Module):
    """Replaces each segment of a token by the nearest codeword that the client may use (sections 3.2 and 3.3).

    size        v, codewords at the start; with 0, tokens are returned unchanged
    dim         d, channels of a token, divisible by segments
    segments    s, parts of a token; each part is replaced by a codeword
    commitment  weight of ||sg(c) - z||^2, which pulls tokens to codewords
    beta        weight of ||c - sg(z)||^2, which pulls codewords to tokens

    codewords   the only parameter, [V, d / s]

    Raises ValueError if segments does not divide dim.
    """

    def __init__(self, size: int, dim: int, segments: int = 1, commitment: float = 0.25, beta: float = 1.0):
        super().__init__()
        if dim % segments:
            raise ValueError(f"tokens of {dim} channels cannot be cut into {segments} segments")
        self.segments, self.commitment, self.beta = segments, commitment, beta
        self.codewords = nn.Parameter(torch.randn(size, dim // segments))

    def forward(self, tokens: Tensor, allowed: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """tokens [N, l, d] -> their codewords [N, l, d], L_code (equation 5), and the codewords' indices [N, l, s].

        allowed  bool [V], the codewords that this client may use; by default all

        The backward pass copies the gradient from the output to the tokens. Raises ValueError if `allowed` has a wrong
        type or length, or no True.
        """
        if not len(self.codewords):
            return tokens, tokens.new_zeros(()), tokens.new_zeros(0, dtype=torch.long)
        v = len(self.codewords)
        if allowed is not None and not (allowed.dtype == torch.bool and allowed.shape == (v,) and allowed.any()):
            raise ValueError(f"allowed must be bool [{v}] with at least one True")
        with torch.autocast(tokens.device.type, enabled=False):
            z = tokens.to(self.codewords.dtype).reshape(-1, self.codewords.shape[1])
            with torch.no_grad():  # |z - c|^2 = |z|^2 - 2 z.c + |c|^2, without the first term
                own = torch.arange(v, device=z.device) if allowed is None else torch.nonzero(allowed).flatten()
                distance = torch.addmm((self.codewords[own] ** 2).sum(1), z, self.codewords[own].T, alpha=-2)
                index = own[distance.argmin(1)]  # line 13, equation 4
            c = self.codewords[index]
            loss = self.commitment * F.mse_loss(z, c.detach()) + self.beta * F.mse_loss(c, z.detach())  # line 15
            straight_through = z + (c - z).detach()
        return straight_through.view(tokens.shape), loss, index.view(*tokens.shape[:-1], self.segments)

    @torch.no_grad()
    def extend(self, codewords: Tensor) -> None:
        """Adds codewords [v, d / s]. The parameter stays the same object, so that an optimizer still knows it."""
        self.codewords.data = torch.cat([self.codewords, codewords.to(self.codewords)])

    def _load_from_state_dict(self, state_dict, prefix, *args):  # so that a new codebook can load a grown one
        self.codewords.data = torch.empty_like(state_dict[f"{prefix}codewords"])
        super()._load_from_state_dict(state_dict, prefix, *args)


def kmeans_codewords(segments: Tensor, size: int, rng: np.random.Generator) -> Tensor:
    """Line 9: the centroids, by K-means, of features cut into segments [n, d / s]: float64 [size, d / s]."""
    with warnings.catch_warnings():  # scipy warns if there are fewer distinct segments than centroids
        warnings.simplefilter("ignore")
        return torch.from_numpy(kmeans2(segments.double().cpu().numpy(), size, minit="++", rng=rng)[0])


def predictive_entropy(probabilities: Tensor) -> Tensor:
    """Equation 6: class probabilities of T passes [T, N, C] -> the entropy of their mean over passes, in nats [N]."""
    return torch.special.entr(probabilities.mean(0)).sum(-1)  # line 22


def uncertain(entropies: Tensor, gamma: float) -> Tensor:
    """Equation 7: bool [K], true if a client's entropy [K] is above (1 + gamma) times the smallest one."""
    return entropies > (1 + gamma) * entropies.min()  # lines 8, 24


def average_codewords(before: Tensor, codewords: Tensor, sizes: Tensor, allowed: Tensor) -> Tensor:
    """Line 20 for codewords: [V, d / s]. Each one is averaged over the clients that may use it, with weights n_k.

    before     the server's codewords [V, d / s]; a codeword that none of these clients may use does not change
    codewords  the clients' codewords after training [K, V, d / s]
    sizes      n_k [K]
    allowed    bool [K, V], true if client k may use codeword v
    """
    weights = sizes.to(codewords)[:, None] * allowed
    total = weights.sum(0)[:, None]
    return torch.where(total > 0, torch.einsum("kv,kvd->vd", weights, codewords) / total, before)  # line 20


class UEFL(nn.Module):
    """p = f_C(f_D(f_E(x))) (equation 1). f_D is the codebook; with a codebook of size 0, this is FedAvg's model."""

    def __init__(self, features: nn.Module, codebook: ExtensibleCodebook, classifier: nn.Module, token_norm: bool):
        super().__init__()
        self.features, self.codebook, self.classifier = features, codebook, classifier
        self.token_norm = token_norm

    @property
    def members(self) -> list[nn.Module]:
        return [self]

    def encode(self, x: Tensor) -> Tensor:
        """x -> tokens [N, l, d]. A feature map [N, d, h, w] gives h w tokens, a feature vector [N, d] gives one."""
        z = self.features(x)
        z = z.flatten(2).mT if z.dim() == 4 else z.unsqueeze(1)
        return F.layer_norm(z, z.shape[-1:]) if self.token_norm else z

    def classify(self, tokens: Tensor) -> Tensor:
        """tokens [N, l, d] -> logits [N, C]."""
        return self.classifier(tokens.mT)  # the classifier expects channels first


class Ensemble(nn.Module):
    """A deep ensemble (table 9): E separate UEFL models. Their tokens are joined along the batch axis, [E N, l, d]."""

    def __init__(self, members: list[UEFL]):
        super().__init__()
        self.members = nn.ModuleList(members)

    def encode(self, x: Tensor) -> Tensor:
        return torch.cat([member.encode(x) for member in self.members])

    def codebook(self, tokens: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        parts = zip(self.members, tokens.chunk(len(self.members)), strict=True)
        c, losses, index = zip(*(member.codebook(z, allowed) for member, z in parts), strict=True)
        return torch.cat(c), sum(losses), torch.cat(index)

    def classify(self, tokens: Tensor) -> Tensor:
        parts = zip(self.members, tokens.chunk(len(self.members)), strict=True)
        return torch.cat([member.classify(c) for member, c in parts])


# ------------------------------------------------------------------------------------------------- what a client does


def client_update(model, w, batches, optimizer, autocast, allowed):
    """Lines 6 and 12 to 17 for one client: trains `model` from w [P] on. Yields each batch's loss."""
    train.set_weights(model, w)  # line 6
    members = len(model.members)  # 1; more in an ensemble, where the loss is the sum of the members' losses
    for x, y in batches:
        with autocast():
            z = model.encode(x)  # line 12
            c, code_loss, _ = model.codebook(z, allowed)  # lines 13, 15
            logits = model.classify(c)  # line 14
            loss = members * F.cross_entropy(logits, y.repeat(members)) + code_loss  # line 16
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()  # line 17
        yield loss


@torch.no_grad()
def client_evaluation(model, batches, autocast, allowed, passes):
    """Line 22 for one client. Returns its uncertainty e_k and, for the log, accuracy and codebook perplexity.

    e_k: average the class probabilities over `passes` passes with dropout, take the entropy, average over samples. In
    an ensemble, the members take the place of the passes.
    """
    for layer in (layer for layer in model.modules() if isinstance(layer, nn.Dropout)):
        layer.train()
    entropies, hits, usage = [], [], torch.zeros(len(allowed), device=allowed.device)
    for x, y in batches:
        with autocast():
            c, _, index = model.codebook(model.encode(x), allowed)
            p = torch.stack([model.classify(c).float().softmax(1) for _ in range(passes)])
        p = p.view(-1, len(y), p.shape[-1])
        entropies.append(predictive_entropy(p))
        hits.append((p.mean(0).argmax(1) == y).float())
        usage += torch.bincount(index.flatten(), minlength=len(usage))
    perplexity = torch.special.entr(usage / usage.sum()).sum().exp()
    return torch.stack([torch.cat(entropies).mean(), torch.cat(hits).mean(), perplexity])


@torch.no_grad()
def client_codewords(model, batches, autocast, size, kind, rng):
    """Line 9 for one client: `size` new codewords for each member of the model, [members, size, d / s]."""
    width = model.members[0].codebook.codewords.shape[1]
    if kind == "gaussian":
        return torch.from_numpy(rng.standard_normal((len(model.members), size, width)))
    with autocast():
        features = [model.encode(x).reshape(len(model.members), -1, width) for x, _ in batches]
    return torch.stack([kmeans_codewords(z, size, rng) for z in torch.cat(features, 1)])


# ------------------------------------------------------------------------------------------------ what the server does


def build(args, bases: list[nn.Module], dim: int) -> nn.Module:
    """Line 2: the model, with a codebook for tokens of `dim` channels. Several bases make an ensemble."""
    with train.seeded(torch.device("cpu"), args.seed, "codebook"):
        books = [ExtensibleCodebook(args.codebook_size, dim, args.segments, args.commitment, args.beta) for _ in bases]
    parts = zip(copy.deepcopy(bases), books, strict=True)
    members = [UEFL(base.features, book, base.classifier, args.token_norm) for base, book in parts]  # line 2
    return members[0] if len(members) == 1 else Ensemble(members)


def average(model: nn.Module, w: Tensor, updates: Tensor, sizes: Tensor, allowed: Tensor) -> Tensor:
    """The new w [P], from the clients' updates w - theta_k [K, P], sizes [K] and allowed codewords, bool [K, V]."""
    new, start = w - sizes / sizes.sum() @ updates, 0  # line 20
    for name, parameter in model.named_parameters():
        span, start = slice(start, start + parameter.numel()), start + parameter.numel()
        if name.endswith("codebook.codewords") and len(parameter):
            before, after = w[span].view_as(parameter), (w[span] - updates[:, span]).view(-1, *parameter.shape)
            new[span] = average_codewords(before, after, sizes, allowed).flatten()
    return new


@torch.no_grad()
def extend(model: nn.Module, state: dict, clients: Tensor, codewords: Tensor) -> None:
    """Adds the new codewords [n, members, v, d / s] of these clients [n]. Each may be used by its own client only."""
    train.set_weights(model, state["w"])
    for m, member in enumerate(model.members):
        member.codebook.extend(codewords[:, m].flatten(0, 1))  # line 9
    owner = clients.repeat_interleave(codewords.shape[2]).to(codewords.device)
    is_own = torch.arange(len(state["allowed"]), device=codewords.device)[:, None] == owner
    state["allowed"] = torch.cat([state["allowed"], is_own], dim=1)  # line 10
    state["w"] = train.get_weights(model)


COLUMNS = ["iteration", "mA", "mE", "mP", "accuracies", "uncertainties", "codewords"]


def evaluate(args, trainer: train.Trainer, model, state: dict, clients: splits.Clients) -> tuple[Tensor, dict]:
    """Line 22: the uncertainties e_k [K], and this round's measures for metrics.csv."""
    k, tests = clients.participating, clients.test[: clients.participating]
    parts = [*tests, clients.ood] if len(clients.ood) else tests  # OOD: like one more client (item 8)
    allowed = F.pad(state["allowed"], (0, 0, 0, 1), value=True)
    found = trainer.map_clients(
        client_evaluation, model, state["w"], torch.arange(len(parts)), parts, state["round"],
        each={"allowed": allowed}, passes=args.passes,
    ).cpu()  # fmt: skip
    e, accuracies, perplexities = found[:k].T
    sizes = torch.tensor([float(len(test)) for test in tests])
    return e, {
        "id_accuracy": sizes @ accuracies / sizes.sum(), "ood_accuracy": found[k, 1] if len(parts) > k else None,
        "mA": accuracies.mean(), "mE": e.mean(), "mP": perplexities.mean() if args.codebook_size else None,
        "accuracies": accuracies, "uncertainties": e, "codewords": state["allowed"].sum(1),
    }  # fmt: skip


def federate(args, trainer: train.Trainer, model: nn.Module, clients: splits.Clients, log: run.Run) -> dict:
    """Algorithm 1 from line 3 on. Returns the server's state."""
    v, ids, iterations = args.codebook_size, clients.ids, args.iterations if args.codebook_size else 1
    allowed = torch.ones(len(ids), v, dtype=torch.bool, device=trainer.device)
    if args.codebooks == "private":  # each client has its own copy of the codebook
        allowed = torch.block_diag(*allowed[:, None]).bool()
        for codebook in (member.codebook for member in model.members):
            codebook.extend(codebook.codewords.repeat(len(ids) - 1, 1))
    first = allowed.shape[1]
    state = log.restore({
        "w": train.get_weights(model), "iteration": 0, "uncertainty": torch.zeros(len(ids)), "allowed": allowed,
    })  # line 3  # fmt: skip
    for codebook in (member.codebook for member in model.members):  # a resumed run has grown codebooks
        codebook.extend(codebook.codewords.new_zeros(state["allowed"].shape[1] - first, codebook.codewords.shape[1]))
    ends = [args.rounds + i * args.later_rounds for i in range(iterations)]  # line 23: later iterations are shorter

    for iteration in range(state["iteration"], iterations):  # line 4
        for t in log.rounds(state, ends[iteration], ends[-1]):  # line 5
            selected = splits.draw(ids, args.sample, random_at(args.seed, "select", t))
            selected, updates, losses = trainer.local_updates(
                client_update, model, state["w"], selected, clients.train, t, each={"allowed": state["allowed"]}
            )  # lines 6, 7, 19: one row of `updates` per client with a usable upload, theta - theta_k
            sizes, row = clients.sizes[selected].to(updates), {}
            state["w"] = average(model, state["w"], updates, sizes, state["allowed"][selected])  # line 20
            if log.due:
                state["uncertainty"], row = evaluate(args, trainer, model, state, clients)  # line 22
            log.log(losses @ sizes / sizes.sum(), selected, iteration=iteration + 1, **row)

        new = ids[uncertain(state["uncertainty"].cpu(), args.gamma)]  # line 8
        if iteration + 1 == iterations or not len(new):  # line 24
            break
        if args.codebooks == "private":  # all clients get new codewords, and use no older ones of their own
            new, state["allowed"][:, first:] = ids, False
        rng = {k: random_at(args.seed, "codewords", state["round"], k) for k in new.tolist()}
        codewords = trainer.map_clients(
            client_codewords, model, state["w"], new, clients.train, each={"rng": rng}, size=v, kind=args.init
        )  # line 9
        extend(model, state, new, codewords)
        state["iteration"] = iteration + 1
    log.finish(state, model, state["w"])
    return state


# fmt: off
# glyphs: our choice, with silos as in table 13. float32: bfloat16 may cost UEFL a point (results/uefl).
PAPER = {
    "partition": "silos", "rotate": [0, -50, 120], "silos": [3, 3, 3], "codebook_size": 64, "gamma": 0.1,  # section 4
    "rounds": 40, "later_rounds": 20, "model": "resblocks",  # section 4
    "optimizer": "adam", "lr": 1e-4, "batch_size": 1024, "local_epochs": 20,  # the authors' code
    "precision": "float32",
}
# "small" is what --small changes: smaller settings of ours, for two cores without a GPU.
CUT = {"model": "resblocks", "width": 0.0625, "segments": 8, "commitment": 0.1, "lr": 1e-3, "batch_size": 32,
       "local_epochs": 4, "rounds": 5, "later_rounds": 2, "iterations": 3}
SETTINGS = {
    "glyphs": {**PAPER, **CUT, "silos": [3, 1, 1], "silo_size": 500, "lr": 2e-3, "local_epochs": 6, "rounds": 3},
    "mnist": {**PAPER, "codebook_size": 32, "gamma": 0.3},
    **dict.fromkeys(["fmnist", "emnist"], PAPER),
    "gtsrb": {**PAPER, "model": "vgg16"},
    "cifar10": {**PAPER, "model": "vgg16", "gamma": 0.2},
    "cifar100": {**PAPER, "model": "vgg16", "silo_size": 4000, "segments": 4},
    "folder": {**PAPER, "model": "resnet18", "partition": "domain", "rotate": None},
    "small": {
        **{name: {**CUT, "silo_size": 500, "gamma": 0.05} for name in ["mnist", "fmnist", "emnist", "gtsrb"]},
        **{name: {**CUT, "silo_size": 500, "gamma": 0.02} for name in ["cifar10", "cifar100"]},
        "folder": {**CUT, "image_size": 32, "local_epochs": 2},
    },
}


def own_flags(add) -> None:
    def plain(args):
        return args.codebook_size == 0 and "there is no codebook"

    def many(args):
        return args.ensemble > 1 and "the members of an --ensemble take the place of dropout"

    whole, number = flags.at_least(1), flags.at_least(0, float)
    add("--codebook-size", type=flags.at_least(0), default=64,
        help="v, codewords at the start and per extension; 0: FedAvg")
    add("--segments", plain, type=whole, default=1, help="s, parts of a token that each get a codeword")
    add("--gamma", type=number, default=0.1, help="equation 7: with a larger gamma, fewer clients get codewords")
    add("--iterations", plain, type=whole, default=5, help="largest number of iterations; 1: no extension (table 16)")
    add("--later-rounds", plain, type=whole, default=5, help="rounds in each iteration after the first")
    add("--codebooks", plain, choices=["shared", "private"], default="shared",
        help="private: the authors' variant, in which the server never averages codewords")
    add("--init", plain, choices=["kmeans", "gaussian"], default="kmeans", help="how new codewords are initialised")
    add("--commitment", plain, type=number, default=0.25, help="weight of ||sg(c) - z||^2: pulls z to codewords")
    add("--beta", plain, type=number, default=1.0, help="weight of ||c - sg(z)||^2: pulls codewords to z")
    add("--token-norm", action=argparse.BooleanOptionalAction, default=True, help="layer norm after the encoder")
    add("--dropout", many, type=flags.at_least(0, float, 0.99), default=0.1, help="probability of both dropout layers")
    add("--passes", many, type=whole, default=20, help="T, forward passes with dropout, to measure uncertainty")
    add("--ensemble", type=whole, default=1, help="number of models (table 9); 1: no ensemble, use dropout")
    add("--compare", plain, action=argparse.BooleanOptionalAction, default=True,
        help="also train FedAvg, for the same number of rounds")
# fmt: on


def main(argv: list[str] | None = None) -> None:
    args = flags.parse(__doc__, SETTINGS, own_flags, argv)
    args.dropout, args.passes = (args.dropout, args.passes) if args.ensemble == 1 else (0.0, 1)
    data, clients, base, trainer = flags.prepare(args, dropout=args.dropout)  # line 1
    if args.ensemble == 1 and not any(isinstance(layer, nn.Dropout) for layer in base.classifier):
        raise UserError(
            f"--model {args.model} has no dropout, so all passes are equal: choose another, or --ensemble 5"
        )
    bases = [flags.initial_model(args, data, trainer.device, m, dropout=args.dropout) for m in range(args.ensemble)]
    dim = base.features.eval()(trainer.batch(clients.train[0][:1].to(trainer.device))[0]).shape[1]
    if args.codebook_size and dim % args.segments:
        raise UserError(f"--segments {args.segments} does not divide the {dim} channels of the model's tokens")

    runs, folder = {}, None
    for size in [args.codebook_size, 0] if args.codebook_size and args.compare else [args.codebook_size]:
        args.codebook_size, args.segments, name = size, args.segments if size else 1, "UEFL" if size else "FedAvg"
        runs[name] = log = run.Run(args, trainer, COLUMNS, folder / "fedavg" if folder else None, name)
        folder = folder or log.folder
        state = federate(args, trainer, build(args, bases, dim).to(trainer.device), clients, log)
        args.rounds = state["round"]  # FedAvg then trains for as many rounds

    plots.partition(folder / "partition.png", data, clients)
    domains, rows = clients.domains[: clients.participating], []
    plots.uefl_curves(folder / "curves.png", {name: log.rows for name, log in runs.items()})
    if args.codebooks == "shared":  # else all clients get codewords, and the picture has no control
        plots.uncertainties(folder / "uncertainty.png", next(iter(runs.values())).rows, domains, args.gamma)
    kinds = [domain for domain in dict.fromkeys(domains) if domain]
    for name, last in ((name, log.rows[-1]) for name, log in runs.items()):
        of = {kind: [a for a, d in zip(last["accuracies"], domains, strict=True) if d == kind] for kind in kinds}
        ood = [] if last["ood_accuracy"] is None else [last["ood_accuracy"]]
        rows.append([name, last["mA"], last["mE"], last["mP"], *ood, *(sum(a) / len(a) for a in of.values())])
    title = f"{data.name}: {len(domains)} clients, {state['round']} rounds; right columns: accuracy by domain"
    run.table(title, ["", "mA", "mE", "mP", *(["OOD"] if ood else []), *kinds], rows)
    print(
        "means over clients: mA accuracy; mE entropy in nats, lower is more certain; mP how many codewords are in use"
    )
    print(f"metrics, models and pictures are in {folder}")


if __name__ == "__main__":
    run.launch(main)
