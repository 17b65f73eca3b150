import gzip
import json
import struct
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import InterpolationMode
from torchvision.transforms.functional import rotate

from common import UserError, random_at
from common.data import image_folder, load, plays, rotated
from common.glyphs import FONTS, glyphs


def test_glyphs_are_the_same_bytes_for_the_same_seed_only():
    a, b, c = glyphs(300, 50, seed=1), glyphs(300, 50, seed=1), glyphs(300, 50, seed=2)
    assert torch.equal(a["x"], b["x"]) and torch.equal(a["y"], b["y"]) and torch.equal(a["domain"], b["domain"])
    assert not torch.equal(a["x"], c["x"])


def test_default_data_set_is_complete():
    data = load("glyphs")
    assert data.x.shape == (14_000, 1, 28, 28) and data.x.dtype == torch.uint8
    assert len(data.train) == 12_000 and len(data.test) == 2_000
    assert len(set(data.train.tolist()) | set(data.test.tolist())) == 14_000
    cells = torch.bincount(data.y * len(FONTS) + data.domain, minlength=10 * len(FONTS))
    assert cells.min() > 200, "every digit comes in every font family"
    assert data.x.flatten(1).amax(1).min() > 30, "no image is empty"


def test_a_digit_is_closer_to_its_own_class_than_to_others():
    data = load("glyphs")
    x = data.x.flatten(1).float()
    means = torch.stack([x[data.train][data.y[data.train] == c].mean(0) for c in range(10)])
    right = (torch.cdist(x[data.test], means).argmin(1) == data.y[data.test]).float().mean()
    assert 0.3 < right < 0.9, "labels belong to images, and the nearest mean does not solve the task"


@pytest.mark.parametrize("angle", [0.0, 15.0, -50.0, 120.0])
def test_rotation_is_torchvisions(tiny, angle):
    turned = rotated(tiny, [0.0, angle] if angle else [0.0], seed=3)
    for i in torch.nonzero(turned.domain == len(turned.domains) - 1).flatten()[:20]:
        assert torch.equal(turned.x[i], rotate(tiny.x[i], angle, InterpolationMode.BILINEAR))


def test_rotation_divides_training_and_test_images_into_equal_parts_and_does_not_change_the_original(tiny):
    before = tiny.x.clone()
    turned = rotated(tiny, [0, 15, 30])
    assert torch.equal(tiny.x, before)
    assert turned.domains == ["0", "15", "30"]
    assert torch.bincount(turned.domain[turned.train]).tolist() == [40, 40, 40]
    assert torch.bincount(turned.domain[turned.test]).tolist() == [20, 20, 20]
    assert torch.equal(turned.x[turned.domain == 0], before[turned.domain == 0])


def test_rotation_of_a_data_set_without_a_test_set(tiny):
    turned = rotated(replace(tiny, test=tiny.test[:0]), [0, 90])
    assert torch.bincount(turned.domain[turned.train]).tolist() == [60, 60] and len(turned.test) == 0
    assert torch.equal(turned.x[tiny.test], tiny.x[tiny.test]), "samples in neither part stay as they are"


def test_rotation_of_fewer_test_images_than_angles(tiny):
    turned = rotated(replace(tiny, test=tiny.test[:2]), [0, 90, 180])
    assert torch.bincount(turned.domain[turned.test], minlength=3).tolist() == [1, 1, 0]
    assert torch.bincount(turned.domain[turned.train]).tolist() == [40, 40, 40]


def test_rotations_that_are_impossible_are_refused(tiny):
    with pytest.raises(UserError, match="3 angles for 2 images"):
        rotated(replace(tiny, train=tiny.train[:2]), [0, 90, 180])
    with pytest.raises(UserError, match="an angle twice: 0 15 0"):
        rotated(tiny, [0, 15, 0])
    with pytest.raises(UserError, match="tiny is text"):
        rotated(replace(tiny, x=tiny.x[:, 0, 0]), [0, 15])


def test_the_fingerprint_changes_with_one_pixel_one_label_or_one_domain_and_not_otherwise(tiny):
    before = tiny.fingerprint()
    same = replace(tiny, name="other", x=tiny.x.clone(), y=tiny.y.clone(), domain=tiny.domain.clone())
    assert same.fingerprint() == before
    assert replace(tiny, x=tiny.x.mT.contiguous().mT).fingerprint() == before, "only the values count, not the strides"
    changed = []
    for part in ("x", "y", "domain"):
        for sample in (0, 77, len(tiny.x) - 1):
            other = getattr(tiny, part).clone()
            other[sample].view(-1)[-1] += 1
            changed.append(replace(tiny, **{part: other}).fingerprint())
    changed.append(replace(tiny, domain=None).fingerprint())
    changed.append(replace(tiny, train=tiny.train[:-1]).fingerprint())
    changed.append(replace(tiny, x=tiny.x[:, :, :, ::2].contiguous()).fingerprint())
    assert len({before, *changed}) == 1 + len(changed), "each change gives another number"


