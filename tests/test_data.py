import os
import re
import shutil
import struct
import sys
import threading
import time
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import draw_images, drawn, lines_of
from PIL import Image, TiffImagePlugin
from torchvision.transforms import InterpolationMode
from torchvision.transforms.functional import rotate

from common import UserError
from common.data import COLOURS, PUBLIC, _alone, load, rotated
from common.folders import image_folder
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
    understood = "2 classes (cat, dog), 2 domains (photo, sketch), 12 training and 0 test images"
    assert lines_of(capsys.readouterr().err)[0] == f"{pets}: {understood}"
    places = ["cover.png", "photo/cat/notes.txt", "__MACOSX/photo/0.png"]
    places += [f"photo/cat/{junk}/0.png" for junk in (".copies", "@eaDir/0.png", "#recycle")]
    for place in places:
        (pets / place).parent.mkdir(parents=True, exist_ok=True)
        (pets / place).write_bytes((pets / "photo/cat/0.png").read_bytes())
    assert len(image_folder(pets, 8)["x"]) == 12
    assert "left out 6 files" in capsys.readouterr().err


def test_a_link_to_a_folder_is_refused_and_one_to_an_image_is_followed(pets):
    link = pets / "photo/cat/again"
    link.symlink_to(pets)
    with pytest.raises(UserError, match="again is a link to a folder"):
        image_folder(pets, 8)
    link.unlink()
    link.with_suffix(".png").symlink_to(pets / "sketch/dog/0.png")
    assert image_folder(pets, 8)["x"][3, 0, 0, 0] == 140


def test_all_images_that_cannot_be_read_are_told_in_one_line(pets):
    torn, link, deep = bad = [pets / f"sketch/dog/{i}.tif" for i in range(3)]
    torn.write_bytes(b"no image")
    link.symlink_to("nowhere")
    Image.fromarray(np.arange(256).reshape(16, 16).astype("uint16")).save(deep)
    with pytest.raises(UserError, match="3 of 15 images") as refused:
        image_folder(pets, 8)
    says = str(refused.value)
    assert all(str(file) in says for file in bad) and "\n" not in says


def sort_images(root, folders):
    """Ten different images in each folder of this text; one that ends with / stays empty."""
    rng = np.random.default_rng(0)
    for folder in folders.split(", "):
        (root / folder).mkdir(parents=True)
        for i in range(0 if folder.endswith("/") else 10):
            pixels = rng.integers(0, 255, (8, 8, 3), np.uint8)
            Image.fromarray(pixels).save(root / folder / f"{i}.png")


@pytest.mark.parametrize(
    ("folders", "classes", "domains", "train", "test", "says"),
    [
        ("cat, dog", "cat dog", "", 16, 4, "a fifth that was drawn"),
        ("kfold/a/cat, kfold/a/dog, kfold/b/cat", "cat dog", "a b", 30, 0, "stepped into .*kfold"),
        ("Training/cat, Training/dog, Testing/cat, Testing/dog", "cat dog", "", 20, 20, ""),
        ("s_train/x/cat, s_train/x/dog, s_test/cat, s_test/dog", "cat dog", "", 20, 20, "train/x"),
        ("train/cat, train/train, VAL/cat, VAL/train", "cat train", "", 20, 20, ""),
        ("train/a, train/b, val/a, val/b, test/a, test/b", "a b", "", 20, 20, "val/ is left out"),
        (
            "a/images/cat, a/images/dog, b/images/cat",
            "cat dog",
            "a b",
            30,
            0,
            "stepped into .*a/im",
        ),
        ("imagesTrain/a, imagesTrain/b, testB/a, testB/b", "a b", "", 20, 20, ""),
        ("a/x, a/y, b/x, b/y, c/z", "x y z", "a b c", 50, 0, "no class of c is in another"),
        ("a/x, a/y, b/y, b/z, c/x, c/z", "x y z", "a b c", 60, 0, ""),
        (
            "a/v, a/w, b/w, b/x, c/x, c/y, d/y, d/z",
            "v w x y z",
            "a b c d",
            80,
            0,
            "most domains lack most",
        ),
    ],
)
def test_a_layout_is_understood(tmp_path, capsys, folders, classes, domains, train, test, says):
    sort_images(tmp_path / "pets", folders)
    data = load(str(tmp_path / "pets"), image_size=8)
    assert (data.classes, data.domains) == (classes.split(), domains.split())
    assert (len(data.train), len(data.test)) == (train, test)
    assert torch.cat([data.train, data.test]).unique().tolist() == [*range(train + test)]
    said = capsys.readouterr().err
    assert re.search(says, said) and ("swap" in said) == ("class" in says or "lack" in says)


