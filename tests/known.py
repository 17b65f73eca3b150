"""The known answers a second time, in numpy and scipy, without any code of the six files.

Each function takes what an entry of docs/known_answers.json gives, and returns its answers and the
steps to them. Below a line stand, as comments, the mistakes that people make there: what is said of
their number, and the line that gives it. The tests put these in the place of the right one.

A derivative comes from complex steps: that of f at x is the imaginary part of f(x + ih) / h. So
.real is what the papers call sg, because the imaginary part ends there.
"""

from itertools import combinations

import numpy as np
from scipy.optimize import linprog
from scipy.spatial.distance import cdist
from scipy.special import softmax


def derivative(function, at):
    steps = 1e-30j * np.eye(at.size).reshape(-1, *at.shape)
    return np.array([function(at + step).imag / 1e-30 for step in steps]).reshape(at.shape)


def entropy_of(p):
    return -sum(share * np.log(share) for share in p if share > 0)
    # in bits:
    #     return -sum(share * np.log2(share) for share in p if share > 0)
    # of 0 log 0:
    #     return -sum(share * np.log(share) for share in p)


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
                # of one model, handed from client to client:
                #     end, velocity = ends[-1] if ends else server, 0
                # of one optimizer for all clients:
                #     end = server
                steps = range(epochs)
                # of one epoch:
                #     steps = range(1)
                for _ in steps:
                    error = softmax(x @ end.T, -1) - np.eye(len(w))[y]
                    velocity = beta * velocity + error.T @ x / len(x)
                    # of losses summed over samples:
                    #     velocity = beta * velocity + error.T @ x
                    end = end - lr * velocity
                ends.append(end)
                sizes.append(len(x))
            shares = np.array(sizes) / sum(sizes)
            # of an unweighted mean:
            #     shares = np.ones(len(ids)) / len(ids)
            # with n_k / n over all clients:
            #     shares = np.array(sizes) / sum(len(y) for x, y in clients)
            server = np.tensordot(shares, ends, 1)
            all_ends += ends
            averages.append(server)
        found |= {"ends" + name: all_ends, "averages" + name: averages}
    return found


# ---------------------------------------------------------------- Wu et al.


def entropy(counts, selected):
    h = np.array([entropy_of(row / row.sum()) for row in counts])
    # of H divided by log C:
    #     h = np.array([entropy_of(row / row.sum()) for row in counts]) / np.log(4)
    e = np.exp(h)
    # of H / sum of H:
    #     e = h
    # of a softmax of -H:
    #     e = np.exp(-h)
    # of n_i exp(H_i):
    #     e = counts.sum(1) * np.exp(h)
    alpha = e / e.sum()
    of_selected = alpha[selected] / alpha[selected].sum()
    # not divided by the selected's sum:
    #     of_selected = alpha[selected]
    return {"H": h, "alpha": alpha, "alpha of the selected": of_selected}


def minimax(**tables):
    """Equation 16 by comparing all subsets, of which the first is taken in a tie."""
    found = {}
    for name, table in tables.items():
        g = np.array(table["g"], float)
        # of weights, 9 before training:
        #     g = 9 - np.array(table["g"], float)
        s = (1 - cdist(g, g, "cosine")).round(9)
        # of inner products:
        #     s = g @ g.T
        clients = range(len(g))
        worst = np.array([max(s[i, j] for j in clients if j != i) for i in clients])
        # of clients compared with themselves:
        #     worst = np.array([max(s[i, j] for j in clients) for i in clients])
        # with 0 for a client itself:
        #     worst = (s * (1 - np.eye(len(g)))).max(1)
        # of mean cosines:
        #     worst = s.sum(1) - s.diagonal()
        score = list(worst)
        # of S* as a set:
        #     score = [9 if w in worst[:i] else w for i, w in enumerate(worst)]
        found |= {f"{name}: cosines": s, f"{name}: S*": worst}
        for k in table["k"]:
            subsets = combinations(clients, k)
            # of `<= K`:
            #     subsets = combinations(clients, k + 1)
            sums = {c: round(sum(score[i] for i in c), 6) for c in subsets}
            # of the largest S*:
            #     sums = {c: -round(sum(score[i] for i in c), 6) for c in subsets}
            found[f"{name}, k = {k}"] = min(sums, key=sums.get)
    return found


