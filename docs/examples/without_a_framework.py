"""The weights and both selections of Wu et al. in a plain PyTorch loop, on random data.

    python without_a_framework.py

Replace `clients`, `new_model` and `local_update` by your own, and keep the text of the LICENSE with
the copied pieces. A server that averages models instead of updates can stay as it is, and compute
updates for the table alone.
"""

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F
from scipy.linalg import eigh
from scipy.spatial import ConvexHull
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

# ----------------------------------------------------------------- copied from entropy_weighting.py


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


# -------------------------------------------------------------------- copied from minimax_select.py


def inner_products(g: Tensor) -> Tensor:
    """<g_i, g_j> of the rows of g [M, P]: float64 [M, M].

    Raises ValueError if a row is zero or not finite.
    """
    blocks = (block.double() for block in g.detach().split(2**11, dim=1))  # a copy would be large
    inner = sum(block @ block.T for block in blocks)
    squares = inner.diagonal()
    if not ((squares > 0) & (squares < torch.inf)).all():
        raise ValueError("an update is zero or not finite")
    return inner


def cosines(g: Tensor) -> Tensor:
    """The cosines S_ij of the rows of g [M, P], float64 [M, M] (Algorithm 1)."""
    inner = inner_products(g)
    length = inner.diagonal().sqrt()
    inner = (inner + inner.T) / 2  # symmetric, so that ties are ties in spite of rounding
    return inner / (length * length[:, None])  # lines 1.2, 1.3, 1.4, 1.5: row i, without i, is S_i


def largest_similarity(similarity: Tensor) -> Tensor:
    """S*_i = max over j != i of similarity [M, M]: [M] (Algorithm 1)."""
    itself = torch.eye(len(similarity), dtype=torch.bool, device=similarity.device)
    return similarity.masked_fill(itself, -torch.inf).amax(1)  # line 1.7


def minimax_clients(g: Tensor, k: int, largest: bool = False) -> Tensor:
    """The k clients with the smallest S*_i (equation 16): int64 [k], ascending.

    g        the clients' updates [M, P]: weights before training minus weights after it, so do not
             pass weights, and leave out the statistics of batch norm, which would outweigh the rest
    largest  takes the largest S*_i instead, our reading of MaxSim ("most similar local gradients")

    Algorithm 1 differs in two ways. Its loop, line 1.10, ends with K + 1 clients. And line 1.14
    takes a value out of a set, in which two clients that share it, being each other's most similar
    one, count once. We follow equation 16. Ties go to the smaller index.

    Raises ValueError if g is not a matrix, if an update is zero or not finite, or if k is not in
    1 .. M.
    """
    g = torch.as_tensor(g)
    if g.dim() != 2 or not 1 <= k <= len(g):
        raise ValueError(f"k = {k} of g {[*g.shape]}: g must be [M, parameters], and k in 1 .. M")
    score = largest_similarity(cosines(g))
    # Lines 1.10, 1.11, 1.13 and 1.14
    return score.sort(stable=True, descending=largest).indices[:k].sort().values


# ---------------------------------------------------------------- copied from convex_hull_select.py


def principal_components(g: Tensor, dim: int, scale: bool = False) -> Tensor:
    """The rows of g [M, P] along their first principal components: float64 [M, up to dim], CPU.

    scale  first scales the rows to unit length; else the unit is the length of the longest row

    In M - 1 or more dimensions normally all M points are vertices, and quickhull cannot run in a
    million dimensions anyway. So we project, which decides who is a vertex. Section IV-B2 speaks of
    the stored gradients, section V of "cosine similarity to construct the convex hull" (NICO).

    Fewer columns are returned if the rows span fewer dimensions. Components with very small
    variance count as rounding errors.
    """
    inner, m = inner_products(g).cpu(), len(g)
    length = inner.diagonal().sqrt()
    unit = length if scale else length.max().expand(m)
    inner = inner / unit / unit[:, None]
    # <g_i - m, g_j - m> = <g_i, g_j> - <g_i, m> - <m, g_j> + <m, m>, where m is the mean row
    inner = inner - inner.mean(0) - inner.mean(1, keepdim=True) + inner.mean()
    values, vectors = eigh(inner, subset_by_index=[max(0, m - dim), m - 1])
    kept = values > 1e-12 * m  # smaller variances may come from the rounding of g to float32
    return torch.from_numpy(vectors[:, kept] * values[kept] ** 0.5).flip(1)  # the largest first


