"""Folders of images: which image is of which class, domain and part.

A folder means what torchvision's ImageFolder takes it to mean, and only its depth and the exact
names train, test and val decide between three layouts, which docs/data.md shows as pictures:

    CLASS/*                    a fifth of each class, always the same images, is for testing
    train|test (or val)/CLASS/*
    DOMAIN/CLASS/*             no test set; a domain may also be a client with some of the classes
"""

from collections import Counter
from itertools import groupby

import numpy as np
import torch
from PIL import Image, ImageOps
from tqdm.contrib.concurrent import thread_map

from common import UserError, few, first_line
from common.chance import random_at
from common.ranks import say

ENDINGS = ".jpg .jpeg .jfif .png .gif .webp .bmp .tif .tiff .ppm .pgm"
FORMATS = ["JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF", "PPM"]  # Pillow's names of these
SPLITS = {"train", "test"}, {"train", "val"}, {"train", "test", "val"}
SHOWN = 20  # so many classes are listed


def image_folder(folder, image_size):
    """The images in a folder, scaled to image_size x image_size.

    It says on stderr what it understood. Raises UserError for a layout that is none of the three,
    for a class without a training or a test image, and for an image that cannot be read; and
    OSError for a folder that cannot.

    Returns the fields of a Dataset but its name.
    """
    left_out = Counter()
    rows = in_parts_or_domains(folder, find_images(folder, left_out), left_out)
    rows.sort(key=lambda row: (row[0] == "test", row))
    tops, labels, files = zip(*rows)
    classes = sorted({*labels})
    domains = sorted({*tops} - {"train", "test"})
    train, test = torch.arange(len(rows)).tensor_split([len(rows) - tops.count("test")])
    found = [f"{len(train)} training and {len(test)} test images", listed("classes", labels)]
    if domains:
        found.append(listed("domains", tops))
    if left_out:
        found.append(listed("left out", left_out))
    say(f"{folder}: {'; '.join(found)}")
    return {
        "x": decode(files, image_size), "y": torch.tensor([classes.index(c) for c in labels]),
        "train": train, "test": test, "classes": classes, "domains": domains,
        "domain": torch.tensor([domains.index(top) for top in tops]) if domains else None,
    }  # fmt: skip


def in_parts_or_domains(folder, images, left_out):
    """For each of these images of a folder "train", "test" or its domain, its class, and itself.

    Counts in left_out what is in val beside a test set. Raises UserError like image_folder.
    """
    rows = [(*image.relative_to(folder).parts[:-1], image) for image in images]
    an_image = {len(row) - 1: row[-1] for row in rows}  # of each depth
    depths = sorted(an_image)
    if depths not in ([1], [2]):
        shown = depths[:3]  # a link to a folder above makes many
        where = ", ".join(f"{depth} folders deep ({an_image[depth]})" for depth in shown)
        raise UserError(
            f"{folder} is not CLASS/*, train|test/CLASS/* or DOMAIN/CLASS/*, because images lie "
            f"{where}: move them, or give another folder"
        )
    tops = {row[0] for row in rows}
    if depths == [2] and not tops & {"train", "test", "val"}:  # DOMAIN/CLASS/*
        return rows
    if depths == [1] and not tops & {"test", "val"}:  # CLASS/*, where train may be a vehicle
        rows = with_a_fifth_for_testing(rows)
    elif depths == [2] and tops in SPLITS:  # train|test/CLASS/*
        part_of = {"train": "train", "test" if "test" in tops else "val": "test"}
        left_out.update(f"{top}/" for top, *_ in rows if top not in part_of)
        rows = [(part_of[top], *row) for top, *row in rows if top in part_of]
    else:
        raise UserError(
            f"{folder} holds {few(sorted(tops))}: a split has train/CLASS/* and test/CLASS/* "
            "(or val), and no other folder, so complete it, or rename these folders"
        )
    for part in ("train", "test"):
        with_images = {label for top, label, _ in rows if top == part}
        if lacking := {label for _, label, _ in rows} - with_images:
            raise UserError(
                f"{folder} has no {part}ing images of {few(sorted(lacking))}: add some, or remove "
                "the class"
            )
    return rows


def find_images(folder, left_out):
    """The images in a folder and in all folders inside it. Counts in left_out what is none.

    That is files with another ending, and what is hidden. Raises UserError for a folder without
    images.
    """
    images = []
    for path in sorted(folder.iterdir()):
        kind = path.suffix or path.name
        if path.name.startswith("."):
            left_out[f"hidden {kind}"] += 1
        elif path.is_dir():
            images += find_images(path, left_out)
        elif path.suffix.lower() in ENDINGS.split():
            images.append(path)
        else:
            left_out[kind] += 1
    if not images:
        raise UserError(f"{folder} holds no images ({ENDINGS}): add some, or remove it")
    return images


def listed(what, names):
    """Such as "classes (2): cat 120, dog 98"."""
    counts = Counter(names)
    shown = [f"{name} {counts[name]}" for name in sorted(counts)[:SHOWN]]
    return f"{what} ({len(counts)}): {', '.join(shown)}{', ...' * (len(counts) > SHOWN)}"


def with_a_fifth_for_testing(rows):
    """Draws a fifth of each class for testing, or at least one image, and always the same."""
    rng = random_at(0, "test")
    drawn = []
    for _, of_class in groupby(rows, lambda row: row[0]):
        of_class = [*of_class]
        tested = max(1, len(of_class) // 5)
        for i, row in zip(rng.permutation(len(of_class)), of_class):
            drawn.append(("test" if i < tested else "train", *row))
    return drawn


def decode(files, image_size):
    """The images as uint8 [N, 3, image_size, image_size], decoded in parallel.

    Raises UserError, which names the first images that cannot be read.
    """
    x = torch.empty(len(files), 3, image_size, image_size, dtype=torch.uint8)

    damaged = []  # texts, one for each image

    def decode_one(i):
        try:
            x[i] = pixels(files[i], image_size)
        except Exception as e:  # Pillow raises many types for a damaged file
            damaged.append(f"{files[i]} ({first_line(e)})")

    thread_map(decode_one, range(len(files)), desc="decoding", unit=" images", leave=False, delay=1)
    if damaged:
        raise UserError(
            f"{len(damaged)} images cannot be read: repair, convert or remove {few(damaged)}"
        )
    return x


def pixels(file, image_size):
    """The image as a person sees it, uint8 [3, image_size, image_size].

    Raises ValueError for a kind that is refused, and Pillow's errors for a damaged file.
    """
    with Image.open(file, formats=FORMATS) as image:
        if image.format != "MPO" and getattr(image, "n_frames", 1) > 1:
            raise ValueError("several pages or frames")
        # A colour image of 16 bits has the mode RGB, too, but its tile says how it is stored
        if image.mode.startswith(("I", "F")) or ";16" in str(image.tile):
            raise ValueError("more than 8 bits per channel, on an unknown scale")
        image = ImageOps.exif_transpose(image)  # photographs say which side is up
        if image.has_transparency_data:
            image = image.convert("RGBA")
            white = Image.new("RGBA", image.size, "white")
            image = Image.alpha_composite(white, image)
        image = image.convert("RGB").resize((image_size, image_size), Image.BILINEAR)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)
