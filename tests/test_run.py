import itertools
import json
import os
import re
import runpy
import shutil
import signal
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import (
    draw_images,
    kept,
    make_tiny,
    outcome,
    parse,
    parsed,
    poison,
    prepared,
    read_rows,
)
from matplotlib.figure import Figure
from scipy.stats import ttest_rel

import common.data
import convex_hull_select
import entropy_weighting
import fedavg
import fediir
import minimax_select
import uefl
from common import UserError, ranks
from common.runner import compare, plots, runs
from common.runner.load import load
from common.splits import make_clients
from common.train import Trainer

WU = (
    "--model cnn --width 0.125 --local-epochs 1 --batch-size 16 --partition dirichlet --clients 6 "
    "--participating 4 --sample 2 --rounds 4 --evaluate-every 1 "
)
CUTS = {
    **dict.fromkeys([fedavg, entropy_weighting, minimax_select], WU),
    convex_hull_select: WU + "--hull-dim 1 ",
    fediir: "--dataset glyphs --width 0.125 --clients 4 --sample 2 --test-domain dark --rounds 4 "
    "--evaluate-every 1 ",
    uefl: "--model resblocks --width 0.01 --partition domain --local-epochs 1 --batch-size 20 "
    "--lr 0.003 --gamma 0 --passes 3 --codebook-size 4 --segments 1 --rounds 2 --later-rounds 1 "
    "--iterations 3 --rotate 0 90 ",
}  # fmt: skip
BASELINES = {  # sibling -> the same run started by hand
    fedavg: {"alpha-1.0": "--dirichlet 1", "alpha-100.0": "--dirichlet 100"},
    entropy_weighting: {"equal": "--weighting equal"},
    minimax_select: {"random": "--selection random"},
    convex_hull_select: {"random": "--selection random"},
    fediir: {"fedavg": "--gamma 0"},
    uefl: {"static": "--iterations 1 --rounds 4", "fedavg": "--codebook-size 0 --rounds 4"},
}
MORE_FILES = {
    fediir: {"samples.png", "best_id.pt"},
    entropy_weighting: {"weights.png"},
    minimax_select: {"similarity.png"},
    convex_hull_select: {"hull.png"},
    uefl: {"uncertainties.png", "samples.png"},
}


@pytest.fixture
def new_run(tiny, tmp_path, monkeypatch):
    """new_run("--flag value ...", choose) is a Run in the folder `run`, of a model of 2 weights."""
    monkeypatch.chdir(tmp_path)
    clients, model = make_clients(tiny, 0, "iid", clients=3), torch.nn.Linear(1, 1)

    def make(flags="", choose=None):
        args = parsed(fedavg, f"--partition iid --out run --rounds 100 {flags}")
        args.name = "FedAvg"
        return runs.Run(args, tiny, clients, model, torch.device("cpu"), choose)

    return make


@pytest.fixture(scope="module")
def wholes(tmp_path_factory):
    return tmp_path_factory.mktemp("whole")


@pytest.fixture
def whole(start, wholes, tmp_path):
    """whole(method) is the folder of a run without baselines, or a copy of it."""

    def copy(method):
        done = wholes / method.__name__
        if not done.exists():
            shutil.copytree(start(method, CUTS[method] + "--no-compare --out whole"), done)
        return Path(shutil.copytree(done, tmp_path / "whole", dirs_exist_ok=True))

    return copy


# ----------------------------------------------------------------------- the same bytes, and resume


STOPS = [(method, 3) for method in CUTS] + [(fedavg, 1), (uefl, 2), (uefl, 4)]


@pytest.mark.parametrize(("method", "stop"), STOPS)
def test_a_run_that_was_stopped_goes_on_to_the_same_end(start, start_and_stop, whole, method, stop):
    expected = outcome(whole(method))
    start_and_stop(method, CUTS[method] + "--no-compare --out cut", stop, "cut")
    assert outcome(start(method, "--resume cut")) == expected


@pytest.mark.parametrize("method", CUTS)
def test_a_notebooks_loop_is_the_run(whole, method):
    """It has no Run. Every number in its state is that of the run."""
    folder = whole(method)
    args, _, clients, trainer = prepared(method, CUTS[method])
    rounds = list(method.federate(args, clients, trainer, {}))
    (state, _), expected = rounds[-1], kept(folder)
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(torch.as_tensor(state[name]), torch.as_tensor(value)), name
    for (_, row), saved in zip(rounds, read_rows(folder), strict=True):
        assert float(saved["id_accuracy"]) == pytest.approx(float(row["id_accuracy"]), rel=1e-5)


