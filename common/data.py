"""The data sets: a name or a folder -> tensors in memory.

    data = load("glyphs")      # drawn by the program, no download
    data.x[data.train]         # uint8 [12000, 1, 28, 28]

All samples are in one pool, and a client or a test set is a tensor of positions in this pool. So ten thousand clients
need ten thousand small tensors, but no copy of an image.
"""

import sys
import zlib
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from tqdm import tqdm

from common import UserError, first_line
from common.glyphs import coloured, glyphs

COLOURS = {  # name -> how often the colour agrees with the label in three domains, and whether it is left out
    "colours": ((1.0, 0.6, 0.1), False),
    "colours-control": ((0.8, 0.8, 0.1), False),
    "colours-grey": ((1.0, 0.6, 0.1), True),
}
DRAWN = ["glyphs", *COLOURS]  # by the program, so that no download is needed
NAMES = [*DRAWN, "mnist", "fmnist", "emnist", "cifar10", "cifar100", "gtsrb"]


@dataclass
class Dataset:
    """A pool of N samples.

    x        images, uint8 [N, channels, height, width]
    y        labels, int64 [N], indices into `classes`
    train    positions of the standard training samples, int64 [N_train]
    test     positions of the standard test samples; empty if the data set has no test set
    domain   int64 [N], indices into `domains`; None if the data set has no domains
    """

    name: str
    x: Tensor
    y: Tensor
    train: Tensor
    test: Tensor
    classes: list[str]
    domain: Tensor | None = None
    domains: list[str] = field(default_factory=list)
    extra: dict[str, Tensor] = field(default_factory=dict)

    def fingerprint(self) -> int:
        """A number that changes if a sample, a label, a domain or a name changes."""
        crc = zlib.crc32(repr((self.classes, self.domains)).encode())
        for part in (self.x, self.y, self.train, self.domain):
            crc = crc if part is None else zlib.crc32(part.contiguous().numpy(), crc)
        return crc


@lru_cache(maxsize=1)  # a run and its baselines share their data
def load(
    name: str,
    root: str | Path = "data",
    image_size: int = 96,
    rotate: Sequence[float] = (),
    seed: int = 0,
) -> Dataset:
    """The data set with this name, or the one in the folder at this path.

    root        folder of the data sets; downloads go there, too
    image_size  height and width to which a folder's images are scaled
    rotate      angles for rotated()
    seed        seed for rotated()

    Raises UserError if there is no such data set, or if it cannot be read and cannot be downloaded.
    """
    path, root = Path(name), Path(root)
    if name == "glyphs":
        data = Dataset(name, **glyphs())
    elif name in COLOURS:
        data = Dataset(name, **coloured(*COLOURS[name]))
    elif (
        name == "cifar10"
        and not (root / "cifar-10-batches-py").exists()
        and (root / "cifar10").is_dir()
    ):
        data = image_folder(root / "cifar10", 32)
    elif name in NAMES:
        data = _from_torchvision(name, root)
    elif path.is_dir():
        data = image_folder(path, image_size)
    else:
        raise UserError(
            f"--dataset {name}: choose from {', '.join(NAMES)}, or give the path of a folder of images"
        )
    return rotated(data, rotate, seed) if rotate else data


def rotated(data: Dataset, angles: Sequence[float], seed: int = 0) -> Dataset:
    """Divides the images at random into len(angles) equal parts, and rotates each part by its angle.

    Angles are in degrees, counter-clockwise. The interpolation is bilinear, and corners become zero (Guo et al., F.1:
    RotatedMNIST; Zhang et al., section 4). Training and test images are divided separately. The angle becomes the
    domain. Raises UserError for equal angles and for fewer images than angles.
    """
    from torchvision.transforms.functional import (
        InterpolationMode,
        rotate,
    )  # here, since torchvision starts slowly

    if len({f"{a % 360:g}" for a in angles}) < len(angles) or len(data.train) < len(angles):
        raise UserError(
            f"--rotate: {len(data.train)} images and the angles {angles}; name each angle once, and fewer"
        )
    g = torch.Generator().manual_seed(seed)
    x, domain = data.x.clone(), torch.zeros_like(data.y)
    for part in (data.train, data.test):
        for d, of_angle in enumerate(
            part[torch.randperm(len(part), generator=g)].tensor_split(len(angles))
        ):
            domain[of_angle] = d
            for batch in (batch for batch in of_angle.split(2000) if len(batch)):
                x[batch] = rotate(x[batch], angles[d], InterpolationMode.BILINEAR)
    return replace(data, x=x, domain=domain, domains=[f"{a:g}" for a in angles])


def _from_torchvision(name: str, root: Path) -> Dataset:
    """A data set of torchvision, downloaded into `root` if it is not there yet."""
    from torchvision import datasets

    make = {
        "mnist": datasets.MNIST,
        "fmnist": datasets.FashionMNIST,
        "emnist": lambda root, **kwargs: datasets.EMNIST(root, split="digits", **kwargs),
        "cifar10": datasets.CIFAR10,
        "cifar100": datasets.CIFAR100,
        "gtsrb": lambda root, train, **kwargs: datasets.GTSRB(
            root, "train" if train else "test", **kwargs
        ),
    }[name]
    try:
        train, test = (make(str(root), train=train, download=True) for train in (True, False))
        (x_train, y_train), (x_test, y_test) = _arrays(train), _arrays(test)
        x, y = torch.cat([x_train, x_test]), torch.cat([y_train, y_test])
        classes = getattr(train, "classes", None) or [str(c) for c in range(int(y_train.max()) + 1)]
        if (
            len(x_train) != len(y_train)
            or len(x) != len(y)
            or int(y.min()) < 0
            or int(y.max()) >= len(classes)
        ):
            raise ValueError(
                f"{len(x)} images with {len(y)} labels in {int(y.min())}..{int(y.max())}"
            )
    except (
        Exception
    ) as e:  # torchvision raises anything from URLError to AssertionError for a bad or missing file
        raise UserError(
            f"{name} is not in {root}/ and could not be downloaded or read ({first_line(e)}): without a "
            f"network, copy the files of torchvision's {name} there, or name their folder with --data-dir"
        ) from e
    if name == "emnist":
        x = x.transpose(2, 3)  # its files store each image transposed
    pool, n_train = torch.arange(len(x)), len(x_train)
    return Dataset(name, x.contiguous(), y, pool[:n_train], pool[n_train:], list(classes))


