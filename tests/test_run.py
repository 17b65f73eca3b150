import ast
import functools
import itertools
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import make_tiny, read_rows

import convex_hull_select
import entropy_weighting
import fedavg
import fediir
import minimax_select
import uefl
from common import UserError, flags, run

ROOT = Path(__file__).parent.parent
CUTS = {
    fedavg: "--model cnn --width 0.125 --local-epochs 1 --clients 6 --participating 4 --sample 2 --rounds 4 ",
    uefl: "--model resblocks --width 0.01 --partition domain --local-epochs 1 --batch-size 10 --lr 0.003 --gamma 0 "
    "--codebook-size 4 --segments 1 --rounds 2 --later-rounds 1 --iterations 3 --rotate 0 90 ",
}


def without_times(folder):
    rows = read_rows(folder)
    return [{c: v for c, v in row.items() if c != "seconds"} for row in rows]


@pytest.mark.parametrize("method", CUTS)
def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(start, method):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        folder = start(method, CUTS[method] + f"--seed {seed} --out {name}")
    assert without_times(folder / "a") == without_times(folder / "b") != without_times(folder / "c")
    assert (folder / "a/model.pt").read_bytes() == (folder / "b/model.pt").read_bytes()


@pytest.mark.parametrize("method", CUTS)
@pytest.mark.parametrize("stop", [1, 2, 3, 4])
def test_a_run_that_was_stopped_goes_on_to_the_same_end(start, start_and_stop, method, stop):
    folder = start(method, CUTS[method] + "--out whole")
    start_and_stop(method, CUTS[method] + "--out cut", stop, "cut")
    start(method, "--resume cut")
    assert without_times(folder / "cut") == without_times(folder / "whole")
    assert (folder / "cut/model.pt").read_bytes() == (folder / "whole/model.pt").read_bytes()


def test_a_resumed_runs_clock_goes_on(start):
    folder = start(fedavg, CUTS[fedavg] + "--out run")
    before = read_rows(folder / "run")
    start(fedavg, "--resume run")
    assert read_rows(folder / "run") == before, "there was nothing left to do"


def test_divergence_is_named(start, capsys):
    with pytest.raises(SystemExit) as end:
        run.launch(lambda: start(fedavg, CUTS[fedavg] + "--out run --lr 1e20"))
    assert end.value.code == 2 and "training diverged in round 2: lower --lr" in capsys.readouterr().err


def test_label_skew_does_not_inherit_the_rotations_of_silos():
    parse = functools.partial(flags.parse, uefl.__doc__, uefl.SETTINGS, uefl.own_flags)
    assert parse(["--partition", "dirichlet"]).rotate is None
    assert parse(["--partition", "dirichlet", "--rotate", "15"]).rotate == [15]
    assert parse([]).rotate == parse(["--partition", "domain"]).rotate == [0, -50, 120]


def test_without_out_a_new_folder_is_made_each_time(start):
    folder = start(fedavg, CUTS[fedavg])
    start(fedavg, CUTS[fedavg])
    assert len(list((folder / "runs").iterdir())) == 2


def test_flags_are_kept(start):
    folder = start(fedavg, CUTS[fedavg] + "--out run --lr 0.07")
    kept = json.loads((folder / "run/args.json").read_text())
    assert kept["flags"]["lr"] == 0.07 and kept["flags"]["partition"] == "dirichlet" and kept["method"] == "fedavg"