@pytest.mark.parametrize("method", CUTS)
def test_baselines_are_ordinary_runs_that_anybody_can_start_by_hand(start, method):
    """Each has its flags, metrics, checkpoint, model and pictures, and can be resumed."""
    folder = start(method, CUTS[method])
    files = {"args.json", "metrics.csv", "checkpoint.pt", "model.pt"}
    files |= {"confusion.csv", "partition.png", *MORE_FILES.get(method, [])}
    assert {file.name for file in folder.iterdir()} == {*files, "curves.png"}
    siblings = {f"run-{name}" for name in BASELINES[method]}
    assert {file.name for file in folder.parent.iterdir()} == {"run", *siblings}
    for name, by_hand in BASELINES[method].items():
        baseline = folder.parent / f"run-{name}"
        no_words = {"uncertainties.png"} if name == "fedavg" else set()  # UEFL has no codebook
        assert {file.name for file in baseline.iterdir()} == files - no_words
        hand = start(method, f"{CUTS[method]} {by_hand} --no-compare --out hand-{name}")
        assert outcome(baseline) == outcome(hand) != outcome(folder)
        start(method, f"--resume {baseline}")
        assert outcome(baseline) == outcome(hand)


@pytest.mark.parametrize("method", [convex_hull_select, uefl])
def test_the_model_of_any_run_is_loaded_in_one_line(method, whole, tiny):
    """It answers as the last evaluation says; UEFL's has all codewords, added ones included."""
    folder = whole(method)
    model, [*_, last] = load(folder), read_rows(folder)
    images = tiny.x[tiny.test].float() / 127.5 - 1
    logits = model(images)[0] if method is uefl else model(images)
    for name, tensor in torch.load(folder / "model.pt").items():
        assert torch.equal(model.state_dict()[name], tensor)
    if method is uefl:
        assert len(model.codebook.codewords) > 4
    else:
        table = np.genfromtxt(folder / "confusion.csv", delimiter=",", skip_header=1)[:, 1:]
        expected = np.zeros((3, 3))
        np.add.at(expected, (tiny.y[tiny.test].numpy(), logits.argmax(1).numpy()), 1)
        assert (table == expected).all()
        for column, counts in (("hits", expected.diagonal()), ("predicted", expected.sum(0))):
            assert [float(n) for n in last[column].split()] == counts.tolist()
    with pytest.raises(UserError, match="has no model; name a run"):
        load(folder.parent)


def test_a_run_that_was_stopped_in_its_baseline_goes_on_there(start, start_and_stop, capsys):
    folder = start(entropy_weighting, CUTS[entropy_weighting] + "--out whole").parent
    printed = capsys.readouterr().out.replace("whole", "cut")
    start_and_stop(entropy_weighting, CUTS[entropy_weighting] + "--out cut", 3, "cut-equal")
    capsys.readouterr()
    start(entropy_weighting, "--resume ./cut/")
    for name in ("", "-equal"):
        assert outcome(folder / f"cut{name}") == outcome(folder / f"whole{name}")
    assert capsys.readouterr().out == printed
    start(entropy_weighting, "--resume cut-equal")
    assert json.loads((folder / "cut-equal/args.json").read_text())["flags"]["name"] == "equal"
    assert len(list(folder.iterdir())) == 4


@pytest.mark.parametrize("method", [convex_hull_select, uefl])
def test_a_copy_under_another_name_runs(method, tmp_path, monkeypatch, start, whole):
    (tmp_path / "mine.py").write_text(Path(method.__file__).read_text())
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    import mine

    assert outcome(start(mine, CUTS[method] + "--no-compare")) == outcome(whole(method))


# ------------------------------------------------------------------------ several seeds and domains


