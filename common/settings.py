"""Settings that fedavg.py and the three methods of Wu et al. share; SETTINGS of each adds the rest.

From section V of Wu et al. (arXiv 2310.07171)
- 40 of 100 clients participate. The Dirichlet alpha is that of the curves, as tables 1 and 2 give
  none.
- WU: 5 local epochs and batches of 128. The paper tunes the learning rate over {0.1, 0.01, 0.001}.
  It names its choice, 0.01, only for figures 7 to 9.
- RESNET: CIFAR-100 (figure 8) and NICO (figure 9), with ResNet-18, 3 local epochs, batches of 16
  and the learning rate 0.01.

Ours, because the paper is silent
- The learning rate of WU is 0.1, the best of the three for random selection on CIFAR-10 (see
  results/). There are 200 rounds, with 10 clients in each.
- "A CNN" is that of McMahan et al. ResNet-18 has group norm, and a hidden layer before the
  classifier (common/models.py). Local training is SGD without momentum on the cross-entropy.
- mnist, fmnist and gtsrb, which the paper does not use, have EMNIST's settings ("other"), and every
  folder of images has NICO's.
- Each class has a Dirichlet draw of its own, and a client with fewer than ten samples gets some of
  the largest client's, which raises the entropy of its labels.
- ID is measured on the local test sets of all participating clients, which are a fifth of their
  samples (a tenth with --partition domain). The paper's ID is on those of the selected clients only
  (`id_selected` in metrics.csv).
- SMALL, which --small takes, and the settings of the drawn glyphs.
"""

WU = {"local_epochs": 5, "batch_size": 128, "lr": 0.1, "rounds": 200}
RESNET = {"model": "resnet18", "local_epochs": 3, "batch_size": 16, "lr": 0.01, "rounds": 200}
QUICK = {
    "model": "cnn", "width": 0.25, "local_epochs": 5, "batch_size": 32, "lr": 0.05, "rounds": 20,
}  # fmt: skip
SMALL = {
    "other": QUICK,
    "folder": {**QUICK, "dirichlet": 0.5, "image_size": 32, "rounds": 30},
}