MISTAKES = [
    (fedavg, "--dataset cifar11", "no data set 'cifar11': choose from"),
    (fedavg, "--dataset missing/folder", "missing/folder: there is no such folder or file"),
    (fedavg, "--dataset mnist --data-dir empty", "--data-dir"),
    (fedavg, "--rounds 0", "--rounds: 0 is out of range"),
    (fedavg, "--rounds many", "'many' is not a whole number"),
    (fedavg, "--lr nan", "--lr: nan is out of range"),
    (fedavg, "--roudns 3", "--roudns"),
    (fedavg, "--clients 40 --participating 50", "--participating 50 is more than the 40 clients"),
    (fedavg, "--participating 40 --sample 50", "--sample 50: only 40 clients participate"),
    (fedavg, "--clients 5000", "lower --clients"),
    (fedavg, "--test-domain gothic", "no domain 'gothic' in glyphs: give one of sans, serif"),
    (fedavg, "--test-domain stix --partition dirichlet --rotate 0 90", "no domain 'stix' in glyphs: give one of 0, 90"),
    (fedavg, "--rotate 15 15", "names an angle twice"),
    (fedavg, "--model vgg99", "no model 'vgg99'"),
    (fedavg, "--model vgg16", "vgg16 does not take samples of shape"),
    (fedavg, "--model charrnn", "not for images"),
    (fedavg, "--pretrained", "no ImageNet weights for cnn"),
    (fedavg, "--device cuda:77", "--device cuda:77 cannot be used"),
    (fedavg, "--resume nowhere", "no run to resume"),
    (fedavg, "--out full", "full exists and is not empty"),
    (fedavg, "--partition silos", "needs --silos"),
    (fedavg, "--out full/notes.txt", "notes.txt is not a folder"),
    (fedavg, "--label-noise 0.5 2", "--label-noise: 2 is out of range"),
    (uefl, "--silos 3 3", "2 numbers for 3 domains"),
    (uefl, "--silo-size 50000", "do not fit"),
    (uefl, "--silos 0 0 0", "gives no domain a silo"),
    (uefl, "--lr -1", "--lr: -1 is out of range: above 0"),
    (uefl, "--segments 7", "--segments 7 does not divide the 32 channels"),
    (uefl, "--model convnet", "convnet has no dropout"),
    (uefl, "--resume full", "no run to resume"),
    (uefl, "--resume other", "a run of fedavg.py, not of uefl.py"),
    (uefl, "--dropout 1.5", "--dropout: 1.5 is out of range"),
    (fedavg, "--rounds 1e3", "'1e3' is not a whole number"),
    (fedavg, "--rounds", "--rounds: expected one argument"),
    (fedavg, "--lr inf", "--lr: inf is out of range"),
    (fedavg, "--momentum 1", "between 0 and 0.999"),
    (fedavg, "--seed -1", "--seed: -1 is out of range"),
    (fedavg, "--participating 0", "--participating: 0 is out of range"),
    (fedavg, "--dirichlet 0", "--dirichlet: 0 is out of range: above 0"),
    (fedavg, "--rotate left", "'left' is not a number"),
    (fedavg, "--rotate 0 nan", "--rotate: nan is out of range"),
    (fedavg, "--seed 99999999999999999999 --rotate 0 90", "--seed: 99999999999999999999 is out of range"),
    (fedavg, "--partition iid --clients 12000", "lower --clients"),
    (fedavg, "--partition domain --clients 15000 --participating 40", "lower --clients"),
    (fediir, "--clients 11000 --participating 12 --sample 4", "lower --clients"),
    (uefl, "--model convnet --ensemble 1", "or --ensemble 5"),
    (fedavg, "--device gpu", "--device gpu cannot be used"),
    (fedavg, "--device meta", "--device meta is not supported"),
    (fedavg, "--precision float16", "--precision"),
    (fedavg, "--selection best", "--selection"),
    (fedavg, "--out ", "--out: is empty"),
    (fedavg, "--resume other --out new", "--out has no effect here: --resume continues in its own folder"),
    (fedavg, "--silos 3 1 1", "--silos has no effect here: it needs --partition silos"),
    (fedavg, "--silo-size 9", "--silo-size has no effect here"),
    (fedavg, "--optimizer adam --momentum 0.9", "--momentum has no effect here"),
    (fedavg, "--image-size 64", "--image-size has no effect here: glyphs has its own size"),
    (fedavg, "--model resnet18 --width 0.5", "--width has no effect here"),
    (fedavg, "--partition iid --dirichlet 0.5", "--dirichlet has no effect here"),
    (fedavg, "--partition domain --clients 3", "--clients 3 is fewer than the 5 domains"),
    (fedavg, "--partition speaker --clients 100", "only 5 domains have 10 samples or more; lower --clients"),
    (fedavg, "--pretrained weights.pt --model resnet18", "the weights of resnet18 cannot be loaded from weights.pt"),
    (fedavg, "--dataset full/notes.txt", "no speaker has the 10 samples that a training and a test part need"),
    (fedavg, "--dataset full", "holds no images"),
    (fedavg, "--dataset mixed", "beside train/ there must be test/, and no other folder"),
    (fedavg, "--dataset broken --partition domain", "1.png cannot be read as an image"),
    (fedavg, "--dataset plays.json", "cannot be read as plays or as LEAF's JSON"),
    (fedavg, "--resume torn", "no run to resume"),
    (entropy_weighting, "--expel 0.9", "--sample 10: only 4 clients are left"),
    (entropy_weighting, "--tv -1", "--tv: -1 is out of range"),
    (entropy_weighting, "--label-noise 0.5", "--label-noise: expected 2 arguments"),
    (minimax_select, "--churn 1", "--churn: 1 is out of range"),
    (minimax_select, "--sketch 100 --event-threshold 0.1", "a --sketch does not keep old updates"),
    (convex_hull_select, "--draw 41", "--draw 41: only 40 clients participate"),
    (convex_hull_select, "--hull-dim 9", "--hull-dim: 9 is out of range: between 1 and 8"),
    (fediir, "--test-domain arial", "no domain 'arial' in glyphs: give one of"),
    (fediir, "--gamma -0.1", "--gamma: -0.1 is out of range"),
    (fediir, "--dataset broken", "--test-domain is missing"),
    (uefl, "--iterations 0", "--iterations: 0 is out of range"),
    (uefl, "--clients 9", "--clients has no effect here: --silos says how many there are"),
    (uefl, "--partition domain --rotate 0 0", "names an angle twice"),
    (uefl, "--codebook-size 0 --segments 7", "--segments has no effect here: there is no codebook"),
    (uefl, "--ensemble 2 --passes 3", "--passes has no effect here: the members of an --ensemble"),
    (fediir, "--gamma 0 --ema 0.5", "--ema has no effect here: --gamma 0 means FedAvg"),
    (convex_hull_select, "--sample 3", "--sample has no effect here: the hull sets"),
    (
        fedavg,
        "--selection full --sample 3",
        "--sample has no effect here: --selection full takes all participating clients",
    ),
    (fedavg, "--resume ", "--resume: is empty"),
    (fedavg, "--model resnet18 --pretrained ", "--pretrained: is empty"),
    (fedavg, "--dataset ", "--dataset: is empty"),
]