def write_images(folder, classes=("cat", "dog"), n=3, shade=0):
    for c, name in enumerate(classes):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for i in range(n):
            Image.new("RGB", (20, 10), (40 * c + shade, i, 0)).save(folder / name / f"{i}.png")


def test_folder_of_train_and_test(tmp_path):
    write_images(tmp_path / "pets" / "train", n=3)
    write_images(tmp_path / "pets" / "test", n=2)
    data = load(str(tmp_path / "pets"), tmp_path, image_size=8)
    assert data.classes == ["cat", "dog"] and data.domain is None
    assert data.x.shape == (10, 3, 8, 8) and len(data.train) == 6 and len(data.test) == 4
    assert (data.x[:, 0, 0, 0] == 40 * data.y).all()


def test_folder_of_domains(tmp_path):
    write_images(tmp_path / "pets" / "photo", n=3)
    write_images(tmp_path / "pets" / "sketch", n=2, shade=100)
    data = load(str(tmp_path / "pets"), tmp_path, image_size=8)
    assert data.domains == ["photo", "sketch"] and len(data.train) == 10 and len(data.test) == 0
    assert (data.x[:, 0, 0, 0] == 40 * data.y + 100 * data.domain).all()


def test_cache_is_used_until_the_folder_changes(tmp_path, monkeypatch):
    folder = tmp_path / "pets"
    write_images(folder / "train")
    write_images(folder / "test")
    first = image_folder(folder, tmp_path / "cache", 8)
    with monkeypatch.context() as patch:
        patch.setattr(Image, "open", lambda *_: pytest.fail("decoded again"))
        assert torch.equal(image_folder(folder, tmp_path / "cache", 8).x, first.x)
    time.sleep(0.01)
    Image.new("RGB", (20, 10), (200, 0, 0)).save(folder / "train" / "cat" / "0.png")
    assert image_folder(folder, tmp_path / "cache", 8).x[0, 0, 0, 0] == 200
    assert len(list((tmp_path / "cache").iterdir())) == 1, "the old cache is gone"


def test_cifar10_is_read_from_a_folder_if_torchvisions_files_are_absent(tmp_path):
    write_images(tmp_path / "cifar10" / "train")
    write_images(tmp_path / "cifar10" / "test")
    assert load("cifar10", tmp_path).x.shape == (12, 3, 32, 32)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda f: f.mkdir(), "holds no images"),
        (lambda f: (write_images(f / "train"), write_images(f / "sketch")), "train, sketch|sketch, train"),
        (
            lambda f: (write_images(f / "train"), write_images(f / "test", ["cat"])),
            "dog has images in only one of train/ and test/",
        ),
        (lambda f: (write_images(f / "a"), (f / "a" / "cat" / "9.png").write_bytes(b"no image")), r"9\.png cannot be"),
    ],
)
def test_bad_folders_are_named(tmp_path, make, says):
    make(tmp_path / "pets")
    with pytest.raises(UserError, match=says):
        load(str(tmp_path / "pets"), tmp_path)


