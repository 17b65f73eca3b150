import os
import struct
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import draw_images, drawn
from PIL import Image
from torchvision.transforms import InterpolationMode
from torchvision.transforms.functional import rotate

from common import UserError
from common.data import COLOURS, image_folder, load, rotated
from common.glyphs import FONTS, glyphs


def test_glyphs_are_the_same_bytes_for_the_same_seed_only():
    a, b, c = (glyphs(300, 50, seed) for seed in (1, 1, 2))
    assert all(torch.equal(a[part], b[part]) for part in ("x", "y", "domain"))
    assert not torch.equal(a["x"], c["x"])


def test_default_data_set_is_complete():
    data = load("glyphs")
    assert data.x.shape == (14_000, 1, 28, 28) and data.x.dtype == torch.uint8
    assert torch.equal(torch.cat([data.train, data.test]), torch.arange(14_000))
    cells = torch.bincount(data.y * len(FONTS) + data.domain, minlength=10 * len(FONTS))
    assert cells.min() > 200, "every digit comes in every font family"
    assert data.x.flatten(1).amax(1).min() > 30, "no image is empty"


def test_a_digit_is_closer_to_its_own_class_than_to_others():
    data = load("glyphs")
    x = data.x.flatten(1).float()
    means = torch.stack([x[data.train][data.y[data.train] == c].mean(0) for c in range(10)])
    right = (torch.cdist(x[data.test], means).argmin(1) == data.y[data.test]).float().mean()
    assert 0.3 < right < 0.9, "labels fit, and the nearest mean does not solve the task"


@pytest.fixture
def digits(monkeypatch):
    """The grey digits behind `colours`, drawn once for all tests."""
    monkeypatch.setattr("common.glyphs.glyphs", drawn)
    digits = drawn(9_000, 4_000)
    used = torch.isin(digits["y"], torch.tensor([0, 1, 7, 8]))
    return digits["x"][used], digits["y"][used]


def within(share, expected):
    """Whether the mean of these draws is within 4 standard deviations of the expected one."""
    deviation = (expected * (1 - expected) / len(share)) ** 0.5
    return abs(share.float().mean() - expected) <= 4 * deviation


@pytest.mark.parametrize("name", ["colours", "colours-control"])
def test_a_colour_agrees_with_the_label_as_often_as_its_domain_says(digits, name):
    data, red_green = load(name), load(name).x.amax((2, 3)) > 0
    assert not red_green[:, 2].any() and (red_green.sum(1) == 1).all(), "one colour"
    colour = red_green[:, 1]
    wrong = data.y[: len(digits[1])] != torch.isin(digits[1], torch.tensor([1, 7]))
    for d, agreement in enumerate(COLOURS[name][0]):
        here = torch.nonzero(data.domain == d).flatten()
        assert within(wrong[here], 0.25), "equally often in every domain"
        for part in (here, here[wrong[here]]):
            assert within(colour[part] == data.y[part], agreement), "colour follows the label"
    assert data.domain[data.train].max() == 1 and data.domain[data.test].min() == 2
    neutral = data.extra["neutral"]
    assert colour[neutral].tolist() == [False] * len(data.test) + [True] * len(data.test)
    for values in (data.y, data.x.sum(1)):
        assert torch.equal(values[neutral], torch.cat([values[data.test]] * 2))


@pytest.mark.parametrize("name", COLOURS)
def test_a_coloured_image_is_the_digit_at_half_the_size(digits, name):
    x, half = load(name).x, digits[0].double().view(-1, 14, 2, 14, 2).mean((2, 4)).floor()
    assert torch.equal(x[: len(half)].amax(1).double(), half)
    assert name != "colours-grey" or (x == x[:, :1]).all()


def test_rotation_is_torchvisions(tiny):
    angle = -50.0
    turned = rotated(tiny, [0.0, angle], seed=3)
    for x, before, domain in zip(turned.x, tiny.x, turned.domain, strict=True):
        assert torch.equal(x, rotate(before, float(domain) * angle, InterpolationMode.BILINEAR))