@pytest.mark.parametrize(("method", "flags", "says"), MISTAKES, ids=[m[1] for m in MISTAKES])
def test_a_mistake_is_one_clear_line_and_writes_nothing(method, flags, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/notes.txt").write_text("mine")
    for folder in ("mixed/train/cat", "mixed/sketch/cat", "broken/photo/cat", "torn"):
        (tmp_path / folder).mkdir(parents=True)
        if folder != "torn":
            (tmp_path / folder / "1.png").write_bytes(b"no image")
    (tmp_path / "plays.json").write_text('{"users": ["HAMLET"]}')
    (tmp_path / "torn/args.json").write_text('{"method": "fed')
    (tmp_path / "other").mkdir()
    (tmp_path / "other/args.json").write_text('{"method": "fedavg", "flags": {}}')
    before = sorted(p for p in tmp_path.rglob("*"))
    monkeypatch.setattr(sys, "argv", [f"{method.__name__}.py", *flags.split(" ")])
    with pytest.raises(SystemExit) as end:
        run.launch(method.main)
    lines = capsys.readouterr().err.strip().splitlines()
    assert end.value.code == 2
    assert len(lines) == 1 and says in lines[0] and lines[0].startswith(f"{method.__name__}.py: ")
    after = sorted(p for p in tmp_path.rglob("*") if "empty" not in p.parts)
    assert after == before, "torchvision may make its own empty folder, but nothing else appears"


def test_a_resumed_run_keeps_its_flags(start, capsys):
    folder = start(fedavg, CUTS[fedavg] + "--out run")
    before = (folder / "run/metrics.csv").read_bytes()
    with pytest.raises(SystemExit):
        run.launch(lambda: start(fedavg, "--resume run --lr 3"))
    assert "was run with --lr 0.05" in capsys.readouterr().err
    for text in (b"", b"not a checkpoint"):
        (folder / "run/checkpoint.pt").write_bytes(text)
        with pytest.raises(SystemExit):
            run.launch(lambda: start(fedavg, "--resume run"))
        assert "cannot be read as a checkpoint" in capsys.readouterr().err
    assert (folder / "run/metrics.csv").read_bytes() == before


def change(file, **entries):
    """Replaces entries of a checkpoint."""
    torch.save({**torch.load(file), **entries}, file)


def test_a_checkpoint_that_belongs_elsewhere_is_refused(start, capsys, tiny):
    folder = start(fedavg, CUTS[fedavg] + "--out run") / "run"
    good = torch.load(folder / "checkpoint.pt")
    for entries, says in [
        ({"flags": {**good["flags"], "seed": 1}}, "have different flags, so they belong to different runs"),
        ({"data": good["data"] + 1}, "the data set has changed since this run began"),
        ({"version": 3}, "was written by another version of this project"),
        ({"method": "uefl"}, "was written by uefl.py, not by fedavg.py"),
    ]:
        change(folder / "checkpoint.pt", **entries)
        with pytest.raises(SystemExit):
            run.launch(lambda: start(fedavg, "--resume run"))
        assert says in capsys.readouterr().err
        torch.save(good, folder / "checkpoint.pt")
    args = (folder / "args.json").read_text()
    (folder / "args.json").write_text(args.replace('"lr": 0.05', '"lr": 0.5'))
    with pytest.raises(SystemExit):
        run.launch(lambda: start(fedavg, "--resume run"))
    assert "have different flags, so they belong to different runs" in capsys.readouterr().err


def test_a_checkpoint_of_the_old_format_gets_its_one_line(start, capsys):
    folder = start(fedavg, CUTS[fedavg] + "--out run") / "run"
    torch.save({"version": 3, "method": "fedavg", "round": 4, "w": torch.zeros(9)}, folder / "checkpoint.pt")
    with pytest.raises(SystemExit):
        run.launch(lambda: start(fedavg, "--resume run"))
    assert "was written by another version of this project: start a new run" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["", "round\n", "round,seconds\n1,0.5\n4,2\n", "\ufeffround\n1\n"])
