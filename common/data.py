"""The data sets: a name, a folder or a text file -> tensors in memory.

    data = load("glyphs")      # drawn by the program, no download
    data.x[data.train]         # uint8 [12000, 1, 28, 28]

All samples are in one pool. A client or a test set is a tensor of positions in this pool. So ten thousand clients need
ten thousand small tensors and no copy of an image.
"""

import glob
import hashlib
import json
import os
import re
import sys
import zlib
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
import torchvision
from PIL import Image, ImageOps
from torch import Tensor
from torchvision.transforms.functional import InterpolationMode
from torchvision.transforms.functional import rotate as rotate_images
from tqdm import tqdm

from common import UserError, first_line
from common.glyphs import glyphs

NAMES = ["glyphs", "mnist", "fmnist", "emnist", "cifar10", "cifar100", "gtsrb", "shakespeare"]
IMAGES = {".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".webp", ".tif", ".tiff", ".gif"}


@dataclass
class Dataset:
    """A pool of N samples.

    x        images: uint8 [N, channels, height, width]; text: uint8 [N, 80], indices into `classes`
    y        labels, int64 [N], indices into `classes`
    train    positions of the standard training samples, int64 [N_train]
    test     positions of the standard test samples; empty if the data set has no test set
    domain   int64 [N], indices into `domains`; None if the data set has no domains
    gap      text: how many earlier windows overlap a window; images: 0
    """

    name: str
    x: Tensor
    y: Tensor
    train: Tensor
    test: Tensor
    classes: list[str]
    domain: Tensor | None = None
    domains: list[str] = field(default_factory=list)
    gap: int = 0

    def fingerprint(self) -> int:
        """A number that changes if a sample, a label or a domain changes."""
        crc = 0
        for part in (self.x, self.y, self.train, self.domain):
            crc = crc if part is None else zlib.crc32(part.contiguous().numpy(), crc)
        return crc


def load(
    name: str, root: str | Path = "data", image_size: int = 96, rotate: Sequence[float] = (), seed: int = 0
) -> Dataset:
    """The data set with this name, or the one in the folder or text file at this path.

    root        folder of the data sets; downloads and caches go there, too
    image_size  height and width to which a folder's images are scaled
    rotate      angles for rotated()
    seed        seed for rotated()

    Raises UserError if there is no such data set, or if it cannot be read and cannot be downloaded.
    """
    path, root = Path(name), Path(root)
    if name == "glyphs":
        data = Dataset(name, **glyphs())
    elif name == "shakespeare":
        data = replace(plays(_shakespeare_file(root)), name=name)
    elif name == "cifar10" and not (root / "cifar-10-batches-py").exists() and (root / "cifar10").is_dir():
        data = image_folder(root / "cifar10", root / "cache", 32)
    elif name in NAMES:
        data = _from_torchvision(name, root)
    elif path.is_dir():
        data = image_folder(path, root / "cache", image_size)
    elif path.is_file():
        data = plays(path)
    elif "/" in name:
        raise UserError(f"--dataset {name}: there is no such folder or file")
    else:
        raise UserError(
            f"no data set {name!r}: choose from {', '.join(NAMES)}, or give the path of a folder or a text file"
        )
    return rotated(data, rotate, seed) if rotate else data


def rotated(data: Dataset, angles: Sequence[float], seed: int = 0) -> Dataset:
    """Divides the images at random into len(angles) equal parts, and rotates each part by its angle.

    Angles are in degrees, counter-clockwise. The interpolation is bilinear, and corners become zero (Guo et al., F.1:
    RotatedMNIST; Zhang et al., section 4). Training and test images are divided separately. The angle becomes the
    domain. Raises UserError for text, for equal angles and for fewer images than angles.
    """
    if data.x.dim() != 4:
        raise UserError(f"--rotate is for images; {data.name} is text")
    if len({f"{a % 360:g}" for a in angles}) < len(angles):
        raise UserError(f"--rotate names an angle twice: {' '.join(f'{a:g}' for a in angles)}")
    if len(data.train) < len(angles):
        raise UserError(f"--rotate: {len(angles)} angles for {len(data.train)} images; give fewer")
    g = torch.Generator().manual_seed(seed)
    x, domain = data.x.clone(), torch.zeros_like(data.y)
    for part in (data.train, data.test):
        for d, of_angle in enumerate(part[torch.randperm(len(part), generator=g)].tensor_split(len(angles))):
            domain[of_angle] = d
            for batch in (batch for batch in of_angle.split(2000) if len(batch)):
                x[batch] = rotate_images(x[batch], angles[d], InterpolationMode.BILINEAR)
    return replace(data, x=x, domain=domain, domains=[f"{a:g}" for a in angles])


def _from_torchvision(name: str, root: Path) -> Dataset:
    """A data set of torchvision, downloaded into `root` if it is not there yet."""
    make = {
        "mnist": torchvision.datasets.MNIST,
        "fmnist": torchvision.datasets.FashionMNIST,
        "emnist": lambda root, **kwargs: torchvision.datasets.EMNIST(root, split="digits", **kwargs),
        "cifar10": torchvision.datasets.CIFAR10,
        "cifar100": torchvision.datasets.CIFAR100,
        "gtsrb": lambda root, train, **kwargs: torchvision.datasets.GTSRB(root, "train" if train else "test", **kwargs),
    }[name]
    try:
        train, test = (make(str(root), train=train, download=True) for train in (True, False))
        (x_train, y_train), (x_test, y_test) = _arrays(train), _arrays(test)
        classes = getattr(train, "classes", None) or [str(c) for c in range(int(y_train.max()) + 1)]
        for x, y in ((x_train, y_train), (x_test, y_test)):
            if len(x) != len(y) or int(y.min()) < 0 or int(y.max()) >= len(classes):
                raise ValueError(f"{len(x)} images with {len(y)} labels in {int(y.min())}..{int(y.max())}")
    except Exception as e:  # torchvision raises anything from URLError to AssertionError for a bad or missing file
        raise UserError(
            f"{name} is not in {root}/ and could not be downloaded or read ({first_line(e)}): without a "
            f"network, copy the files of torchvision's {name} there, or name their folder with --data-dir"
        ) from e
    x = torch.cat([x_train, x_test])
    if name == "emnist":
        x = x.transpose(2, 3)  # its files store each image transposed
    pool, n_train = torch.arange(len(x)), len(x_train)
    return Dataset(name, x.contiguous(), torch.cat([y_train, y_test]), pool[:n_train], pool[n_train:], list(classes))


def _arrays(dataset) -> tuple[Tensor, Tensor]:
    """Images, uint8 [N, channels, height, width], and labels, int64 [N], of one of torchvision's data sets."""
    if not hasattr(dataset, "data"):  # GTSRB: files of many sizes
        paths, labels = zip(*dataset._samples, strict=True)
        return _decode([Path(p) for p in paths], 32), torch.tensor(labels)
    x = torch.as_tensor(dataset.data)
    x = x.unsqueeze(1) if x.dim() == 3 else x.permute(0, 3, 1, 2)
    return x, torch.as_tensor(dataset.targets)


def image_folder(folder: Path, cache: Path, image_size: int) -> Dataset:
    """The images of a folder with `train/<class>` and `test/<class>`, or with `<domain>/<class>` and no test set.

    Scales them to image_size x image_size, and keeps the result in one file in the folder `cache`. If the name, size or
    date of an image changes, they are decoded again. Raises UserError if there are no images, or if one cannot be
    read. Also raises it for a mix of the two layouts, for `<class>/<domain>`, and for a class that train or test lacks.
    """
    found: dict[str, dict[str, list[Path]]] = {}
    everything = sorted(folder.glob("[!.]*/[!.]*/[!.]*"))
    runs = {file.parent for file in everything if file.name == "args.json"}  # their pictures are no class
    files = [file for file in everything if file.parent not in runs]
    images = [file for file in files if file.suffix.lower() in IMAGES]
    for file in images:
        part, name = file.parts[-3:-1]
        part = part.lower() if part.lower() in ("train", "test") else part
        found.setdefault(part, {}).setdefault(name, []).append(file)
    empty = {place for place in folder.glob("[!.]*/[!.]*") if place.is_dir()} - {file.parent for file in images} - runs
    left_out = [file.suffix or file.name for file in files if file.suffix.lower() not in IMAGES]
    if left_out := Counter([*left_out, *(f"{place.relative_to(folder)}/ without an image" for place in empty)]):
        kinds = ", ".join(f"{count} x {kind}" for kind, count in sorted(left_out.items()))
        print(f"{folder}: left out {kinds}", file=sys.stderr)
    if not found:
        raise UserError(f"{folder} holds no images as train/<class>/*, test/<class>/* or <domain>/<class>/*")
    classes, has_test = sorted(set().union(*found.values())), "test" in found or "train" in found
    if has_test and set(found) != {"train", "test"}:
        raise UserError(f"{folder} holds {', '.join(found)}: beside train/ there must be test/, and no other folder")
    if has_test and (odd := set(found["train"]) ^ set(found["test"])):
        raise UserError(f"{folder}: {', '.join(sorted(odd))} has images in only one of train/ and test/")
    if sum(map(len, found.values())) < len(found) * len(classes) / 2:  # NICO's contexts differ from class to class
        raise UserError(
            f"{folder}: {', '.join(list(found)[:3])}, ... hold different classes: this looks like <class>/<domain>/ and"
            " must be <domain>/<class>/; swap the two levels"
        )
    try:
        "".join([*found, *classes]).encode()
    except UnicodeEncodeError as e:
        raise UserError(f"{folder}: a name of a folder is not UTF-8 ({e.object!a}): rename the folder") from e

    parts = ["train", "test"] if has_test else list(found)
    samples = [(f, classes.index(c), p) for p, part in enumerate(parts) for c in found[part] for f in found[part][c]]
    files = [file for file, _, _ in samples]
    stats = [(str(f.relative_to(folder)), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    place, stem = str(folder.resolve()), f"{folder.resolve().name}-{image_size}"
    place, key = (hashlib.sha256(repr(what).encode()).hexdigest()[:8] for what in (place, stats))
    cached = cache / f"{stem}-{place}-{key}.pt"
    try:
        x, checksum = torch.load(cached, weights_only=True)
        assert x.shape == (len(files), 3, image_size, image_size) and zlib.crc32(x.numpy()) == checksum
    except Exception:  # it is missing or damaged: anything from FileNotFoundError to UnpicklingError
        x = _decode(files, image_size)
        part = cached.with_suffix(f".{os.getpid()}")  # an interrupted run leaves no half-written cache
        try:
            cache.mkdir(parents=True, exist_ok=True)
            for stale in cache.glob(glob.escape(f"{stem}-{place}-") + "*"):
                stale.unlink(missing_ok=True)
            torch.save((x, zlib.crc32(x.numpy())), part)
            part.replace(cached)
        except (OSError, RuntimeError) as e:  # torch's error for a full disk is a RuntimeError
            if part.exists():
                part.unlink()
            print(f"no cache of the images: {cache} cannot be written ({first_line(e)})", file=sys.stderr)

    y, part = torch.tensor([c for _, c, _ in samples]), torch.tensor([p for *_, p in samples])
    pool = torch.arange(len(samples))
    if has_test:
        return Dataset(folder.name, x, y, pool[part == 0], pool[part == 1], classes)
    return Dataset(folder.name, x, y, pool, pool[:0], classes, part, parts)


def _decode(files: list[Path], image_size: int) -> Tensor:
    """The images as uint8 [N, 3, image_size, image_size], decoded in parallel."""

    stretched = []

    def decode(file: Path) -> np.ndarray:
        try:
            with Image.open(file) as image:
                image = ImageOps.exif_transpose(image)  # photographs say which side is up
                if image.mode.startswith(("I", "F")):
                    values = np.asarray(image)
                    if image.mode == "F" or values.min() < 0 or values.max() > 65535:
                        raise ValueError("its range is unknown; save it with 8 or 16 bits")
                    image = Image.fromarray((values / 257).round().astype(np.uint8))  # 16 bits
                if image.has_transparency_data:
                    image = image.convert("RGBA")
                    image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
                if image.width != image.height:
                    stretched.append(file)
                return np.array(image.convert("RGB").resize((image_size, image_size), Image.BILINEAR))
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as e:
            raise UserError(f"{file} cannot be read as an image ({first_line(e)}): repair or remove it") from e

    x = torch.empty(len(files), image_size, image_size, 3, dtype=torch.uint8)
    with ThreadPoolExecutor() as pool:  # threads help, because Pillow releases the interpreter while it decodes
        images = tqdm(pool.map(decode, files), "decoding", len(files), unit=" images", leave=False, delay=1)
        for i, image in enumerate(images):
            x[i] = torch.from_numpy(image)
    if stretched:
        print(f"{len(stretched)} images are not square and are stretched: crop them if this matters; the first is "
              f"{min(stretched)}", file=sys.stderr)  # fmt: skip
    return x.permute(0, 3, 1, 2).contiguous()


WINDOW = 80  # length of a sample: the characters before the one to predict, as in LEAF
STRIDE = 10  # characters from one window of a play to the next
PLAYS_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
PLAYS_MD5 = "6fb458f1232090904fb40fe944165e91"


def _shakespeare_file(root: Path) -> Path:
    """`shakespeare/input.txt` in root, downloaded if it is not there yet."""
    file = root / "shakespeare" / "input.txt"
    if not file.exists():
        try:
            torchvision.datasets.utils.download_url(PLAYS_URL, str(file.parent), file.name, PLAYS_MD5)
        except Exception as e:
            raise UserError(
                f"{file} does not exist and could not be downloaded ({first_line(e)}): without a network, put a text "
                "of plays there, or name its folder with --data-dir"
            ) from e
    return file


def plays(file: Path) -> Dataset:
    """Samples are windows of 80 characters of one speaker. The label is the next character, the domain is the speaker.

    `file` is a text in which each speech begins with a line `Speaker:` and ends with an empty line, or LEAF's JSON
    (Caldas et al. 2018: `users`, and `user_data` with lists x and y). The last tenth of each speaker's windows is the
    test set. Training windows that overlap it, and speakers with too little text for both sets, are left out.

    Raises UserError if the file has neither format.
    """
    try:
        text = file.read_text(encoding="utf-8-sig")
        windows, stride = (_leaf_windows(text), 1) if file.suffix == ".json" else (_speech_windows(text), STRIDE)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as e:
        raise UserError(f"{file} cannot be read as plays or as LEAF's JSON ({first_line(e)})") from e
    gap = WINDOW // stride
    windows = {speaker: w for speaker, w in sorted(windows.items()) if len(w) * 9 // 10 > gap}
    if not windows:
        raise UserError(
            f"{file}: no speaker has the {-(-10 * (gap + 1) // 9)} samples that a training and a test part need; in a "
            "text, each speech must begin with a line `Speaker:`"
        )

    rows, speaker, train, test = [], [], [], []
    for s, said in enumerate(windows.values()):
        first, cut, last = len(rows), len(rows) + len(said) * 9 // 10, len(rows) + len(said)
        rows += said
        speaker += [s] * len(said)
        train += range(first, cut - gap)
        test += range(cut, last)
    points = np.frombuffer("".join(rows).encode("utf-32-le"), dtype=np.uint32)
    alphabet, codes = np.unique(points, return_inverse=True)
    if len(alphabet) > 256:
        raise UserError(f"{file} uses {len(alphabet)} different characters; at most 256 are possible")
    codes = torch.from_numpy(codes.reshape(len(rows), WINDOW + 1))
    return Dataset(
        file.stem, codes[:, :-1].to(torch.uint8), codes[:, -1].clone(), torch.tensor(train), torch.tensor(test),
        [chr(c) for c in alphabet], torch.tensor(speaker), list(windows), gap,
    )  # fmt: skip


def _speech_windows(text: str) -> dict[str, list[str]]:
    """Speaker -> windows of 80 + 1 characters, one every STRIDE, from all of the speaker's speeches joined."""
    said: dict[str, list[str]] = {}
    for speech in re.split(r"\n[ \t]*\n", text):
        speaker, _, words = speech.strip().partition("\n")
        speaker = speaker.rstrip()
        if speaker.endswith(":") and words:
            said.setdefault(speaker[:-1], []).append(words)
    texts = {speaker: "\n".join(speeches) for speaker, speeches in said.items()}
    return {u: [t[i : i + WINDOW + 1] for i in range(0, len(t) - WINDOW, STRIDE)] for u, t in texts.items()}


def _leaf_windows(text: str) -> dict[str, list[str]]:
    """Speaker -> windows of 80 + 1 characters, as LEAF's file has them."""
    leaf = json.loads(text)
    samples = {u: leaf["user_data"][u] for u in leaf["users"]}
    windows = {u: [x + y for x, y in zip(s["x"], s["y"], strict=True)] for u, s in samples.items()}
    everything = [w for of_speaker in windows.values() for w in of_speaker]
    if not all(isinstance(w, str) and len(w) == WINDOW + 1 for w in everything):
        raise ValueError(f"a sample needs {WINDOW} characters in x and one in y")
    "".join(everything).encode("utf-32")  # raises for a lone surrogate
    return windows