def test_rotation_divides_images_into_equal_parts_and_does_not_change_the_original(tiny):
    before = tiny.x.clone()
    turned = rotated(tiny, [0, 15, 30])
    assert torch.equal(tiny.x, before) and turned.domains == ["0", "15", "30"]
    assert torch.bincount(turned.domain[turned.train]).tolist() == [40, 40, 40]
    assert torch.bincount(turned.domain[turned.test]).tolist() == [20, 20, 20]


def test_the_fingerprint_changes_with_one_pixel_one_label_or_one_domain(tiny):
    same = replace(tiny, name="other", x=tiny.x.mT.contiguous().mT)
    assert same.fingerprint() == tiny.fingerprint(), "only values count, not strides"
    changes = [{"classes": ["a", "b", "x"]}, {"train": tiny.train[:-1]}]
    for part in ("x", "y", "domain"):
        other = getattr(tiny, part).clone()
        other[-1].view(-1)[-1] += 1
        changes.append({part: other})
    found = {replace(tiny, **change).fingerprint() for change in changes}
    assert len({tiny.fingerprint(), *found}) == 6, "each change gives another number"


@pytest.fixture
def pets(tmp_path):
    """A folder with two domains of two classes, three images each."""
    draw_images(tmp_path / "pets", ("photo", "sketch"))
    return tmp_path / "pets"


def test_folder_of_train_and_test(tmp_path):
    draw_images(tmp_path / "pets", ("Train", "test"))
    data, is_test = load(str(tmp_path / "pets"), tmp_path, image_size=8), torch.arange(12) > 5
    assert data.classes == ["cat", "dog"] and data.domain is None and data.domains == []
    assert data.train.tolist() == [*range(6)] and data.test.tolist() == [*range(6, 12)]
    assert (data.x[:, 0, 0, 0] == 40 * data.y + 100 * is_test).all()


def test_folder_of_domains_and_the_files_in_it_that_are_left_out(pets, capsys):
    data = load(str(pets), pets, image_size=8)
    assert data.domains == ["photo", "sketch"] and len(data.train) == 12 and len(data.test) == 0
    assert (data.x[:, 0, 0, 0] == 40 * data.y + 100 * data.domain).all()
    assert not capsys.readouterr().err
    (pets / "photo/cat/.copies").mkdir()
    places = ["cover.png", "photo/stray.jpg", "photo/cat/notes.txt", "photo/cat/.copies/0.png"]
    for place in places:
        (pets / place).write_bytes((pets / "photo/cat/0.png").read_bytes())
    assert len(image_folder(pets, 8).x) == 12
    assert "left out 4 files" in capsys.readouterr().err


def test_a_link_to_a_folder_is_refused_and_one_to_an_image_is_followed(pets):
    link = pets / "photo/cat/again"
    link.symlink_to(pets)
    with pytest.raises(UserError, match="again is a link to a folder"):
        image_folder(pets, 8)
    link.unlink()
    link.with_suffix(".png").symlink_to(pets / "sketch/dog/0.png")
    assert image_folder(pets, 8).x[3, 0, 0, 0] == 140


def test_all_images_that_cannot_be_read_are_told_in_one_line(pets):
    torn, link, deep = bad = [pets / f"sketch/dog/{i}.tif" for i in range(3)]
    torn.write_bytes(b"no image")
    link.symlink_to("nowhere")
    Image.fromarray(np.arange(256).reshape(16, 16).astype("uint16")).save(deep)
    with pytest.raises(UserError, match="3 of 15 images") as refused:
        image_folder(pets, 8)
    says = str(refused.value)
    assert all(str(file) in says for file in bad) and "\n" not in says


