"""The data sets: a name or a folder -> tensors in memory.

    data = load("glyphs")      # drawn by the program, no download
    data.x[data.train]         # uint8 [12000, 1, 28, 28]

All samples are in one pool, and a client or a test set is a tensor of positions in this pool. So
ten thousand clients need ten thousand small tensors, but no copy of an image.
"""

import zlib
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from common import UserError, check_tensor, first_line
from common.folders import decode, image_folder
from common.glyphs import coloured, glyphs
from common.ranks import say

OFFLINE = {"glyphs": glyphs, "colours": coloured}  # drawn by the program, without a download
# name -> torchvision's class, and how many training and test images there are. The first two have
# files of the same names, so it also says how many training images are of the first class
PUBLIC = {
    "mnist": ("MNIST", 60_000, 10_000, 5_923),
    "fmnist": ("FashionMNIST", 60_000, 10_000, 6_000),
    "emnist": ("EMNIST", 240_000, 40_000),  # the digits
    "cifar10": ("CIFAR10", 50_000, 10_000),
    "cifar100": ("CIFAR100", 50_000, 10_000),
    "gtsrb": ("GTSRB", 26_640, 12_630),
}
NAMES = [*OFFLINE, *PUBLIC]


@dataclass
class Dataset:
    """A pool of N samples.

    x        images, uint8 [N, channels, height, width]
    y        labels, int64 [N], indices into `classes`
    train    positions of the standard training samples, int64 [N_train]
    test     positions of the standard test samples; empty if the data set has no test set
    domain   int64 [N], indices into `domains`, or -1; None if the data set has no domains
    extra    positions of further test sets, by name
    source   the fingerprint before the rotation, which depends on a run's seed

    Raises UserError for another type or shape, and for a label that is no class.
    """

    name: str
    x: Tensor
    y: Tensor
    train: Tensor
    test: Tensor
    classes: list
    domain: Tensor = None
    domains: list = field(default_factory=list)
    extra: dict = field(default_factory=dict)
    source: int | None = None

    def __post_init__(self):
        check_tensor("x", self.x, torch.uint8, 4)
        of_numbers = {"y": self.y, "train": self.train, "test": self.test, **self.extra}
        if self.domain is not None:
            of_numbers["domain"] = self.domain
        for name, numbers in of_numbers.items():
            check_tensor(name, numbers, torch.int64, 1)
        last = len(self.classes) - 1
        if len(self.y) != len(self.x) or self.y.min() < 0 or self.y.max() > last:
            raise UserError(f"y must be in 0 .. {last} for each of {len(self.x)} images")

    def fingerprint(self):
        """A number that changes if a sample, a label, a domain or a name changes."""
        crc = zlib.crc32(repr((self.classes, self.domains)).encode())
        for part in (self.x, self.y, self.train, self.domain):
            if part is not None:
                crc = zlib.crc32(part.contiguous().numpy(), crc)
        return crc


def load(name, root="data", image_size=96):
    """The data set with this name, or the one in the folder at this path.

    root        folder of the data sets; downloads go there, too
    image_size  height and width to which a folder's images are scaled

    Raises UserError if there is no such data set, or if it can be neither read nor downloaded. It
    does so, too, if a public data set has other images or another number of them than it should.
    """
    root = Path(root)
    folder = Path(name)
    if name in NAMES and folder.is_dir():
        say(f"--dataset {name} is the name of a data set: for the folder here, write ./{name}")
    if name in OFFLINE:
        return Dataset(name, **OFFLINE[name]())
    if name not in PUBLIC:
        if not folder.is_dir():
            raise UserError(
                f"--dataset {name} is no folder, and no data set: there are {', '.join(NAMES)}"
            )
        return Dataset(folder.resolve().name, **image_folder(folder, image_size))
    images = root / "cifar10"  # somebody has unpacked them, in place of torchvision's file
    if name == "cifar10" and images.is_dir() and not (root / "cifar-10-batches-py").exists():
        data = Dataset(name, **image_folder(images, 32))
    else:
        data = _from_torchvision(name, root)
    expected = PUBLIC[name][1:]
    of_first_class = int((data.y[data.train] == 0).sum())
    found = (len(data.train), len(data.test), of_first_class)[: len(expected)]
    if found != expected:
        raise UserError(
            f"{name} in {root}/ has {found} training and test images, and not {expected}: remove "
            "its folder there, so that it is downloaded again"
        )
    return data


def rotated(data, angles, seed=0):
    """Divides the images at random into len(angles) equal parts, and rotates each by its angle.

    An angle is in degrees, counter-clockwise, and becomes the domain of its images (Guo et al.,
    F.1: RotatedMNIST; Zhang et al., section 4). Training and test images are divided separately, so
    that both have all angles. The interpolation is bilinear, and the corners become zero. Returns
    another Dataset.
    """
    from torchvision.transforms.functional import InterpolationMode, rotate  # slow to import

    g = torch.Generator().manual_seed(seed)
    x, domain = data.x.clone(), torch.full_like(data.y, -1)
    for part in (data.train, data.test):
        mixed = part[torch.randperm(len(part), generator=g)]
        for d, positions in enumerate(mixed.tensor_split(len(angles))):
            domain[positions] = d
            for batch in positions.split(2000):
                if len(batch):
                    x[batch] = rotate(x[batch], angles[d], InterpolationMode.BILINEAR)
    names = [f"{angle:g}" for angle in angles]
    return replace(data, x=x, domain=domain, domains=names, source=data.fingerprint())


def _from_torchvision(name, root):
    """A data set of torchvision, downloaded into `root` if it is not there yet."""
    from torchvision import datasets

    images, labels = [], []
    try:
        for split in ("train", "test"):
            options = {"split": split} if name == "gtsrb" else {"train": split == "train"}
            if name == "emnist":
                options["split"] = "digits"
            part = getattr(datasets, PUBLIC[name][0])(str(root), download=True, **options)
            if name == "gtsrb":  # files of many sizes
                files, part.targets = zip(*part._samples)
                part.data = decode(files, 32)
            images.append(torch.as_tensor(part.data))
            labels.append(torch.as_tensor(part.targets).view(len(part.data)))  # one per image
    except Exception as e:  # torchvision raises anything from URLError to AssertionError
        raise UserError(
            f"{name} is not in {root}/ and could not be downloaded or read ({first_line(e)}): "
            f"without a network, copy what torchvision downloads for {name} there, or name its "
            "folder with --data-dir; if you have done so, a file is damaged: remove its folder"
        ) from e
    x = torch.cat(images)
    y = torch.cat(labels)
    classes = getattr(part, "classes", [str(c) for c in range(43)])  # those of gtsrb have no names
    if name.startswith("cifar"):  # has channels last
        x = x.permute(0, 3, 1, 2)
    if "mnist" in name:  # is grey
        x = x.unsqueeze(1)
    if name == "emnist":  # stores each image transposed
        x = x.mT
    train, test = torch.arange(len(x)).tensor_split([len(images[0])])
    return Dataset(name, x.contiguous(), y, train, test, classes)
