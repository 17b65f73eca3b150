"""Folders of images: which image is of which class, domain and part.

A folder has one of three exact layouts, which docs/data.md shows as pictures:

    CLASS/*              a fifth of each class, always the same images, is for testing
    train|test/CLASS/*   val/ may take the place of test/, and is left out if both are there
    DOMAIN/CLASS/*       no test set; a domain may also be a client that holds some of the classes

Everything else is refused, because a wrong guess would be a wrong result.
"""

import re
import sys
import unicodedata
from collections import Counter
from functools import lru_cache

import numpy as np
import torch
from PIL import Image, ImageOps
from tqdm.contrib.concurrent import thread_map

from common import UserError, first_line, random_at, ranks

ENDINGS = ".jpg .jpeg .jfif .png .gif .webp .bmp .tif .tiff .ppm .pgm"
# How systems begin their names
JUNK = ".", "@", "__MACOSX", "#recycle", "$RECYCLE", "lost+found", "System Volume"
PARTS = {  # name of a folder in small letters -> which part it is
    "train": "train", "training": "train", "test": "test", "testing": "test",
    "val": "val", "valid": "val", "validation": "val",
}  # fmt: skip
ALMOST_PART = re.compile(  # in seg_test and Augmented, which are no domains, but not in strain
    r"(?i:(?<!\bs)train|trn|test|tst|valid|hold.?out|\b(dev|eval)\b|(mini|cross)val|augment)"
    r"|(?<![a-z])val(?![a-z])|Val(?![a-z])|VAL(?![A-Z])"
)
PICTURE = r"\b((jpe?g|png)?images?|imgs?|rgb|inputs?)\b"  # words in names that are no class ...
ANNOTATION = (
    r"\b(ma?sks?|labels?( (train )?ids)?|anno?(tations?)?|(depth|heat)( ?maps?)?|gt|ground ?truth"
    r"|targets?|seg(mentation)?s?|superpixels?|trimaps?|overlays?|contours?|bbox(es)?"
    r"|thumb(nail)?s?|pred(iction)?s?|annotated|rois?|clahe|\d+x\d+)(?![a-z])"
)


def image_folder(folder, image_size):
    """The images in a folder, scaled to image_size x image_size.

    It says on stderr what it understood. Raises UserError for a layout that is none of the three,
    for names of annotations such as masks, for a class without a training or a test image, and for
    an image that cannot be read; and OSError for a folder that cannot.

    Returns the fields of a Dataset but its name.
    """
    files = find_files(folder)
    rows = understand(folder, [file for file in files if is_image(file)])
    rows.sort(key=lambda row: (row[0] == "test", row))
    part_of, class_of, images = zip(*rows)
    classes, domains = sorted({*class_of}), sorted({*part_of} - {"train", "test"})
    holders = Counter(name for _, name in {row[:2] for row in rows})
    rare = [name for name in classes if holders[name] < (len(domains) or 2)]
    if rare and not domains:
        raise UserError(
            f"{folder}: {few(rare)} has no training or no test image: add some, or "
            "remove the class, or a test/ without labels"
        )
    train, test = torch.arange(len(rows)).tensor_split([len(rows) - part_of.count("test")])
    understood = {
        "classes": classes,
        "domains": domains,
        "classes that some domain lacks": rare,
        "kinds of files left out": sorted({f.suffix or f.name for f in files if not is_image(f)}),
    }
    lists = [f"{len(names)} {what} ({few(names)})" for what, names in understood.items() if names]
    say(f"{folder}: {len(train)} training and {len(test)} test images, {', '.join(lists)}")

    x = decode(images, image_size)
    pictures = {hash(image.numpy().tobytes()) for image in x}
    copies = len(x) - min(len(pictures), len({image.with_suffix("") for image in images}))
    if copies:
        say(f"{folder}: {copies} images are as others, or have their name: are these for testing?")
    return {
        "x": x, "y": torch.tensor([classes.index(name) for name in class_of]),
        "train": train, "test": test, "classes": classes, "domains": domains,
        "domain": torch.tensor([domains.index(part) for part in part_of]) if domains else None,
    }  # fmt: skip


def find_files(folder, depth=0):
    """The files in a folder and in all folders inside it, sorted, without JUNK.

    Raises UserError if a folder has no images, and for names of annotations and links to nothing.
    """
    paths = sorted(path for path in folder.iterdir() if not path.name.startswith(JUNK))
    if depth > 6:  # perhaps by a link to a folder above
        raise UserError(f"{folder} is too deep: give a folder further in, or remove a link")
    refuse_annotations([path for path in paths if is_image(path) or path.is_dir()])
    files = []
    for path in paths:
        if path.is_dir():
            files += find_files(path, depth + 1)
        elif path.is_file() or (path.suffix and not is_image(path)):
            files.append(path)
        else:
            raise UserError(f"{path} is no file, but a link to nothing, say: remove it")
    if not any(map(is_image, files)):
        raise UserError(f"{folder} holds no images ({ENDINGS}): add some, or remove it")
    return files


