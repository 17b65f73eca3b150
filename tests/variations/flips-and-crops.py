import torch
import torch.nn.functional as F

from common.chance import random_at, shuffled
from common.train import flips_and_crops


def windows_of(image):
    """By brute force: nine rows, nine columns, and their mirror images [162, C, H, W]."""
    _, height, width = image.shape
    padded = F.pad(image, [4] * 4, value=-1.0)
    found = [padded[:, i:, j:][:, :height, :width] for i in range(9) for j in range(9)]
    return torch.stack([*found, *(window.flip(2) for window in found)])


def test_all_windows_of_an_image_are_equally_likely(rng):
    image = torch.from_numpy(rng.uniform(-1, 1, [1, 5, 5]))
    found = flips_and_crops(image.expand(16_200, 1, 5, 5), rng)
    counts = (found[:, None] == windows_of(image)).all((2, 3, 4)).sum(0)
    assert counts.sum() == 16_200 and counts.min() > 60 and counts.max() < 140  # 100 each


def test_a_clients_batches_are_its_images_in_the_order_they_had_before(trainer):
    rng = random_at(0, "batches", 3, 1)
    order = torch.cat([shuffled(trainer.clients.train[1], rng) for _ in range(2)])
    x, y = map(torch.cat, zip(*trainer._batches(1, 3)))
    assert torch.equal(y, trainer.y[order])
    images, _ = trainer.batch(order)
    for image, found in zip(images, x):
        assert (found == windows_of(image)).all((1, 2, 3)).any()
    assert not torch.equal(x, images)