def vertices_of(points: Tensor) -> Tensor:
    """Which points [M, dim] are vertices of their convex hull, by quickhull: int64, ascending."""
    if points.shape[1] == 0:
        return torch.arange(len(points))[:1]
    if points.shape[1] == 1:
        return torch.stack([points[:, 0].argmin(), points[:, 0].argmax()]).sort().values
    return torch.from_numpy(ConvexHull(points.numpy()).vertices.astype("int64")).sort().values


def hull_vertices(g: Tensor, dim: int, scale: bool = False) -> Tensor:
    """Line 3: the clients on the hull, int64, ascending.

    g      the clients' updates [M, P]: weights before training minus weights after it, so do not
           pass weights, and leave out the statistics of batch norm, which would outweigh the rest
    dim    principal components in which the hull is built, 1 to 8
    scale  first scales the updates to unit length

    If the points span fewer dimensions, the hull is built in the dimensions that they span. Of
    several clients at one point, one is selected, and the first client if all share one point.
    Raises ValueError if g is not a matrix, if an update is zero or not finite, or if dim is not in
    1 .. 8.
    """
    g = torch.as_tensor(g)
    if g.dim() != 2 or not len(g) or not 1 <= dim <= 8:
        raise ValueError(f"g must be [clients, parameters], not {[*g.shape]}; dim 1 to 8: {dim}")
    return vertices_of(principal_components(g, dim, scale))


# ------------------------------------------------------------------------------------- your project


def new_model():
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


def local_update(model, x, y):
    """Trains a copy of the model on one client. Returns its update [P] and its running statistics.

    The update is w before training minus w after it, and holds the parameters only. Batch norm's
    running statistics, a list of tensors, move further than the parameters and in a similar
    direction for all clients, so in an update they would hide it.
    """
    local = copy.deepcopy(model).train()
    optimizer = torch.optim.SGD(local.parameters(), lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(local(x), y).backward()
        optimizer.step()
    update = parameters_to_vector(model.parameters()) - parameters_to_vector(local.parameters())
    return update.detach(), list(local.buffers())


@torch.no_grad()
def step(model, updates, buffers, alpha):
    """The server's step: the mean of the updates [K, P] and statistics, with weights alpha [K]."""
    w = parameters_to_vector(model.parameters())
    vector_to_parameters(w - alpha.to(updates) @ updates, model.parameters())
    for ours, *theirs in zip(model.buffers(), *buffers, strict=True):
        if ours.is_floating_point():  # batch norm's number of batches is an integer, and stays
            ours.copy_(sum(a * b for a, b in zip(alpha, theirs, strict=True)))


def federate(model, clients, select, rounds):
    """Trains the model. Returns the selected clients of each round.

    select  the latest update of each client [M, P] -> the rows of the clients that train, int64 [K]
    """
    counts = torch.stack([torch.bincount(y, minlength=3) for _, y in clients])  # [M, C]
    table = torch.stack([local_update(model, x, y)[0] for x, y in clients])  # [M, P], moves nothing
    history = []
    for _ in range(rounds):
        selected = select(table).tolist()  # ValueError if an update is zero or not finite
        results = {}
        for i in selected:
            update, buffers = local_update(model, *clients[i])
            if all(values.isfinite().all() for values in [update, *buffers]):
                results[i] = update, buffers  # else it is left out, and keeps its earlier row
        if results:
            trained, (updates, buffers) = list(results), zip(*results.values(), strict=True)
            table[trained] = torch.stack(updates)
            alpha = entropy_weights(counts[trained])  # or torch.ones(len(trained)) / len(trained)
            step(model, torch.stack(updates), buffers, alpha)
        history.append(selected)
    return history


if __name__ == "__main__":
    torch.manual_seed(0)
    labels = [torch.randint(1 + i % 3, (20,)) for i in range(9)]  # of one, two or three classes
    clients = [(torch.randn(20, 8) + 2 * F.one_hot(y, 8), y) for y in labels]
    choices = {
        "minimax": lambda table: minimax_clients(table, 3),
        "hull": lambda table: hull_vertices(table, 2),
    }
    for name, select in choices.items():
        model = new_model()
        print(name, "selects", federate(model, clients, select, rounds=5))
        accuracy = torch.cat([model.eval()(x).argmax(1) == y for x, y in clients]).float().mean()
        print(f"and the model knows {100 * accuracy:.0f} % of all clients' labels")
