"""Measures what FedIIR's penalty charges in its example, and how strongly an old mean would pull.

    python -m docs.penalty 300 batches 400    batches of 300 images, g~ from them, seed 400
    python -m docs.penalty 6000 all 400       all data

It prints, for round 1, what the penalty charges for the disagreement, and for noise; then lr gamma
lambda in some rounds; and the colour-neutral accuracy in the last five evaluations.
"""

import sys

import torch
import torch.nn.functional as F

import fediir
from common import data
from common.runner import compare, flags


def main(size: int, g_from: str, seed: int, rounds: int = 120) -> None:
    """Trains with one step a round, on batches of `size` images; g~ is of these, or of all data."""
    args, digits = flags.defaults(fediir, f"--seed {seed}"), data.load("colours")
    clients, model = compare.assemble(args, digits, fediir.build_model)
    x, y, weights = digits.x.float() / 127.5 - 1, digits.y, list(model.parameters())
    optimizer, rng = torch.optim.SGD(weights, args.lr), torch.Generator().manual_seed(seed)

    def gradient(k):  # of the samples k, [Q]
        return fediir.risk_and_gradient(model.classifier, model.features(x[k]), y[k], graph=True)[1]

    def variance(k):  # V_c: a sample's gradient is (p - label) times (z, 1)
        z = model.features(x[k])
        error = model.classifier(z).softmax(1) - F.one_hot(y[k], 2)
        squares = (error.square().sum(1) * (z.square().sum(1) + 1)).mean()
        return squares - gradient(k).square().sum()

    def strength(vector):  # lr gamma lambda
        rows = [torch.autograd.grad(number, weights, retain_graph=True) for number in vector]
        jacobian = torch.stack([torch.cat([part.flatten() for part in row]) for row in rows])
        return args.lr * args.gamma * torch.linalg.matrix_norm(jacobian, 2).item() ** 2

    for t in range(1, rounds + 1):
        batches = [k[torch.randperm(len(k), generator=rng)[:size]] for k in clients.train]
        a, b = [gradient(k) for k in (batches if g_from == "batches" else clients.train)]
        g = (a + b) / 2
        if t == 1:
            print(f"charged: {args.gamma / 2 * (a - g).square().sum():.3f}")
            print(f"noise: {args.gamma / 4 * sum(map(variance, clients.train)):.1f} / size")
        if t % 40 == 0 or t in (1, 5, 10):
            print(f"round {t}: pull {strength(g):.1f}")
        parts = model.features, model.classifier
        losses = [fediir.fediir_loss(*parts, x[k], y[k], g.detach(), args.gamma) for k in batches]
        optimizer.zero_grad()
        sum(losses).div(2).backward()
        optimizer.step()
        if t > rounds - 25 and t % 5 == 0:
            neutral = clients.tests["neutral"]
            print((model(x[neutral]).argmax(1) == y[neutral]).float().mean())


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