def test_several_seeds_and_domains_are_runs_as_by_hand_and_resume_repeats_nothing(
    start, start_and_stop, capsys, monkeypatch
):
    cut = CUTS[fediir].replace("dark", "all").replace("rounds 4", "rounds 2")
    cut += "--gamma 9 --seed 1 2 --out all"
    start_and_stop(fediir, cut, 2, "seed2-fedavg")
    rounds, train = [], Trainer.train

    def count(self, *args, **more):
        rounds.append(args[3])
        return train(self, *args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "train", count)
        folder = start(fediir, "--resume all")
        assert rounds == [2, 1, 2, 1, 2], "half a baseline, and one domain with its baseline"
        picture = Figure(layout="constrained")
        patch.setattr(plots, "picture", lambda file, width, height: nullcontext(picture))
        start(fediir, "--resume all")
        assert len(rounds) == 5, "there is nothing left to do"
    printed = capsys.readouterr().out.splitlines()
    by_hand = cut.replace("all", "light", 1).replace("1 2 --out all", "2 --no-compare --out hand")
    assert outcome(folder / "light/seed2") == outcome(start(fediir, by_hand))

    ends = {"FedIIR": {}, "FedAvg": {}}  # name -> domain -> OOD, a number for each seed
    for seed, domain, name in itertools.product("12", ("light", "dark"), ends):
        rows = read_rows(folder / f"{domain}/seed{seed}{'-fedavg' * (name == 'FedAvg')}")
        mean = np.mean([100 * float(row["ood_accuracy"]) for row in rows])
        ends[name].setdefault(domain, []).append(mean)
    (axes,) = (axes for axes in picture.axes if "OOD" in axes.get_title())
    lines = {line.get_label(): line.get_ydata() for line in axes.lines}
    for name, of_domain in ends.items():
        assert np.mean(lines[name]) == pytest.approx(np.mean([*of_domain.values()])), name
    for of_domain in ends.values():
        of_domain[""] = np.mean([of_domain["light"], of_domain["dark"]], 0)
    for domain, ours in ends["FedIIR"].items():
        theirs = ends["FedAvg"][domain]
        bounds = ttest_rel(ours, theirs).confidence_interval(0.95)
        shown = f"{np.subtract(ours, theirs).mean():+.1f} ({bounds.low:+.1f} to {bounds.high:+.1f})"
        row = "FedIIR - FedAvg" + f", {domain}" * bool(domain)
        found = [line for line in printed if re.match(rf"{row} +1 2 .* {re.escape(shown)}$", line)]
        assert "0.0 to" not in shown and len(found) == 2, (row, shown, printed)


# ----------------------------------------------------------------------------------------- mistakes

MISTAKES = [
    (fedavg, "--dataset cifar11", "--dataset cifar11: no such folder"),
    (fedavg, "--dataset mnist --data-dir empty", "--data-dir"),
    (fedavg, "--dataset full", "holds no images"),
    (fedavg, "--dataset mixed", "in train/ and test/, and no other folder"),
    (fedavg, "--dataset broken --partition domain", "1.png cannot be read as an image"),
    (fedavg, "--rounds 0", "--rounds: 0 is out of range"),
    (fedavg, "--round 3", "--round"),
    (fedavg, "--lr nan", "--lr: nan is out of range"),
    (fedavg, "--momentum 1", "out of range: 0 to 0.999"),
    (fedavg, "--image-size 32", "--image-size is for folders of images; glyphs has its own size"),
    (fedavg, "--resume", "--out, which is missing"),
    (fediir, "--test-domain mono --dataset glyphs --model resblocks", "has batch norm"),
    (fedavg, "--rotate left", "--rotate: invalid number value: 'left'"),
    (uefl, "--partition domain --rotate 0 360", "name each angle once"),
    (fedavg, "--clients 40 --participating 50", "--participating 50 is more than the 40 clients"),
    (fedavg, "--participating 40 --sample 50", "--sample 50: only 40 of 100 clients participate"),
    (fedavg, "--clients 5000", "samples are too few for 5000 clients"),
    (fedavg, "--partition domain --clients 3", "--clients 3 is fewer than the 5 training domains"),
    (minimax_select, "--clients 3", "over 3 clients"),
    (fedavg, "--test-domain gothic", "no domain 'gothic' in glyphs; its domains are sans, serif"),
    (fedavg, "--dataset broken --test-domain all", "1.png cannot be read"),
    (fedavg, "--partition silos", "needs --silos"),
    (uefl, "--sample 3", "--sample: in UEFL all clients train"),
    (uefl, "--silos 3 3", "give a number for each of 3 domains"),
    (uefl, "--silo-size 50000", "lower --silo-size"),
    (fedavg, "--model vgg99", "--model: invalid choice: 'vgg99'"),
    (uefl, "--model convnet", "convnet has no dropout"),
    (uefl, "--segments 7", "--segments 7 does not divide"),
    (fedavg, "--pretrained", "no ImageNet weights for cnn"),
    (fedavg, "--pretrained weights.pt --model resnet18", "cannot be loaded from weights.pt"),
    (fedavg, "--device cuda:77", "--device cuda:77 cannot be used"),
    (fedavg, "--device meta", "only cpu and cuda"),
    (fedavg, "--device mps", "--device mps cannot be used"),
    (fedavg, "--selection best", "--selection"),
    (convex_hull_select, "--hull-dim 9", "--hull-dim: 9 is out of range: 1 to 8"),
    (fedavg, "--small", "glyphs is small already"),
    (fedavg, "--out ''", "value is empty"),
    (fedavg, "--out=", "value is empty"),
    (fedavg, "--out full", "full is taken: choose another --out"),
    (fedavg, "--out full/notes.txt", "notes.txt is taken"),
    (fedavg, "--resume nowhere", "no run to resume"),
    (fedavg, "--resume torn", "no run to resume"),
    (uefl, "--resume other", "a run of fedavg.py"),
    (fedavg, "--partition iid --dirichlet 0.5", "--dirichlet has no effect"),
    (uefl, "--clients 9", "--clients has no effect with --partition silos"),
]


