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
from common.folders import image_folder
from common.glyphs import AGREEMENT, glyphs

# ---------------------------------------------------------------- drawn by the program


def test_glyphs_are_the_same_bytes_for_the_same_seed_only():
    one, again, other = (glyphs(300, 50, seed)["x"] for seed in (1, 1, 2))
    assert torch.equal(one, again) and not torch.equal(one, other)


def test_a_colour_agrees_with_the_label_as_often_as_its_domain_says(monkeypatch):
    monkeypatch.setattr("common.glyphs.glyphs", drawn)
    digits, data = drawn(9_000, 4_000), load("colours")
    used = torch.isin(digits["y"], torch.tensor([0, 1, 7, 8]))
    shape = torch.isin(digits["y"][used], torch.tensor([1, 7]))
    half = digits["x"][used].double().view(-1, 14, 2, 14, 2).mean((2, 4)).floor()
    assert torch.equal(data.x[: len(half)].amax(1).double(), half)  # the digit at half the size
    red, green, blue = (data.x.amax((2, 3)) > 0).T
    assert not blue.any() and (red ^ green).all()  # one colour
    wrong, agrees = data.y[: len(half)] != shape, green == data.y
    for d, agreement in enumerate(AGREEMENT):
        here = torch.nonzero(data.domain == d).flatten()
        among_wrong = agrees[here][wrong[here]]
        shares = agreement, agreement, 0.25
        for drawn_so, p in zip((agrees[here], among_wrong, wrong[here]), shares):
            error = abs(drawn_so.double().mean() - p)
            assert error <= 4 * (p * (1 - p) / len(drawn_so)) ** 0.5
    assert data.domain[data.train].max() == 1 and data.domain[data.test].min() == 2
    neutral = data.extra["neutral"]
    assert green[neutral].tolist() == [False] * len(data.test) + [True] * len(data.test)
    for values in (data.y, data.x.sum(1)):
        assert torch.equal(values[neutral], torch.cat([values[data.test]] * 2))


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
    same = replace(tiny, name="other", x=tiny.x.mT.contiguous().mT)
    assert same.fingerprint() == tiny.fingerprint()  # only values count, not strides
    found = {tiny.fingerprint(), replace(tiny, classes=["a", "b", "x"]).fingerprint()}
    for part in ("x", "y", "domain", "train"):
        other = getattr(tiny, part).clone()
        other[-1:].view(-1)[-1] += 1
        found.add(replace(tiny, **{part: other}).fingerprint())
    assert len(found) == 6  # each change gives another number


# ---------------------------------------------------------------- folders of images


@pytest.fixture
def pets(tmp_path):
    """A folder with two domains of two classes, whose red is 60 times the domain + 30 the class."""
    return sort_images(tmp_path / "pets", "photo/cat, photo/dog, sketch/cat, sketch/dog")


LAYOUTS = """
cat, dog -> cat dog; ; 16 4; 16 training and 4 test images, 2 classes
Training/cat, Training/dog, Testing/cat, Testing/dog -> cat dog; ; 20 20;
train/cat, train/train, VALID/cat, VALID/train -> cat train; ; 20 20;
train/a, train/b, val/a, val/b, test/a, test/b -> a b; ; 20 20; for validation are
a/x, a/y, b/x, b/y, c/z -> x y z; a b c; 50 0; 3 classes that .* lacks .x, y, z
a/x, a/y, b/x, b/y -> x y; a b; 40 0; 2 domains .a, b.$
bus, retrain, train -> bus retrain train; ; 24 6;
fastest, slow, -, +, with_mask -> + - fastest slow with_mask; ; 40 10;
a/caf\u00e9, b/cafe\u0301, a/1, b/1 -> 1 caf\u00e9; a b; 40 0; b.$
a/masked/with_mask_1.png, a/masked/with_mask_2.png, strain/masked -> masked; a strain; 12 0;
cat, .git/x, @eaDir/x/y, cat/__MACOSX, dog, lost+found -> cat dog; ; 16 4;
E.coli/1.png, E.coli/2.png, E.dog/1.png, E.dog/2.png -> E.coli E.dog; ; 2 2;
"""  # folders -> classes; domains; numbers of training and test images; what is said