def test_metrics_that_were_changed_are_written_again_from_the_checkpoint(start, content):
    folder = start(fedavg, CUTS[fedavg] + "--out run") / "run"
    before = (folder / "metrics.csv").read_bytes()
    (folder / "metrics.csv").write_text(content)
    start(fedavg, "--resume run")
    assert (folder / "metrics.csv").read_bytes() == before


def test_runs_that_start_in_the_same_second_get_a_folder_each(start, monkeypatch):
    class Clock(run.datetime):
        @classmethod
        def now(cls):
            return super().now().replace(year=2030, month=1, day=1, hour=0, minute=0, second=0)

    monkeypatch.setattr(run, "datetime", Clock)
    for _ in range(3):
        folder = start(fedavg, CUTS[fedavg].replace("--rounds 4", "--rounds 1"))
    assert len(list((folder / "runs").iterdir())) == 3


def test_evaluations_come_every_so_many_rounds_and_after_the_last(start):
    found = read_rows(start(fedavg, CUTS[fedavg] + "--evaluate-every 3 --out run") / "run")
    assert [r["round"] for r in found if r["id_accuracy"]] == ["3", "4"]
    assert all(bool(r["id_accuracy"]) == bool(r["ood_accuracy"]) and r["train_loss"] for r in found)


def test_ctrl_c_says_how_to_go_on(start, capsys, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(run.Run, "log", interrupt)
    with pytest.raises(SystemExit) as end:
        run.launch(lambda: start(fedavg, CUTS[fedavg] + "--out run"))
    assert (
        end.value.code == 130 and "fedavg.py: stopped; --resume run continues from the start" in capsys.readouterr().err
    )


def test_from_the_shell(tmp_path):
    end = subprocess.run(
        [sys.executable, ROOT / "uefl.py", "--dataset", "nope"], cwd=tmp_path, capture_output=True, text=True
    )
    assert end.returncode == 2 and end.stdout == "" and "Traceback" not in end.stderr
    assert end.stderr.startswith("uefl.py: no data set 'nope'") and not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------ pieces that people copy


def copied(file, *names):
    """The named functions and classes of a file, executed with torch, numpy and scipy and nothing of this project."""
    body = [
        node
        for node in ast.parse((ROOT / file).read_text()).body
        if getattr(node, "name", None) in names
        or (
            isinstance(node, ast.Import)
            and all(a.name.split(".")[0] in ("torch", "numpy", "warnings") for a in node.names)
        )
        or (isinstance(node, ast.ImportFrom) and node.module.split(".")[0] in ("torch", "scipy", "dataclasses"))
    ]
    space = {"__name__": "elsewhere"}
    exec(compile(ast.Module(body, []), file, "exec"), space)
    return [space[name] for name in names]


def test_fedavgs_pieces_run_alone():
    select, weights = copied("fedavg.py", "select_power_of_choice", "aggregation_weights")
    assert select(torch.tensor([1.0, 4, 3, 2]), 2).tolist() == [1, 2]
    assert weights(torch.tensor([1.0, 3.0]), "size").tolist() == [0.25, 0.75]


def test_uefls_pieces_run_alone():
    names = ("ExtensibleCodebook", "kmeans_codewords", "predictive_entropy", "uncertain", "average_codewords")
    codebook_class, kmeans, entropy, uncertain, average = copied("uefl.py", *names)
    codebook = codebook_class(8, 4, segments=2)
    codebook.extend(kmeans(torch.randn(50, 2), 8, np.random.default_rng(0)))
    output, loss, index = codebook(torch.randn(5, 9, 4), torch.arange(16) % 2 == 0)
    loss.backward()
    assert output.shape == (5, 9, 4) and (index % 2 == 0).all()
    assert uncertain(entropy(torch.rand(3, 5, 10).softmax(2)), 0.1).shape == (5,)
    before = codebook.codewords.detach()
    assert average(before, before[None], torch.ones(1), torch.ones(1, 16, dtype=torch.bool)).shape == (16, 2)


def test_the_pieces_of_wu_et_al_run_alone():
    (weights,) = copied("entropy_weighting.py", "entropy_weights", "label_entropy")[:1]
    assert weights(torch.tensor([[2.0, 2.0], [5.0, 5.0]])).tolist() == [0.5, 0.5]
    (select,) = copied("minimax_select.py", "minimax_clients", "minimax_select", "largest_similarity")[:1]
    assert select(torch.tensor([[1.0, 0.1, 0], [1, 0, 0.1], [0, 1, 0]]), 1).tolist() == [2]
    (vertices,) = copied("convex_hull_select.py", "hull_vertices", "principal_components", "vertices_of")[:1]
    square = torch.tensor([[0.0, 0, 1], [2, 0, 1], [1, 1, 1], [0, 2, 1], [2, 2, 1]])
    assert vertices(square, 2).tolist() == [0, 1, 3, 4]
    table_class, _, trimmed = copied("common/server.py", "GradientTable", "sketch", "trimmed_mean")
    table = table_class.empty(3, 2)
    assert table.put(torch.tensor([0, 2]), torch.eye(2)).tolist() == [[1, 0], [0, 1]]
    assert table.known(torch.arange(3)).tolist() == [0, 2]
    assert trimmed(torch.tensor([[1.0], [2], [9]]), 0.1).item() == 2


def test_fediirs_pieces_run_alone():
    loss, gradient_of, average = copied("fediir.py", "fediir_loss", "risk_and_gradient", "moving_average")
    features, classifier = torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)
    x, y = torch.randn(5, 3), torch.randint(2, (5,))
    risk, g = gradient_of(classifier, features(x), y)
    assert loss(features, classifier, x, y, average(0 * g, g, 0.0), 1.0).item() == pytest.approx(risk.item())