@pytest.mark.parametrize(
    ("folders", "says"),
    [
        ("empty/", "pets holds no images"),
        ("train/cat, empty/", "pets/empty holds no images"),
        ("train/cat, train/dog, test/cat", "train/ and test/.* see test/dog"),
        ("train/cat, test/cat, sketch/cat", "no other folder: see sketch/cat"),
        ("cat/train, cat/test, dog/train", "test would be a class: sort it as test/CLASS/"),
        ("trainA, trainB, testA, testB", "testA would be a class"),
        (
            "raw/a/cat, raw/a/dog, raw/b/cat, old/a/cat, old/b/cat",
            "too deep .* if (cat|dog) is a class, give .*pets/(raw|old),",
        ),
        (
            "a/train/x, a/train/y, a/test/x, b/train/x, b/test/x",
            "too deep .* if [xy] is a class, give .*pets/[ab],",
        ),
        ("cat/a/train, cat/b/test, dog/a/train, dog/b/test", "if t.* is a class, .* else sort"),
        ("train/cat, test/cat, TEST_SIMPLE/cat", "TEST_SIMPLE and test would both be test/"),
        ("train_images/cat, train_masks/cat", "would both be train/: move one of them away"),
        ("train/cat, train/dog, test", "pets/test and .*train/.* at different depths"),
        ("cat, dog, dog/small", "pets/cat and .*dog/small hold images at different depths"),
        ("a/cat, b/Cat", "'Cat' and 'cat' look the same"),
        ("Sketch/cat, sketch/cat", "'Sketch' and 'sketch' look the same"),
        ("polar-bear, polar bear", "look the same"),
        ("cat, c\u200bat", r"'c.u200bat' look the same"),
        ("cat, \uff43at", "look the same"),
        ("caf\u00e9, cafe\u0301", r"'caf.xe9' look the same"),
    ],
)
def test_bad_folders_are_named(tmp_path, folders, says):
    sort_images(tmp_path / "pets", folders)
    with pytest.raises(UserError, match=says):
        load(str(tmp_path / "pets"), tmp_path)


def test_labels_that_differ_in_a_sign_are_two_classes(tmp_path):
    sort_images(tmp_path, "-1, 1")
    assert image_folder(tmp_path, 8)["classes"] == ["-1", "1"]


def test_the_test_images_of_a_folder_without_a_test_set_are_always_the_same(tmp_path):
    sort_images(tmp_path, "cat, dog")
    a, b = (image_folder(tmp_path, 8) for _ in range(2))
    assert all(torch.equal(a[part], b[part]) for part in ("x", "train", "test"))


def test_images_that_are_in_two_places_are_counted(tmp_path, capsys):
    sort_images(tmp_path, "a/train/cat, a/train/dog, b/train/cat, b/train/dog")
    shutil.copytree(tmp_path / "a/train/cat", tmp_path / "a/test/cat")
    shutil.copytree(tmp_path / "b/train/dog", tmp_path / "a/test/dog")
    image_folder(tmp_path / "a", 8)
    said = capsys.readouterr().err
    assert "10 images are copies of others, and 10 images are in the training and" in said
    shutil.copy(tmp_path / "a/train/cat/0.png", tmp_path / "b/train/dog/again.png")
    shutil.rmtree(tmp_path / "a/test")
    image_folder(tmp_path, 8)
    said = capsys.readouterr().err
    assert "1 images are copies of others, and 1 images are in two domains" in said
    (tmp_path / "b/train/dog/again.png").rename(tmp_path / "a/train/dog/again.png")
    image_folder(tmp_path, 8)  # with another label in the same domain
    assert "1 images are copies of others, and 0 images" in capsys.readouterr().err
    with pytest.raises(UserError, match="do not fit into memory: lower --image-size"):
        image_folder(tmp_path, 10**7)


def test_a_folder_that_has_changed_is_read_again(pets):
    before = load(str(pets), image_size=8)
    assert load(str(pets), image_size=8) is before, "a run and its baselines share their data"
    (pets / "photo/dog/2.png").unlink()
    assert len(load(str(pets), image_size=8).x) == 11
    file = pets / "photo/dog/1.png"
    Image.new("RGB", (20, 10), "white").save(file)
    assert load(str(pets), image_size=8).x[4].min() == 255


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse to make such a folder")
def test_a_folder_whose_name_no_picture_and_no_table_could_show_is_named(pets):
    (pets / "photo/cat").rename(pets / "photo" / os.fsdecode(b"caf\xe9"))
    with pytest.raises(UserError, match=r"folder 'caf.udce9' is not UTF-8: rename it"):
        image_folder(pets, 8)


