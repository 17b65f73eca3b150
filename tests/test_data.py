import os
import re
import struct
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import ROOT, drawn, lines_of, sort_images
from PIL import Image
from torchvision.transforms import InterpolationMode
from torchvision.transforms.functional import rotate

from common import UserError
from common.data import PUBLIC, load, rotated
from common.folders import decode, image_folder
from common.glyphs import AGREEMENT
from common.splits import Clients

# ---------------------------------------------------------------- drawn by the program


def test_a_colour_agrees_with_the_label_as_often_as_its_domain_says(monkeypatch):
    """And it is independent of whether the label is wrong."""
    monkeypatch.setattr("common.glyphs.glyphs", drawn)
    digits, data = drawn(9_000, 4_000)["y"], load("colours")
    used = digits[torch.isin(digits, torch.tensor([0, 1, 7, 8]))]
    n = len(used)  # the others are the neutral ones
    red, green, blue = (data.x.amax((2, 3)) > 0).T
    assert not blue.any() and (red ^ green).all()  # one colour
    wrong = data.y[:n] != torch.isin(used, torch.tensor([1, 7]))
    agrees = (data.y == green)[:n]
    for d, agreement in enumerate(AGREEMENT):
        found = torch.stack([wrong, agrees, wrong & agrees])[:, data.domain[:n] == d].double()
        expected = torch.tensor([0.25, agreement, 0.25 * agreement])
        error = (found.mean(1) - expected).abs()
        assert (error <= 4 * (expected * (1 - expected) / found.shape[1]).sqrt()).all()
    assert data.domain[data.train].max() == 1 and data.domain[data.test].min() == 2
    in_red, in_green = data.extra["neutral"].view(2, -1)
    assert red[in_red].all() and torch.equal(data.x[in_red, 0], data.x[in_green, 1])
    assert torch.equal(data.y[in_red], data.y[data.test])
    assert torch.equal(data.y[in_green], data.y[data.test])


# ---------------------------------------------------------------- a Dataset


def test_rotation_is_torchvisions_in_equal_parts_and_leaves_the_original(tiny):
    before = tiny.x.clone()
    turned = rotated(tiny, [0.0, -50.0, 30.0], seed=3)
    for x, image, domain in zip(turned.x, tiny.x, turned.domain, strict=True):
        angle = [0.0, -50.0, 30.0][domain]
        assert torch.equal(x, rotate(image, angle, InterpolationMode.BILINEAR))
    assert torch.equal(tiny.x, before) and turned.domains == ["0", "-50", "30"]
    assert turned.source == tiny.fingerprint() != turned.fingerprint()
    for part, size in ((turned.train, 40), (turned.test, 20)):
        assert torch.bincount(turned.domain[part]).tolist() == [size] * 3


def test_the_fingerprint_changes_with_one_pixel_one_label_or_one_domain(tiny):
    same = replace(tiny, x=tiny.x.mT.contiguous().mT)
    assert same.fingerprint() == tiny.fingerprint()  # only values count, not strides
    for part in ("x", "y", "domain", "train"):
        other = getattr(tiny, part).clone()
        other.view(-1)[-1] -= 1
        assert replace(tiny, **{part: other}).fingerprint() != tiny.fingerprint()


def test_what_is_of_another_type_or_has_no_name_is_refused(tiny):
    """Masks and lists would select other samples, in silence."""
    mask = torch.arange(180) < 120
    for change, says in (
        ({"x": [*tiny.x]}, "x must be a 4-dimensional tensor of torch.uint8, not list"),
        ({"y": tiny.y[:, None]}, r"y must be a 1-.*, not torch.int64 \[180, 1\]"),
        ({"train": mask}, r"train must be a 1-.*, not torch.bool \[180\]"),
        ({"extra": {"mine": mask}}, "mine must be a 1-.*, not torch.bool"),
        ({"y": tiny.y + 1}, r"y must be in 0 \.\. 2 for each of 180 images"),
        ({"domain": tiny.domain.bool()}, "domain must be a 1-.*, not torch.bool"),
    ):
        with pytest.raises(UserError, match=says):
            replace(tiny, **change)
    with pytest.raises(UserError, match="a client's or a test set's samples must be a 1-"):
        Clients([mask], [tiny.test], 1, 1, [""], {})


# ---------------------------------------------------------------- folders of images