def is_vertex(points, i):
    """Whether point i is no mixture of points elsewhere: a linear program has no solution."""
    others = points[(points != points[i]).any(1)]
    # without points that have a copy:
    #     others = np.delete(points, i, 0)
    mixtures = np.vstack([others.T, np.ones(len(others))])
    sums = [*points[i], 1]
    # with points on edges and faces:
    #     sums = [*(1.000001 * points[i]), 1]
    return linprog(np.zeros(len(others)), A_eq=mixtures, b_eq=sums, bounds=(0, None)).status == 2


def hull(**tables):
    """The vertices along the first components; of equal rows, only the first can be one."""
    found = {}
    for name, table in tables.items():
        g = np.array(table["g"], float)
        # of weights, 0 before training, or 9 from client 4 on:
        #     g = 9 * (np.arange(len(table["g"])) > 3)[:, None] - np.array(table["g"])
        # rows of unit length:
        #     g = np.array([row / np.linalg.norm(row) for row in np.array(table["g"])])
        g = g - g.mean(0)
        # of rows not centred:
        #     pass
        axes = np.linalg.svd(g)[2]
        # of the first coordinates:
        #     axes = np.eye(g.shape[1])
        lengths = np.linalg.norm(g @ axes.T, axis=0)
        for dim in table["dims"]:
            points = (g @ axes[:dim].T).round(9)
            # without a projection:
            #     points = (g @ axes.T).round(9)
            first = [i for i in range(len(g)) if not (points[:i] == points[i]).all(1).any()]
            found[f"{name}, dim {dim}"] = [i for i in first if is_vertex(points, i)]
        found[f"{name}: lengths of the components"] = lengths[:dim]
    return found


# ---------------------------------------------------------------- FedIIR


def risk_and_gradient(z, y, weight, bias):
    share = 1 / len(y)
    # of losses summed over samples:
    #     share = 1
    p = softmax(z @ weight.T + bias, -1)
    error = share * (p - np.eye(len(bias))[y])
    risk = -share * np.log(p[range(len(y)), y]).sum()
    return risk, np.concatenate([(error.T @ z).ravel(), error.sum(0)])


def fediir(x, y, features, weight, bias, global_gradient, gamma):
    def parts(features=features, weight=weight, bias=bias):
        z = x @ features.T
        risk, gradient = risk_and_gradient(z, y, weight, bias)
        difference = gradient - global_gradient
        # of a penalty without a gradient:
        #     difference = gradient.real - global_gradient
        # of a penalty that stops at the features:
        #     difference = risk_and_gradient(z.real, y, weight, bias)[1] - global_gradient
        # without the bias in the penalty:
        #     difference = (gradient - global_gradient)[:-2]
        distance = (difference**2).sum()
        # of the norm, not its square:
        #     distance = (difference**2).sum() ** 0.5
        # of the mean over Q:
        #     distance = (difference**2).mean()
        loss = risk + gamma / 2 * distance
        # without 1/2:
        #     loss = risk + gamma * distance
        return z, risk, gradient, distance, loss

    steps = ["z", "R", "gradient of R", "squared distance", "loss"]
    return dict(zip(steps, parts())) | {
        "gradient by features": derivative(lambda u: parts(features=u)[-1], features),
        "gradient by weight": derivative(lambda u: parts(weight=u)[-1], weight),
        "gradient by bias": derivative(lambda u: parts(bias=u)[-1], bias),
    }


def fediir_gradient(clients, weight, bias):
    found = [risk_and_gradient(np.array(z), y, weight, bias) for z, y in clients]
    return {"R": [risk for risk, _ in found], "g": [gradient for _, gradient in found]}


