"""UEFL's codebook in plain PyTorch: an uncertain client gets codewords of its own.

    python uefl_codebook.py

Replace `clients` and `Model` by your own. The pieces are copied from uefl.py; keep the text of the
LICENSE with them.
"""

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F
from scipy.cluster.vq import kmeans2
from torch import Tensor

# ------------------------------------------------------------------------------ copied from uefl.py


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


def predictive_entropy(probabilities: Tensor) -> Tensor:
    """Equation 6: probabilities of T passes [T, N, C] -> the entropy of their mean, in nats [N].

    Line 22 lacks the minus sign. NaN stays NaN. Raises ValueError if a row is no distribution.
    """
    p = probabilities
    if p.dim() != 3 or (p < 0).any() or ((p.sum(-1) - 1).abs() > 0.01).any():
        raise ValueError("probabilities must be [passes, samples, classes], and each row sum to 1")
    return torch.special.entr(p.mean(0)).sum(-1)  # line 22


def uncertain(entropies: Tensor, gamma: float) -> Tensor:
    """Equation 7: is a client's entropy above (1 + gamma) times the smallest? [K] -> bool [K].

    For a client whose entropy is NaN the answer is no.
    """
    return entropies > (1 + gamma) * entropies.nan_to_num(torch.inf).min()  # lines 8, 24


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


# ------------------------------------------------------------------------------------- your project


class Model(nn.Module):
    """Encoder, codebook and classifier. Only the classifier has dropout."""

    def __init__(self, codewords=4, dim=16, segments=2):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, dim), nn.ReLU())
        self.codebook = ExtensibleCodebook(codewords, dim, segments)
        self.classifier = nn.Sequential(nn.Dropout(0.1), nn.Linear(dim, 3))

    def encode(self, x):
        """x -> tokens [N, l, d], here with l = 1. A map [N, d, h, w] would need z.flatten(2).mT."""
        return F.layer_norm(self.encoder(x), [16]).unsqueeze(1)

    def forward(self, x, allowed):
        c, code_loss, _ = self.codebook(self.encode(x), allowed)
        return self.classifier(c.flatten(1)), code_loss


def local_training(model, x, y, allowed):
    """Trains a copy of the model on one client. Returns its weights, a state_dict."""
    local = copy.deepcopy(model).train()
    # a new optimizer, because after extend an old one would have the old shapes
    optimizer = torch.optim.Adam(local.parameters(), lr=0.01)
    for _ in range(20):
        logits, code_loss = local(x, allowed)
        optimizer.zero_grad()
        (F.cross_entropy(logits, y) + code_loss).backward()
        optimizer.step()
    return local.state_dict()


@torch.no_grad()
def average(model, weights, sizes, allowed):
    """The server's step, from the clients' K state_dicts, their sizes [K] and allowed [K, V]."""
    words = torch.stack([w["codebook.codewords"] for w in weights])
    words = average_codewords(model.codebook.codewords, words, sizes, allowed)
    shares = (sizes / sizes.sum()).tolist()
    mean = {}
    for name in weights[0]:
        mean[name] = sum(a * w[name] for a, w in zip(shares, weights, strict=True))
    model.load_state_dict(mean | {"codebook.codewords": words})


@torch.no_grad()
def uncertainty(model, x, allowed, passes=20):
    """e_k of one client, from inputs without labels. The passes differ because dropout stays on."""
    p = torch.stack([model.train()(x, allowed)[0].softmax(1) for _ in range(passes)])
    return predictive_entropy(p).mean()


@torch.no_grad()
def give_codewords(model, clients, allowed, k, v):
    """Adds v codewords for client k, the centroids of its segments. Returns the new `allowed`."""
    width = model.codebook.codewords.shape[1]
    segments = model.encode(clients[k][0]).reshape(-1, width).double()  # [n, d / s]
    centroids, _ = kmeans2(segments.numpy(), v, minit="++", rng=0)
    model.codebook.extend(torch.from_numpy(centroids))
    own = torch.arange(len(clients)) == k
    return torch.cat([allowed, own[:, None].expand(-1, v)], dim=1)


def federate(model, clients, iterations, rounds, gamma, v):
    """Trains the model. Returns allowed, bool [M, V], and the uncertainties of each iteration."""
    allowed = torch.ones(len(clients), len(model.codebook.codewords), dtype=torch.bool)
    history = []
    for iteration in range(iterations):
        for _ in range(rounds):
            weights = {}
            for k, (x, y) in enumerate(clients):
                found = local_training(model, x, y, allowed[k])
                if all(value.isfinite().all() for value in found.values()):  # else left out
                    weights[k] = found
            if weights:
                sizes = torch.tensor([float(len(clients[k][1])) for k in weights])
                average(model, list(weights.values()), sizes, allowed[list(weights)])
        entropies = [uncertainty(model, x, allowed[k]) for k, (x, _) in enumerate(clients)]
        entropies = torch.stack(entropies)
        history.append(entropies.tolist())
        if iteration + 1 < iterations:
            for k in uncertain(entropies, gamma).nonzero().flatten().tolist():  # false for NaN
                allowed = give_codewords(model, clients, allowed, k, v)
    return allowed, history


if __name__ == "__main__":
    torch.manual_seed(0)
    labels = [torch.randint(3, (n,)) for n in (60, 60, 40)]
    clients = [(torch.randn(len(y), 8) + 3 * F.one_hot(y, 8), y) for y in labels]
    x, y = clients[2]
    clients[2] = x.flip(1), y  # the smallest client sees its inputs in another order
    allowed, history = federate(Model(), clients, iterations=3, rounds=5, gamma=0.3, v=4)
    for entropies in history:
        print("uncertainties", [round(e, 2) for e in entropies])
    print("codewords of each client:", allowed.sum(1).tolist())
