import torch
from helpers import loss_and_gradient, prepared

import fediir
from common import random_at

CUT = "--model convnet --width 0.125 --test-domain dark --clients 3 --lr 0.1 --optimizer sgd "
CUT += "--batch-size 8 --local-epochs 3 "


def test_a_client_takes_one_step_per_round_on_a_random_part_of_its_data(start):
    """With gamma 0 it ends at theta - lr gradient, for the first batch of a random order."""
    data, clients, model, trainer, theta = prepared(fediir, CUT)
    omega = sum(p.numel() for p in model.classifier.parameters())
    options, ends = {"global_gradient": torch.zeros(omega), "gamma": 0.0}, []
    for t in (1, 2):
        one = torch.tensor([1])
        _, thetas, losses = trainer.train(fediir.client_update, model, theta, one, t, **options)
        samples = clients.train[1]
        batch = samples[random_at(0, "batches", t, 1).permutation(len(samples))[:8]]
        loss, gradient = loss_and_gradient(model, theta, data, batch)
        ends.append(theta - 0.1 * gradient)
        assert torch.allclose(thetas[0], ends[-1], atol=1e-5)
        assert torch.isclose(losses[0], loss)
    assert len(samples) > 8 and not torch.allclose(*ends, atol=1e-4), "other samples in each round"