LAYOUTS = """
cat, dog -> 16 training and 4 test images; classes (2): cat 10, dog 10
a, a/._0.png -> 8 training and 2 test images; classes (1): a 10; left out (1): hidden .png 1
bus, train -> 16 training and 4 test images; classes (2): bus 10, train 10
train/a, train/b, val/a, val/b -> 20 training and 20 test images; classes (2): a 20, b 20
train/a, test/a, val/a -> 10 training and 10 test images; classes (1): a 20; left out (1): val/ 10
a/x, a/y, b/x -> 30 training and 0 test images; classes (2): x 20, y 10; domains (2): a 20, b 10
Train/a, Test/a -> 20 training and 0 test images; classes (1): a 20; domains (2): Test 10, Train 10
"""  # folders -> what is said


@pytest.mark.parametrize("layout", LAYOUTS.strip().splitlines())
def test_what_is_understood_is_said(tmp_path, capsys, layout):
    folders, says = layout.split(" -> ")
    pets = sort_images(tmp_path / "pets", folders)
    image_folder(pets, 8)
    assert lines_of(capsys.readouterr().err) == [f"{pets}: {says}"]


def test_pixels_labels_domains_and_parts_belong_together(tmp_path):
    """Red is 60 times the domain, or the part, + 30 times the class."""
    pets = sort_images(tmp_path / "pets", "photo/cat, photo/dog, sketch/cat, sketch/dog")

    def loaded(folder):
        data = load(str(folder), image_size=8)
        return data, data.x[:, 0, 0, 0], data.y

    data, red, y = loaded(pets)
    assert (data.classes, data.domains) == (["cat", "dog"], ["photo", "sketch"])
    assert (red == 30 * y + 60 * data.domain).all()
    data, red, y = loaded(sort_images(tmp_path / "x", "train/cat, train/dog, val/cat, val/dog"))
    assert data.test.tolist() == [*range(20, 40)] and data.domain is None
    assert (red == 30 * y + 60 * (torch.arange(40) >= 20)).all()
    (pets / "photo/cat/0.png").unlink()
    data, red, y = loaded(pets / "photo")
    assert (red == 30 * y).all() and y[data.test].bincount().tolist() == [1, 2]  # of 9 and 10
    again, *_ = loaded(pets / "photo")
    assert torch.equal(data.x, again.x)  # the fifth for testing is always the same


REFUSED = """
cat, fox/ -> pets/fox holds no images
0.png, cat, dog -> 0 folders deep .*png., 1 folders deep
cat, dog, dog/small -> 1 folders deep .*png., 2 folders deep
seg/seg/cat, seg/seg/dog -> 3 folders deep .*png.: move them, or give another folder
cat, val -> holds cat, val: a split has
train/cat, train/dog -> holds train: a split has
test/cat, val/cat -> holds test, val: a split has
train/cat, test/cat, sketch/cat -> holds sketch, test, train: a split has
train/cat, train/dog, test/cat -> no testing images of dog
cat, dog/0.png, fox/0.png -> no training images of dog, fox: add some
"""


@pytest.mark.parametrize("refused", REFUSED.strip().splitlines())
def test_everything_else_is_refused_in_one_line(tmp_path, refused):
    folders, says = refused.split(" -> ")
    with pytest.raises(UserError, match=f"^[^\n]*{says}[^\n]*$"):
        load(str(sort_images(tmp_path / "pets", folders)))


def test_a_folder_with_the_name_of_a_data_set_is_another_one(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    sort_images(tmp_path / "glyphs", "cat, dog")
    assert len(load("glyphs").classes) == 10
    assert "for the folder here, write ./glyphs" in capsys.readouterr().err
    assert load("./glyphs").classes == ["cat", "dog"]


def test_the_pages_command_says_its_line_and_trains_in_two_processes(tmp_path):
    """The threads that decode images must have ended when the ranks are forked."""
    page = (ROOT / "docs/data.md").read_text()
    [(file, words)] = re.findall(r"^python (\S+) (.*)", page, re.M)
    [line] = re.findall(r"^pets: .*", page, re.M)
    (sort_images(tmp_path / "pets", "cat, dog, masks") / "labels.csv").touch()
    words += " --clients 2 --participating 2 --sample 2 --processes 2 --rounds 1 --no-compare"
    program = [sys.executable, ROOT / file, *words.split()]
    run = subprocess.run(program, cwd=tmp_path, check=True, capture_output=True, text=True)
    assert line in lines_of(run.stderr)


# A black pixel of 16 bits for each of red, green and blue, which Pillow reads but does not write
DEEP_PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000011002000000c0e78f9d"
    "0000000b49444154789c636000030000070001b286acf40000000049454e44ae426082"
)