@pytest.mark.parametrize("layout", LAYOUTS.strip().splitlines())
def test_a_layout_is_understood(tmp_path, capsys, layout):
    folders, expected = layout.split(" -> ")
    classes, domains, sizes, says = (text.strip() for text in expected.split(";"))
    train, test = map(int, sizes.split())
    data = load(str(sort_images(tmp_path / "pets", folders)), image_size=8)
    assert (data.classes, data.domains) == (classes.split(), domains.split())
    assert (len(data.train), len(data.test)) == (train, test)
    assert torch.cat([data.train, data.test]).unique().tolist() == [*range(train + test)]
    assert re.search(says, lines_of(capsys.readouterr().err)[-1 if "val" not in says else 0])
    if data.domain is None:
        tested = torch.bincount(data.y[data.test], minlength=len(data.classes))
        assert len({*tested.tolist()}) == 1  # equally many of each class


REFUSED = r"""
empty/ -> pets/empty holds no images
cat, dog, fox/ -> pets/fox holds no images
0.png, 1.png -> 0 folders deep \(\S+pets\): .* give \S+ if pets is a class
cover.png, cat, dog -> 0 folders deep \(\S+pets\) and 1 .*\)
cat, dog, dog/small -> 1 folders deep .* and 2 folders deep
kfold/a/cat, kfold/b/cat -> 3 folders deep .*, or .*pets/kfold if [ab] is a domain
seg_train/seg_train/cat, seg_test/seg_test/cat -> give .*(seg_t\w+)/\1 if cat is a cl
a/b/c/d/e/f/g/h -> too deep: give a folder further in
kfold/cat, kfold/dog -> holds kfold: .* give .*pets/kfold
train/cat, holdout/cat -> holds holdout, train: neither
train_data, dev -> dev is no class
input, target -> pets/input has the name
train/cat, train/dog -> holds train: .* give .*pets/train
test/cat, val/cat -> holds test, val: neither
train/cat, test/cat, sketch/cat -> holds sketch, test, train: neither
train/cat, test/cat, Testing/cat -> holds Testing, test, train: neither
seg_train/cat, seg_test/cat -> holds seg_test, seg_train: neither
train/cat, train/dog, test/cat -> dog has no training or no test image
cat, dog/0.png -> dog has no training or no test image
cat/train, cat/test, dog/train -> test is no class: sort its images as test/CLASS/
train, test1 -> test1 is no class: sort its images as test1/CLASS/
train2017, val2017 -> val2017 is no class
TRAIN, VAL -> VAL is no class
minitrain, minival -> minival is no class
imagesTrain/cat, imagesTest/cat -> holds imagesTest, imagesTrain: neither
cat/ROI_1.png, cat/ROI_1_mask.png -> ROI_1.png has the name
trainA, testA, trainB, testB -> testA is no class
trn/cat, trn/dog, tst/cat, tst/dog -> holds trn, tst: neither
Original/cat, Augmented/cat -> holds Augmented, Original: neither .* give \S+Original, say
train, Valid -> Valid is no class: sort its images as Valid/CLASS/
cat/images, cat/masks -> cat/images has the name of an annotation
cat, dog, Ground Truth -> pets/Ground Truth has the name
PNGImages, PedMasks -> pets/PNGImages has the name
images/cat, labels/cat -> pets/images has the name
train/depth, train/rgb -> train/depth has the name
imgs_train/a, masks_train/a -> masks_train has the name
cat/x.png, cat/x_mask.png -> x_mask.png has the name
cat/x.png, cat/x_superpixels.png -> x_superpixels.png has the name
cat/x.png, cat/x_labelTrainIds.png -> x_labelTrainIds.png has the name
cat, dog, trimaps -> pets/trimaps has the name
cat/x.jpg, cat/x-GT.png -> x-GT.png has the name
cat/img_1.jpg, cat/label_1.png -> label_1.png has the name
cat/x.jpg, cat/xSegmentation.png -> xSegmentation.png has the name
cat/x.jpg, cat/x.png, dog -> cat/x.jpg has the name
cat/case_1.png, cat/case_1_mask_2.png -> case_1_mask_2.png has the name
cat/a (1).png, cat/a (1)_mask_2.png -> mask_2.png has the name
cat/x.jpg, cat/x_msk0.jpg -> x_msk0.jpg has the name
cat/x.jpg, cat/x-150x150.jpg -> x-150x150.jpg has the name
"""