def fediir_average(gradients, batches, scales, ema):
    mean = np.mean(gradients, 0)
    # of a mean over all batches:
    #     mean = np.mean(batches, 0)
    # of means over a client's batches:
    #     mean = (batches[0] + np.mean(batches[1:], 0)) / 2
    # of a mean over all samples:
    #     mean = np.average(gradients, 0, [4, 6])
    average, found = 0 * mean, []
    # a start at the first mean:
    #     average, found = mean, []
    for scale in scales:
        average = ema * average + (1 - ema) * scale * mean
        # of an average never stored:
        #     average = (1 - ema) * scale * mean
        # without a moving average:
        #     average = scale * mean
        # with v and 1 - v exchanged:
        #     average = (1 - ema) * average + ema * scale * mean
        found.append(average)
        # divided by 1 - v^t:
        #     found.append(average / (1 - ema ** (1 + len(found))))
    return {"mean": mean, "g~": found}


# ---------------------------------------------------------------- UEFL


def uefl(codewords, segments, tokens, may_use, task):
    parts = tokens.reshape(-1, codewords.shape[1])
    distances = ((parts[:, None] - codewords) ** 2).sum(2)
    usable = np.where(may_use, distances, np.inf)
    # with words of others:
    #     usable = distances
    indices = usable.argmin(1)

    def quantised(z, words):
        c = words[indices].reshape(z.shape)
        of_z, of_c = (c.real - z) ** 2, (c - z.real) ** 2
        # without sg:
        #     of_z = of_c = (c - z) ** 2
        loss = 0.25 * of_z.mean() + 1 * of_c.mean()
        # of sums:
        #     loss = 0.25 * of_z.sum() + 1 * of_c.sum()
        # a token's squared norm:
        #     loss = (0.25 * of_z + of_c).sum(2).mean()
        # with the weights exchanged:
        #     loss = 1 * of_z.mean() + 0.25 * of_c.mean()
        return z + (c - z).real, loss
        # of a task that trains words:
        #     return c, loss

    def whole(z=tokens, words=codewords):
        out, loss = quantised(z, words)
        return (task * out).sum() + loss

    out, loss = quantised(tokens, codewords)
    return {
        "indices": indices.reshape(*tokens.shape[:2], segments),
        "squared distances": usable.min(1),
        "out": out,
        "L_code": loss,
        "gradient of L_code by tokens": derivative(lambda u: quantised(u, codewords)[1], tokens),
        "gradient by tokens": derivative(lambda u: whole(z=u), tokens),
        "gradient by codewords": derivative(lambda u: whole(words=u), codewords),
    }


def uefl_entropy(passes, without_dropout):
    p = softmax(passes, -1)
    # of passes without dropout:
    #     p = softmax(without_dropout[None], -1)
    # of mean logits:
    #     p = softmax(passes.mean(0), -1)[None]
    mean = p.mean(0)
    entropies = [entropy_of(row) for row in mean]
    # of single passes:
    #     entropies = np.mean([[entropy_of(row) for row in one] for one in p], 0)
    return {"mean of the passes": mean, "entropies": entropies}


def uefl_extended(entropies, gamma):
    threshold = (1 + gamma) * min(entropies)
    # of the mean in place of the smallest:
    #     threshold = (1 + gamma) * np.mean(entropies)
    extended = entropies > threshold
    # of >=:
    #     extended = entropies >= threshold
    return {"threshold": threshold, "extended": extended}


def uefl_average(theta, thetas, sizes, uses):
    n = sizes[:, None] * uses
    # with clients that may not use a word:
    #     n = sizes[:, None] * np.ones_like(uses)
    # of an unweighted mean:
    #     n = 1 * uses
    shares = n / np.maximum(n.sum(0), 1)
    # divided by all clients' samples:
    #     shares = n / sum(sizes)
    mean = np.where(n.sum(0) > 0, (shares * thetas).sum(0), theta)
    return {"shares": shares, "theta": mean}
