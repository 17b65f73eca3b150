import ast
import functools
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import convex_hull_select
import entropy_weighting
import fedavg
import fediir
import minimax_select
import uefl
from common import flags, run

ROOT = Path(__file__).parent.parent
CUTS = {
    fedavg: "--model cnn --width 0.125 --local-epochs 1 --clients 6 --participating 4 --sample 2 --rounds 4 ",
    uefl: "--model resblocks --width 0.01 --partition domain --local-epochs 1 --batch-size 10 --lr 0.003 --gamma 0 "
    "--codebook-size 4 --segments 1 --rounds 2 --later-rounds 1 --iterations 3 --rotate 0 90 ",
}


def without_times(folder):
    rows = run.read_metrics(folder / "metrics.csv")
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
    before = run.read_metrics(folder / "run/metrics.csv")
    start(fedavg, "--resume run")
    assert run.read_metrics(folder / "run/metrics.csv") == before, "there was nothing left to do"


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
    (fedavg, "--dataset missing/folder", "missing/folder: there is no such folder"),
    (fedavg, "--dataset mnist --data-dir empty", "--data-dir"),
    (fedavg, "--rounds 0", "--rounds: 0 is out of range"),
    (fedavg, "--rounds many", "'many' is not a whole number"),
    (fedavg, "--lr nan", "--lr: nan is out of range"),
    (fedavg, "--roudns 3", "--roudns"),
    (fedavg, "--clients 40 --participating 50", "50 of 40 clients"),
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
    (fedavg, "--cuda-graphs --device cpu", "--cuda-graphs needs a GPU"),
    (fedavg, "--momentum 1", "between 0 and 0.999"),
    (fedavg, "--seed -1", "--seed: -1 is out of range"),
    (fedavg, "--participating 0", "--participating: 0 is out of range"),
    (fedavg, "--alpha 0", "--alpha: 0 is out of range: above 0"),
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
    (fedavg, "--resume other --out new", "--out does not apply: --resume goes on in its own folder"),
    (fedavg, "--silos 3 1 1", "--silos does not apply: it needs --partition silos"),
    (fedavg, "--silo-size 9", "--silo-size does not apply"),
    (fedavg, "--optimizer adam --momentum 0.9", "--momentum does not apply"),
    (fedavg, "--image-size 64", "--image-size does not apply: glyphs comes in its own size"),
    (fedavg, "--model resnet18 --width 0.5", "--width does not apply"),
    (fedavg, "--partition iid --alpha 0.5", "--alpha does not apply"),
    (fedavg, "--partition domain --clients 3", "--clients 3 is fewer than the 5 domains"),
    (fedavg, "--partition speaker --clients 100", "only 5 domains have 10 samples or more; lower --clients"),
    (fedavg, "--pretrained weights.pt --model resnet18", "no weights of resnet18 to be had from weights.pt"),
    (fedavg, "--dataset full/notes.txt", "no speaker has enough text"),
    (fedavg, "--dataset full", "holds no images"),
    (fedavg, "--dataset mixed", "must hold either train/ and test/ or one folder a domain"),
    (fedavg, "--dataset broken --partition domain", "1.png cannot be read as an image"),
    (fedavg, "--dataset plays.json", "cannot be read as plays or as LEAF's JSON"),
    (fedavg, "--resume torn", "no run to resume"),
    (entropy_weighting, "--expel 0.9", "--sample 10: only 4 clients are left"),
    (entropy_weighting, "--tv -1", "--tv: -1 is out of range"),
    (entropy_weighting, "--label-noise 0.5", "--label-noise: expected 2 arguments"),
    (minimax_select, "--churn 1", "--churn: 1 is out of range"),
    (minimax_select, "--sketch 100 --event-threshold 0.1", "choose one of them"),
    (convex_hull_select, "--draw 41", "--draw 41: only 40 clients participate"),
    (convex_hull_select, "--hull-dim 9", "--hull-dim: 9 is out of range: between 1 and 8"),
    (fediir, "--test-domain arial", "no domain 'arial' in glyphs: give one of"),
    (fediir, "--gamma -0.1", "--gamma: -0.1 is out of range"),
    (fediir, "--dataset broken", "--test-domain is missing"),
    (uefl, "--iterations 0", "--iterations: 0 is out of range"),
    (uefl, "--clients 9", "--clients does not apply: --silos says how many there are"),
    (uefl, "--partition domain --rotate 0 0", "names an angle twice"),
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
    (folder / "run/checkpoint.before.pt").unlink(missing_ok=True)
    for text in (b"", b"not a checkpoint"):
        (folder / "run/checkpoint.pt").write_bytes(text)
        with pytest.raises(SystemExit):
            run.launch(lambda: start(fedavg, "--resume run"))
        assert "not a checkpoint that can be read" in capsys.readouterr().err
    assert (folder / "run/metrics.csv").read_bytes() == before


