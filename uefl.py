"""UEFL: silos on whose data the model is unsure get codewords of their own.

Zhang, Cao and Liu, Uncertainty-Based Extensible Codebook for Discrete Federated Learning in Heterogeneous Data Silos
(arXiv 2402.18888). An encoder turns an image into tokens, each token is replaced by the nearest of a few learned
codewords, and a classifier reads these. Clients share v codewords; whoever stays uncertain gets v more.

    Algorithm 1, counting every line of its listing                      in the code
     1  sample K data silos as clients                                   clients.participating
     2  initialise theta, and a codebook of v codewords, at random       build(), args.codebook_size
     3  e_k = 0                                                          (nobody is extended in the first iteration)
     4  repeat                                                           iteration
     5      for each round t = 1, 2, ...
     6          broadcast theta                                          trainer.local_updates
     7          for all K clients in parallel
     8              if e_k > (1 + gamma) min_j e_j                       uncertain()
     9                  K-means-initialise another v codewords           ExtensibleCodebook.extend
    10                  v_k <- v_k + v                                   state["allowed"], a row a client
    12              z = f_E(x)                                           UEFL.encode
    13              c = the nearest of v_k codewords (equation 4)        ExtensibleCodebook.forward
    14              p = f_C(c)                                           UEFL.classify
    15              L_code = ||sg(c) - z||^2 + beta ||c - sg(z)||^2      ExtensibleCodebook.forward
    16              L_task = cross-entropy                               uefl_loss
    17              theta_k <- theta_k - eta grad (L_code + L_task)      args.lr
    19          clients return theta_k                                   updates
    20          theta <- sum of n_k / n theta_k                          average()
    22      e_k = -sum p log p, the uncertainty (equation 6)             assess(), predictive_entropy()
    23      reduce the number of rounds                                  args.rounds, then args.later_rounds
    24  until e_k <= (1 + gamma) min_j e_j for all k (equation 7)        or after args.iterations iterations

Where the paper is silent or unclear
 1. Lines 8-10 stand inside the loop over rounds; sections 3.1 and 3.2 extend once an iteration, at its start. So here.
 2. New codewords belong to one client each (section 3.1: "exclusively accessible to the corresponding heterogeneous
    clients"). v_k grows by v (line 10), though tables 11, 14 and 16 count as if it doubled.
 3. Line 20 for codewords (section 3.2): each is averaged over the clients allowed to use it, by n_k among them.
 4. e_k is the mean entropy over the client's held-out samples; their labels are not looked at. These samples are its
    share of the standard test set where there is one. mA and mP are taken with dropout off; mP is exp of the entropy
    of how often codewords are used, over all segments.
 5. Which Gaussian initialises the codewords: the standard one. The tokens of a network with ReLUs, however, point all
    into much the same direction, and a few codewords get all of them. So the encoder ends in a layer norm
    without parameters, which gives tokens the length of such codewords; --no-token-norm leaves it out. What it does
    is measured in results/uefl; FedAvg does not have it.
 6. beta = 1 on line 15's second term, and 0.25 (--commitment) on its first, as in the authors' code; both are means.
 7. Dropout: two layers (section 3.4), here one before each linear layer of the classifier; the encoder is therefore
    the same in all passes and runs once.
 8. Where a client that never trained picks its codewords (leave-one-domain-out): from all of the server's;
    --unseen-codewords shared keeps it to the shared ones. One that joins would get its own by lines 8-10.
 9. Optimizer (Adam, where line 17 has gradient descent), learning rate, batch size and local epochs are the authors'
    code's. Rounds: 40, then 20 (section 4 and appendix H, on CIFAR-10; the authors' code has 20, then 10).
10. All clients train in each round; --sample takes fewer.
11. Images are scaled to -1..1. The paper's VGG16 and ResNet-18 are pretrained: add --pretrained to compare with it.

Where the authors' code differs: it keeps codebooks per silo and averages none, averages the rest by 1/K, compares with
the mean uncertainty unless told otherwise, and its threshold stays what it was after iteration 1; its second dropout
acts on the logits, and its evaluation turns dropout off, so that its 20 passes are one.

    python uefl.py
    python uefl.py --dataset cifar10 --pretrained
    python uefl.py --dataset mnist --silos 3 1 1                                                          (table 13)
    python uefl.py --dataset mnist --rotate 0 15 30 45 60 75 --test-domain 75                              (table 2)
    python uefl.py --dataset fmnist --partition dirichlet --clients 10 --participating 10 --sample 10     (table 12)
"""

