"""UEFL: if the model is uncertain about a client's data, this client gets codewords of its own.

Zhang, Cao and Liu, Uncertainty-Based Extensible Codebook for Discrete Federated Learning in
Heterogeneous Data Silos (arXiv 2402.18888). An encoder f_E turns an image into tokens, the codebook
replaces each token by its nearest codeword, and a classifier f_C reads the codewords. A silo is a
client, and sg(a) means that no gradient flows through a.

    Algorithm 1, counting from line 1 of its listing            in the code
     1  sample K data silos as clients                          build
     2  initialise theta, and a codebook of v codewords, at random  build, federate
     3  e_k = 0                                                 federate
     4  repeat                                                  federate
     5      for each round t = 1, 2, ...                        federate
     6          broadcast theta                                 federate, client_update
     7          for all K clients in parallel                   federate, trainer.train
     8              if e_k > (1 + gamma) min_j e_j              federate, uncertain
     9                  K-means-initialise another v codewords  client_codewords, federate
    10                  v_k <- v_k + v                          federate, the matrix `allowed`
    12              z = f_E(x)                                  client_update, UEFL
    13              c = the nearest of v_k codewords (equation 4)  client_update, ExtensibleCodebook
    14              p = f_C(c)                                  client_update, UEFL
    15              L_code = ||sg(c) - z||^2 + beta ||c - sg(z)||^2  ExtensibleCodebook
    16              L_task = cross-entropy                      client_update
    17              theta_k <- theta_k - eta grad (L_code + L_task)  client_update
    19          clients return theta_k                          federate, trainer.train
    20          theta <- sum of n_k / n theta_k                 average, average_codewords
    22      e_k = -sum p log p, the uncertainty (equation 6)    client_evaluation, evaluate
    23      reduce the number of rounds                         federate
    24  until e_k <= (1 + gamma) min_j e_j for all k (equation 7)  federate

Lines 11, 18 and 21 only end a branch or a loop.

Where the paper is silent or unclear
1. In the listing, lines 8 to 10 stand in the loop over rounds, while sections 3.1 and 3.2 add
   codewords once per iteration. We follow the sections: an iteration (lines 4 to 24) begins with
   new codewords for the clients that were uncertain at the end of the last one, and there are at
   most --iterations. All silos train in each round. With another --partition some clients do, and
   line 7 needs --sample as large as --participating.
2. New codewords belong to one client (section 3.1: "exclusively accessible to the corresponding
   heterogeneous clients"). Line 10 adds v, while tables 11, 14 and 16 double the codebook; we add.
   K-means (k-means++, ten steps) runs on all of the client's training tokens. For a domain that no
   client has (--test-domain), all codewords are allowed.
3. Line 20: section 3.2 averages a codeword "across the clients that utilize" it. We take all that
   may use it, by n_k.
4. Line 22 lacks the minus sign of equation 6. e_k is the mean, over the client's held-out samples,
   of the entropy of the mean probabilities of all passes. For a silo, these samples come from the
   test set if there is one; e_k needs no labels. mA, mE and mP are means over clients of accuracy
   (of the mean probabilities of all passes), e_k, and perplexity, exp(entropy) of how often each
   codeword is used.
5. Codewords start from a Gaussian, ours a standard one. Tokens after ReLUs point in similar
   directions and would use few of them, so our layer norm without parameters follows the encoder,
   in FedAvg, too (--no-token-norm).
6. Line 17: as in VQ-VAE, the task's gradient for c is handed on to z, past the choice of the
   nearest codeword, so the codewords learn from L_code alone. Line 15: the weights --commitment
   0.25 and --beta 1, and means over all numbers, come from the authors' code.
7. The two dropout layers stand before the classifier's linear layers, so the encoder runs once for
   all passes.
8. Adam, new in each round, its learning rate, batch size and local epochs come from the authors'
   code. The 40 rounds of the first iteration stand in appendix H alone; later ones have 20 (section
   4; in our example on glyphs all have 6). In the paper VGG16 and ResNet-18 are pretrained, here
   with --pretrained only. VGG16 has the batch norm that table 11's count implies. The server
   averages the statistics of batch norm, also those of our `resblocks`.

Where the authors' code differs
- The server never averages codewords, and at each extension all clients get new ones, which replace
  their earlier additions. So the model is personalised, and a fair baseline is another personalised
  model, not FedAvg.
- Other parameters have equal weights 1/K. The threshold is computed once, after iteration 1, from
  the mean uncertainty.
- The second dropout comes after the last layer. Dropout is off in the evaluation, so all 20 passes
  are equal.

In docs/variations/: those private codebooks, and deep ensembles instead of dropout (table 9).

    python uefl.py
    python uefl.py --dataset mnist --silos 3 1 1          (table 13, which does not name its data)
    python uefl.py --dataset cifar10 --pretrained                                       (table 1)
    python uefl.py --dataset mnist --rotate 0 15 30 45 60 75 --test-domain 75 \\
        --model resnet18 --pretrained                                                   (table 2)
    python uefl.py --dataset fmnist --partition dirichlet --clients 10 --participating 10 \\
        --sample 10                                                                    (table 12)
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
        self.codewords = nn.Parameter(torch.randn(size, dim // segments))

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
        if not (allowed.dtype == torch.bool and allowed.shape == (v,) and allowed.any()):
            raise ValueError(f"allowed must be bool [{v}] with at least one True")
        with torch.autocast(tokens.device.type, enabled=False):
            z = tokens.to(self.codewords.dtype).reshape(-1, self.codewords.shape[1])
            with torch.no_grad():  # |z - c|^2 = |z|^2 - 2 z.c + |c|^2, without the first term
                usable = torch.nonzero(allowed).flatten()
                centre = z.mean(0)  # the new origin, so that large numbers do not cancel
                words = self.codewords[usable] - centre
                distances = torch.addmm((words**2).sum(1), z - centre, words.T, alpha=-2)
                index = usable[distances.argmin(1)]  # line 13, equation 4
            c = self.codewords[index]
            loss = self.commitment * F.mse_loss(z, c.detach())  # line 15: z comes to c
            loss = loss + self.beta * F.mse_loss(c, z.detach())  # line 15: c comes to z
            straight_through = z + (c - z).detach()
        index = index.view(*tokens.shape[:-1], self.segments)
        return straight_through.view(tokens.shape), loss, index

    @torch.no_grad()
    def extend(self, codewords: Tensor) -> None:
        """Adds codewords [v, d / s]. An optimizer like Adam must be made anew afterwards."""
        self.codewords.data = torch.cat([self.codewords, codewords.to(self.codewords)])


def predictive_entropy(probabilities: Tensor) -> Tensor:
    """Equation 6: probabilities of T passes [T, N, C] -> the entropy of their mean, in nats [N]."""
    if probabilities.dim() != 3:
        raise ValueError(
            f"probabilities must be [passes, samples, classes], not {tuple(probabilities.shape)}"
        )
    return torch.special.entr(probabilities.mean(0)).sum(-1)  # line 22


def uncertain(entropies: Tensor, gamma: float) -> Tensor:
    """Equation 7: is a client's entropy above (1 + gamma) times the smallest? [K] -> bool [K].

    For a client whose entropy is NaN the answer is no.
    """
    return entropies > (1 + gamma) * entropies.nan_to_num(torch.inf).min()  # lines 8, 24


def average_codewords(before: Tensor, codewords: Tensor, sizes: Tensor, allowed: Tensor) -> Tensor:
    """Line 20 for codewords [V, d / s]: each is averaged over the clients that may use it, by n_k.

    before     the server's codewords [V, d / s], which stay as they are if no client may use them
    codewords  the clients' codewords after training [K, V, d / s]
    sizes      n_k, float32 [K]
    allowed    bool [K, V], true if client k may use codeword v
    """
    codewords = torch.where(allowed[:, :, None], codewords, 0)  # 0 times NaN would be NaN
    weights = sizes[:, None] * allowed
    total = weights.sum(0)[:, None]
    mean = torch.einsum("kv,kvd->vd", weights, codewords.to(weights)) / total
    return torch.where(total > 0, mean.to(before), before)  # line 20


class UEFL(nn.Module):
    """Encoder, codebook and classifier, without a codebook FedAvg's. `token_norm` is ours."""

    def __init__(
        self,
        features: nn.Module,
        codebook: ExtensibleCodebook,
        classifier: nn.Module,
        token_norm: bool,
    ):
        super().__init__()
        self.codebook = codebook  # the first attribute, so that theta begins with the codewords
        self.features, self.classifier, self.token_norm = features, classifier, token_norm

    def encode(self, x: Tensor) -> Tensor:
        """x -> tokens [N, l, d]: h w of them from a feature map [N, d, h, w], one from a vector."""
        z = self.features(x)
        z = z.flatten(2).mT if z.dim() == 4 else z.unsqueeze(1)
        return F.layer_norm(z, z.shape[-1:]) if self.token_norm else z

    def forward(self, x: Tensor, allowed: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """p = f_C(f_D(f_E(x))) (equation 1): x -> logits [N, C] and L_code."""
        z = self.encode(x)  # line 12
        c, code_loss, _ = self.codebook(z, allowed)  # lines 13, 15
        return self.classifier(c.mT), code_loss  # line 14; the classifier expects channels first


def client_update(model, theta, batches, optimizer, autocast, allowed):
    """Lines 6 and 12 to 17 for one client: trains `model` from theta [P] on. -> the mean loss."""
    train.set_weights(model, theta)  # line 6
    total, samples = 0.0, 0
    for x, y in batches:
        with autocast():
            logits, code_loss = model(x, allowed)  # lines 12 to 15
            task_loss = F.cross_entropy(logits, y)  # line 16
            loss = code_loss + task_loss
        optimizer.zero_grad()
        loss.backward()  # line 17
        optimizer.step()  # line 17
        total += len(y) * loss.detach()
        samples += len(y)
    return total / samples


def average(
    codebook: ExtensibleCodebook, theta: Tensor, thetas: Tensor, sizes: Tensor, allowed: Tensor
) -> Tensor:
    """Line 20: theta [P], the clients' thetas [K, P], n_k [K], allowed [K, V] -> new theta."""
    v, d = codebook.codewords.shape
    cut = v * d  # theta begins with the codewords
    before, after = theta[:cut].view(v, d), thetas[:, :cut].unflatten(1, (v, d))
    words = average_codewords(before, after, sizes, allowed)  # line 20
    alpha = sizes / sizes.sum()
    rest = alpha @ thetas[:, cut:]  # line 20
    return torch.cat([words.flatten(), rest])


@torch.no_grad()
def client_codewords(model, batches, autocast, size, rng):
    """Line 9 for one client: the K-means centroids of its segments, [size, d / s] as a vector."""
    width = model.codebook.codewords.shape[1]
    segments = []
    for x, _ in batches:
        with autocast():
            segments.append(model.encode(x).reshape(-1, width))
    segments = torch.cat(segments)
    with warnings.catch_warnings(action="ignore"):  # if segments are equal, codewords may be equal
        centroids, _ = kmeans2(segments.double().cpu().numpy(), size, minit="++", rng=rng)
    return torch.from_numpy(centroids).to(segments.device, torch.float32).flatten()


@torch.no_grad()
def client_evaluation(model, batches, autocast, passes, allowed=None):
    """Line 22 for one client: its uncertainty e_k, and for the log accuracy and perplexity, [3]."""
    for layer in model.modules():
        if isinstance(layer, nn.Dropout):
            layer.train()
    entropies, hits, words = [], [], []
    for x, y in batches:
        with autocast():
            c, _, index = model.codebook(model.encode(x), allowed)
            logits = torch.stack([model.classifier(c.mT) for _ in range(passes)])
        p = logits.float().softmax(2)  # [passes, N, C]
        entropies.append(predictive_entropy(p))  # line 22
        hits.append(p.mean(0).argmax(1) == y)
        words.append(index.flatten())
    usage = torch.bincount(torch.cat(words)).float()
    perplexity = torch.special.entr(usage / usage.sum()).sum().exp()
    e, accuracy = torch.cat(entropies).mean(), torch.cat(hits).float().mean()
    return torch.stack([e, accuracy, perplexity])


def evaluate(args, clients, trainer, model, theta: Tensor, allowed: Tensor, t: int) -> dict:
    """Line 22: the uncertainties e_k, accuracies and so on, by column of metrics.csv."""
    options = {"per_client": {"allowed": allowed}, "passes": args.passes}
    measured = trainer.map(client_evaluation, model, theta, clients.ids, clients.test, t, **options)
    e, accuracies, perplexities = measured.T.cpu()
    sizes = torch.tensor([len(clients.test[k]) for k in clients.ids]).float()
    measures = {"id_accuracy": sizes @ accuracies / sizes.sum()}
    if "ood" in clients.tests:  # in pieces, and with all codewords
        pieces = clients.tests["ood"].split(1000)
        ids = torch.arange(len(pieces))
        n = torch.tensor([len(piece) for piece in pieces]).float()
        options = {"passes": args.passes}
        measured = trainer.map(client_evaluation, model, theta, ids, pieces, t, **options)
        measures["ood_accuracy"] = n @ measured[:, 1].cpu() / n.sum()
    measures |= {"mA": accuracies.mean(), "mE": e.mean()}
    if args.codebook_size:
        measures["mP"] = perplexities.mean()
    codewords = allowed.sum(1).cpu()
    turned = torch.tensor([clients.groups[k] != clients.groups[0] for k in clients.ids])
    if args.rotate and turned.any():
        measures["turned_accuracy"] = accuracies[turned].mean()
        measures["turned_extended"] = (codewords[turned] > args.codebook_size).float().mean()
    return {**measures, "accuracies": accuracies, "uncertainties": e, "codewords": codewords}


def build(args):
    """Lines 1 and 2: clients, model, trainer and run."""
    clients, base, trainer, run = prepare(args, dropout=args.dropout)
    if not any(isinstance(layer, nn.Dropout) for layer in base.classifier):
        raise UserError(f"--model {args.model} has no dropout, so passes are equal: choose another")
    example, _ = trainer.batch(clients.train[0][:1].to(trainer.device))
    dim = base.features.eval()(example).shape[1]
    segments = args.segments if args.codebook_size else 1
    if dim % segments:
        raise UserError(f"--segments {segments} does not divide a token's {dim} channels")
    with seeded(torch.device("cpu"), args.seed, "codebook"):
        codebook = ExtensibleCodebook(args.codebook_size, dim, segments, args.commitment, args.beta)
    model = UEFL(base.features, codebook, base.classifier, args.token_norm)
    return clients, model.to(trainer.device), trainer, run


def federate(args):
    """Algorithm 1 with these flags."""
    clients, model, trainer, run = build(args)  # lines 1, 2
    ids, v, codebook = clients.ids, args.codebook_size, model.codebook
    kept, everybody = run.state, torch.ones(len(ids), v, dtype=torch.bool, device=trainer.device)
    theta = kept.get("theta", train.get_weights(model))  # line 2
    e = kept.get("e", torch.zeros(len(ids)))  # line 3
    allowed, first = kept.get("allowed", everybody), kept.get("iteration", 1)
    added = allowed.shape[1] - v  # by the run that is resumed
    codebook.extend(torch.zeros(added, codebook.codewords.shape[1]))

    iterations = args.iterations if v else 1  # FedAvg has no codewords to add
    for iteration in range(first, iterations + 1):  # line 4
        if iteration > first:
            extended = ids[uncertain(e, args.gamma).cpu()]  # line 8
            if not len(extended):  # line 24
                print(f"{args.name}: training ends, as no client is above the threshold of line 24")
                break
            rng = [random_at(args.seed, "codewords", run.t, k) for k in ids.tolist()]
            options = {"per_client": {"rng": rng}, "size": v}
            where = (theta, extended, clients.train, run.t)
            new = trainer.map(client_codewords, model, *where, **options)
            train.set_weights(model, theta)
            codebook.extend(new.view(-1, codebook.codewords.shape[1]))  # line 9
            theta = train.get_weights(model)
            owner = extended.repeat_interleave(v)  # of each new codeword
            is_own = ids[:, None] == owner
            allowed = torch.cat([allowed, is_own.to(allowed.device)], dim=1)  # line 10

        for t in run.rounds(args.rounds + (iteration - 1) * args.later_rounds):  # lines 5, 23
            selected = splits.draw(ids, clients.sample, random_at(args.seed, "select", t))
            # Lines 6 to 19: ids, weights [k, P] and losses of the clients whose upload is finite
            trained, thetas, losses = trainer.train(
                client_update, model, theta, selected, t, per_client={"allowed": allowed}
            )
            n = clients.sizes[trained].to(theta)
            theta = average(codebook, theta, thetas, n, allowed[trained])  # line 20
            measures = {}
            if run.evaluate_now:
                measures = evaluate(args, clients, trainer, model, theta, allowed, t)
            e = measures.get("uncertainties", e)  # line 22; that of the last round counts
            measures |= {"train_loss": n / n.sum() @ losses, "iteration": iteration}
            keep = {"theta": theta, "e": e, "allowed": allowed, "iteration": iteration}
            run.record(t, keep, selected=trained, **measures)
    run.draw("uncertainties", args.gamma)
    return run.finish(model, theta)


# fmt: off
# The example on glyphs is ours, with silos as in table 13. float32: bfloat16 may cost UEFL a point
# (results/README.md).
PAPER = {
    "partition": "silos", "rotate": [0, -50, 120], "silos": [3, 3, 3],  # section 4
    "codebook_size": 64, "gamma": 0.1,  # section 4
    "rounds": 40, "later_rounds": 20, "model": "resblocks",  # appendix H, section 4, section 4
    "optimizer": "adam", "lr": 1e-4, "batch_size": 1024, "local_epochs": 20,  # the authors' code
    "precision": "float32",
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
        label, baselines = "UEFL", {"static": {"iterations": 1}, "FedAvg": {"codebook_size": 0}}
    prediction = (
        "the model is least certain about the turned silos, so they get codewords of their own, "
        "and gain accuracy over a codebook that is not extended"
    )
    shows_in = {"turned_extended": "above", "turned_accuracy": "above"}
    return compare(args, federate, label, baselines, prediction, shows_in)


if __name__ == "__main__":
    launch(main)
