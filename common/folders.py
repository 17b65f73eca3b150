"""Folders of images as the world has them: which image is of which class, domain and part."""

import os
import re
import sys
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import NamedTemporaryFile

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from tqdm.contrib.concurrent import thread_map

from common import UserError, first_line, random_at, ranks

ENDINGS = [".jpg", ".jpeg", ".png", ".gif", ".webp", ".bmp", ".tif", ".tiff", ".ppm", ".pgm"]
JUNK = (".", "@", "#", "$", "__")  # begins the names of what is hidden, such as @eaDir and __MACOSX
SPLIT = re.compile(  # a word of its own, as in Training, seg_test, imagesVal or train2017
    r"((?<![A-Za-z])|(?<=[a-z])(?=[A-Z]))"
    r"(?i:(train|test|val)(s|ing|id|idation|set|data)?)[A-Z\d]*(?![a-z])"
)
DEEP = re.compile(r";16[BLN]|'ppm.*\d{4}\)\)")  # how Pillow's decoders name over 8 bits per channel


def image_folder(folder: Path, image_size: int) -> dict:
    """The images in a folder that has one of these layouts (docs/data.md shows them).

    CLASS/*              a fifth of the images, always the same ones, are for testing
    train|test/CLASS/*   val/ may take the place of test/, and is left out if both are there
    DOMAIN/CLASS/*       no test set; a domain may also be a client that holds some of the classes

    Every program decodes them anew, a few thousand per second, and scales them to image_size x
    image_size. It says on stderr what it understood, and what could be a mistake. Raises UserError
    for any other layout, for two names that look the same, for a run or a link to a folder inside
    it, and for an image or the name of a folder that cannot be read.

    Returns the fields of a Dataset but its name.
    """
    rows = find_images(folder)
    parts = {row[0] for row in rows}
    is_split = bool(parts & {"train", "val", "test"})
    test = "val" if parts & {"val", "test"} == {"val"} else "test"
    if {"val", "test"} <= parts:
        rows = [row for row in rows if row[0] != "val"]
        say(f"{folder}: val/ is left out, because there is test/")
    parts, classes = (sorted({row[i] for row in rows}) for i in (0, 1))
    check_names(folder, parts)
    check_names(folder, classes)
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

    text = f"{len(domains)} domains ({few(domains)}), " if domains else ""
    text += f"{(~is_test).sum()} training and {is_test.sum()} test images"
    text += ", a fifth that was drawn" if parts == [""] else ""
    say(f"{folder}: {len(classes)} classes ({few(classes)}), {text}")
    owners = Counter(name for _, name in held)
    alone = set(domains) - {part for part, name in held if owners[name] > 1}
    if alone or len(held) < len(domains) * len(classes) / 2:
        what = f"no class of {few(sorted(alone))} is in another domain"
        say(
            f"{folder}: {what if alone else 'most domains lack most classes'}: this is right for a "
            "folder per client, but if the domains are classes, swap the two levels"
        )

    x, places = decode(files, image_size), defaultdict(set)
    for pixels, part in zip(x, part_of, strict=True):
        places[hash(pixels.numpy().tobytes())].add(part)
    copies = len(files) - len(places)
    if copies:
        twice = sum(len(found) > 1 for found in places.values())
        both = "two domains" if domains else "the training and in the test set"
        say(f"{folder}: {copies} images are copies of others, and {twice} images are in {both}")
    y = torch.tensor([classes.index(name) for name in class_of])
    pool = torch.arange(len(files))
    domain = torch.tensor([parts.index(part) for part in part_of]) if domains else None
    return {
        "x": x, "y": y, "train": pool[~is_test], "test": pool[is_test], "classes": classes,
        "domain": domain, "domains": domains,
    }  # fmt: skip


