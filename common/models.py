"""The models: image classifiers, each an nn.Module with .features and .classifier.

    model = build("cnn", shape=(1, 28, 28), classes=10)
    logits = model.classifier(model.features(x))      # the same as model(x)

Their input is images, float32 [N, channels, height, width] in -1..1.
"""

from functools import partial

import torch
import torch.nn as nn
from torch import Tensor

from common import UserError, first_line

OWN = ["cnn", "convnet", "resblocks"]  # defined here
RESNETS = {"resnet18": 512, "resnet50": 2048}  # torchvision's: name -> its features
NAMES = [*OWN, *RESNETS, "vgg16"]


class Classifier(nn.Module):
    """classifier(features(x)). `features` may give vectors [N, d] or maps [N, d, h, w]; `classifier` takes either."""

    def __init__(self, features: nn.Module, classifier: nn.Module):
        super().__init__()
        self.features, self.classifier = features, classifier

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x))


def build(
    name: str,
    shape: tuple[int, ...],
    classes: int,
    width: float = 1.0,
    dropout: float = 0.0,
    pretrained: str = "",
) -> Classifier:
    """The model called `name` for images of `shape` (channels, height, width).

    width       multiplies the channels of the models defined here (not of torchvision's), rounded to multiples of 8
    dropout     probability of the dropout layers before both linear layers of a classifier with a hidden layer
    pretrained  for torchvision's: "imagenet" (downloaded on first use), or a file with such weights. A ResNet's batch
                norm then uses its stored statistics. Without pretrained weights, group norm replaces it, because its
                result does not depend on the other samples in a batch. VGG16 has usual batch norm in both cases

    Draws the weights from torch's global generator. Raises UserError if name, shape or weights do not fit together.
    """
    if pretrained and name in OWN:
        raise UserError(
            f"--pretrained: there are no ImageNet weights for {name}; choose one of torchvision's models"
        )

    def scaled(channels: int) -> int:
        return max(8, round(channels * width / 8) * 8)

    activation: nn.Module = nn.ReLU()
    if name == "cnn":
        features, hidden = _cnn(shape[0], scaled), scaled(512)
    elif name == "convnet":
        features, hidden = _convnet(shape[0], scaled), None
    elif name == "resblocks":
        features, hidden, activation = _resblocks(shape[0], scaled), scaled(512), nn.GELU()
    elif name == "vgg16":
        features, hidden, activation = (
            _from_torchvision("vgg16_bn", shape[0], pretrained),
            512,
            nn.GELU(),
        )
    else:
        features, hidden = _from_torchvision(name, shape[0], pretrained), RESNETS[name]
    try:
        with torch.no_grad():
            size = features.eval()(torch.zeros(1, *shape)).numel()
    except RuntimeError as e:
        raise UserError(
            f"--model {name} does not take images of shape {tuple(shape)} ({first_line(e)})"
        ) from e
    if hidden is None:
        layers = [nn.Linear(size, classes)]
    else:
        layers = [nn.Dropout(dropout), nn.Linear(size, hidden), activation, nn.Dropout(dropout),
                  nn.Linear(hidden, classes)]  # fmt: skip
    return Classifier(features.train(), nn.Sequential(nn.Flatten(), *layers))


def _cnn(channels: int, scaled) -> nn.Sequential:
    """McMahan et al. 2017: two 5x5 convolutions, each with 2x2 pooling. Its classifier has 512 hidden units.

    Pooling before ReLU is the same function, with a quarter of the work for ReLU.
    """
    return nn.Sequential(
        nn.Conv2d(channels, scaled(32), 5, padding=2), nn.MaxPool2d(2), nn.ReLU(),
        nn.Conv2d(scaled(32), scaled(64), 5, padding=2), nn.MaxPool2d(2), nn.ReLU(),
    )  # fmt: skip


def _convnet(channels: int, scaled) -> nn.Sequential:
    """Guo et al.'s model: four 3x3 convolutions, each followed by ReLU and group norm, then average pooling."""
    layers, sizes = [], [channels, scaled(64), scaled(128), scaled(128), scaled(128)]
    for i in range(4):
        layers += [
            nn.Conv2d(sizes[i], sizes[i + 1], 3, stride=2 if i == 1 else 1, padding=1),
            nn.ReLU(),
        ]
        layers += [GroupNorm(8, sizes[i + 1])]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def _resblocks(channels: int, scaled) -> nn.Sequential:
    """Zhang et al.'s encoder for grey images: three times a 3x3 convolution, a residual block and 2x2 pooling."""
    layers, sizes = [], [channels, scaled(128), scaled(256), scaled(512)]
    for i in range(3):
        layers += [
            nn.Conv2d(sizes[i], sizes[i + 1], 3, padding=1),
            ResidualBlock(sizes[i + 1]),
            nn.MaxPool2d(2),
        ]
    return nn.Sequential(*layers)


class ResidualBlock(nn.Module):
    """relu(x + two 3x3 convolutions with batch norm)."""

    def __init__(self, channels: int):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.body(x))


class GroupNorm(nn.GroupNorm):
    """Group norm in float32. On a GPU, autocast does this. On a CPU it would use bfloat16, which is slower here."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float())


class FrozenBatchNorm2d(nn.BatchNorm2d):
    """Batch norm that uses its stored statistics in training, too. It still learns its scale and shift."""

    def train(self, mode: bool = True):
        return super().train(False)


def _from_torchvision(name: str, channels: int, pretrained: str) -> nn.Module:
    """A ResNet, or VGG16's convolutions with batch norm: table 11 of Zhang et al. counts its parameters.

    The last layer of the ResNet is linear, and as wide as its input (Guo et al., section 5.1).
    """
    from torchvision import models  # here, because torchvision starts slowly
    from torchvision.transforms import v2

    options = (
        {}
        if name == "vgg16_bn"
        else {"norm_layer": FrozenBatchNorm2d if pretrained else partial(GroupNorm, 32)}
    )
    net = getattr(models, name)(**options)
    if pretrained:
        weights = models.get_model_weights(name).IMAGENET1K_V1  # the papers use these
        try:
            download = pretrained == "imagenet"
            net.load_state_dict(
                weights.get_state_dict(check_hash=True) if download else torch.load(pretrained)
            )
        except (
            Exception
        ) as e:  # many types; UnpicklingError's text advises an unsafe load, so it is left out
            raise UserError(
                f"--pretrained: the weights of {name} cannot be loaded from {pretrained} ({type(e).__name__}): with no"
                f" network, download {weights.url} elsewhere and give the file's path"
            ) from e
    if name in RESNETS:
        if channels == 1 and not pretrained:
            net.conv1 = nn.Conv2d(1, 64, 7, stride=2, padding=3, bias=False)
        net.fc = nn.Linear(net.fc.in_features, net.fc.in_features)
    features = net if name in RESNETS else net.features
    if not pretrained:
        return features
    # ((x + 1) / 2 - mean) / std with ImageNet's mean and std, for x in -1..1; grey becomes three equal channels
    return nn.Sequential(v2.Normalize([-0.03, -0.088, -0.188], [0.458, 0.448, 0.45]), features)
