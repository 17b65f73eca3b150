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

    def forward(self, x, may_use):
        c, code_loss, _ = self.codebook(self.encode(x), may_use)
        return self.classifier(c.flatten(1)), code_loss


def get_weights(model):
    """The model as one vector [P], with the statistics of batch norm."""
    return torch.cat([value.flatten() for value in model.state_dict().values()])


@torch.no_grad()
def set_weights(model, theta):
    values = list(model.state_dict().values())
    for value, part in zip(values, theta.split([v.numel() for v in values]), strict=True):
        value.copy_(part.view_as(value))


def uses(model, may_use):
    """Which weights each client uses, bool [K, P]: all but the codewords of others."""
    parts = {
        name: may_use.new_ones(len(may_use), v.numel()) for name, v in model.state_dict().items()
    }
    width = model.codebook.codewords.shape[1]
    parts["codebook.codewords"] = may_use.repeat_interleave(width, dim=1)
    return torch.cat([*parts.values()], dim=1)


def local_training(model, x, y, may_use):
    """Trains a copy of the model on one client. Returns its weights [P]."""
    local = copy.deepcopy(model).train()
    # a new optimizer, because after extend an old one would have the old shapes
    optimizer = torch.optim.Adam(local.parameters(), lr=0.01)
    for _ in range(20):
        logits, code_loss = local(x, may_use)
        optimizer.zero_grad()
        (F.cross_entropy(logits, y) + code_loss).backward()
        optimizer.step()
    return get_weights(local)


@torch.no_grad()
def uncertainty(model, x, may_use, passes=20):
    """e_k of one client, from inputs without labels. The passes differ because dropout stays on."""
    model.eval()  # batch norm in training mode would depend on the batch, and change the model
    for layer in model.classifier.modules():
        if isinstance(layer, nn.modules.dropout._DropoutNd):  # of any kind
            layer.train()
    p = torch.stack([model(x, may_use)[0].softmax(1) for _ in range(passes)])
    return predictive_entropy(p).mean()


@torch.no_grad()
def give_codewords(model, clients, may_use, k, v):
    """Adds v codewords for client k, the centroids of its segments. Returns the new `may_use`."""
    width = model.codebook.codewords.shape[1]
    segments = model.eval().encode(clients[k][0]).reshape(-1, width).double()  # [n, d / s]
    centroids, _ = kmeans2(segments.numpy(), v, minit="++", rng=0)
    model.codebook.extend(torch.from_numpy(centroids))
    own = torch.arange(len(clients)) == k
    return torch.cat([may_use, own[:, None].expand(-1, v)], dim=1)


def federate(model, clients, iterations, rounds, gamma, v):
    """Trains the model. Returns may_use, bool [K, V], and the uncertainties of each iteration."""
    sizes = torch.tensor([len(y) for _, y in clients])
    may_use = torch.ones(len(clients), len(model.codebook.codewords), dtype=torch.bool)
    history = []
    for iteration in range(iterations):
        for _ in range(rounds):
            trained = [
                local_training(model, *client, may_use[k]) for k, client in enumerate(clients)
            ]
            thetas = torch.stack(trained)  # [K, P]
            ok = thetas.isfinite().all(1)  # a client that returns NaN is left out
            theta = average(get_weights(model), thetas[ok], sizes[ok], uses(model, may_use)[ok])
            set_weights(model, theta)
        ids = ok.nonzero().flatten()  # nor does it say how uncertain the model is
        entropies = torch.stack([uncertainty(model, clients[k][0], may_use[k]) for k in ids])
        history.append(entropies.tolist())
        if iteration + 1 < iterations:
            for k in ids[uncertain(entropies, gamma)].tolist():
                may_use = give_codewords(model, clients, may_use, k, v)
    return may_use, history


if __name__ == "__main__":
    torch.manual_seed(0)
    labels = [torch.randint(3, (n,)) for n in (60, 60, 40)]
    clients = [(torch.randn(len(y), 8) + 3 * F.one_hot(y, 8), y) for y in labels]
    x, y = clients[2]
    clients[2] = x.flip(1), y  # the smallest client sees its inputs in another order
    may_use, history = federate(Model(), clients, iterations=3, rounds=5, gamma=0.3, v=4)
    for entropies in history:
        print("uncertainties", [round(e, 2) for e in entropies])
    print("codewords of each client:", may_use.sum(1).tolist())