@pytest.mark.parametrize(("method", "typed", "says"), MISTAKES, ids=[m[1] for m in MISTAKES])
def test_a_mistake_is_one_clear_line_and_writes_nothing(method, typed, says, tmp_path, launched):
    for file, text in {
        "full/notes.txt": "mine",
        "torn/args.json": '{"method": "fed',
        "other/args.json": '{"flags": {"method": "fedavg", "seed": 0}}',
        **dict.fromkeys(["mixed/train/cat/1.png", "mixed/sketch/dog/1.png"], "no image"),
        **dict.fromkeys(["broken/photo/cat/1.png", "broken/photo/dog/1.png"], "no image"),
    }.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    before = sorted(tmp_path.rglob("*"))
    code, (*others, line) = launched(method, typed)
    assert code == 2 and says in line, line
    assert line.startswith(f"{method.__name__}.py: ") and len(line) < 400
    assert all(other.startswith("broken: ") for other in others), "what was found in the folder"
    after = sorted(p for p in tmp_path.rglob("*") if "empty" not in p.parts)
    assert after == before, "torchvision may make its own empty folder, but nothing else appears"


def test_a_run_that_diverges_names_the_client_and_keeps_what_it_has(
    start, launched, whole, monkeypatch
):
    expected = outcome(whole(fedavg))
    k = expected[1][2]["selected"].split()[1]
    with monkeypatch.context() as patch:
        poison(int(k), 3, patch.setattr)
        code, lines = launched(fedavg, CUTS[fedavg] + "--no-compare", start)
    assert code == 2 and lines[-1] == f"fedavg.py: client {k} diverged in round 3: lower --lr"
    assert outcome(Path("run"))[1] == expected[1][:2]
    assert outcome(start(fedavg, "--resume run")) == expected


def test_a_picture_that_fails_costs_no_model(start, monkeypatch):
    def fail(*args):
        raise ZeroDivisionError

    monkeypatch.setattr(plots, "similarity", fail)
    with pytest.raises(ZeroDivisionError):
        start(minimax_select, CUTS[minimax_select] + "--rounds 1 --no-compare")
    assert Path("run/model.pt").exists()


def test_a_baseline_never_overwrites_another_run(start):
    equal = start(entropy_weighting, CUTS[entropy_weighting] + "--no-compare --out run-equal")
    before = outcome(equal)
    with pytest.raises(UserError, match="run-equal is taken"):
        start(entropy_weighting, CUTS[entropy_weighting])
    assert outcome(equal) == before and not (equal.parent / "run").exists()


def test_of_two_runs_that_start_together_the_second_is_refused(new_run):
    first = new_run()
    with pytest.raises(UserError, match="run is taken"):
        new_run("--lr 3")
    assert json.loads(Path("run/args.json").read_text())["flags"]["lr"] == first.args.lr


def test_a_full_disk_does_not_empty_the_flags_of_a_comparison(start, monkeypatch):
    """The disk fills up between the creation of a file and its first byte."""
    folder = start(fedavg, CUTS[fedavg] + "--rounds 1 --seed 1 2 --no-compare")
    before = (folder / "args.json").read_text()

    def write_text(self, text, **options):
        self.touch()
        os.truncate(self, 0)
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", write_text)
        with pytest.raises(OSError, match="No space"):
            start(fedavg, "--resume run")
    assert (folder / "args.json").read_text() == before


def test_a_test_domain_that_leaves_too_little_is_found_before_the_first_run(start, monkeypatch):
    def load(*args):
        tiny = make_tiny()
        return replace(tiny, domains=["few", "most"], domain=(torch.arange(len(tiny.y)) > 5).long())

    monkeypatch.setattr(common.data, "load", load)
    with pytest.raises(UserError, match="samples"):
        start(fedavg, CUTS[fedavg] + "--partition iid --test-domain all")
    assert not Path("run").exists()