def is_image(path):
    return path.suffix.lower() in ENDINGS.split()


def refuse_annotations(paths):
    """Raises UserError if one of these paths in a folder has the name of an annotation.

    So has a folder that is called masks or images, x_mask.png or GT-x.png beside x.png, and every
    x.png if all of them stand beside an x.jpg.
    """
    # Each name in small letters, with spaces between its words
    stems = [path.name if path.is_dir() else path.stem for path in paths]
    names = [re.sub(r"[\W_]+|(?<=[a-z\d])(?=[A-Z])", " ", stem).lower() for stem in stems]
    subjects = [" ".join(re.sub(f"{PICTURE}|{ANNOTATION}", "", n).split()) for n in names]
    count, known = Counter(subjects), {*names}
    are_pairs, stripped = 2 * len(known) <= len(names), {*map(str.strip, names)}
    for path, name, subject in zip(paths, names, subjects):
        is_second = count[subject] > 1 and (are_pairs or re.search(ANNOTATION, name))
        original = re.sub(rf" {ANNOTATION} ?\d+$", "", name)  # case 1, of case 1 mask 2
        is_mark = path.is_dir() and name.strip() and not subject
        if is_second or is_mark or (name != original and original.strip() in stripped):
            raise UserError(
                f"{path} has the name of an annotation, not of a class or a picture: take it away, "
                "rename it, move its images up, or give the folder itself if it holds the classes"
            )


def understand(folder, images):
    """The part, the class and the path of each image. Raises UserError for another layout."""
    rows, homes = [], {}
    for image in images:
        names = image.relative_to(folder).parts[:-1]
        homes[len(names)] = image.parent.absolute()
        names = [name.encode(errors="backslashreplace").decode() for name in names]  # not UTF-8
        rows.append((*(unicodedata.normalize("NFC", name) for name in names), image))
    if len(homes) > 1 or not {*homes} <= {1, 2}:
        where = " and ".join(f"{depth} folders deep ({homes[depth]})" for depth in sorted(homes))
        deep = homes[max(homes)]
        raise UserError(
            f"{folder} is not CLASS/*, train|test/CLASS/* or DOMAIN/CLASS/*, because images lie "
            f"{where}: move them, or give {deep.parent} if {deep.name} is a class, or "
            f"{deep.parent.parent} if {deep.parent.name} is a domain or train"
        )
    marked = [name for name in sorted({row[-2] for row in rows}) if ALMOST_PART.search(name)]
    # Those for testing or validation, because train may also be a vehicle
    tests = [name for name in marked if "tr" not in ALMOST_PART.search(name)[0].lower()]
    for name in tests:
        if len(tests) < len(marked) or name.lower() in PARTS:
            raise UserError(
                f"{folder}: {name} is no class: sort its images as {name}/CLASS/, or rename it"
            )
    if 1 in homes:
        return with_a_fifth_for_testing(rows)
    part_of = {top: PARTS.get(top.lower(), "domain") for top in sorted({row[0] for row in rows})}
    parts = {*part_of.values()}
    if parts == {"domain"} and len(part_of) > 1 and not any(map(ALMOST_PART.search, part_of)):
        return rows
    if "domain" in parts or len(parts) < max(2, len(part_of)) or "train" not in parts:
        raise UserError(
            f"{folder} holds {few([*part_of])}: neither train and test (or val) nor several "
            f"domains, so rename or remove some, or give {folder / max(part_of)}, say"
        )
    if {"test", "val"} <= parts:
        say(f"{folder}: images for validation are left out, because there are test images")
    new = {"train": "train", "test" if "test" in parts else "val": "test"}
    return [(new[part_of[top]], *more) for top, *more in rows if part_of[top] in new]


def with_a_fifth_for_testing(rows):
    """Draws a fifth of each class for testing, or at least one image, and always the same."""
    rng, drawn, classes = random_at(0, "test"), [], {}
    for row in sorted(rows):
        classes.setdefault(row[0], []).append(row)
    for of_class in classes.values():
        tested = max(1, len(of_class) // 5)
        for i, row in zip(rng.permutation(len(of_class)), of_class):
            drawn.append(("test" if i < tested else "train", *row))
    return drawn


def few(names):
    """The first of these names, for a message."""
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


def say(text):
    if not ranks.LOCAL_RANK:
        print(text, file=sys.stderr)


say_once = lru_cache(say)


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
    with Image.open(file) as image:
        if image.format != "MPO" and getattr(image, "n_frames", 1) > 1:
            raise ValueError("several pages or frames")
        if image.mode.startswith(("I", "F")) or ";16" in str(image.tile):
            raise ValueError("more than 8 bits per channel, on an unknown scale")
        image = ImageOps.exif_transpose(image)  # photographs say which side is up
        if image.has_transparency_data:
            image = image.convert("RGBA")
            white = Image.new("RGBA", image.size, "white")
            image = Image.alpha_composite(white, image)
        image = image.convert("RGB").resize((image_size, image_size), Image.BILINEAR)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)
