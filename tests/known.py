"""The known answers a second time, in numpy and scipy, without any code of the six files.

Each function takes what an entry of docs/known_answers.json gives, and returns its answers and the
steps to them. A derivative comes from complex steps: that of f at x is the imaginary part of
f(x + ih) / h. So .real is what the papers call sg, because the imaginary part ends there.
"""

from itertools import combinations

import numpy as np
from scipy.optimize import linprog


def derivative(function, at):
    steps = 1e-30j * np.eye(at.size).reshape(-1, *at.shape)
    return np.array([function(at + step).imag / 1e-30 for step in steps]).reshape(at.shape)


def softmax(logits):
    return np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)


def entropy_of(p):
    return -sum(share * np.log(share) for share in p if share > 0)


# ---------------------------------------------------------------- FedAvg


def fedavg(w, clients, selected, lr, epochs, momentum):
    """With plain SGD and with momentum: the clients' weights in each round, and the averages."""
    found = {}
    for name, beta in (("", 0), (" with momentum", momentum)):
        server, velocity, all_ends, averages = w, 0, [], []
        for ids in selected:
            ends, sizes = [], []
            for k in ids:
                x, y = map(np.array, clients[k])
                end, velocity = server, 0
                for _ in range(epochs):
                    error = softmax(x @ end.T) - np.eye(len(w))[y]
                    velocity = beta * velocity + error.T @ x / len(x)
                    end = end - lr * velocity
                ends.append(end)
                sizes.append(len(x))
            shares = np.array(sizes) / sum(sizes)
            server = np.tensordot(shares, ends, 1)
            all_ends += ends
            averages.append(server)
        found |= {"ends" + name: all_ends, "averages" + name: averages}
    return found


# ---------------------------------------------------------------- Wu et al.


def entropy(counts, selected):
    h = np.array([entropy_of(row / row.sum()) for row in counts])
    alpha = np.exp(h) / np.exp(h).sum()
    of_selected = alpha[selected] / alpha[selected].sum()
    return {"H": h, "alpha": alpha, "alpha of the selected": of_selected}


def minimax(**tables):
    """Equation 16 by comparing all subsets, of which the first is taken in a tie."""
    found = {}
    for name, table in tables.items():
        g = np.array(table["g"], float)
        length = np.sqrt((g * g).sum(1))
        s = g @ g.T / length / length[:, None]
        worst = [max(s[i, j] for j in range(len(g)) if j != i) for i in range(len(g))]
        worst = np.round(worst, 9)
        found |= {f"{name}: cosines": s, f"{name}: S*": worst}
        for k in table["k"]:
            subsets = combinations(range(len(g)), k)
            found[f"{name}, k = {k}"] = min(subsets, key=lambda c: round(sum(worst[[*c]]), 6))
    return found


def is_vertex(points, i):
    """Whether point i is no mixture of points elsewhere: a linear program has no solution."""
    others = points[(points != points[i]).any(1)]
    mixtures = np.vstack([others.T, np.ones(len(others))])
    sums = [*points[i], 1]
    return linprog(np.zeros(len(others)), A_eq=mixtures, b_eq=sums, bounds=(0, None)).status == 2


def hull(**tables):
    """The vertices along the first components; of equal rows, only the first can be one."""
    found = {}
    for name, table in tables.items():
        g = np.array(table["g"], float)
        g = g - g.mean(0)
        axes = np.linalg.svd(g)[2][: table["dim"]]
        points = (g @ axes.T).round(9)
        first = [i for i in range(len(g)) if not (points[:i] == points[i]).all(1).any()]
        found[f"{name}: lengths of the components"] = np.linalg.norm(points, axis=0)
        found[name] = [i for i in first if is_vertex(points, i)]
    return found


# ---------------------------------------------------------------- FedIIR


def risk_and_gradient(z, y, weight, bias):
    share = 1 / len(y)
    p = softmax(z @ weight.T + bias)
    error = share * (p - np.eye(len(bias))[y])
    risk = -share * np.log(p[range(len(y)), y]).sum()
    return risk, np.concatenate([(error.T @ z).ravel(), error.sum(0)])


def fediir(x, y, features, weight, bias, global_gradient, gamma):
    def parts(features=features, weight=weight, bias=bias):
        z = x @ features.T
        risk, _ = risk_and_gradient(z, y, weight, bias)
        _, gradient = risk_and_gradient(z, y, weight, bias)
        distance = ((gradient - global_gradient) ** 2).sum()
        return z, risk, gradient, distance, risk + gamma / 2 * distance

    steps = ["z", "R", "gradient of R", "squared distance", "loss"]
    return dict(zip(steps, parts())) | {
        "gradient by features": derivative(lambda u: parts(features=u)[-1], features),
        "gradient by weight": derivative(lambda u: parts(weight=u)[-1], weight),
        "gradient by bias": derivative(lambda u: parts(bias=u)[-1], bias),
    }


def fediir_gradient(clients, weight, bias):
    found = [risk_and_gradient(np.array(z), y, weight, bias) for z, y in clients]
    return {"R": [risk for risk, _ in found], "g": [gradient for _, gradient in found]}


def fediir_average(gradients, batches, ema, rounds):
    average, found = np.zeros(len(gradients[0])), []
    for _ in range(rounds):
        mean = np.mean(gradients, 0)
        average = ema * average + (1 - ema) * mean
        found.append(average)
    return {"mean": mean, "g~": found}


# ---------------------------------------------------------------- UEFL


def uefl(codewords, segments, tokens, may_use, task):
    parts = tokens.reshape(-1, codewords.shape[1])
    distances = ((parts[:, None] - codewords) ** 2).sum(2)
    indices = np.where(may_use, distances, np.inf).argmin(1)

    def quantised(z, words):
        c = words[indices].reshape(z.shape)
        loss = 0.25 * ((c.real - z) ** 2).mean() + 1 * ((c - z.real) ** 2).mean()
        return z + (c - z).real, loss

    def whole(z=tokens, words=codewords):
        out, loss = quantised(z, words)
        return (task * out).sum() + loss

    out, loss = quantised(tokens, codewords)
    return {
        "indices": indices.reshape(*tokens.shape[:2], segments),
        "squared distances": distances.min(1, where=may_use, initial=np.inf),
        "out": out,
        "L_code": loss,
        "gradient of L_code by tokens": derivative(lambda u: quantised(u, codewords)[1], tokens),
        "gradient by tokens": derivative(lambda u: whole(z=u), tokens),
        "gradient by codewords": derivative(lambda u: whole(words=u), codewords),
    }


def uefl_entropy(passes, without_dropout):
    mean = softmax(passes).mean(0)
    return {"mean of the passes": mean, "entropies": [entropy_of(p) for p in mean]}


def uefl_extended(entropies, gamma):
    threshold = (1 + gamma) * min(entropies)
    return {"threshold": threshold, "extended": [e > threshold for e in entropies]}


def uefl_average(theta, thetas, sizes, uses):
    n = sizes[:, None] * uses
    shares = n / np.maximum(n.sum(0), 1)
    mean = np.where(n.sum(0) > 0, (shares * thetas).sum(0), theta)
    return {"shares": shares, "theta": mean}
