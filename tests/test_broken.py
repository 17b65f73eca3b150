"""What users do by mistake to folders, files and terminals. Nothing may give a silent wrong result or lose data."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import make_tiny
from PIL import Image

import convex_hull_select
import fedavg
import fediir
from common import UserError, plots, ranks, run
from common.data import Dataset, image_folder, plays
from common.models import build
from common.splits import deal

ROOT = Path(__file__).parent.parent
TINY = (
    "--model cnn --width 0.125 --image-size 8 --rounds 3 --local-epochs 1 --clients 2 --participating 2 --sample 1 "
    "--partition iid --device cpu --precision float32 "
)


def draw_images(folder, parts=("train", "test"), classes=("cat", "dog"), n=12):
    for p, part in enumerate(parts):
        for c, name in enumerate(classes):
            (folder / part / name).mkdir(parents=True, exist_ok=True)
            for i in range(n):
                Image.new("L", (8, 8), 40 * c + 5 * i + p).save(folder / part / name / f"{i}.png")


@pytest.fixture
def launched(monkeypatch, tmp_path, capsys):
    """launched(method, flags) runs a method as from the shell, in an empty folder. Returns exit code and stderr."""
    monkeypatch.chdir(tmp_path)

    def launch(method, flags):
        monkeypatch.setattr(sys, "argv", [f"{method.__name__}.py", *flags.split()])
        capsys.readouterr()
        try:
            run.launch(method.main)
        except SystemExit as end:
            return end.code, capsys.readouterr().err
        return 0, capsys.readouterr().err

    return launch


@pytest.mark.parametrize("change", ["overwrite", "remove", "add", "rename a class"])
def test_a_run_does_not_go_on_with_other_images(launched, tmp_path, change):
    draw_images(tmp_path / "pets")
    assert launched(fedavg, f"{TINY} --dataset pets --out r")[0] == 0
    if change == "overwrite":
        Image.new("L", (8, 8), 255).save(tmp_path / "pets/train/cat/0.png")
    elif change == "remove":
        (tmp_path / "pets/train/cat/0.png").unlink()
    elif change == "add":
        Image.new("L", (8, 8), 255).save(tmp_path / "pets/train/cat/99.png")
    else:
        for part in ("train", "test"):
            (tmp_path / "pets" / part / "cat").rename(tmp_path / "pets" / part / "zebra")
    code, said = launched(fedavg, "--resume r")
    assert code == 2 and "the data set has changed since this run began" in said


def test_two_folders_with_equal_names_sizes_and_dates_keep_their_own_images(tmp_path):
    for version, shade in (("v1", 10), ("v2", 20)):
        for domain in ("a", "b"):
            file = tmp_path / version / "pets" / domain / "cat" / "0.bmp"
            file.parent.mkdir(parents=True)
            Image.new("L", (8, 8), shade).save(file)
            os.utime(file, (1, 1))
    found = [
        image_folder(tmp_path / v / "pets", tmp_path / "cache", 8).x[0, 0, 0, 0].item() for v in ("v1", "v2", "v1")
    ]
    assert found == [10, 20, 10]


@pytest.mark.parametrize("name", ["../../escaped", "/tmp/escaped", "a/b"])
def test_a_domains_name_is_never_a_path(launched, tmp_path, name):
    speech = "".join(f"{name if i % 2 else 'ROMEO'}:\n{'But soft, what light through yonder window breaks? ' * 30}\n\n"
                     for i in range(2))  # fmt: skip
    (tmp_path / "play.txt").write_text(speech)
    (tmp_path / "a/b").mkdir(parents=True)
    before = set(tmp_path.rglob("*"))
    flags = "--model charrnn --width 0.05 --rounds 1 --clients 1 --no-compare --device cpu --batch-size 64"
    code, said = launched(fediir, f"--dataset play.txt {flags} --test-domain all --out a/b/run")
    assert code == 0, said
    new = set(tmp_path.rglob("*")) - before
    assert all((tmp_path / "a/b/run") in [p, *p.parents] for p in new) and not Path("/tmp/escaped").exists()


def test_a_data_folder_that_cannot_be_written_means_no_cache(tmp_path, capsys):
    draw_images(tmp_path / "pets", n=1)
    (tmp_path / "cache").write_text("a file, not a folder")
    assert len(image_folder(tmp_path / "pets", tmp_path / "cache", 8).x) == 4
    assert "no cache of the images" in capsys.readouterr().err


def test_a_cache_that_is_torn_or_holds_something_else_is_made_again(tmp_path):
    draw_images(tmp_path / "pets", n=1)
    good = image_folder(tmp_path / "pets", tmp_path / "cache", 8).x.clone()
    (file,) = (tmp_path / "cache").iterdir()
    part = file.with_suffix(".123")
    part.write_bytes(b"left behind by a run that was killed")
    for content in (torch.zeros(3), torch.zeros(4, 3, 8, 8), {"x": 1}):
        torch.save(content, file)
        assert torch.equal(image_folder(tmp_path / "pets", tmp_path / "cache", 8).x, good)
    assert not part.exists()


@pytest.mark.parametrize("lr", ["1e12", "1e20"])
def test_a_hull_of_diverged_clients_is_one_line(launched, lr, monkeypatch):
    monkeypatch.setattr("common.data.load", lambda name, *args: make_tiny())
    cut = "--clients 8 --participating 6 --width 0.125 --rounds 3 --local-epochs 2 --device cpu --precision float32"
    code, said = launched(convex_hull_select, f"{cut} --lr {lr} --out r")
    assert code == 2 and "lower --lr" in said and "Traceback" not in said


@pytest.mark.parametrize(
    "leaf",
    [
        {"users": ["A"], "user_data": {"A": {"x": [["a"] * 80] * 200, "y": [["b"]] * 200}}},
        {"users": ["A"], "user_data": {"A": {"x": ["\ud800" * 80] * 200, "y": ["b"] * 200}}},
        {"users": ["A"], "user_data": [1]},
    ],
)
def test_leafs_json_with_other_things_in_it_is_refused(tmp_path, leaf):
    (tmp_path / "leaf.json").write_text(json.dumps(leaf))
    with pytest.raises(UserError, match="cannot be read as plays"):
        plays(tmp_path / "leaf.json")


def test_a_hundred_thousand_brackets_are_refused(tmp_path):
    (tmp_path / "leaf.json").write_text("[" * 100_000)
    with pytest.raises(UserError, match="cannot be read as plays"):
        plays(tmp_path / "leaf.json")


def test_a_single_class_is_refused(launched, tmp_path):
    draw_images(tmp_path / "pets", classes=("cat",), n=24)
    code, said = launched(fedavg, f"{TINY} --dataset pets --label-noise 1 1 --out r")
    assert code == 2 and "has only one class, cat" in said


def test_a_class_may_have_any_name_in_pictures(tmp_path):
    tiny = make_tiny()
    data = Dataset("tiny", tiny.x, tiny.y, tiny.train, tiny.test, [r"$\frac$", "$", "c"], tiny.domain, ["$x", "b"])
    plots.partition(tmp_path / "partition.png", data, deal(data, 0, "iid", clients=3))
    assert (tmp_path / "partition.png").stat().st_size > 1000


@pytest.mark.parametrize("flags", ["[1]", "null", '"text"', '{"rounds": null}'])
def test_flags_of_a_run_that_are_no_flags_are_refused(launched, tmp_path, flags):
    (tmp_path / "r").mkdir()
    (tmp_path / "r/args.json").write_text('{"method": "fedavg", "flags": %s}' % flags)  # noqa: UP031
    code, said = launched(fedavg, "--resume r")
    assert code == 2 and len(said.strip().splitlines()) == 1, said


def test_a_checkpoint_without_weights_is_refused(launched, tmp_path):
    draw_images(tmp_path / "pets")
    assert launched(fedavg, f"{TINY} --dataset pets --out r")[0] == 0
    checkpoint = torch.load(tmp_path / "r/checkpoint.pt")
    del checkpoint["state"]["w"]
    torch.save(checkpoint, tmp_path / "r/checkpoint.pt")
    code, said = launched(fedavg, "--resume r")
    assert code == 2 and "is incomplete: start a new run" in said


def test_of_several_ranks_one_tells_of_ctrl_c(monkeypatch, capsys):
    def interrupt():
        raise KeyboardInterrupt

    said = []
    for rank in (0, 1):
        monkeypatch.setattr(ranks, "RANK", rank)
        with pytest.raises(SystemExit) as end:
            run.launch(interrupt)
        assert end.value.code == 130
        said.append(capsys.readouterr().err)
    assert len(said[0].splitlines()) == 1 and not said[1]


def test_advice_to_load_a_file_unsafely_is_not_passed_on(tmp_path):
    import collections

    torch.save(collections.Counter(a=1), tmp_path / "evil.pt")
    with pytest.raises(UserError) as error:
        build("resnet18", (3, 32, 32), 10, pretrained=str(tmp_path / "evil.pt"))
    assert "evil.pt" in str(error.value) and not re.search("weights_only|unsafe|trust", str(error.value))


def shell(command, folder):
    return subprocess.run(["sh", "-c", command], cwd=folder, capture_output=True, text=True, timeout=120)


def test_a_closed_or_redirected_stderr(tmp_path):
    draw_images(tmp_path / "pets")
    call = f"{sys.executable} {ROOT / 'fedavg.py'} {TINY} --dataset pets"
    assert shell(f"{call} --out closed 2>&-", tmp_path).returncode == 0 and (tmp_path / "closed/model.pt").exists()
    assert shell(f"{call} --out file 2>log.txt", tmp_path).returncode == 0
    bars = re.findall(r"\d+%\|", (tmp_path / "log.txt").read_text())
    assert len(bars) <= 3, "a file gets a line per minute, not per round"


def test_a_second_program_in_the_same_folder_is_refused(launched, tmp_path):
    draw_images(tmp_path / "pets")
    assert launched(fedavg, f"{TINY} --dataset pets --out r")[0] == 0
    run._opened.clear()  # gives up this program's own lock
    before = (tmp_path / "r/metrics.csv").read_bytes()
    code = "import fcntl, time; f = open('r/args.json', 'r+'); fcntl.lockf(f, fcntl.LOCK_EX | fcntl.LOCK_NB)"
    code += "; print(1, flush=True); time.sleep(60)"
    other = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=tmp_path)
    try:
        assert other.stdout.readline() == b"1\n"
        code, said = launched(fedavg, "--resume r")
        assert code == 2 and "another program is working in this folder" in said
        assert (tmp_path / "r/metrics.csv").read_bytes() == before
    finally:
        other.kill()
        other.wait()
    assert launched(fedavg, "--resume r")[0] == 0


def test_the_pictures_of_a_run_are_no_class_and_what_is_left_out_is_named(tmp_path, capsys):
    draw_images(tmp_path / "pets", parts=("a", "b"), n=2)
    assert image_folder(tmp_path / "pets", tmp_path / "cache", 8).classes == ["cat", "dog"]
    assert not capsys.readouterr().err
    (tmp_path / "pets/a/run").mkdir()
    (tmp_path / "pets/a/run/args.json").write_text("{}")
    Image.new("L", (8, 8)).save(tmp_path / "pets/a/run/curves.png")
    Image.new("L", (8, 8)).save(tmp_path / "pets/a/cat/._0.png")  # as some systems write beside each file
    (tmp_path / "pets/b/dog/photo.avif").write_bytes(b"an image of a kind that is not read")
    (tmp_path / "pets/b/bird").mkdir()
    data = image_folder(tmp_path / "pets", tmp_path / "cache", 8)
    assert data.classes == ["cat", "dog"] and len(data.x) == 8
    assert "left out 1 x .avif, 1 x b/bird/ without an image" in capsys.readouterr().err


def test_stretched_images_are_named_once(tmp_path, capsys):
    draw_images(tmp_path / "pets", parts=("a",), n=2)
    Image.new("L", (8, 16)).save(tmp_path / "pets/a/cat/wide.png")
    for said in ("1 images are not square and are stretched", ""):
        image_folder(tmp_path / "pets", tmp_path / "cache", 8)
        assert said in capsys.readouterr().err


def test_classes_with_contexts_inside_are_refused(launched, tmp_path):
    for name, contexts in {"cat": ("snow", "grass", "sofa"), "dog": ("beach", "grass", "car")}.items():
        draw_images(tmp_path / "nico", parts=(name,), classes=contexts, n=2)
    draw_images(tmp_path / "nico", parts=("owl",), classes=("night", "tree"), n=2)
    code, said = launched(fedavg, f"{TINY} --dataset nico --out r")
    assert code == 2 and "looks like <class>/<domain>/ and must be <domain>/<class>/" in said


def test_one_class_missing_in_one_domain_is_no_mistake(tmp_path):
    draw_images(tmp_path / "pets", parts=("a", "b"), n=2)
    draw_images(tmp_path / "pets", parts=("c",), classes=("cat",), n=2)
    assert len(image_folder(tmp_path / "pets", tmp_path / "cache", 8).domains) == 3


def test_a_changed_byte_in_the_cache_is_found(tmp_path):
    draw_images(tmp_path / "pets")
    x = image_folder(tmp_path / "pets", tmp_path / "cache", 8).x
    (file,) = (tmp_path / "cache").iterdir()
    damaged, checksum = torch.load(file)
    damaged[0, 0, 0, 0] += 1
    torch.save((damaged, checksum), file)
    assert torch.equal(image_folder(tmp_path / "pets", tmp_path / "cache", 8).x, x)


def test_a_flag_without_effect_is_also_found_in_its_negated_form(launched):
    code, said = launched(fediir, "--gamma 0 --no-compare --test-domain mono")
    assert code == 2 and "--compare has no effect here" in said


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS has only names in UTF-8")
def test_a_name_that_is_not_utf_8_is_refused(launched, tmp_path):
    draw_images(tmp_path / "pets")
    os.rename(bytes(tmp_path / "pets/train/cat"), bytes(tmp_path / "pets/train") + b"/c\xff")
    os.rename(bytes(tmp_path / "pets/test/cat"), bytes(tmp_path / "pets/test") + b"/c\xff")
    code, said = launched(fedavg, f"{TINY} --dataset pets --out r")
    assert code == 2 and "is not UTF-8" in said