def find_images(folder: Path) -> list[tuple[str, str, Path]]:
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
                f"{path} holds no images ({' '.join(ENDINGS)}) in folders of classes: add some, "
                "remove it, or give a folder without it"
            )
    if others:
        kinds = few(sorted({path.suffix or path.name for path in others}))
        say(f"{folder}: left out {len(others)} files ({kinds}); the first is {others[0]}")

    outer, tops, places = shared_parent(homes), defaultdict(list), {}
    for home in homes:
        tops[home.relative_to(outer).parts[0]].append(home)
    stepped = {outer} - {folder}
    named = {}  # train, test or val -> the folder that is called so
    for top, inside in tops.items():
        inner, part = shared_parent(inside), split_name(top)
        if part and named.setdefault(part, top) != top and inner != outer:
            raise UserError(
                f"{folder}: {named[part]} and {top} would both be {part}/: move one of them away"
            )
        stepped |= {inner} - {outer, outer / top}
        above = () if inner == outer else (part or top,)
        places |= {home: (*above, *home.relative_to(inner).parts) for home in inside}
    if stepped:
        say(f"{folder}: stepped into {few(sorted(stepped))}")
    low, *_, deep = sorted([*places, *places], key=lambda home: len(places[home]))
    if len(places[low]) < len(places[deep]):
        raise UserError(
            f"{low} and {deep} hold images at different depths: move one of them away, or give the "
            "folder that you mean"
        )
    if len(places[deep]) > 2:
        raise UserError(
            f"{deep} is too deep for CLASS/, DOMAIN/CLASS/ or train/CLASS/ and test/CLASS/: if "
            f"{deep.name} is a class, give {deep.parents[1]}, and else sort the images by class"
        )
    return [("/".join(places[h][:-1]), places[h][-1], path) for h in homes for path in homes[h]]


def shared_parent(homes: Iterable[Path]) -> Path:
    """The folder in which these folders of images can be told apart; it is none of them."""
    common = Path(os.path.commonpath(homes))
    return common.parent if common in homes else common


def split_name(name: str) -> str:
    """train, test or val, if this name of a folder says so, as Training and seg_test do; or ""."""
    found = SPLIT.search(name)
    return found[2].lower() if found else ""


def check_names(folder: Path, names: Sequence[str]) -> None:
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
            raise UserError(f"{folder}: {other!a} and {name!a} look the same: rename one")


def few(names: Sequence) -> str:
    """The first of these names, for a message."""
    return ", ".join(map(str, names[:5])) + (", ..." if len(names) > 5 else "")


def say(text: str) -> None:
    if ranks.LOCAL_RANK == 0:
        print(text, file=sys.stderr)


def decode(files: Sequence[str | Path], image_size: int) -> Tensor:
    """The images as uint8 [N, 3, image_size, image_size], decoded in parallel."""
    try:
        x = torch.empty(len(files), 3, image_size, image_size, dtype=torch.uint8)
    except RuntimeError as e:
        raise UserError(f"{len(files)} images do not fit into memory: lower --image-size") from e
    bad = []
    odd = defaultdict(list)  # what may be a mistake -> files

    def decode_one(i):
        try:
            x[i] = pixels(files[i], image_size, odd)
        except Exception as e:  # Pillow raises many types for a damaged file
            bad.append(f"{files[i]} cannot be read as an image ({first_line(e)})")

    thread_map(decode_one, range(len(files)), desc="decoding", unit=" images", leave=False, delay=1)
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
        say(f"among {len(files)} images: {'; '.join(found)}")
    return x


def pixels(file: str | Path, image_size: int, odd: dict[str, list]) -> Tensor:
    """The image as a person sees it, uint8 [3, image_size, image_size].

    Adds the file to the lists in `odd` that are named after what may be wrong with it.
    """
    with Image.open(file) as image:
        bits = image.tag_v2.get(258, (1,)) if image.format == "TIFF" else (1,)  # BitsPerSample
        if max(bits) > 8 or image.mode.startswith(("I", "F")) or DEEP.search(str(image.tile)):
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