import argparse
import copy
from functools import partial

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from scipy.cluster.vq import kmeans2
from torch import Tensor

from common import UserError, flags, plots, random_at, run, splits, train
from common.splits import Clients


class ExtensibleCodebook(nn.Module):
    """Replaces each of a token's segments by the nearest codeword it may use (sections 3.2 and 3.3).

    size        v, codewords to begin with; with 0 tokens pass as they are
    dim         d, channels of a token, divisible by segments
    segments    s, parts into which a token is cut, each with its own codeword from the same codebook
    commitment  weight of ||sg(c) - z||^2, which draws tokens to codewords
    beta        weight of ||c - sg(z)||^2, which draws codewords to tokens

    codewords   [V, d / s]
    allowed     bool [V], those that the present client may use

    Raises ValueError where segments does not divide dim.
    """

    def __init__(self, size: int, dim: int, segments: int = 1, commitment: float = 0.25, beta: float = 1.0):
        super().__init__()
        if dim % segments:
            raise ValueError(f"tokens of {dim} channels cannot be cut into {segments} segments")
        self.segments, self.commitment, self.beta = segments, commitment, beta
        self.codewords = nn.Parameter(torch.randn(size, dim // segments))
        self.register_buffer("allowed", torch.ones(size, dtype=torch.bool))

    def use(self, allowed: Tensor) -> None:
        """From now on the codebook serves the client that may use the codewords `allowed`, bool [V]."""
        self.allowed.copy_(allowed)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """tokens [N, l, d] -> codewords in their place [N, l, d], L_code (equation 5), their indices [N, l, s].

        The gradient with respect to the output goes to the tokens unchanged (straight through).
        """
        if not len(self.codewords):
            return tokens, tokens.new_zeros(()), tokens.new_zeros(0, dtype=torch.long)
        with torch.autocast(tokens.device.type, enabled=False):
            z = tokens.float().reshape(-1, self.codewords.shape[1])
            with torch.no_grad():  # |z - c|^2 = |z|^2 - 2 z.c + |c|^2, of which the first does not matter
                distance = torch.addmm((self.codewords**2).sum(1), z, self.codewords.T, alpha=-2)
                index = distance.masked_fill(~self.allowed, torch.inf).argmin(1)
            c = self.codewords[index]
            loss = self.commitment * F.mse_loss(z, c.detach()) + self.beta * F.mse_loss(c, z.detach())
            straight_through = z + (c - z).detach()
        return straight_through.view(tokens.shape), loss, index.view(*tokens.shape[:-1], self.segments)

    @torch.no_grad()
    def extend(self, size: int, tokens: Tensor | None, rng: np.random.Generator) -> None:
        """Adds `size` codewords: the centroids of the tokens' segments by K-means, or Gaussian ones without tokens."""
        if tokens is None:
            new = torch.from_numpy(rng.standard_normal((size, self.codewords.shape[1])))
        else:
            segments = tokens.reshape(-1, self.codewords.shape[1]).double().cpu().numpy()
            new = torch.from_numpy(kmeans2(segments, size, minit="++", rng=rng)[0])
        self.codewords = nn.Parameter(torch.cat([self.codewords, new.to(self.codewords)]))
        self.allowed = torch.cat([self.allowed, self.allowed.new_ones(size)])


def predictive_entropy(probabilities: Tensor) -> Tensor:
    """Class probabilities from T passes [T, N, C] -> entropy of their mean over passes, in nats [N] (equation 6)."""
    mean = probabilities.mean(0)
    return -torch.xlogy(mean, mean).sum(-1)


def threshold(entropies: Tensor, gamma: float, reference: str = "min") -> Tensor:
    """(1 + gamma) times the least of the clients' entropies [K], or their mean: a scalar (equation 7)."""
    return (1 + gamma) * (entropies.mean() if reference == "mean" else entropies.min())


def uncertain(entropies: Tensor, gamma: float, reference: str = "min") -> Tensor:
    """Which clients' entropies [K] are over the threshold: bool [K]."""
    return entropies > threshold(entropies, gamma, reference)


def perplexity(index: Tensor, codewords: int) -> Tensor:
    """exp of the entropy of how often each codeword is used, a scalar between 1 and the number of codewords."""
    usage = torch.bincount(index.flatten(), minlength=codewords) / index.numel()
    return torch.exp(-torch.xlogy(usage, usage).sum())


class UEFL(nn.Module):
    """p = f_C(f_D(f_E(x))) (equation 1), with f_D the codebook; one of size 0 makes it FedAvg's model."""

    def __init__(self, features: nn.Module, codebook: ExtensibleCodebook, classifier: nn.Module, token_norm: bool):
        super().__init__()
        self.features, self.codebook, self.classifier = features, codebook, classifier
        self.token_norm = token_norm

    def encode(self, x: Tensor) -> Tensor:
        """x -> tokens [N, l, d]: one for each place of a feature map [N, d, h, w], one for a feature vector [N, d]."""
        z = self.features(x)
        z = z.flatten(2).mT if z.dim() == 4 else z.unsqueeze(1)
        return F.layer_norm(z, z.shape[-1:]) if self.token_norm else z

    def classify(self, tokens: Tensor) -> Tensor:
        return self.classifier(tokens.mT)  # [N, d, l], which flattens like the map that the classifier was made for

    def forward(self, x: Tensor) -> Tensor:
        return self.classify(self.codebook(self.encode(x))[0])


def uefl_loss(model: UEFL, x: Tensor, y: Tensor) -> Tensor:
    """L_task + L_code (section 3.3)."""
    c, code_loss, _ = model.codebook(model.encode(x))
    return F.cross_entropy(model.classify(c), y) + code_loss


def average(model: UEFL, w: Tensor, updates: Tensor, sizes: Tensor, allowed: Tensor) -> Tensor:
    """Line 20: w [P] after the clients' updates [K, P], weighted by their sizes [K]; a codeword only moves by the
    updates of the clients that may use it, `allowed` bool [K, V]."""
    alpha = sizes / sizes.sum()
    step = alpha @ updates
    share = alpha[:, None] * allowed
    share = share / share.sum(0).clamp(min=1e-12)  # no client here may use the codeword: it stays where it is
    at = train.span(model, "codebook.codewords")
    of_codewords = updates[:, at].view(*allowed.shape, model.codebook.codewords.shape[1])
    step[at] = torch.einsum("kv,kvd->vd", share, of_codewords).flatten()
    return w - step


def build(args, trainer: train.Trainer, bases: list[nn.Module], samples: Tensor) -> tuple[UEFL, list[Tensor]]:
    """Line 2: a model with a codebook in its middle and w; of several bases (deep ensembles, appendix E) one w each.

    samples  some positions in the pool
    """
    one = trainer.batch(samples[:1].to(trainer.device))
    dim = bases[0].features.eval()(one).shape[1]
    if dim % args.segments:
        raise UserError(f"--segments {args.segments} does not divide the {dim} channels of the model's tokens")
    models = []
    for m, base in enumerate(bases):
        with train.seeded(torch.device("cpu"), args.seed, "codebook", m):
            codebook = ExtensibleCodebook(args.codebook_size, dim, args.segments, args.commitment, args.beta)
        norm = args.codebook_size > 0 and not args.no_token_norm
        models.append(UEFL(copy.deepcopy(base.features), codebook, copy.deepcopy(base.classifier), norm))
    return models[0].to(trainer.device), [train.get_weights(model.to(trainer.device)) for model in models]


COLUMNS = ["iteration", "mA", "mE", "mP", "accuracies", "uncertainties", "codewords"]


def assess(args, trainer: train.Trainer, model: UEFL, state: dict, clients: Clients) -> dict:
    """A row of metrics.csv: line 22, each client's uncertainty, and the paper's means over clients mA, mE and mP.

    The uncertainty is that of args.passes passes with dropout on, or, of a deep ensemble, of one pass a member with
    dropout off. Accuracy and perplexity: dropout off, of an ensemble the last member.
    """
    hits, entropies, perplexities = [], [], []
    for k in clients.participating.tolist():
        model.codebook.use(state["allowed"][k])
        passes = []
        for w in state["w"]:
            tokens = trainer.predict(model, w, clients.test[k], model.encode)
            with torch.no_grad(), train.seeded(trainer.device, args.seed, "passes", state["round"], k):
                c, _, index = model.codebook(tokens)
                certain = model.classify(c).softmax(1)
                model.classifier.train()
                if args.ensemble == 1:
                    passes += [model.classify(c).softmax(1) for _ in range(args.passes)]
                else:
                    passes.append(certain)
        hits.append((certain.argmax(1) == trainer.y[clients.test[k]]).float())
        entropies.append(predictive_entropy(torch.stack(passes)).mean().item())
        perplexities.append(perplexity(index, len(model.codebook.codewords)).item())
    model.codebook.use(state["allowed"].all(0) | (args.unseen_codewords == "all"))  # item 8: who has none of its own
    ood = trainer.evaluate(model, state["w"][-1], [clients.ood])[0].item() if len(clients.ood) else None
    accuracies = [h.mean().item() for h in hits]
    mean_perplexity = np.mean(perplexities) if args.codebook_size else None
    return {
        "id_accuracy": torch.cat(hits).mean().item(), "ood_accuracy": ood, "iteration": state["iteration"] + 1,
        "mA": np.mean(accuracies), "mE": np.mean(entropies), "mP": mean_perplexity, "accuracies": accuracies,
        "uncertainties": entropies, "codewords": state["allowed"][clients.participating].sum(1),
    }  # fmt: skip


def extend(args, trainer: train.Trainer, model: UEFL, state: dict, clients: Clients, k: int) -> None:
    """Lines 9-10: client k, and nobody else, gets v more codewords (in each member of an ensemble)."""
    for m, w in enumerate(state["w"]):
        member = copy.deepcopy(model)
        train.set_weights(member, w)
        tokens = trainer.predict(member, w, clients.train[k], member.encode) if args.init == "kmeans" else None
        member.codebook.extend(args.codebook_size, tokens, random_at(args.seed, "codewords", state["round"], k, m))
        state["w"][m] = train.get_weights(member)
    model.codebook = member.codebook  # every w has this size from now on
    new = torch.zeros(len(state["allowed"]), args.codebook_size, dtype=torch.bool, device=trainer.device)
    new[k] = True
    state["allowed"] = torch.cat([state["allowed"], new], dim=1)


def federate(args, trainer: train.Trainer, model: UEFL, w: list[Tensor], clients: Clients, log: run.Run) -> dict:
    """Algorithm 1 from line 3 on. Returns what the server remembers at the end, with the weights in state["w"]."""
    everyone, device, iterations = clients.participating, trainer.device, args.iterations if args.codebook_size else 1
    state = log.state or {
        "round": 0, "iteration": 0, "w": w, "uncertainties": torch.zeros(len(everyone)),
        "allowed": torch.ones(len(clients.train), args.codebook_size, dtype=torch.bool, device=device),
    }  # line 3  # fmt: skip
    if log.state:  # a resumed run's codebook has grown; its codewords are in state["w"]
        model.codebook.extend(state["allowed"].shape[1] - args.codebook_size, None, random_at(args.seed, "any"))
    for iteration in range(state["iteration"], iterations):  # line 4
        if iteration > state["iteration"]:
            is_uncertain = uncertain(state["uncertainties"], args.gamma, args.reference).cpu()
            for k in everyone[is_uncertain].tolist():  # line 8
                extend(args, trainer, model, state, clients, k)
        state["iteration"] = iteration
        until, most = (args.rounds + i * args.later_rounds for i in (iteration, iterations - 1))  # line 23
        for t in log.rounds(state, until, most):  # line 5
            selected = splits.draw(everyone, args.sample, random_at(args.seed, "select", t))
            for m, of_member in enumerate(state["w"]):
                back, updates, losses = trainer.local_updates(
                    model, of_member, selected, clients.train, t, uefl_loss,
                    per_client=lambda model, k: model.codebook.use(state["allowed"][k]),
                    progress=lambda share: log.tick(share / len(state["w"])),
                )  # lines 6-19  # fmt: skip
                sizes = clients.sizes[back].to(device)
                state["w"][m] = average(model, of_member, updates, sizes, state["allowed"][back])  # line 20
            state["round"] = t
            found = assess(args, trainer, model, state, clients)
            state["uncertainties"] = torch.tensor(found["uncertainties"])  # line 22
            log.log(t, losses @ sizes / sizes.sum(), back, **found)
        if not uncertain(state["uncertainties"], args.gamma, args.reference).any():  # line 24
            break
    log.finish(state, model, state["w"][-1])
    return state


# Section 4 of the paper, first two lines; the third is the authors' code's. glyphs: ours, with silos as in table 13.
# Not bfloat16, with which UEFL on glyphs ended a point lower (results/uefl).
PAPER = {
    "partition": "silos", "rotate": [0, -50, 120], "silos": [3, 3, 3], "codebook_size": 64, "gamma": 0.1,
    "rounds": 40, "later_rounds": 20, "model": "resblocks",
    "optimizer": "adam", "lr": 1e-4, "batch_size": 1024, "local_epochs": 20, "precision": "float32",
}  # fmt: skip
SETTINGS = {
    "glyphs": {**PAPER, "silos": [3, 1, 1], "silo_size": 500, "width": 0.0625, "segments": 8, "commitment": 0.1,
               "lr": 2e-3, "batch_size": 32, "local_epochs": 6, "rounds": 3, "later_rounds": 2, "iterations": 3},
    "mnist": {**PAPER, "codebook_size": 32, "gamma": 0.3},
    "fmnist": PAPER,
    "emnist": PAPER,
    "gtsrb": {**PAPER, "model": "vgg16"},
    "cifar10": {**PAPER, "model": "vgg16", "gamma": 0.2},
    "cifar100": {**PAPER, "model": "vgg16", "silo_size": 4000, "segments": 4},
    "folder": {**PAPER, "model": "resnet18", "partition": "domain", "rotate": None},
}  # fmt: skip


def own_flags(add) -> None:
    whole = flags.at_least(1)
    add("--codebook-size", type=flags.at_least(0), default=64, help="v, codewords to begin with and to add; 0: FedAvg")
    add("--segments", type=whole, default=1, help="s, parts of a token that each get a codeword")
    add("--gamma", type=flags.at_least(0, float), default=0.1, help="gamma of equation 7; larger extends less")
    add("--reference", choices=["min", "mean"], default="min", help="equation 7: of the uncertainties, least or mean")
    add("--iterations", type=whole, default=5, help="at most; with 1 nobody is extended (static codebook, table 16)")
    add("--later-rounds", type=whole, default=5, help="rounds of each iteration after the first")
    add("--init", choices=["kmeans", "gaussian"], default="kmeans", help="how new codewords are initialised")
    add("--commitment", type=flags.at_least(0, float), default=0.25, help="weight of ||sg(c) - z||^2")
    add("--beta", type=flags.at_least(0, float), default=1.0, help="weight of ||c - sg(z)||^2")
    add("--no-token-norm", action="store_true", help="no layer norm before the codebook")
    add("--dropout", type=flags.at_least(0, float, 0.99), default=0.1, help="probability of both dropout layers")
    add("--passes", type=whole, default=20, help="passes with dropout on")
    add("--ensemble", type=whole, default=1, help="above 1: deep ensemble of so many models instead of dropout")
    add("--unseen-codewords", choices=["all", "shared"], default="all", help="those of a domain that never trained")
    add("--compare", action=argparse.BooleanOptionalAction, default=True, help="train FedAvg for as many rounds, too")


def without_effect(args) -> dict:
    plain, once = args.codebook_size == 0, args.iterations == 1
    of_codebook = plain and "there is no codebook"
    return {
        **dict.fromkeys(["segments", "init", "commitment", "beta", "no-token-norm", "unseen-codewords"], of_codebook),
        "later-rounds": (plain or once) and "there is one iteration",
        "passes": args.ensemble > 1 and "--ensemble takes a pass a member",
    }


def main(argv: list[str] | None = None) -> None:
    args = flags.parse(__doc__, SETTINGS, own_flags, argv, without_effect)
    data, clients, base, trainer = flags.prepare(args, dropout=args.dropout)
    if args.ensemble == 1 and not any(isinstance(layer, nn.Dropout) for layer in base.classifier):
        raise UserError(
            f"--model {args.model} has no dropout, without which all passes agree: choose another, or --ensemble 5"
        )
    more = [flags.initial_model(args, data, trainer.device, m, dropout=args.dropout) for m in range(1, args.ensemble)]
    model, w = build(args, trainer, [base, *more], clients.train[0])  # line 2
    log = run.Run(args, COLUMNS, trainer, name="UEFL" if args.codebook_size else "FedAvg")
    plots.partition(log.folder / "partition.png", data, clients)
    state = federate(args, trainer, model, w, clients, log)
    runs = {"UEFL" if args.codebook_size else "FedAvg": log}
    if args.codebook_size and args.compare:
        plain = argparse.Namespace(**{**vars(args), "codebook_size": 0, "rounds": state["round"]})
        runs["FedAvg"] = run.Run(plain, COLUMNS, trainer, log.folder / "fedavg", "FedAvg")
        federate(plain, trainer, *build(plain, trainer, [base, *more], clients.train[0]), clients, runs["FedAvg"])

    domain_of = [clients.domains[k] for k in clients.participating]
    plots.learning_curves(log.folder / "curves.png", {name: r.rows for name, r in runs.items()})
    limit = partial(threshold, gamma=args.gamma, reference=args.reference)
    plots.uncertainties(log.folder / "uncertainty.png", log.rows, domain_of, limit)
    if args.codebook_size:
        codewords = model.codebook.codewords.detach()
        tests = [clients.test[k] for k in clients.participating]
        tokens = [trainer.predict(model, state["w"][-1], test, model.encode) for test in tests]
        tokens = [z.reshape(-1, codewords.shape[1]) for z in tokens]
        allowed = state["allowed"][clients.participating]
        plots.codebook(log.folder / "codebook.png", tokens, domain_of, codewords, allowed)

    domains = [domain for domain in dict.fromkeys(domain_of) if domain]
    rows = []
    for name, r in runs.items():
        last = r.rows[-1]
        measures = [float(last[column]) if last[column] else None for column in ("mA", "mE", "mP")]
        accuracy = list(zip(domain_of, map(float, last["accuracies"].split()), strict=True))
        rows.append([name, *measures, *(np.mean([a for n, a in accuracy if n == d]) for d in domains)])
    title = f"{data.name}: {len(domain_of)} clients, {state['round']} rounds"
    title += "; accuracy by domain on the right" if domains else ""
    run.table(title, ["", "mA", "mE", "mP", *domains], rows)
    print("mA: mean accuracy, mE: mean entropy in nats, mP: mean codebook perplexity, over clients")
    if args.codebook_size and state["iteration"] + 1 < args.iterations:
        print(f"stopped after iteration {state['iteration'] + 1}: no client is uncertain any more (line 24)")
    print(f"metrics, models and pictures are in {log.folder}")


if __name__ == "__main__":
    run.launch(main)