def write_idx(file, array):
    header = struct.pack(">HBB", 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(header + array.astype(np.uint8).tobytes())


@pytest.mark.parametrize(
    ("name", "folder", "stem"), [("mnist", "MNIST", "{}"), ("emnist", "EMNIST", "emnist-digits-{}")]
)
def test_torchvisions_files_are_read(tmp_path, name, folder, stem):
    x = np.random.default_rng(0).integers(0, 256, (6, 28, 28))
    parts = {"train": (x[:4], np.arange(4)), "t10k" if name == "mnist" else "test": (x[4:], np.arange(2))}
    for part, (images, labels) in parts.items():
        at = tmp_path / folder / "raw"
        write_idx(at / f"{stem.format(part)}-images-idx3-ubyte", images)
        write_idx(at / f"{stem.format(part)}-labels-idx1-ubyte", labels)
    data = load(name, tmp_path)
    upright = x.transpose(0, 2, 1) if name == "emnist" else x
    assert np.array_equal(data.x[:, 0].numpy(), upright)
    assert data.y.tolist() == [0, 1, 2, 3, 0, 1] and data.classes[3].startswith("3")
    assert data.train.tolist() == [0, 1, 2, 3] and data.test.tolist() == [4, 5]


def test_a_data_set_that_cannot_be_read_or_downloaded_says_what_to_do(tmp_path):
    (tmp_path / "MNIST" / "raw").mkdir(parents=True)
    for name in (
        "train-images-idx3-ubyte",
        "train-labels-idx1-ubyte",
        "t10k-images-idx3-ubyte",
        "t10k-labels-idx1-ubyte",
    ):
        (tmp_path / "MNIST" / "raw" / name).write_bytes(gzip.compress(b"cut short"))
    with pytest.raises(UserError, match="--data-dir"):
        load("mnist", tmp_path)


def test_windows_of_plays_are_cut_from_a_speakers_own_words_and_training_never_sees_test_text(tmp_path):
    rng = random_at(0, "play")
    speeches = {u: ["".join(rng.choice(list("abcde"), 70)) for _ in range(10)] for u in ("ROMEO", "JULIET")}
    text = "".join(f"{u}:\n{speeches[u][i]}\n\n" for i in range(10) for u in speeches)
    (tmp_path / "play.txt").write_text(text + "SERVANT:\nAy.\n")
    data = plays(tmp_path / "play.txt")
    assert data.domains == ["JULIET", "ROMEO"], "a speaker with too little text is left out"
    windows = ["".join(data.classes[c] for c in [*x, y]) for x, y in zip(data.x.tolist(), data.y.tolist(), strict=True)]
    for u, speaker in enumerate(data.domains):
        said = "\n".join(speeches[speaker])
        train, test = (
            [said.index(windows[i]) for i in part if data.domain[i] == u] for part in (data.train, data.test)
        )
        assert train and test
        assert max(train) + 81 <= min(test)


def test_leafs_json(tmp_path):
    samples = {"x": ["abcdefgh" * 10] * 200, "y": list("ab" * 100)}
    (tmp_path / "all.json").write_text(json.dumps({"users": ["HAMLET"], "user_data": {"HAMLET": samples}}))
    data = plays(tmp_path / "all.json")
    assert [data.classes[c] for c in data.y] == samples["y"]
    assert "".join(data.classes[c] for c in data.x[0]) == samples["x"][0]


def test_text_without_speakers_is_refused(tmp_path):
    (tmp_path / "novel.txt").write_text("Call me Ishmael. " * 100)
    with pytest.raises(UserError, match="Speaker"):
        load(str(tmp_path / "novel.txt"), tmp_path)


def test_images_of_other_kinds_look_as_a_person_sees_them(tmp_path):
    folder = tmp_path / "pets" / "a" / "cat"
    folder.mkdir(parents=True)
    ramp = np.tile(np.arange(16, dtype=np.uint16) * 4369, (16, 1))  # 0 .. 65535
    Image.fromarray(ramp).save(folder / "0-sixteen-bits.png")
    clear = Image.new("RGBA", (16, 16), (255, 0, 0, 0))
    clear.putpixel((0, 0), (0, 0, 0, 255))
    clear.save(folder / "1-transparent.png")
    upright = Image.new("L", (16, 16))
    upright.paste(255, (0, 0, 16, 8))  # the upper half is white
    exif = Image.Exif()
    exif[0x0112] = 3  # the camera was upside down
    upright.rotate(180).convert("RGB").save(folder / "2-rotated.jpg", exif=exif, quality=95)
    palette = Image.new("P", (16, 16), 0)
    palette.putpalette([9, 9, 9, 200, 200, 200])
    palette.save(folder / "3-palette.gif", transparency=0)
    (folder.parent / ".ipynb_checkpoints").mkdir()
    Image.new("L", (16, 16)).save(folder.parent / ".ipynb_checkpoints/0.png")
    data = image_folder(tmp_path / "pets", tmp_path / "cache", 16)
    sixteen, transparent, rotated_back, gif = data.x.int()
    assert data.classes == ["cat"] and len(data.x) == 4
    assert (sixteen[0, 5] - torch.arange(16) * 17).abs().max() <= 1, "equal steps from black to white"
    assert transparent[:, 8, 8].tolist() == [255] * 3 and transparent[:, 0, 0].tolist() == [0] * 3
    assert rotated_back[:, :6].min() > 200 and rotated_back[:, 10:].max() < 50
    assert (gif == 255).all()


def test_train_and_test_in_capitals_are_train_and_test(tmp_path):
    write_images(tmp_path / "pets" / "Train")
    write_images(tmp_path / "pets" / "TEST")
    data = load(str(tmp_path / "pets"), tmp_path, image_size=8)
    assert data.domain is None and len(data.train) == len(data.test) == 6


def test_a_speech_after_a_byte_order_mark_or_a_line_of_spaces_is_a_speech(tmp_path):
    words = "But soft, what light through yonder window breaks? " * 30
    (tmp_path / "play.txt").write_text(f"\ufeffROMEO:\n{words}\n \t\nJULIET:\n{words}\n", encoding="utf-8")
    assert plays(tmp_path / "play.txt").domains == ["JULIET", "ROMEO"]