def _arrays(dataset) -> tuple[Tensor, Tensor]:
    """Images, uint8 [N, channels, height, width], and labels, int64 [N], of one of torchvision's data sets."""
    if not hasattr(dataset, "data"):  # GTSRB: files of many sizes
        paths, labels = zip(*dataset._samples, strict=True)
        return _decode([Path(p) for p in paths], 32), torch.tensor(labels)
    x = torch.as_tensor(dataset.data)
    x = x.unsqueeze(1) if x.dim() == 3 else x.permute(0, 3, 1, 2)
    return x, torch.as_tensor(dataset.targets)


def image_folder(folder: Path, image_size: int) -> Dataset:
    """The images of a folder with `train/<class>` and `test/<class>`, or with `<domain>/<class>` and no test set.

    Every program decodes them anew, a few thousand per second, and scales them to image_size x image_size. Other files
    are named on stderr. Raises UserError if the folder has neither layout, or if an image cannot be read.
    """
    from torchvision.datasets.folder import IMG_EXTENSIONS, find_classes, make_dataset

    try:
        parts = [part for part in find_classes(folder)[0] if part[0] != "."]
        classes = sorted(
            {name for part in parts for name in find_classes(folder / part)[0] if name[0] != "."}
        )
    except FileNotFoundError as e:
        raise UserError(
            f"{folder} holds no images as train|test/<class>/* or <domain>/<class>/* ({e})"
        ) from e
    if has_test := {"train", "test"} & {part.lower() for part in parts}:
        parts.sort(key=str.lower, reverse=True)  # first train, then test
        if [part.lower() for part in parts] != ["train", "test"]:
            raise UserError(
                f"{folder} holds {', '.join(parts)}: give train/ and test/, and no other folder"
            )
    number, kinds, samples = (
        {name: c for c, name in enumerate(classes)},
        (*IMG_EXTENSIONS, ".gif"),
        [],
    )
    for p, part in enumerate(parts):
        samples += [
            (Path(f), c, p) for f, c in make_dataset(folder / part, number, kinds, allow_empty=True)
        ]
    files, y, part = (
        [file for file, *_ in samples],
        *torch.tensor([s[1:] for s in samples]).long().view(-1, 2).T,
    )
    holds = torch.zeros(len(parts), len(classes), dtype=torch.bool)
    holds[part, y] = True
    if absent := [classes[c] for c in torch.nonzero(~(holds.all(0) if has_test else holds.any(0)))]:
        raise UserError(
            f"{folder}: train/ or test/ or all domains have no image of the class {absent[0]}: remove it"
        )
    if holds.float().mean() < 0.5:  # NICO's contexts differ from class to class
        raise UserError(
            f"{folder}: {', '.join(parts[:3])}, ... hold different classes: this looks like <class>/<domain>/ and must "
            "be <domain>/<class>/; swap the two levels"
        )
    others = {file for file in folder.rglob("*") if file.is_file()} - set(files)
    if run := [file.parent for file in others if file.name == "metrics.csv"]:
        raise UserError(
            f"{run[0]} is the folder of a run, and its pictures are no data: move it out of {folder}"
        )
    if others:
        endings = Counter(file.suffix or file.name for file in others)
        text = ", ".join(f"{count} x {ending}" for ending, count in sorted(endings.items()))
        print(f"{folder}: left out {text}; the first is {min(others)}", file=sys.stderr)

    x, pool = _decode(files, image_size), torch.arange(len(files))
    if has_test:
        return Dataset(folder.name, x, y, pool[part == 0], pool[part == 1], classes)
    return Dataset(folder.name, x, y, pool, pool[:0], classes, part, parts)


def _decode(files: list[Path], image_size: int) -> Tensor:
    """The images as uint8 [N, 3, image_size, image_size], decoded in parallel."""

    def decode(file: Path) -> np.ndarray:
        try:
            with Image.open(file) as image:
                if image.mode.startswith(("I", "F")):
                    raise ValueError("more than 8 bits per channel, on an unknown scale")
                image = ImageOps.exif_transpose(image)  # photographs say which side is up
                if image.has_transparency_data:
                    image = image.convert("RGBA")
                    image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
                return np.array(
                    image.convert("RGB").resize((image_size, image_size), Image.BILINEAR)
                )
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as e:
            raise UserError(
                f"{file} cannot be read as an image ({first_line(e)}): repair or remove it"
            ) from e

    x = torch.empty(len(files), image_size, image_size, 3, dtype=torch.uint8)
    with (
        ThreadPoolExecutor() as pool
    ):  # threads help, because Pillow releases the interpreter while it decodes
        images = tqdm(
            pool.map(decode, files), "decoding", len(files), unit=" images", leave=False, delay=1
        )
        for i, image in enumerate(images):
            x[i] = torch.from_numpy(image)
    return x.permute(0, 3, 1, 2).contiguous()
