"""The data sets: a name or a folder -> tensors in memory.

    data = load("glyphs")      # drawn by the program, no download
    data.x[data.train]         # uint8 [12000, 1, 28, 28]

All samples are in one pool, and a client or a test set is a tensor of positions in this pool. So
ten thousand clients need ten thousand small tensors, but no copy of an image.
"""

import os
import re
import sys
import unicodedata
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from tempfile import NamedTemporaryFile

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from tqdm.contrib.concurrent import thread_map

from common import UserError, first_line, random_at
from common.glyphs import coloured, glyphs

COLOURS = {  # how often the colour agrees with the label in three domains, and if it is left out
    "colours": ((1.0, 0.6, 0.1), False),
    "colours-control": ((0.8, 0.8, 0.1), False),
    "colours-grey": ((1.0, 0.6, 0.1), True),
}
DRAWN = ["glyphs", *COLOURS]  # by the program, so that no download is needed
PUBLIC = {  # name -> torchvision's class, and how many training and test images there are
    "mnist": ("MNIST", 60_000, 10_000),
    "fmnist": ("FashionMNIST", 60_000, 10_000),
    "emnist": ("EMNIST", 240_000, 40_000),  # the digits
    "emnist-letters": ("EMNIST", 124_800, 20_800),
    "emnist-balanced": ("EMNIST", 112_800, 18_800),
    "cifar10": ("CIFAR10", 50_000, 10_000),
    "cifar100": ("CIFAR100", 50_000, 10_000),
    "gtsrb": ("GTSRB", 26_640, 12_630),
}
NAMES = [*DRAWN, *PUBLIC]
ENDINGS = [".jpg", ".jpeg", ".png", ".gif", ".webp", ".bmp", ".tif", ".tiff", ".ppm", ".pgm"]
JUNK = (".", "@", "#", "$", "__")  # begins the names of what is hidden, such as @eaDir and __MACOSX
SPLIT = re.compile(  # a word of its own, as in Training, seg_test, imagesVal or train2017
    r"((?<![A-Za-z])|(?<=[a-z])(?=[A-Z]))"
    r"(?i:(train|test|val)(s|ing|id|idation|set|data)?)[A-Z\d]*(?![a-z])"
)
DEEP = re.compile(r";16[BLN]|'ppm.*\d{4}\)\)")  # how Pillow's decoders name over 8 bits per channel


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

    Raises UserError if there is no such data set, if it cannot be read and cannot be downloaded, or
    if a data set with a name has not as many images as it should.
    """
    # A folder of images that has changed since the last call is read anew
    place = Path(root, name) if name in NAMES else Path(name)
    stats = [(str(path), path.lstat()) for path in place.rglob("*")]
    files = frozenset((path, stat.st_size, stat.st_mtime_ns) for path, stat in stats)
    return _load(name, Path(root), image_size, tuple(rotate), seed, files)


@lru_cache(maxsize=1)  # a run and its baselines share their data
def _load(name, root, image_size, rotate, seed, files) -> Dataset:
    """load() of what is in these files."""
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
    found = len(data.train), len(data.test)
    if name in PUBLIC and found != PUBLIC[name][1:]:
        raise UserError(
            f"{name} in {root}/ has {found} training and test images, and not {PUBLIC[name][1:]}: "
            "remove its folder there, so that it is downloaded again"
        )
    return rotated(data, rotate, seed) if rotate else data


load.cache_clear = _load.cache_clear


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


@contextmanager
def _alone(root: Path) -> Iterator[None]:
    """Only one process at a time is in here: the first downloads, and the others wait for it."""
    with ExitStack() as stack:
        with suppress(ImportError, OSError):  # Windows has no fcntl, a read-only folder no download
            import fcntl

            root.mkdir(parents=True, exist_ok=True)
            fcntl.flock(stack.enter_context(open(root / ".lock", "w")), fcntl.LOCK_EX)
        yield


def _from_torchvision(name: str, root: Path) -> Dataset:
    """A data set of torchvision, downloaded into `root` if it is not there yet."""
    from torchvision import datasets

    images, labels = [], []
    try:
        for split in ("train", "test"):
            options = {"split": split} if name == "gtsrb" else {"train": split == "train"}
            if name.startswith("emnist"):
                options["split"] = name.partition("-")[2] or "digits"
            with _alone(root):
                part = getattr(datasets, PUBLIC[name][0])(str(root), download=True, **options)
            if name == "gtsrb":  # files of many sizes
                files, part.targets = zip(*part._samples, strict=True)
                part.data = _decode(files, 32)
            images.append(torch.as_tensor(part.data))
            labels.append(torch.as_tensor(part.targets).view(len(part.data)))  # one per image
    except Exception as e:  # torchvision raises anything from URLError to AssertionError
        raise UserError(
            f"{name} is not in {root}/ and could not be downloaded or read ({first_line(e)}): if "
            "its folder is there, it is damaged, and has to be removed; without a network, copy "
            f"the files of torchvision's {name} there, or name their folder with --data-dir"
        ) from e
    x, y = torch.cat(images), torch.cat(labels)
    classes = getattr(part, "classes", [str(c) for c in range(43)])  # those of gtsrb have no names
    if name.startswith("cifar"):  # has channels last
        x = x.permute(0, 3, 1, 2)
    if "mnist" in name:  # is grey
        x = x.unsqueeze(1)
    if name.startswith("emnist"):  # stores each image transposed
        x = x.mT
    if name == "emnist-letters":  # counts from 1, and has a name for 0, too
        y, classes = y - 1, classes[1:]
    train, test = torch.arange(len(x)).tensor_split([len(images[0])])
    return Dataset(name, x.contiguous(), y, train, test, classes)


def image_folder(folder: Path, image_size: int) -> Dataset:
    """The images in a folder that has one of these layouts (docs/data.md shows them).

    CLASS/*              a fifth of the images, always the same ones, are for testing
    train|test/CLASS/*   val/ may take the place of test/, and is left out if both are there
    DOMAIN/CLASS/*       no test set; a domain may also be a client that holds some of the classes

    Every program decodes them anew, a few thousand per second, and scales them to image_size x
    image_size. It says on stderr what it understood, and what could be a mistake. Raises UserError
    for any other layout, for two names that look the same, for a run or a link to a folder inside
    it, and for an image or the name of a folder that cannot be read.
    """
    rows = _rows(folder)
    parts = {row[0] for row in rows}
    is_split = bool(parts & {"train", "val", "test"})
    test = "test" if "test" in parts else "val"
    if {"val", "test"} <= parts:
        rows = [row for row in rows if row[0] != "val"]
        _say(f"{folder}: val/ is left out, because there is test/")
    parts, classes = (sorted({row[i] for row in rows}) for i in (0, 1))
    _check_names(folder, parts)
    _check_names(folder, classes)
    for name in classes:
        if SPLIT.fullmatch(name) and name.lower() != "train":  # which may be a vehicle
            raise UserError(
                f"{folder}: {name} would be a class: sort it as {name}/CLASS/, or rename"
            )
    held = {row[:2] for row in rows}
    wanted = {(part, name) for part in ("train", test) for name in classes}
    if is_split and held != wanted:
        raise UserError(
            f"{folder} must hold the same classes in train/ and {test}/, and no other folder: "
            f"see {'/'.join(min(held ^ wanted))}"
        )
    domains = [] if is_split or parts == [""] else parts
    if parts == [""]:  # CLASS/*
        drawn = random_at(0, "test").permutation(len(rows)) < len(rows) // 5
        rows = [(test if d else "train", *row[1:]) for d, row in zip(drawn, rows, strict=True)]
    rows.sort(key=lambda row: (row[0] == test, row))
    part_of, class_of, files = zip(*rows, strict=True)
    is_test = torch.tensor([part == test for part in part_of])

    text = f"{len(domains)} domains ({_few(domains)}), " if domains else ""
    text += f"{(~is_test).sum()} training and {is_test.sum()} test images"
    text += ", a fifth that was drawn" if parts == [""] else ""
    _say(f"{folder}: {len(classes)} classes ({_few(classes)}), {text}")
    owners = Counter(name for _, name in held)
    alone = set(domains) - {part for part, name in held if owners[name] > 1}
    if alone or len(held) < len(domains) * len(classes) / 2:
        what = f"no class of {_few(sorted(alone))} is in another domain"
        _say(
            f"{folder}: {what if alone else 'most domains lack most classes'}: this is right for a "
            "folder per client, but if the domains are classes, swap the two levels"
        )

    x, places = _decode(files, image_size), defaultdict(set)
    for pixels, part in zip(x, part_of, strict=True):
        places[hash(pixels.numpy().tobytes())].add(part)
    twice = sum(len(found) > 1 for found in places.values())
    if twice:
        both = "two domains" if domains else "the training and in the test set"
        _say(f"{folder}: {twice} images are in {both}")
    y = torch.tensor([classes.index(name) for name in class_of])
    pool = torch.arange(len(files))
    data = Dataset(folder.name, x, y, pool[~is_test], pool[is_test], classes)
    domain = torch.tensor([parts.index(part) for part in part_of]) if domains else None
    return replace(data, domain=domain, domains=domains)


def _rows(folder: Path) -> list[tuple[str, str, Path]]:
    """The part, the class and the path of each image in a folder, in the order of the paths.

    The part is train, val or test, the name of a domain, or "" if the layout is CLASS/*. A folder
    in which there is nothing but one folder of folders is stepped into, and so is such a part.
    """
    homes, others, folders = defaultdict(list), [], [folder]
    for path in sorted(folder.rglob("*")):
        place = path.relative_to(folder).parts
        is_junk = any(name.startswith(JUNK) for name in place)
        if path.is_dir():
            if path.is_symlink():  # it could lead to the same images again
                raise UserError(f"{path} is a link to a folder: put the folder itself there")
            folders += [] if is_junk else [path]
        elif path.name == "metrics.csv":
            raise UserError(
                f"{path.parent} is the folder of a run, and its pictures are no data: "
                f"move it out of {folder}"
            )
        elif is_junk or len(place) < 2 or path.suffix.lower() not in ENDINGS:
            others.append(path)
        else:
            homes[path.parent].append(path)
    full = {path for home in homes for path in (home, *home.parents)}
    for path in folders:
        if path not in full:
            raise UserError(
                f"{path} holds no images: add some, remove it, or give a folder without it"
            )
    if others:
        kinds = _few(sorted({path.suffix or path.name for path in others}))
        _say(f"{folder}: left out {len(others)} files ({kinds}); the first is {others[0]}")

    outer, tops, places = _inner(homes), defaultdict(list), {}
    for home in homes:
        tops[home.relative_to(outer).parts[0]].append(home)
    stepped = {outer} - {folder}
    for top, inside in tops.items():
        inner = _inner(inside)
        stepped |= {inner} - {outer, outer / top}
        above = () if inner == outer else (_split(top) or top,)
        places |= {home: (*above, *home.relative_to(inner).parts) for home in inside}
    if stepped:
        _say(f"{folder}: stepped into {_few(sorted(stepped))}")
    low, *_, deep = sorted([*places, *places], key=lambda home: len(places[home]))
    if len(places[low]) < len(places[deep]):
        raise UserError(
            f"{low} and {deep} hold images at different depths: move one of them away, or give the "
            "folder that you mean"
        )
    if len(places[deep]) > 2:
        raise UserError(
            f"{deep} is too deep for CLASS/, DOMAIN/CLASS/ or train/CLASS/ and test/CLASS/: "
            f"give {deep.parents[1]}, or move the folders up"
        )
    return [("/".join(places[h][:-1]), places[h][-1], path) for h in homes for path in homes[h]]


def _inner(homes: Iterable[Path]) -> Path:
    """The folder in which these folders of images can be told apart; it is none of them."""
    common = Path(os.path.commonpath(homes))
    return common.parent if common in homes else common


def _split(name: str) -> str:
    """train, test or val, if this name of a folder says so, as Training and seg_test do; or ""."""
    found = SPLIT.search(name)
    return found[2].lower() if found else ""


def _check_names(folder: Path, names: Sequence[str]) -> None:
    """Raises UserError if two names look the same, or if a run could not write one at its end."""
    seen = {}
    for name in names:
        if name.encode(errors="ignore").decode() != name:
            raise UserError(f"{folder}: the name of the folder {name!a} is not UTF-8: rename it")
        plain = unicodedata.normalize("NFKC", name.casefold())
        visible = "".join(letter for letter in plain if letter.isprintable())
        looks = re.sub(r"(?<=\w)[ _-]+", " ", visible).strip()
        other = seen.setdefault(looks, name)
        if other != name:
            raise UserError(f"{folder}: {other!a} and {name!a} look the same: give both one name")


def _few(names: Sequence) -> str:
    """The first of these names, for a message."""
    return ", ".join(map(str, names[:5])) + (", ..." if len(names) > 5 else "")


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _decode(files: Sequence[str | Path], image_size: int) -> Tensor:
    """The images as uint8 [N, 3, image_size, image_size], decoded in parallel."""
    x, bad = torch.empty(len(files), 3, image_size, image_size, dtype=torch.uint8), []
    odd = defaultdict(list)  # what may be a mistake -> files

    def decode(i):
        try:
            x[i] = _pixels(files[i], image_size, odd)
        except Exception as e:  # Pillow raises many types for a damaged file
            bad.append(f"{files[i]} cannot be read as an image ({first_line(e)})")

    thread_map(decode, range(len(files)), desc="decoding", unit=" images", leave=False, delay=1)
    if bad:
        bad.sort()
        shown = "; ".join(bad[:3])
        if len(bad) > 3:
            with NamedTemporaryFile("w", prefix="unreadable-", suffix=".txt", delete=False) as out:
                out.write("\n".join(bad) + "\n")
            shown = f"{bad[0]}; all are listed in {out.name}"
        raise UserError(f"repair or remove {len(bad)} of {len(files)} images: {shown}")
    if odd:
        found = [f"{len(odd[what])} {what}, such as {min(odd[what])}" for what in sorted(odd)]
        _say(f"among {len(files)} images: {'; '.join(found)}")
    return x


def _pixels(file: str | Path, image_size: int, odd: dict[str, list]) -> Tensor:
    """The image as a person sees it, uint8 [3, image_size, image_size].

    Adds the file to the lists in `odd` that are named after what may be wrong with it.
    """
    with Image.open(file) as image:
        if image.mode.startswith(("I", "F")) or DEEP.search(str(image.tile)):
            raise ValueError("more than 8 bits per channel, on an unknown scale")
        if getattr(image, "is_animated", False) and image.format != "MPO":  # a camera's is no film
            odd["with several frames, of which the first counts"].append(file)
        if image.format == "JPEG":
            stored = Path(file).read_bytes()
            if stored.rfind(b"\xff\xd9") < stored.rfind(b"\xff\xda"):  # the end, the last start
                odd["without the end of a JPEG"].append(file)
        image.getexif()  # keeps the orientation; the rest may be wrong, and cannot be copied then
        image.info.pop("exif", None)
        image = ImageOps.exif_transpose(image)  # photographs say which side is up
        if image.has_transparency_data:
            image = image.convert("RGBA")
            white = Image.new("RGBA", image.size, "white")
            image = Image.alpha_composite(white, image)
        image = image.convert("RGB").resize((image_size, image_size), Image.BILINEAR)
    if all(high - low < 4 for low, high in image.getextrema()):
        odd["of one colour"].append(file)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)