@pytest.mark.parametrize(
    ("folders", "says"),
    [
        ("empty/", "pets holds no images"),
        ("train/cat empty/", "pets/empty holds no images"),
        ("train/cat train/dog test/cat", "train/ and test/.* see test/dog"),
        ("train/cat test/cat sketch/cat", "no other folder: see sketch/cat"),
        ("a/x b/y c/z", "looks like <class>/<domain>/"),
    ],
)
def test_bad_folders_are_named(tmp_path, folders, says):
    for name in folders.split():
        (tmp_path / "pets" / name).mkdir(parents=True)
        if not name.endswith("/"):
            Image.new("L", (4, 4)).save(tmp_path / "pets" / name / "0.png")
    with pytest.raises(UserError, match=says):
        load(str(tmp_path / "pets"), tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse to make such a folder")
def test_a_folder_whose_name_no_picture_and_no_table_could_show_is_named(pets):
    (pets / "photo/cat").rename(pets / "photo" / os.fsdecode(b"caf\xe9"))
    with pytest.raises(UserError, match=r"folder 'caf.udce9' is not UTF-8: rename it"):
        image_folder(pets, 8)


def write_idx(file, array):
    header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(header + array.astype(np.uint8).tobytes())


@pytest.mark.parametrize(
    ("name", "start"), [("mnist", "MNIST/raw/"), ("emnist", "EMNIST/raw/emnist-digits-")]
)
def test_torchvisions_files_are_read(tmp_path, name, start):
    x, y = np.random.default_rng(0).integers(0, 256, (6, 28, 28)), np.array([0, 1, 2, 3, 1, 0])
    for part, samples in {"train": slice(4), "t10k": slice(4, 6), "test": slice(4, 6)}.items():
        write_idx(tmp_path / f"{start}{part}-images-idx3-ubyte", x[samples])
        write_idx(tmp_path / f"{start}{part}-labels-idx1-ubyte", y[samples])
    data = load(name, tmp_path)
    upright = x.transpose(0, 2, 1) if name == "emnist" else x
    assert np.array_equal(data.x[:, 0], upright)
    assert data.y.tolist() == y.tolist() and data.classes[3].startswith("3")
    assert data.train.tolist() == [0, 1, 2, 3] and data.test.tolist() == [4, 5]


def test_traffic_signs_are_decoded(tmp_path):
    images = tmp_path / "gtsrb/GTSRB/Final_Test/Images"
    images.mkdir(parents=True)
    for c in range(3):
        folder = tmp_path / f"gtsrb/GTSRB/Training/{c:05}"
        folder.mkdir(parents=True)
        Image.new("RGB", (20 + c, 30), (c, 100, 200)).save(folder / "0.ppm")
    Image.new("RGB", (9, 9), (7, 8, 9)).save(images / "0.ppm")
    (tmp_path / "gtsrb/GT-final_test.csv").write_text("Filename;ClassId\n0.ppm;42\n")
    data = load("gtsrb", tmp_path)
    assert data.x.shape == (4, 3, 32, 32) and data.x[:, 0, 5, 5].tolist() == [0, 1, 2, 7]
    assert data.y.tolist() == [0, 1, 2, 42] and len(data.classes) == 43 and len(data.test) == 1


def test_images_of_other_kinds_look_as_a_person_sees_them(tmp_path):
    folder = tmp_path / "a" / "cat"
    folder.mkdir(parents=True)
    clear = Image.new("RGBA", (16, 16), (255, 0, 0, 0))
    clear.paste((0, 0, 0, 255), (0, 0, 1, 1))
    clear.save(folder / "1.png")
    turned = Image.new("RGB", (16, 16))
    turned.paste("white", (0, 8, 16, 16))  # the lower half
    exif = Image.Exif()
    exif[0x0112] = 3  # the camera was upside down
    turned.save(folder / "2.jpg", exif=exif)
    Image.new("P", (16, 16), 0).save(folder / "3.gif", transparency=0)
    Image.new("CMYK", (16, 16), (0, 255, 255, 0)).save(folder / "4.jpg")
    transparent, upright, gif, printed = image_folder(tmp_path, 16).x
    assert (transparent[:, 8, 8] == 255).all() and (transparent[:, 0, 0] == 0).all()
    assert upright[:, :6].min() > 200 and upright[:, 10:].max() < 50
    assert (gif == 255).all() and printed[0].min() > 200 and printed[1:].max() < 50