@pytest.mark.parametrize("method", [fedavg, entropy_weighting, minimax_select, convex_hull_select, fediir, uefl])
def test_small_changes_only_what_its_cut_names(method):
    parse = functools.partial(flags.parse, method.__doc__, method.SETTINGS, method.own_flags)
    for name, cut in method.SETTINGS["small"].items():
        name = "." if name == "folder" else name
        full, small = vars(parse(["--dataset", name])), vars(parse(["--dataset", name, "--small"]))
        assert {flag for flag in full if full[flag] != small[flag]} <= {"small", *cut}
        assert small.items() >= cut.items()
        assert parse(["--dataset", name, "--small", "--rounds", "7"]).rounds == 7
    with pytest.raises(UserError, match="--small: glyphs has no small settings"):
        parse(["--small"])


@pytest.mark.parametrize(("seconds", "warns"), [(1, 0), (100, 1)])
def test_a_run_that_will_take_hours_says_so_once(start, monkeypatch, capsys, seconds, warns):
    """Each reading of the clock takes this many seconds: the run of 300 rounds then takes some minutes, or hours."""
    ticks = itertools.count(0, seconds)
    monkeypatch.setattr(run.time, "monotonic", lambda: next(ticks))
    start(fedavg, "--model cnn --width 0.1 --partition iid --clients 2 --participating 2 --sample 1 --local-epochs 1 "
          "--batch-size 60 --evaluate-every 300 --rounds 300 --out run")  # fmt: skip
    assert capsys.readouterr().err.count("with --small it takes minutes") == warns