def test_domains_whose_names_end_like_a_baseline_have_folders_of_their_own(start, monkeypatch):
    load = common.data.load
    named = lambda *args: replace(load(*args), domains=["a", "a-random"])  # noqa: E731
    monkeypatch.setattr(common.data, "load", named)
    folder = start(minimax_select, CUTS[minimax_select] + "--rounds 1 --test-domain all")
    domains, names = ("a", "a-random"), ("seed0", "seed0-random")
    for domain, name in itertools.product(domains, names):
        flags = json.loads((folder / domain / name / "args.json").read_text())["flags"]
        method = "random" if name.endswith("random") else "minimax"
        assert (flags["test_domain"], flags["name"]) == (domain, method)


def test_the_baseline_of_a_run_in_this_folder_is_not_inside_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = parsed(fedavg, "--out .").out
    assert compare.folder_of(out, "random", "FedAvg").parent == tmp_path.parent


def test_what_a_copy_yields_is_converted_or_refused_in_the_first_round(
    new_run, tmp_path, monkeypatch
):
    run = new_run()
    row = {"a": (1, 2.5), "b": np.float64(0.5), "c": np.arange(3), "d": torch.tensor(True), "f": 7}
    state = {"t": 1, "theta": torch.ones(2), "mine": {"list": [3, 0.5, None]}}
    run.record(state, row)
    [found] = read_rows(tmp_path / "run")
    assert [found[name] for name in row] == ["1 2.5", "0.5", "0 1 2", "1", "7"]
    saved = torch.load("run/checkpoint.pt", weights_only=True)
    assert saved["rows"][0]["b"] == 0.5 and saved["rows"][0]["c"] == [0, 1, 2]
    assert saved["state"]["mine"] == state["mine"]
    for wrong in ("text", {"x": 1}, [[1], [1, 2]], run, None):
        with pytest.raises(UserError, match="wrong is no number and no list of numbers"):
            run.record(state, {"wrong": wrong})
    monkeypatch.chdir(tmp_path / "run")
    with pytest.raises(UserError, match="something else than numbers and tensors"):
        new_run().record({"t": 1, "mean": np.float64(0.5)}, {})


def test_the_best_model_stays_if_a_copy_changes_its_weights_in_place(new_run):
    """Its round is the first one with the largest value, and rounds without one do not count."""
    run, theta = new_run(choose="id_accuracy"), torch.zeros(2)
    for t, accuracy in enumerate([0.2, None, 0.9, 0.5, 0.9], 1):
        theta += 1
        run.record({"t": t, "theta": theta}, {"id_accuracy": accuracy} if accuracy else {})
    run.finish()
    ends = [torch.load(f"run/{name}.pt") for name in ("model", "best_id")]
    assert [[weight.item() for weight in end.values()] for end in ends] == [[5, 5], [3, 3]]


