import numpy as np
import torch
from helpers import kept, prepared

import entropy_weighting
import fedavg

CUT = "--model cnn --width 0.125 --batch-size 16 --lr 0.1 --partition dirichlet --dirichlet 0.5 "
CUT += "--clients 5 --participating 4 --sample 2 --local-epochs 2 --rounds 2 --no-compare "


def test_steps_follow_the_formula():
    """theta <- theta - eta (gradient + mu (theta - w)); softmax regression has (p - y) x^T."""
    rng, eta, mu = np.random.default_rng(0), 0.5, 0.3
    x, y, w = rng.standard_normal((6, 4)), rng.integers(0, 3, 6), rng.standard_normal((3, 4))
    theta, loss = w, 0
    for _ in range(3):
        p = np.exp(x @ theta.T)
        p /= p.sum(1, keepdims=True)
        loss += -np.log(p[range(6), y]).mean() + mu / 2 * ((theta - w) ** 2).sum()
        theta = theta - eta * ((p - np.eye(3)[y]).T @ x / 6 + mu * (theta - w))

    model = torch.nn.Linear(4, 3, bias=False, dtype=torch.float64)
    model.weight.data = torch.from_numpy(w.copy())
    batch = torch.from_numpy(x), torch.from_numpy(y)
    optimizer = torch.optim.SGD(model.parameters(), lr=eta)
    found = fedavg.client_update(model, [batch] * 3, optimizer, mu=mu)
    assert np.isclose(found.item(), loss / 3)
    assert np.allclose(model.weight.detach().numpy(), theta)


def test_mu_0_is_fedavg_and_a_large_mu_holds_the_clients_back(start):
    before = prepared(fedavg, CUT)[-1].initial
    plain = kept(start(entropy_weighting, CUT + "--weighting size"))["w"] - before
    none, large = (
        kept(start(fedavg, CUT + f"--mu {mu} --out mu-{mu}"))["w"] - before for mu in (0, 1)
    )
    assert torch.allclose(none, plain, atol=1e-6)
    assert 0 < large.norm() < 0.95 * none.norm()