@pytest.mark.parametrize("method", [entropy_weighting, minimax_select, convex_hull_select])
def test_on_a_folder_fedavg_has_the_defaults_of_the_method_it_is_compared_with(method):
    baseline, theirs = (
        vars(flags.parse(m.__doc__, m.SETTINGS, m.own_flags, ["--dataset", "."])) for m in (fedavg, method)
    )
    own = {"selection", "weighting", "server_lr"}
    assert {flag: value for flag, value in baseline.items() if flag not in own}.items() <= theirs.items()


def test_the_first_line_says_what_the_run_works_on(start, capsys):
    start(fedavg, "--model cnn --width 0.1 --partition iid --clients 6 --rounds 1 --local-epochs 1 --out run")
    assert capsys.readouterr().out.startswith(
        "tiny: 180 samples, 3 classes (a, b, c; the largest has 37 %), 2 domains (light, dark); 6 clients (--partition "
        "iid), 2 participate; ID on 8 samples, OOD on 60\n"
    )


def test_a_table_has_no_column_for_what_was_not_measured(start, capsys, monkeypatch):
    data = make_tiny()
    monkeypatch.setattr("common.data.load", lambda name, *args: replace(data, test=data.test[:0]))
    start(fedavg, "--model cnn --width 0.1 --clients 4 --rounds 1 --local-epochs 1 --out run")
    header = capsys.readouterr().out.splitlines()[3]
    assert header.split() == ["train", "loss", "id", "accuracy"]