def test_a_damaged_checkpoint_gives_way_to_the_one_before(start, capsys, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(run.time, "monotonic", iter(range(0, 10**6, 20)).__next__)  # a checkpoint after every round
        folder = start(fedavg, CUTS[fedavg] + "--out run") / "run"
    whole = (folder / "model.pt").read_bytes(), without_times(folder)
    (folder / "checkpoint.pt").write_bytes((folder / "checkpoint.pt").read_bytes()[:1000])
    with pytest.raises(SystemExit):
        run.launch(lambda: start(fedavg, "--resume run"))
    assert "checkpoint.pt is not a checkpoint that can be read" in (said := capsys.readouterr().err)
    assert "remove it, to go on from checkpoint.before.pt" in said
    (folder / "checkpoint.pt").unlink()
    (folder / "model.pt").unlink()
    start(fedavg, "--resume run")
    assert ((folder / "model.pt").read_bytes(), without_times(folder)) == whole


def test_a_line_that_was_cut_short_is_not_read(tmp_path):
    (tmp_path / "metrics.csv").write_text("round,train_loss\n1,0.5\n2,0.2")
    assert run.read_metrics(tmp_path / "metrics.csv") == [{"round": "1", "train_loss": "0.5"}]


def test_what_a_flag_does_not_do_is_said(start, capsys):
    start(fedavg, CUTS[fedavg] + "--selection full --out run")
    assert "fedavg.py: --sample does nothing here: --selection full takes everybody" in capsys.readouterr().err


def test_ctrl_c_says_how_to_go_on(start, capsys, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(run.Run, "log", interrupt)
    with pytest.raises(SystemExit) as end:
        run.launch(lambda: start(fedavg, CUTS[fedavg] + "--out run"))
    assert end.value.code == 130 and "fedavg.py: stopped; --resume run goes on" in capsys.readouterr().err


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
        or (isinstance(node, ast.Import) and all(a.name.split(".")[0] in ("torch", "numpy") for a in node.names))
        or (isinstance(node, ast.ImportFrom) and node.module.split(".")[0] in ("torch", "scipy"))
    ]
    space = {"__name__": "elsewhere"}
    exec(compile(ast.Module(body, []), file, "exec"), space)
    return [space[name] for name in names]


def test_fedavgs_pieces_run_alone():
    select, weights = copied("fedavg.py", "select_power_of_choice", "aggregation_weights")
    assert select(torch.arange(4), torch.tensor([1.0, 4, 3, 2]), 2).tolist() == [1, 2]
    assert weights(torch.tensor([1.0, 3.0]), "size").tolist() == [0.25, 0.75]


def test_uefls_pieces_run_alone():
    names = ("ExtensibleCodebook", "predictive_entropy", "uncertain", "perplexity", "threshold")
    codebook_class, entropy, uncertain, perplexity, _ = copied("uefl.py", *names)
    codebook = codebook_class(8, 4, segments=2)
    codebook.extend(8, torch.randn(5, 9, 4), np.random.default_rng(0))
    output, loss, index = codebook(torch.randn(5, 9, 4))
    loss.backward()
    assert output.shape == (5, 9, 4) and 1 <= perplexity(index, 16) <= 16
    assert uncertain(entropy(torch.rand(3, 5, 10).softmax(2)), 0.1).shape == (5,)


def test_the_pieces_of_wu_et_al_run_alone():
    (weights,) = copied("entropy_weighting.py", "entropy_weights", "label_entropy")[:1]
    assert weights(torch.tensor([[2.0, 2.0], [5.0, 5.0]])).tolist() == [0.5, 0.5]
    (select,) = copied("minimax_select.py", "minimax_select", "nearest")[:1]
    assert select(torch.tensor([[1.0, 0.9, 0.1], [0.9, 1.0, 0.2], [0.1, 0.2, 1.0]]), 1).tolist() == [2]
    (vertices,) = copied("convex_hull_select.py", "hull_vertices", "principal_components", "vertices_of")[:1]
    square = torch.tensor([[0.0, 0, 0], [2, 0, 0], [1, 1, 0], [0, 2, 0], [2, 2, 0]])
    assert vertices(square, 2, scale=False).tolist() == [0, 1, 3, 4]


def test_fediirs_pieces_run_alone():
    loss, gradient, _ = copied("fediir.py", "fediir_loss", "classifier_gradient", "risk_and_gradient")
    model = torch.nn.Module()
    model.features, model.classifier = torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)
    x, y = torch.randn(5, 3), torch.randint(2, (5,))
    g, risk = gradient(model, x, y)
    assert loss(model, x, y, g, 1.0).item() == pytest.approx(risk.item())