@pytest.mark.parametrize("refused", REFUSED.strip().splitlines())
def test_everything_else_is_refused(tmp_path, refused):
    folders, says = refused.split(" -> ")
    with pytest.raises(UserError, match=says) as error:
        load(str(sort_images(tmp_path / "pets", folders)))
    assert "\n" not in str(error.value)


def test_pixels_labels_and_parts_belong_together(pets, tmp_path, capsys):
    for name in ("notes.heic", "LICENSE"):
        (pets / "photo/cat" / name).touch()
    data = load(str(pets), image_size=8)
    assert (data.x[:, 0, 0, 0] == 30 * data.y + 60 * data.domain).all()
    assert "2 kinds of files left out (.heic, LICENSE)" in capsys.readouterr().err
    split = sort_images(tmp_path / "split", "Train/cat, Train/dog, test/cat, test/dog")
    data, is_test = load(str(split), image_size=8), torch.arange(40) > 19
    assert (data.x[:, 0, 0, 0] == 30 * data.y + 60 * is_test).all() and data.domain is None
    assert data.train.tolist() == [*range(20)] and data.test.tolist() == [*range(20, 40)]
    one, again = (load(str(pets / "photo"), image_size=8) for _ in range(2))
    assert one.fingerprint() == again.fingerprint()  # the fifth for testing is always the same
    (split / "Train/cat/again.png").symlink_to(split / "test/cat/0.png")
    image_folder(split, 8)
    assert "1 images are as others" in capsys.readouterr().err
    Image.new("RGB", (8, 8)).save(split / "Train/cat/0.webp")  # 0.png in another format
    image_folder(split / "Train", 8)
    assert "1 images are as others" in capsys.readouterr().err


def test_its_clients_train_in_two_processes(pets, tmp_path):
    """The threads that decode images must have ended when the ranks are forked."""
    words = "--model cnn --width 0.1 --image-size 8 --rounds 1 --partition iid --clients 2 "
    words += "--sample 2 --participating 2 --local-epochs 1 --no-compare --processes 2 --dataset"
    program = [sys.executable, ROOT / "fedavg.py", *words.split(), pets]
    subprocess.run(program, cwd=tmp_path, check=True)


def test_a_link_is_what_it_leads_to(pets):
    (pets / "photo/cat/again.png").symlink_to(pets / "sketch/dog/0.png")
    (pets / "paint").symlink_to(pets / "photo")
    assert image_folder(pets, 8)["x"][10, 0, 0, 0] == 90
    assert image_folder(pets, 8)["domains"] == ["paint", "photo", "sketch"]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse to make such a folder")
def test_a_name_that_is_no_utf8_becomes_one_that_a_table_can_show(pets):
    (pets / "photo/cat").rename(pets / "photo" / os.fsdecode(b"caf\xe9"))
    assert image_folder(pets, 8)["classes"] == [r"caf\udce9", "cat", "dog"]


