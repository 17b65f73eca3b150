"""The models: image classifiers, each an nn.Module with .features and .classifier.

    model = build("cnn", shape=(1, 28, 28), classes=10)
    logits = model(x)           # in float32 the same as model.classifier(model.features(x))

Their input is images, float32 [N, channels, height, width] in -1..1.
"""

from functools import partial
from itertools import pairwise
from textwrap import shorten

import torch
import torch.nn as nn

from common import UserError, first_line, load_tensors, one_of

OWN = {  # defined here: name -> channels
    "cnn": [32, 64],
    "convnet": [64, 128, 128, 128],
    "resblocks": [128, 256, 512],
    "resnet18-cifar": [64, 64, 128, 256, 512],
}
TORCHVISION = {"resnet18": 512, "resnet50": 2048, "vgg16": 512}  # name -> hidden units
NAMES = [*OWN, *TORCHVISION]


class Classifier(nn.Module):
    """classifier(features(x)), where `features` may give vectors [N, d] or maps [N, d, h, w].

    dim        d, if it is known
    precision  of the forward pass, "float32" or "bfloat16", which a Trainer sets
    """

    precision = "float32"

    def __init__(self, features, classifier, dim=None):
        super().__init__()
        self.features, self.classifier, self.dim = features, classifier, dim

    def encode(self, x):
        with in_precision(self, x):
            return self.features(x)

    def forward(self, x):
        z = self.encode(x)
        with in_precision(self, x):
            return self.classifier(z).float()  # for the loss


def in_precision(model, x):
    """The context of a model's forward pass on x, which computes in bfloat16 if the model says so.

    It is the forward pass's alone, because FedIIR computes gradients inside of its loss.
    """
    return torch.autocast(x.device.type, torch.bfloat16, model.precision == "bfloat16")


def build(name, shape, classes, width=1.0, dropout=0.0, pretrained="", pooled=True):
    """The model called `name` for images of `shape` (channels, height, width).

    name        in OWN or TORCHVISION. torchvision's ResNet-18 has a stem for 224 pixels, which
                shrinks an image to a quarter. In resnet18-cifar the stem is a 3 x 3 convolution of
                stride 1 without pooling, as everybody has it on CIFAR: 11,173,962 parameters for 10
                classes. Wu et al. do not say which, so each has its own name
    width       multiplies the channels of the models in OWN (not of torchvision's), rounded to
                multiples of 8
    dropout     probability of the dropout layers before both linear layers of a classifier with a
                hidden layer
    pretrained  for torchvision's: "imagenet" (downloaded on first use), or a file with weights of
                the same network, for VGG16 the one with batch norm. A ResNet's batch norm then uses
                its stored statistics. Without pretrained weights, group norm replaces it, because
                its result does not depend on the other samples in a batch. VGG16 has ordinary batch
                norm in both cases
    pooled      if false, a ResNet's features are the map before its average pooling, whose places
                are UEFL's tokens (Zhang et al., section 3.1). It changes no other model

    Draws the weights from torch's global generator. Raises UserError if name, shape or weights do
    not fit together.
    """
    one_of(name, NAMES)
    if name in OWN and pretrained:
        raise UserError(
            f"--pretrained: there are no ImageNet weights for {name}; choose a model of torchvision"
        )

    def scaled(channels):
        return max(8, round(channels * width / 8) * 8)

    if name in OWN:
        features = _own(name, [shape[0], *map(scaled, OWN[name])], pooled)
    else:
        features = _from_torchvision(name, shape[0], pretrained, pooled)
    try:
        # With bfloat16 on a CPU, the gradients of a single pixel are random
        if name in ("resnet18", "resnet50") and min(shape[1:]) <= 16:
            raise RuntimeError("its last stage would see a single pixel")
        with torch.no_grad():
            example = features.eval()(torch.zeros(1, *shape))
    except RuntimeError as e:
        raise UserError(
            f"--model {name} does not take images of shape {shape} ({first_line(e)}): take another "
            "model, or larger images"
        ) from e
    if name in OWN and example.dim() == 2:  # after average pooling
        layers = [nn.Linear(example.numel(), classes)]
    else:
        hidden = TORCHVISION.get(name, scaled(512))
        # As in Zhang et al.'s published code, GELU follows maps, except McMahan et al.'s
        activation = nn.ReLU() if name == "cnn" or example.dim() == 2 else nn.GELU()
        layers = [
            nn.Dropout(dropout),
            nn.Linear(example.numel(), hidden),
            activation,
            nn.Dropout(dropout),
            nn.Linear(hidden, classes),
        ]
    classifier = nn.Sequential(nn.Flatten(), *layers)
    return Classifier(features.train(), classifier, dim=example.shape[1])