def write_idx(file, array):
    header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(header + array.astype(np.uint8).tobytes())


NUMBERS = {
    "mnist": "MNIST/raw/",
    "emnist": "EMNIST/raw/emnist-digits-",
    "emnist-letters": "EMNIST/raw/emnist-letters-",
    "emnist-balanced": "EMNIST/raw/emnist-balanced-",
}


def write_numbers(folder, name):
    """Four training and two test images in torchvision's files of this data set, and labels."""
    x, y = np.random.default_rng(0).integers(0, 256, (6, 28, 28)), np.array([1, 2, 3, 4, 2, 1])
    for part, samples in {"train": slice(4), "t10k": slice(4, 6), "test": slice(4, 6)}.items():
        write_idx(folder / f"{NUMBERS[name]}{part}-images-idx3-ubyte", x[samples])
        write_idx(folder / f"{NUMBERS[name]}{part}-labels-idx1-ubyte", y[samples])
    return x, y


@pytest.mark.parametrize("name", NUMBERS)
def test_torchvisions_files_are_read(tmp_path, name, monkeypatch):
    monkeypatch.setitem(PUBLIC, name, (PUBLIC[name][0], 4, 2))
    x, y = write_numbers(tmp_path, name)
    data = load(name, tmp_path)
    assert np.array_equal(data.x[:, 0], x if name == "mnist" else x.transpose(0, 2, 1))
    letters = name == "emnist-letters"  # counted from 1 in the files
    assert data.y.tolist() == (y - letters).tolist()
    assert data.classes[3].startswith("d" if letters else "3")
    assert len(data.classes) == {"emnist-letters": 26, "emnist-balanced": 47}.get(name, 10)
    assert data.train.tolist() == [0, 1, 2, 3] and data.test.tolist() == [4, 5]


def test_a_data_set_that_is_not_whole_is_refused(tmp_path):
    write_numbers(tmp_path, "mnist")
    draw_images(tmp_path / "cifar10")
    with pytest.raises(UserError, match=r"\(4, 2\) .* not \(60000, 10000\): remove its folder"):
        load("mnist", tmp_path)
    with pytest.raises(UserError, match=r"\(6, 6\) .* not \(50000, 10000\): remove its folder"):
        load("cifar10", tmp_path)


def test_the_remedy_for_a_truncated_file_is_to_remove_it(tmp_path):
    write_numbers(tmp_path, "mnist")
    file = tmp_path / "MNIST/raw/train-images-idx3-ubyte"
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(
        UserError, match="its folder is there, it is damaged, and has to be removed"
    ):
        load("mnist", tmp_path)