def test_checkpoints_take_at_most_a_hundredth_of_the_time(new_run, monkeypatch):
    run, clock, saves = new_run(), [1000.0], []
    write_to_disk = run._write

    def write(name, content):
        if name == "checkpoint.pt":
            clock[0] += 2
            saves.append(run.t)
        write_to_disk(name, content)

    monkeypatch.setattr(runs, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(run, "_write", write)
    for t in range(1, 101):
        clock[0] += 10
        run.record({"t": t}, {})
    assert saves[0] == 1 and 5 <= len(saves) <= 7
    assert np.diff(saves).min() >= 19


@pytest.mark.parametrize("changed", ["typed", "lr", "data", "code"])
def test_a_run_does_not_go_on_with_other_flags_data_or_code(
    start, whole, launched, tmp_path, monkeypatch, changed
):
    folder = whole(fedavg)
    before, more, says = outcome(folder), "", f"belongs to other {changed}"
    if changed == "typed":
        more, says = "--lr 3", "was run with another --lr: leave --lr out"
    elif changed == "lr":
        file = folder / "args.json"
        file.write_text(re.sub(r'"lr": [\d.]+', '"lr": 9.0', file.read_text()))
    elif changed == "data":
        fingerprint = common.data.Dataset.fingerprint
        monkeypatch.setattr(common.data.Dataset, "fingerprint", lambda data: fingerprint(data) + 1)
    else:
        (tmp_path / "fedavg.py").write_text(Path(fedavg.__file__).read_text() + "# changed")
        monkeypatch.setattr(fedavg, "__file__", str(tmp_path / "fedavg.py"))
    code, lines = launched(fedavg, f"--resume whole {more}", start)
    assert code == 2 and len(lines) == 1 and says in lines[0], lines
    assert outcome(folder) == before


def test_a_damaged_checkpoint_is_refused(start, whole, launched):
    file = whole(fedavg) / "checkpoint.pt"
    for damage in (file.read_bytes()[:-1], b"no checkpoint"):
        file.write_bytes(damage)
        code, lines = launched(fedavg, "--resume whole", start)
        assert code == 2 and len(lines) == 1 and "checkpoint.pt cannot be read" in lines[0], lines
        assert file.read_bytes() == damage


@pytest.mark.parametrize(
    ("where", "says"),
    [("runs.Run.record", "stopped; continue with --resume run"), ("compare.check_free", "stopped")],
)
def test_ctrl_c_is_one_line_that_says_how_to_go_on(start, launched, monkeypatch, where, says):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs ignore Ctrl-C
    stop = lambda *args, **values: signal.raise_signal(signal.SIGINT)  # noqa: E731
    monkeypatch.setattr(f"common.runner.{where}", stop)
    code, lines = launched(fedavg, CUTS[fedavg], start)
    assert code == 130 and lines[-1] == f"fedavg.py: {says}"


@pytest.mark.parametrize("method", CUTS)
def test_each_file_is_a_program(method, monkeypatch, capsys):
    words = [method.__file__, "--dataset", "nope", "--test-domain", "a"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as end:
        runpy.run_path(method.__file__, run_name="__main__")
    out, err = capsys.readouterr()
    assert end.value.code == 2 and out == "" and len(err.splitlines()) == 1
    assert err.startswith(f"{method.__name__}.py: --dataset nope: no such folder")


# -------------------------------------------------------------------------------------------- flags


def test_label_skew_does_not_inherit_the_rotations_of_silos():
    assert parsed(uefl, "--partition iid").rotate is None
    assert parsed(uefl, "--partition iid --rotate 15").rotate == [15]
    assert parsed(uefl, "").rotate == parsed(uefl, "--partition domain").rotate == [0, -50, 120]
    mnist = parsed(fediir, "--dataset mnist --partition iid")
    assert mnist.rotate and float(mnist.test_domain) in mnist.rotate, "it leaves one angle out"


@pytest.mark.parametrize("method", CUTS)
def test_every_default_is_one_that_a_user_could_type(method):
    """Typed by hand, its settings give the same flags, so a typo in them is refused."""
    for small, table in (("", method.SETTINGS), ("--small", method.SMALL)):
        for name, defaults in table.items():
            name = {"folder": ".", "other": "emnist"}.get(name, name)
            words = f"--dataset {name} {small} --out run"
            given = parse(method, words)
            assert {flag: getattr(given, flag) for flag in defaults} == defaults
            for flag, value in defaults.items():
                if value is not None and ("silo" not in flag or given.partition == "silos"):
                    values = value if isinstance(value, list) else [value]
                    words += f" --{flag.replace('_', '-')} {' '.join(map(str, values))}"
            typed = parse(method, words)
            typed.is_example = given.is_example
            assert typed == given


@pytest.mark.parametrize(("method", "rounds"), [(fedavg, "34"), (uefl, "234")])
def test_evaluations_come_every_so_many_rounds_and_after_the_last(start, method, rounds):
    """In UEFL after the last of an iteration, because its clients are then chosen by them."""
    found = read_rows(start(method, CUTS[method] + "--evaluate-every 3 --no-compare"))
    assert [row["round"] for row in found if row["id_accuracy"]] == [*rounds]
    assert all(row["train_loss"] for row in found)


# ---------------------------------------------------------------- runs that go on by themselves


LONGER = [(fedavg, "--rounds 2", "--rounds 4"), (minimax_select, "--rounds 1", "--rounds 4")]
LONGER += [(uefl, "--iterations 1", "--iterations 3")]


@pytest.mark.parametrize(("method", "short", "longer"), LONGER)
def test_a_run_that_is_made_longer_is_one_that_was_longer_from_the_start(
    start,
    whole,
    method,
    short,
    longer,
):
    start(method, f"{CUTS[method]} --no-compare --out short {short}")
    assert outcome(start(method, f"--resume short {longer}")) == outcome(whole(method))


@pytest.mark.parametrize(("method", "flags"), [(fedavg, "--rounds 3"), (uefl, "--rounds 9")])
def test_a_run_does_not_become_shorter_or_another_one(start, whole, launched, method, flags):
    before = outcome(whole(method))
    code, lines = launched(method, f"--resume whole {flags}", start)
    assert code == 2 and "was run with another --rounds" in lines[-1]
    assert outcome(Path("whole")) == before


@pytest.mark.parametrize("processes", [1, 2])
def test_the_same_command_after_sigterm_ends_with_the_same_bytes(
    start,
    whole,
    launched,
    monkeypatch,
    processes,
):
    """SIGTERM comes in round 2, to one of the ranks only."""
    expected, train = outcome(whole(fedavg)), Trainer.train

    def train_and_stop(self, update, theta, selected, t, *more, **options):
        if (t, ranks.RANK) == (2, processes - 1):
            signal.raise_signal(signal.SIGTERM)
        return train(self, update, theta, selected, t, *more, **options)

    words = f"{CUTS[fedavg]} --no-compare --precision float32 --out again --resume "
    words += f"--processes {processes}"
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "train", train_and_stop)
        patch.setattr(ranks, "_terminated", False)
        code, lines = launched(fedavg, words, start)
    assert code == 143 and lines[-1] == "fedavg.py: stopped; continue with --resume again"
    assert kept(Path("again"))["t"] == 2
    assert launched(fedavg, words, start)[0] == 0
    assert outcome(Path("again")) == expected


def test_after_a_damaged_checkpoint_the_one_before_goes_on(start, start_and_stop, whole):
    start_and_stop(fedavg, CUTS[fedavg] + "--no-compare --out cut", 3, "cut")
    last, before = (Path("cut", name) for name in runs.CHECKPOINTS)
    last.write_bytes(last.read_bytes()[:-9])
    assert before.exists() and outcome(start(fedavg, "--resume cut")) == outcome(whole(fedavg))


def test_the_same_images_at_another_path_are_the_same_data(launched, tmp_path):
    draw_images(tmp_path / "pets", n=40)
    words = "--rounds 1 --local-epochs 1 --model cnn --width 0.125 --image-size 8 --clients 3"
    words += " --participating 3 --sample 1 --no-compare --device cpu --precision float32"
    assert launched(fedavg, f"{words} --dataset pets --out run")[0] == 0
    expected = outcome(Path("run"))
    Path("pets").rename("elsewhere")
    assert launched(fedavg, "--resume run --dataset elsewhere --rounds 1")[0] == 0
    assert outcome(Path("run")) == expected
    next(Path("elsewhere").rglob("*.png")).unlink()
    common.data.load.cache_clear()
    code, lines = launched(fedavg, "--resume run --dataset elsewhere")
    assert code == 2 and "belongs to other data" in lines[-1]


def test_a_file_that_a_spreadsheet_holds_open_is_written_later(tmp_path, monkeypatch):
    replace, refusals, waited = Path.replace, [PermissionError, PermissionError], []

    def replace_later(self, target):
        if refusals:
            raise refusals.pop()
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", replace_later)
    monkeypatch.setattr(runs.time, "sleep", waited.append)
    runs.write_whole(tmp_path / "metrics.csv", "round\n1\n")
    assert (tmp_path / "metrics.csv").read_text() == "round\n1\n" and len(waited) == 2


def test_all_seeds_keep_the_precision_that_the_first_node_has_picked(start, monkeypatch):
    has = {"avx512_bf16": True}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: has)
    folder = start(fedavg, f"{CUTS[fedavg]} --no-compare --out x --seed 1 2 --rounds 1 --resume")
    has["avx512_bf16"] = False  # another node
    start(fedavg, "--resume x --rounds 2")
    for args in folder.rglob("args.json"):
        assert json.loads(args.read_text())["flags"]["precision"] == "bfloat16"
    assert all(len(read_rows(folder / f"seed{seed}")) == 2 for seed in (1, 2))