def test_what_cannot_be_read_is_named(pets):
    file = pets / "sketch/dog/x.tif"
    Image.fromarray(np.zeros((50, 50, 3), np.uint8)).save(file)
    for content in (b"no image", file.read_bytes()[:999]):
        file.write_bytes(content)
        with pytest.raises(UserError, match=r"1 images cannot be read: .* \S+dog/x\.tif \("):
            image_folder(pets, 8)
    for kind in ("uint16", "float32"):
        Image.fromarray(np.arange(256).reshape(16, 16).astype(kind)).save(file)
        with pytest.raises(UserError, match=r"x\.tif .*more than 8 bits per channel"):
            image_folder(pets, 8)
    Image.new("RGB", (9, 9)).save(file, save_all=True, append_images=[Image.new("RGB", (9, 9))])
    with pytest.raises(UserError, match=r"x\.tif .*several pages"):
        image_folder(pets, 8)
    file.unlink()
    os.mkfifo(file)  # opening it would wait for ever
    with pytest.raises(UserError, match=r"x\.tif is no file"):
        image_folder(pets, 8)
    with pytest.raises(UserError, match="is no folder, and no data set"):
        load(str(pets / "photo/cat/0.png"))


def test_images_of_other_kinds_look_as_a_person_sees_them(pets):
    clear = Image.new("RGBA", (16, 16), (255, 0, 0, 0))
    clear.paste((0, 0, 0, 255), (0, 0, 1, 1))
    turned, exif = Image.new("RGB", (16, 16)), Image.Exif()
    turned.paste("white", (0, 8, 16, 16))  # the lower half
    exif[0x0112] = 3  # the camera was upside down
    cat = pets / "art/cat"
    cat.mkdir(parents=True)
    clear.save(cat / "1.png")
    turned.save(cat / "2.jpg", exif=exif)
    Image.new("P", (16, 16), 0).save(cat / "3.gif", transparency=0)
    transparent, upright, gif = image_folder(pets, 16)["x"][:3]
    assert (transparent[:, 8, 8] == 255).all() and (transparent[:, 0, 0] == 0).all()
    assert upright[:, :6].min() > 200 and upright[:, 10:].max() < 50
    assert (gif == 255).all()


# ---------------------------------------------------------------- public data sets

NUMBERS = {"mnist": "MNIST/raw/", "emnist": "EMNIST/raw/emnist-digits-"}


def write_numbers(folder, name):
    """Four training and two test images in torchvision's files of this data set, and labels."""
    x, y = np.random.default_rng(0).integers(0, 256, (6, 28, 28)), np.array([1, 2, 3, 4, 2, 1])
    for part, samples in {"train": slice(4), "t10k": slice(4, 6), "test": slice(4, 6)}.items():
        for kind, array in (("images-idx3", x[samples]), ("labels-idx1", y[samples])):
            header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
            file = folder / f"{NUMBERS[name]}{part}-{kind}-ubyte"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(header + array.astype(np.uint8).tobytes())
    return x, y


@pytest.mark.parametrize("name", NUMBERS)
def test_torchvisions_files_are_read(tmp_path, name, monkeypatch):
    monkeypatch.setitem(PUBLIC, name, (PUBLIC[name][0], 4, 2))
    x, y = write_numbers(tmp_path, name)
    data = load(name, tmp_path)
    assert np.array_equal(data.x[:, 0], x if name == "mnist" else x.transpose(0, 2, 1))
    assert data.y.tolist() == y.tolist() and data.classes[3].startswith("3")
    assert data.train.tolist() == [0, 1, 2, 3] and data.test.tolist() == [4, 5]


def test_a_data_set_that_is_not_whole_is_refused(tmp_path):
    write_numbers(tmp_path, "mnist")
    sort_images(tmp_path / "cifar10", "train/cat, train/dog, test/cat, test/dog")
    with pytest.raises(UserError, match=r"\(4, 2\) .* not \(60000, 10000\): remove its folder"):
        load("mnist", tmp_path)
    with pytest.raises(UserError, match=r"\(20, 20\) .* not \(50000, 10000\): remove its folder"):
        load("cifar10", tmp_path)
    file = tmp_path / "MNIST/raw/train-images-idx3-ubyte"
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(UserError, match="it is damaged, and has to be removed; without a network"):
        load("mnist", tmp_path)


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