def test_one_process_downloads_and_the_others_wait(tmp_path):
    inside, most = [], []

    def download():
        with _alone(tmp_path / "data"):
            inside.append(1)
            most.append(len(inside))
            time.sleep(0.05)
            inside.pop()

    threads = [threading.Thread(target=download) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 4


def test_without_fcntl_or_the_right_to_write_there_is_no_lock(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with _alone(tmp_path / "file"):
        pass
    monkeypatch.setitem(sys.modules, "fcntl", None)  # as on Windows
    with _alone(tmp_path / "data"):
        pass
    with pytest.raises(OSError, match="network"), _alone(tmp_path / "data"):
        raise OSError("no network")


def test_traffic_signs_are_decoded(tmp_path, monkeypatch):
    monkeypatch.setitem(PUBLIC, "gtsrb", ("GTSRB", 3, 1))
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
    transparent, upright, gif, printed = image_folder(tmp_path, 16)["x"]
    assert (transparent[:, 8, 8] == 255).all() and (transparent[:, 0, 0] == 0).all()
    assert upright[:, :6].min() > 200 and upright[:, 10:].max() < 50
    assert (gif == 255).all() and printed[0].min() > 200 and printed[1:].max() < 50


def png_of_16_bits(kind, channels):
    pixels = np.random.default_rng(0).integers(0, 65535, (4, 4 * channels)).astype(">u2")
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    data = b"\x89PNG\r\n\x1a\n"
    header = struct.pack(">IIBBBBB", 4, 4, 16, kind, 0, 0, 0)
    for name, part in ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")):
        end = zlib.crc32(name + part)
        data += struct.pack(">I", len(part)) + name + part + struct.pack(">I", end)
    return data


def tiff_of_16_bits(order, planes=1):
    """RGB of 4 x 4 pixels, without compression; with three planes, each colour is a strip."""
    n, size = 10, 96 // planes
    bits = 8 + 2 + 12 * n + 4  # where that field has its numbers, and then the other two
    offsets, counts = bits + 6, bits + 6 + 4 * planes
    first = counts + 4 * planes
    at, of = (first, size) if planes == 1 else (offsets, counts)
    fields = [(256, 4, 1, 4), (257, 4, 1, 4), (258, 3, 3, bits), (259, 3, 1, 1), (262, 3, 1, 2)]
    fields += [(273, 4, planes, at), (277, 3, 1, 3), (278, 4, 1, 4), (279, 4, planes, of)]
    fields += [(284, 3, 1, 1 if planes == 1 else 2)]
    data = b"II*\0" if order == "<" else b"MM\0*"
    data += struct.pack(f"{order}IH", 8, n)
    for tag, kind, count, value in fields:
        numbers = (value, 0) if kind == 3 and count == 1 else (value,)
        data += struct.pack(
            f"{order}HHI" + "HI"[len(numbers) == 1] * len(numbers), tag, kind, count, *numbers
        )
    data += struct.pack(f"{order}I3H", 0, 16, 16, 16)
    data += struct.pack(f"{order}{planes}I", *range(first, first + 96, size))
    return data + struct.pack(f"{order}{planes}I", *[size] * planes) + bytes(range(96))


@pytest.mark.parametrize(
    ("ending", "content"),
    [
        ("png", png_of_16_bits(0, 1)),
        ("png", png_of_16_bits(2, 3)),
        ("png", png_of_16_bits(4, 2)),
        ("png", png_of_16_bits(6, 4)),
        ("tif", tiff_of_16_bits("<")),
        ("tif", tiff_of_16_bits(">")),
        ("tif", tiff_of_16_bits("<", planes=3)),
        ("ppm", b"P6 4 4 65535\n" + bytes(96)),
        ("ppm", b"P6 4 4 4095\n" + bytes(96)),
        ("pgm", b"P5 4 4 4095\n" + bytes(32)),
    ],
)
def test_more_than_8_bits_are_refused(pets, ending, content):
    (pets / f"photo/cat/x.{ending}").write_bytes(content)
    with pytest.raises(UserError, match=rf"x.{ending} .*more than 8 bits per channel"):
        image_folder(pets, 8)


def test_images_that_lost_what_they_show_are_counted(tmp_path, capsys):
    sort_images(tmp_path, "cat, dog")
    noise = Image.open(tmp_path / "cat/0.png").resize((64, 64))
    grey = np.array(noise.convert("L"))
    clear = Image.new("RGBA", (8, 8), (255, 255, 255, 0))
    clear.putpixel((1, 1), (255, 255, 255, 255))
    clear.save(tmp_path / "cat/white.png")
    Image.fromarray(grey // 128).save(tmp_path / "cat/mask.png")
    for ending in ("gif", "webp", "tif"):
        film = {"save_all": True, "append_images": [noise]}
        Image.new("RGB", (64, 64)).save(tmp_path / f"dog/film.{ending}", **film)
    noise.save(tmp_path / "dog/phone.jpg", format="MPO", save_all=True, append_images=[noise])
    noise.save(tmp_path / "dog/whole.jpg")
    whole = (tmp_path / "dog/whole.jpg").read_bytes()
    (tmp_path / "dog/torn.jpg").write_bytes(whole[: len(whole) // 2] + bytes(5000))
    (tmp_path / "dog/motion.jpg").write_bytes(whole + b"a film")
    image_folder(tmp_path, 64)
    (said,) = [line for line in lines_of(capsys.readouterr().err) if "among 29 images" in line]
    assert "5 of one colour" in said and "3 with several frames" in said
    assert f"1 without the end of a JPEG, such as {tmp_path}/dog/torn.jpg" in said


def test_a_photograph_whose_resolution_is_no_number_is_turned_and_read(tmp_path):
    turned, exif = Image.new("RGB", (16, 16)), Image.Exif()
    turned.paste("white", (0, 8, 16, 16))  # the lower half
    exif[0x0112], exif[0x011A] = 3, TiffImagePlugin.IFDRational(72, 1)
    (tmp_path / "cat").mkdir()
    file = tmp_path / "cat/0.jpg"
    turned.save(file, exif=exif)
    content, unsigned, signed = file.read_bytes(), b"\x01\x1a\x00\x05", b"\x01\x1a\x00\x0a"
    content = content.replace(struct.pack(">II", 72, 1), struct.pack(">ii", -1, 0))
    file.write_bytes(content.replace(unsigned, signed))
    (upright,) = image_folder(tmp_path, 16)["x"]
    assert upright[:, :6].min() > 200 and upright[:, 10:].max() < 50