def _own(name, channels, pooled):
    """The features of a model in OWN, for images with the first of these numbers of channels."""
    if name == "resnet18-cifar":
        return _resnet18(channels, pooled)
    layers = []
    for i, (before, after) in enumerate(pairwise(channels)):
        if name == "cnn":
            # McMahan et al. 2017, with 512 hidden units. Pooling before ReLU is the same function,
            # with a quarter of the work for ReLU
            layers += [nn.Conv2d(before, after, 5, padding=2), nn.MaxPool2d(2), nn.ReLU()]
        elif name == "convnet":  # Guo et al., with average pooling at the end
            convolution = nn.Conv2d(before, after, 3, stride=2 if i == 1 else 1, padding=1)
            layers += [convolution, nn.ReLU(), GroupNorm(8, after)]
        else:  # Zhang et al.'s encoder for grey images, with the pooling of their code
            from torchvision.models.resnet import BasicBlock  # here, because it starts slowly

            convolution = nn.Conv2d(before, after, 3, padding=1)
            layers += [convolution, BasicBlock(after, after), nn.MaxPool2d(2)]
    if name == "convnet":
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers)


def _resnet18(channels, pooled):
    """torchvision's ResNet-18 without its last layer, but with a stem for small images."""
    from torchvision.models.resnet import BasicBlock  # here, because it starts slowly

    norm = partial(GroupNorm, 8)  # 8 groups divide all widths
    stem = nn.Conv2d(channels[0], channels[1], 3, padding=1, bias=False)
    layers = [stem, norm(channels[1]), nn.ReLU()]
    for stage, (before, after) in enumerate(pairwise(channels[1:])):
        stride, shortcut = 1, None
        if stage > 0:  # all but the first halve the map
            stride = 2
            narrow = nn.Conv2d(before, after, 1, stride, bias=False)
            shortcut = nn.Sequential(narrow, norm(after))
        layers.append(BasicBlock(before, after, stride, shortcut, norm_layer=norm))
        layers.append(BasicBlock(after, after, norm_layer=norm))
    if pooled:
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers)


class GroupNorm(nn.GroupNorm):
    """Group norm in float32, as autocast does it on a GPU. On a CPU, bfloat16 would be slower."""

    def forward(self, x):
        return super().forward(x.float())


class FrozenBatchNorm2d(nn.BatchNorm2d):
    """Batch norm that uses its stored statistics in training, too. It learns scale and shift."""

    def train(self, mode=True):
        return super().train(False)


def _from_torchvision(name, channels, pretrained, pooled):
    """A ResNet, or VGG16's convolutions with batch norm, which Zhang et al.'s table 11 implies.

    A pooled ResNet ends with a linear layer as wide as its input (Guo et al., section 5.1).
    """
    from torchvision import models  # here, because torchvision starts slowly
    from torchvision.transforms import v2

    if name == "vgg16":
        net = models.vgg16_bn()
        weights = models.VGG16_BN_Weights
        del net.classifier
    else:
        norm = FrozenBatchNorm2d if pretrained else partial(GroupNorm, 32)
        net = models.get_model(name, norm_layer=norm)
        weights = models.get_model_weights(name)
        del net.fc
        if channels == 1 and not pretrained:
            net.conv1 = nn.Conv2d(1, 64, 7, stride=2, padding=3, bias=False)
    if pretrained:
        _load_weights(net, pretrained, weights.IMAGENET1K_V1)  # as in Guo et al.'s published code
    if pooled and name != "vgg16":
        net.fc = nn.Linear(TORCHVISION[name], TORCHVISION[name])
    else:
        net = nn.Sequential(*net.children())[:-1]  # without the last layer, average pooling
    if not pretrained:
        return net
    # ((x + 1) / 2 - mean) / std with ImageNet's mean and std, for x in -1..1. Grey images become
    # three equal channels
    return nn.Sequential(v2.Normalize([-0.03, -0.088, -0.188], [0.458, 0.448, 0.45]), net)


def _load_weights(net, pretrained, weights):
    """Loads torchvision's `weights`, or those in a file, into `net`, which lacks its last layers.

    The file has a state dict, or a checkpoint that holds one as "state_dict" or "model". Raises
    UserError, which says why the weights cannot be downloaded, or read, or do not fit.
    """
    try:
        if pretrained == "imagenet":
            state = weights.get_state_dict(check_hash=True)
        else:
            state = load_tensors(pretrained)
            state = state.get("state_dict", state.get("model", state))
        last = "fc.", "classifier."  # net has another layer there, or none
        net.load_state_dict({k: v for k, v in state.items() if not k.startswith(last)})
    except Exception as e:  # many types; UnpicklingError's text advises an unsafe load
        why = shorten(str(e), 300) if isinstance(e, (OSError, RuntimeError)) else type(e).__name__
        raise UserError(
            f"--pretrained: weights cannot be loaded from {pretrained} ({why}): give a copy of "
            f"{weights.url}, or a file with the same names and shapes"
        ) from e