def test_a_flipped_bit_in_a_checkpoint_is_noticed(start, start_and_stop, whole):
    start_and_stop(fedavg, CUTS[fedavg] + "--no-compare --out cut", 3, "cut")
    last = Path("cut", runs.CHECKPOINTS[0])
    content = bytearray(last.read_bytes())
    content[len(content) // 2] ^= 1
    last.write_bytes(content)
    assert outcome(start(fedavg, "--resume cut")) == outcome(whole(fedavg))


@pytest.mark.parametrize("typed", ["--precision auto --seed 3 3", "--precision tf32 --seed 3"])
def test_the_same_command_goes_on_whatever_its_flags_stood_for(start, typed):
    words = f"{CUTS[fedavg]} --no-compare --out again {typed} --resume"
    first = outcome(start(fedavg, words))
    assert outcome(start(fedavg, words)) == first


def test_a_run_without_a_checkpoint_does_not_go_on_with_other_data(start, whole, launched, tiny):
    folder = whole(fedavg)
    (folder / "checkpoint.pt").unlink()
    about = json.loads((folder / "args.json").read_text())
    (folder / "args.json").write_text(json.dumps(about | {"data": about["data"] + 1}))
    code, lines = launched(fedavg, "--resume whole", start)
    assert code == 2 and "belongs to other data" in lines[-1]


@pytest.mark.parametrize(
    ("left", "says"),
    [
        (None, "run-equal is taken: choose another --out\n"),
        ({"data": 1, "flags": {"method": "minimax_select"}}, "run-equal belongs to other data"),
        ("", "args.json cannot be read"),
    ],
)
def test_a_resumed_comparison_does_not_overwrite_what_stands_in_its_baselines_folder(
    start, launched, left, says
):
    """A folder without a checkpoint: of somebody else, of another method, and after a power loss"""
    folder = Path(f"{start(entropy_weighting, CUTS[entropy_weighting])}-equal")
    (folder / "checkpoint.pt").unlink()
    (folder / "args.json").unlink()
    if left is not None:
        (folder / "args.json").write_text(left and json.dumps(left))
    before = {file: file.read_bytes() for file in folder.iterdir()}
    code, lines = launched(entropy_weighting, "--resume run", start)
    assert code == 2 and says in f"{lines[-1]}\n"
    assert {file: file.read_bytes() for file in folder.iterdir()} == before


def test_seeds_of_unequal_length_do_not_go_on_as_if_they_were_done(start, launched):
    """The first of two seeds was made longer, and the program stopped before the second one."""
    start(fedavg, f"{CUTS[fedavg]} --no-compare --out x --seed 1 2 --rounds 2")
    start(fedavg, "--resume x/seed1 --rounds 3")
    code, lines = launched(fedavg, "--resume x", start)
    assert code == 2 and "seed1 has had 3 rounds: repeat the --rounds" in lines[-1]
    start(fedavg, "--resume x --rounds 3")
    assert all(len(read_rows(Path(f"x/seed{seed}"))) == 3 for seed in (1, 2))


def test_metrics_that_were_cut_are_whole_after_resume(start, whole):
    expected = outcome(whole(fedavg))
    Path("whole/metrics.csv").write_text("round,seconds\n1,0.5\n")
    assert outcome(start(fedavg, "--resume whole/")) == expected


def test_a_run_begins_in_a_folder_where_another_was_killed_at_once(start, whole):
    Path("run").mkdir()
    Path("run/args.123.part").touch()
    assert outcome(start(fedavg, CUTS[fedavg] + "--no-compare")) == outcome(whole(fedavg))


def test_images_that_change_before_the_baseline_trains_are_named(start, monkeypatch, capsys):
    images = iter(range(99))
    monkeypatch.setattr(common.data.Dataset, "fingerprint", lambda data: next(images))
    start(entropy_weighting, CUTS[entropy_weighting])
    assert re.search(r"images \d+ \(entropy\), \d+ \(equal\)", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("seconds", "flags", "shorter"),
    [
        (20, "--dataset mnist", None),
        (7200, "--dataset mnist", "; --small takes minutes"),
        (7200, "--dataset mnist --small", ""),
        (7200, "--dataset glyphs", ""),  # for which --small is refused
    ],
)
def test_a_run_of_hours_says_once_how_long_it_takes(
    start, monkeypatch, capsys, seconds, flags, shorter
):
    """Because the clock is ahead by two hours, the first step of four rounds seems to take them."""
    first, really = {}, runs.Run.progress

    def progress(self, t, share):
        really(self, t, share)
        first.setdefault("done", self.bar.n)

    def clock():
        return time.time() + seconds

    monkeypatch.setattr(runs.Run, "progress", progress)
    monkeypatch.setattr(runs, "time", SimpleNamespace(time=clock, monotonic=time.monotonic))
    start(fedavg, f"--no-compare {flags} {WU}")
    said = re.findall(r"about (\d+) more hours at this pace(.*)", capsys.readouterr().err)
    hours = seconds / 3600 * (4 - first["done"]) / first["done"]
    assert said == ([] if shorter is None else [(f"{hours:.0f}", shorter)])
