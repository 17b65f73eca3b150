"""The data sets: a name or a folder -> tensors in memory.

    data = load("glyphs")      # drawn by the program, no download
    data.x[data.train]         # uint8 [12000, 1, 28, 28]

All samples are in one pool, and a client or a test set is a tensor of positions in this pool. So
ten thousand clients need ten thousand small tensors, but no copy of an image.
"""

import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from tempfile import NamedTemporaryFile

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from tqdm.contrib.concurrent import thread_map

from common import UserError, first_line
from common.glyphs import coloured, glyphs

COLOURS = {  # how often the colour agrees with the label in three domains, and if it is left out
    "colours": ((1.0, 0.6, 0.1), False),
    "colours-control": ((0.8, 0.8, 0.1), False),
    "colours-grey": ((1.0, 0.6, 0.1), True),
}
DRAWN = ["glyphs", *COLOURS]  # by the program, so that no download is needed
NAMES = [*DRAWN, "mnist", "fmnist", "emnist", "cifar10", "cifar100", "gtsrb"]
ENDINGS = [".jpg", ".jpeg", ".png", ".gif", ".webp", ".bmp", ".tif", ".tiff", ".ppm", ".pgm"]


@dataclass
class Dataset:
    """A pool of N samples.

    x        images, uint8 [N, channels, height, width]
    y        labels, int64 [N], indices into `classes`
    train    positions of the standard training samples, int64 [N_train]
    test     positions of the standard test samples; empty if the data set has no test set
    domain   int64 [N], indices into `domains`, or -1; None if the data set has no domains
    extra    positions of further test sets, by name
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
            if part is not None:
                crc = zlib.crc32(part.contiguous().numpy(), crc)
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
    root = Path(root)
    jpegs, batches = root / "cifar10", root / "cifar-10-batches-py"  # its images, torchvision's
    if name == "glyphs":
        data = Dataset(name, **glyphs())
    elif name in COLOURS:
        data = Dataset(name, **coloured(*COLOURS[name]))
    elif name == "cifar10" and jpegs.is_dir() and not batches.exists():
        data = image_folder(jpegs, 32)
    elif name in NAMES:
        data = _from_torchvision(name, root)
    elif Path(name).is_dir():
        data = image_folder(Path(name), image_size)
    else:
        raise UserError(
            f"--dataset {name}: no such folder or data set; choose from {', '.join(NAMES)}, or "
            "give a folder of images"
        )
    return rotated(data, rotate, seed) if rotate else data


def rotated(data: Dataset, angles: Sequence[float], seed: int = 0) -> Dataset:
    """Divides the images at random into len(angles) equal parts, and rotates each by its angle.

    An angle is in degrees, counter-clockwise, and becomes the domain of its images (Guo et al.,
    F.1: RotatedMNIST; Zhang et al., section 4). Training and test images are divided separately, so
    that both have all angles. The interpolation is bilinear, and the corners become zero. Raises
    UserError for equal angles and for fewer images than angles.
    """
    from torchvision.transforms.functional import InterpolationMode, rotate  # slow to import

    n, different = len(data.train), {f"{angle % 360:g}" for angle in angles}
    if len(angles) > min(n, len(different)):
        raise UserError(f"--rotate: {n} images for {angles}; name each angle once, and fewer")
    g = torch.Generator().manual_seed(seed)
    x, domain = data.x.clone(), torch.full_like(data.y, -1)
    for part in (data.train, data.test):
        mixed = part[torch.randperm(len(part), generator=g)]
        for d, positions in enumerate(mixed.tensor_split(len(angles))):
            domain[positions] = d
            for batch in positions.split(2000):
                if len(batch):
                    x[batch] = rotate(x[batch], angles[d], InterpolationMode.BILINEAR)
    return replace(data, x=x, domain=domain, domains=[f"{angle:g}" for angle in angles])


def _from_torchvision(name: str, root: Path) -> Dataset:
    """A data set of torchvision, downloaded into `root` if it is not there yet."""
    from torchvision import datasets

    kind = getattr(datasets, "FashionMNIST" if name == "fmnist" else name.upper())
    images, labels = [], []
    try:
        for split in ("train", "test"):
            options = {"split": split} if name == "gtsrb" else {"train": split == "train"}
            if name == "emnist":
                options["split"] = "digits"
            part = kind(str(root), download=True, **options)
            if name == "gtsrb":  # files of many sizes
                files, part.targets = zip(*part._samples, strict=True)
                part.data = _decode(files, 32)
            images.append(torch.as_tensor(part.data))
            labels.append(torch.as_tensor(part.targets).view(len(part.data)))  # one per image
    except Exception as e:  # torchvision raises anything from URLError to AssertionError
        raise UserError(
            f"{name} is not in {root}/ and could not be downloaded or read ({first_line(e)}): "
            f"without a network, copy the files of torchvision's {name} there, or name their "
            "folder with --data-dir"
        ) from e
    x = torch.cat(images)
    if name.startswith("cifar"):  # has channels last
        x = x.permute(0, 3, 1, 2)
    if name.endswith("mnist"):  # is grey
        x = x.unsqueeze(1)
    if name == "emnist":  # stores each image transposed
        x = x.mT
    train, test = torch.arange(len(x)).tensor_split([len(images[0])])
    classes = getattr(part, "classes", [str(c) for c in range(43)])  # those of gtsrb have no names
    return Dataset(name, x.contiguous(), torch.cat(labels), train, test, classes)


def image_folder(folder: Path, image_size: int) -> Dataset:
    """The images in `train/<class>` and `test/<class>`, or in `<domain>/<class>` and no test set.

    Every program decodes them anew, a few thousand per second, and scales them to image_size x
    image_size. Files that are hidden, have another ending or lie elsewhere are left out and named
    on stderr. Raises UserError if the folder has neither layout, if it holds a run or a link to a
    folder, or if an image or the name of a folder cannot be read.
    """
    images, others = [], []
    for path in sorted(folder.rglob("*")):
        place = path.relative_to(folder).parts
        is_hidden = any(name.startswith(".") for name in place)
        if path.is_dir():
            if path.is_symlink():  # it could lead to the same images again
                raise UserError(f"{path} is a link to a folder: put the folder itself there")
        elif path.name == "metrics.csv":
            raise UserError(
                f"{path.parent} is the folder of a run, and its pictures are no data: "
                f"move it out of {folder}"
            )
        elif is_hidden or len(place) < 3 or path.suffix.lower() not in ENDINGS:
            others.append(path)
        else:
            images.append((place[0].lower() == "test", *place[:2], str(path.parent), path))
    if not images:
        raise UserError(f"{folder} holds no images as train|test/<class>/* or <domain>/<class>/*")
    is_test, part_of, class_of, _, files = zip(*sorted(images), strict=True)

    parts, classes = sorted(set(part_of)), sorted(set(class_of))
    for name in (*parts, *classes):
        if name.encode(errors="ignore").decode() != name:  # a run could not write it at its end
            raise UserError(f"{folder}: the name of the folder {name!a} is not UTF-8: rename it")
    for path in folder.glob("[!.]*"):
        if path.is_dir() and path.name not in parts:
            raise UserError(f"{path} holds no images as <class>/*: add some, or remove it")
    held = {(part.lower(), name) for part, name in zip(part_of, class_of, strict=True)}
    wanted = {(part, name) for part in ("train", "test") for name in classes}
    has_test = any(part in ("train", "test") for part, _ in held)
    if has_test and held != wanted:
        raise UserError(
            f"{folder} must hold the same classes in train/ and test/, and no other folder: "
            f"see {'/'.join(min(held ^ wanted))}"
        )
    if len(held) < len(parts) * len(classes) / 2:  # NICO's contexts differ from class to class
        raise UserError(
            f"{folder}: {', '.join(parts[:3])}, ... hold different classes: this looks like "
            "<class>/<domain>/ and must be <domain>/<class>/; swap the two levels"
        )
    if others:
        kinds = ", ".join(sorted({path.suffix or path.name for path in others}))
        text = f"left out {len(others)} files ({kinds}); the first is {others[0]}"
        print(f"{folder}: {text}", file=sys.stderr)

    x = _decode(files, image_size)
    y = torch.tensor([classes.index(name) for name in class_of])
    domain = torch.tensor([parts.index(part) for part in part_of])
    pool, is_test = torch.arange(len(files)), torch.tensor(is_test)
    data = Dataset(folder.name, x, y, pool[~is_test], pool[is_test], classes)
    return data if has_test else replace(data, domain=domain, domains=parts)


def _decode(files: Sequence[str | Path], image_size: int) -> Tensor:
    """The images as uint8 [N, 3, image_size, image_size], decoded in parallel."""
    x, bad = torch.empty(len(files), 3, image_size, image_size, dtype=torch.uint8), []

    def decode(i):
        try:
            x[i] = _pixels(files[i], image_size)
        except Exception as e:  # Pillow raises many types for a damaged file
            bad.append(f"{files[i]} cannot be read as an image ({first_line(e)})")

    thread_map(decode, range(len(files)), desc="decoding", unit=" images", leave=False, delay=1)
    if bad:
        shown = "; ".join(sorted(bad)[:3])
        if len(bad) > 3:
            with NamedTemporaryFile("w", prefix="unreadable-", suffix=".txt", delete=False) as out:
                out.write("\n".join(sorted(bad)) + "\n")
            shown = f"all are listed in {out.name}"
        raise UserError(f"repair or remove {len(bad)} of {len(files)} images: {shown}")
    return x


def _pixels(file: str | Path, image_size: int) -> Tensor:
    """The image as a person sees it, uint8 [3, image_size, image_size]."""
    with Image.open(file) as image:
        if image.mode.startswith(("I", "F")):
            raise ValueError("more than 8 bits per channel, on an unknown scale")
        image = ImageOps.exif_transpose(image)  # photographs say which side is up
        if image.has_transparency_data:
            image = image.convert("RGBA")
            white = Image.new("RGBA", image.size, "white")
            image = Image.alpha_composite(white, image)
        image = image.convert("RGB").resize((image_size, image_size), Image.BILINEAR)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)