def test_what_cannot_be_read_is_named(tmp_path):
    small = Image.new("RGB", (9, 9))
    small.save(tmp_path / "pages.tif", save_all=True, append_images=[small])
    small.save(tmp_path / "postscript.jpg", "EPS")  # a program, which Pillow would run
    small.save(tmp_path / "cut.bmp")
    os.truncate(tmp_path / "cut.bmp", 99)
    Image.new("F", (9, 9)).save(tmp_path / "float.tif")
    (tmp_path / "deep.png").write_bytes(DEEP_PNG)
    for name, why in {
        "pages.tif": "several pages",
        "postscript.jpg": "cannot identify",
        "cut.bmp": "truncated",
        "float.tif": "more than 8 bits",
        "deep.png": "more than 8 bits",
    }.items():
        with pytest.raises(UserError, match=rf"1 images cannot be read: .*{name} \(.*{why}"):
            decode([tmp_path / name], 8)


def test_images_of_other_kinds_look_as_a_person_sees_them(tmp_path):
    clear = Image.new("RGBA", (16, 16), (255, 0, 0, 0))
    clear.paste((0, 0, 0, 255), (0, 0, 1, 1))
    clear.save(tmp_path / "1.png")
    turned, exif = Image.new("RGB", (16, 16)), Image.Exif()
    turned.paste("white", (0, 8, 16, 16))  # the lower half
    exif[0x0112] = 3  # the camera was upside down
    turned.save(tmp_path / "2.jpg", exif=exif)
    Image.new("P", (16, 16), 0).save(tmp_path / "3.gif", transparency=0)
    transparent, upright, gif = decode(sorted(tmp_path.iterdir()), 16)
    assert (transparent[:, 8, 8] == 255).all() and (transparent[:, 0, 0] == 0).all()
    assert upright[:, :6].min() > 200 and upright[:, 10:].max() < 50
    assert (gif == 255).all()


# ---------------------------------------------------------------- public data sets

NUMBERS = {"mnist": "MNIST/raw/", "emnist": "EMNIST/raw/emnist-digits-"}


@pytest.mark.parametrize("name", NUMBERS)
def test_torchvisions_files_are_read(tmp_path, name, monkeypatch):
    """Four training and two test images. Then the files are cut off."""
    x, y = np.random.default_rng(0).integers(0, 256, (6, 28, 28)), np.array([1, 2, 3, 4, 2, 1])
    for part, samples in {"train": slice(4), "t10k": slice(4, 6), "test": slice(4, 6)}.items():
        for kind, array in (("images-idx3", x[samples]), ("labels-idx1", y[samples])):
            header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
            file = tmp_path / f"{NUMBERS[name]}{part}-{kind}-ubyte"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(header + array.astype(np.uint8).tobytes())
    monkeypatch.setitem(PUBLIC, name, (PUBLIC[name][0], 4, 2, 1))  # as MNIST's zeros tell Fashion
    with pytest.raises(UserError, match=r"\(4, 2, 0\) .* not \(4, 2, 1\): remove its folder"):
        load(name, tmp_path)
    monkeypatch.setitem(PUBLIC, name, (PUBLIC[name][0], 4, 2))
    data = load(name, tmp_path)
    assert np.array_equal(data.x[:, 0], x if name == "mnist" else x.transpose(0, 2, 1))
    assert data.y.tolist() == y.tolist()
    assert data.train.tolist() == [0, 1, 2, 3] and data.test.tolist() == [4, 5]
    for file in tmp_path.rglob("*-ubyte"):
        os.truncate(file, 9)
    with pytest.raises(UserError, match="a file is damaged: remove its folder"):
        load(name, tmp_path)


def test_unpacked_images_of_cifar10_are_read_and_counted(tmp_path):
    sort_images(tmp_path / "cifar10", "train/cat, train/dog, test/cat, test/dog")
    with pytest.raises(UserError, match=r"\(20, 20\) .* not \(50000, 10000\): remove its folder"):
        load("cifar10", tmp_path)


def test_traffic_signs_are_decoded(tmp_path, monkeypatch):
    monkeypatch.setitem(PUBLIC, "gtsrb", ("GTSRB", 3, 1))
    for c, place in enumerate([f"Training/{c:05}" for c in range(3)] + ["Final_Test/Images"]):
        folder = tmp_path / "gtsrb/GTSRB" / place
        folder.mkdir(parents=True)
        Image.new("RGB", (20 + c, 30), (c, 100, 200)).save(folder / "0.ppm")
    (tmp_path / "gtsrb/GT-final_test.csv").write_text("Filename;ClassId\n0.ppm;42\n")
    data = load("gtsrb", tmp_path)
    assert data.x.shape == (4, 3, 32, 32) and data.x[:, 0, 5, 5].tolist() == [0, 1, 2, 3]
    assert data.y.tolist() == [0, 1, 2, 42] and len(data.classes) == 43 and len(data.test) == 1
