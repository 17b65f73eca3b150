"""Settings that fedavg.py and the three methods of Wu et al. share; SETTINGS of each adds the rest.

From section V of Wu et al. (arXiv 2310.07171)
- 40 of 100 clients participate. The Dirichlet alpha is that of the curves, as tables 1 and 2 give
  none.
- WU: 5 local epochs and batches of 128. The paper tunes the learning rate over {0.1, 0.01, 0.001}.
  It names its choice, 0.01, only for figures 7 to 9.
- RESNET: CIFAR-100 (figure 8) and NICO (figure 9), with ResNet-18, 3 local epochs, batches of 16
  and the learning rate 0.01.

Ours
- The learning rate of WU is 0.1, the best of the three for random selection on CIFAR-10 (see
  results/). There are 200 rounds, with 10 clients in each.
- mnist, fmnist and gtsrb, which the paper does not use, have EMNIST's settings ("other"), and every
  folder of images has NICO's.
- SMALL, what --small changes, and all settings of the drawn glyphs.
"""

WU = {"local_epochs": 5, "batch_size": 128, "lr": 0.1, "rounds": 200}
RESNET = {"model": "resnet18", "local_epochs": 3, "batch_size": 16, "lr": 0.01, "rounds": 200}
QUICK = {
    "model": "cnn", "width": 0.25, "local_epochs": 5, "batch_size": 32, "lr": 0.05, "rounds": 20,
}  # fmt: skip
SMALL = {
    "other": QUICK,
    "folder": {**QUICK, "dirichlet": 0.5, "image_size": 32, "clients": 12, "rounds": 30},
}
