import ast
import hashlib
import json
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import pytest
import torch
from conftest import make_tiny, read_rows

import convex_hull_select
import entropy_weighting
import fedavg
import fediir
import minimax_select
import uefl
from common import UserError, flags, runs

ROOT = Path(__file__).parent.parent
WU = (
    "--model cnn --width 0.125 --local-epochs 1 --batch-size 16 --partition dirichlet --clients 6 --participating 4 "
    "--sample 2 --rounds 4 "
)
CUTS = {
    **dict.fromkeys([fedavg, entropy_weighting, minimax_select], WU),
    convex_hull_select: WU + "--hull-dim 1 ",
    fediir: "--dataset glyphs --width 0.125 --clients 4 --sample 2 --test-domain dark --rounds 4 --evaluate-every 1 ",
    uefl: "--model resblocks --width 0.01 --partition domain --local-epochs 1 --batch-size 20 --lr 0.003 --gamma 0 "
    "--passes 3 --codebook-size 4 --segments 1 --rounds 2 --later-rounds 1 --iterations 3 --rotate 0 90 ",
}
BASELINES = {  # sibling -> the same run started by hand
    fedavg: {"alpha-1": "--dirichlet 1", "alpha-100": "--dirichlet 100"},
    entropy_weighting: {"equal": "--weighting equal"},
    minimax_select: {"random": "--selection random"},
    convex_hull_select: {"random": "--selection random"},
    fediir: {"fedavg": "--gamma 0"},
    uefl: {"static": "--iterations 1 --rounds 4", "fedavg": "--codebook-size 0 --rounds 4"},
}
PICTURES = {
    entropy_weighting: {"weights.png"},
    minimax_select: {"similarity.png"},
    convex_hull_select: {"hull.png"},
}


def parse(method, *argv):
    return flags.parse(method.__name__, method.__doc__, method.SETTINGS, method.own_flags, [*argv], ["baseline"])


def without_times(folder):
    rows = read_rows(folder)
    return [{c: v for c, v in row.items() if c != "seconds"} for row in rows]


def outcome(folder):
    return without_times(folder), (folder / "model.pt").read_bytes()


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    return tmp_path_factory.mktemp("whole")


@pytest.fixture
def whole(start, kept, tmp_path):
    """whole(method) is the folder "whole" of a run without baselines, a copy if another test has made it before."""

    def copy(method):
        if not (kept / method.__name__).exists():
            shutil.copytree(start(method, CUTS[method] + "--no-compare --out whole") / "whole", kept / method.__name__)
        return Path(shutil.copytree(kept / method.__name__, tmp_path / "whole", dirs_exist_ok=True))

    return copy


@pytest.mark.parametrize("method", CUTS)
def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(start, whole, method):
    for seed in (0, 1):
        folder = start(method, CUTS[method] + f"--no-compare --seed {seed} --out {seed}")
    assert outcome(folder / "0") == outcome(whole(method))
    assert without_times(folder / "1") != without_times(folder / "0")


STOPS = [(method, stop) for method in CUTS for stop in (1, 3)] + [(uefl, 2), (uefl, 4)]


@pytest.mark.parametrize(("method", "stop"), STOPS)
def test_a_run_that_was_stopped_goes_on_to_the_same_end(start, start_and_stop, whole, method, stop):
    expected = outcome(whole(method))
    start_and_stop(method, CUTS[method] + "--no-compare --out cut", stop, "cut")
    folder = start(method, "--resume cut")
    assert outcome(folder / "cut") == expected


@pytest.mark.parametrize("method", CUTS)
def test_baselines_are_ordinary_runs_that_anybody_can_start_by_hand(start, method):
    """A default run has its flags, metrics, checkpoint, model and pictures, and so has each baseline beside it."""
    folder = start(method, CUTS[method] + "--out run")
    files = {"args.json", "metrics.csv", "checkpoint.pt", "model.pt", "partition.png", *PICTURES.get(method, [])}
    compared = {"curves.png", "extensions.png"} if method is uefl else {"curves.png"}
    assert {file.name for file in folder.iterdir()} == {"run", *(f"run-{name}" for name in BASELINES[method])}
    assert {file.name for file in (folder / "run").iterdir()} == files | compared
    for name, by_hand in BASELINES[method].items():
        assert {file.name for file in (folder / f"run-{name}").iterdir()} == files
        start(method, f"{CUTS[method]} {by_hand} --no-compare --out hand-{name}")
        assert outcome(folder / f"run-{name}") == outcome(folder / f"hand-{name}") != outcome(folder / "run")
        start(method, f"--resume run-{name}")
        assert outcome(folder / f"run-{name}") == outcome(folder / f"hand-{name}")


@pytest.mark.parametrize("typed", ["cut", "cut/", "./cut"])
def test_a_run_that_was_stopped_in_its_baseline_goes_on_there(start, start_and_stop, capsys, typed):
    folder = start(entropy_weighting, CUTS[entropy_weighting] + "--out whole")
    start_and_stop(entropy_weighting, CUTS[entropy_weighting] + "--out cut", 3, "cut-equal")
    assert torch.load(folder / "cut-equal/checkpoint.pt")["state"]["round"] == 2
    printed = [line.replace("whole", "cut") for line in capsys.readouterr().out.splitlines()]
    start(entropy_weighting, f"--resume {typed}")
    for name in ("", "-equal"):
        assert outcome(folder / f"cut{name}") == outcome(folder / f"whole{name}")
    assert capsys.readouterr().out.splitlines() == printed[:-1], "the run that was stopped printed its first line"
    assert {file.name for file in folder.iterdir()} == {"whole", "whole-equal", "cut", "cut-equal"}


def test_a_baseline_never_overwrites_another_run(start):
    folder = start(entropy_weighting, CUTS[entropy_weighting] + "--no-compare --out run-equal")
    before = outcome(folder / "run-equal")
    with pytest.raises(UserError, match="run-equal is taken"):
        start(entropy_weighting, CUTS[entropy_weighting] + "--out run")
    assert outcome(folder / "run-equal") == before and not (folder / "run").exists()


def test_a_resumed_runs_clock_goes_on(start, whole):
    folder = whole(fedavg)
    before = read_rows(folder)
    start(fedavg, "--resume whole")
    assert read_rows(folder) == before, "there was nothing left to do"


@pytest.mark.parametrize("lr", ["1e8", "1e9"])
def test_divergence_is_named(start, capsys, lr):
    """With 1e8 all weights stay finite, but the model's logits are NaN, and the largest of NaNs would be class 0."""
    with pytest.raises(SystemExit) as end:
        runs.launch("fedavg.py", lambda: start(fedavg, CUTS[fedavg] + f"--local-epochs 3 --out run --lr {lr}"))
    said = capsys.readouterr().err.splitlines()[-1]
    assert end.value.code == 2 and said.startswith("fedavg.py: training diverged") and said.endswith("lower --lr")


@pytest.mark.parametrize("partition", ["dirichlet", "iid", "specialists"])
def test_label_skew_does_not_inherit_the_rotations_of_silos(partition):
    assert parse(uefl, "--partition", partition).rotate is None
    assert parse(uefl, "--partition", partition, "--rotate", "15").rotate == [15]
    assert parse(uefl).rotate == parse(uefl, "--partition", "domain").rotate == [0, -50, 120]


def test_without_out_a_new_folder_is_made_each_time(start, monkeypatch):
    """Also for runs that start in the same second."""

    class Clock(flags.datetime):
        @classmethod
        def now(cls):
            return super().now().replace(year=2030, month=1, day=1, hour=0, minute=0, second=0)

    monkeypatch.setattr(flags, "datetime", Clock)
    for _ in range(3):
        folder = start(fedavg, CUTS[fedavg].replace("--rounds 4", "--rounds 1 --no-compare"))
    assert len(list((folder / "runs").iterdir())) == 3


def test_flags_are_kept(start):
    folder = start(fedavg, CUTS[fedavg] + "--no-compare --out run --lr 0.07")
    kept = json.loads((folder / "run/args.json").read_text())
    assert kept["flags"]["lr"] == 0.07 and kept["flags"]["partition"] == "dirichlet" and kept["method"] == "fedavg"


MISTAKES = [
    (fedavg, "--dataset cifar11", "--dataset cifar11: choose from"),
    (fedavg, "--dataset missing/folder", "--dataset missing/folder: choose from"),
    (fedavg, "--dataset mnist --data-dir empty", "--data-dir"),
    (fedavg, "--dataset full", "holds no images"),
    (fedavg, "--dataset mixed", "give train/ and test/, and no other folder"),
    (fedavg, "--dataset broken --partition domain", "1.png cannot be read as an image"),
    (fedavg, "--dataset ", "--dataset: is empty"),
    (fedavg, "--rounds 0", "--rounds: 0 is out of range"),
    (fedavg, "--rounds many", "--rounds: invalid whole number value: 'many'"),
    (fedavg, "--rounds 1e3", "--rounds: invalid whole number value: '1e3'"),
    (fedavg, "--rounds", "--rounds: expected one argument"),
    (fedavg, "--roudns 3", "--roudns"),
    (fedavg, "--round 3", "--round"),
    (fedavg, "--lr nan", "--lr: nan is out of range"),
    (fedavg, "--lr inf", "--lr: inf is out of range"),
    (uefl, "--lr -1", "--lr: -1 is out of range"),
    (fedavg, "--momentum 1", "between 0 and 0.999"),
    (fedavg, "--seed -1", "--seed: -1 is out of range"),
    (fedavg, "--seed 99999999999999999999 --rotate 0 90", "--seed: 99999999999999999999 is out of range"),
    (fedavg, "--rotate left", "--rotate: invalid number value: 'left'"),
    (fedavg, "--rotate 0 nan", "--rotate: nan is out of range"),
    (fedavg, "--rotate 15 15", "name each angle once"),
    (uefl, "--partition domain --rotate 0 360", "name each angle once"),
    (fedavg, "--clients 40 --participating 50", "--participating 50 is more than the 40 clients"),
    (fedavg, "--participating 40 --sample 50", "--sample 50: only 40 clients participate"),
    (fedavg, "--participating 0", "--participating: 0 is out of range"),
    (fedavg, "--clients 5000", "lower --clients"),
    (fedavg, "--partition iid --clients 12000", "lower --clients"),
    (fedavg, "--partition domain --clients 15000 --participating 40", "lower --clients"),
    (fedavg, "--partition domain --clients 3", "--clients 3 is fewer than the 5 domains"),
    (minimax_select, "--clients 3", "more than 3 clients"),
    (fediir, "--dataset glyphs --clients 11000 --participating 12 --sample 4", "lower --clients"),
    (fedavg, "--test-domain gothic", "no domain 'gothic' in glyphs; its domains are sans, serif"),
    (fedavg, "--test-domain stix --partition dirichlet --rotate 0 90", "'stix' in glyphs; its domains are 0, 90"),
    (fediir, "--dataset broken", "--test-domain is missing"),
    (fedavg, "--partition silos", "needs --silos"),
    (uefl, "--silos 3 3", "--silos [3, 3]: give a number for each of the 3 domains"),
    (uefl, "--silos 0 0 0", "not all of them 0"),
    (uefl, "--silo-size 50000", "do not fit"),
    (fedavg, "--model vgg99", "--model: invalid choice: 'vgg99'"),
    (fedavg, "--model vgg16", "--model vgg16 does not take images of shape"),
    (uefl, "--model convnet", "convnet has no dropout"),
    (uefl, "--segments 7", "--segments 7 does not divide the 16 channels"),
    (fedavg, "--pretrained", "no ImageNet weights for cnn"),
    (fedavg, "--model resnet18 --pretrained ", "--pretrained: is empty"),
    (fedavg, "--pretrained weights.pt --model resnet18", "the weights of resnet18 cannot be loaded from weights.pt"),
    (fedavg, "--device cuda:77", "--device cuda:77 cannot be used"),
    (fedavg, "--device gpu", "--device gpu cannot be used"),
    (fedavg, "--device meta", "only cpu and cuda are supported"),
    (fedavg, "--precision float16", "--precision"),
    (fedavg, "--selection best", "--selection"),
    (convex_hull_select, "--sample 41", "--sample 41: only 40 clients participate"),
    (convex_hull_select, "--hull-dim 9", "--hull-dim: 9 is out of range: between 1 and 8"),
    (fediir, "--gamma -0.1", "--gamma: -0.1 is out of range"),
    (uefl, "--dropout 1.5", "--dropout: 1.5 is out of range"),
    (uefl, "--iterations 0", "--iterations: 0 is out of range"),
    (fedavg, "--out ", "--out: is empty"),
    (fedavg, "--out full", "full is taken: choose another --out"),
    (fedavg, "--out full/", "full is taken: choose another --out"),
    (fedavg, "--out full/notes.txt", "notes.txt is taken"),
    (fedavg, "--resume ", "--resume: is empty"),
    (fedavg, "--resume nowhere", "no run to resume"),
    (fedavg, "--resume torn", "no run to resume"),
    (uefl, "--resume full", "no run to resume"),
    (uefl, "--resume other", "a run of fedavg.py, not of uefl.py"),
    (fedavg, "--partition iid --dirichlet 0.5", "--dirichlet has no effect here"),
    (fedavg, "--silos 3 1 1", "--silos has no effect here: it needs --partition silos"),
    (uefl, "--clients 9", "--clients has no effect here: --silos says how many there are"),
    (fedavg, "--optimizer adam --momentum 0.9", "--momentum has no effect here"),
    (fedavg, "--resume other --out new", "--out has no effect here: --resume continues in its own folder"),
]


def test_each_rule_about_flags_without_effect_has_its_mistake():
    refused = {says.split()[0] for _, _, says in MISTAKES if "has no effect here" in says}
    assert refused == {f"--{flag}" for flag, _, _ in flags.USELESS}


@pytest.mark.parametrize(("method", "flags", "says"), MISTAKES, ids=[m[1] for m in MISTAKES])
def test_a_mistake_is_one_clear_line_and_writes_nothing(method, flags, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/notes.txt").write_text("mine")
    for folder in ("mixed/train/cat", "mixed/sketch/cat", "broken/photo/cat", "broken/photo/dog", "torn"):
        (tmp_path / folder).mkdir(parents=True)
        if folder != "torn":
            (tmp_path / folder / "1.png").write_bytes(b"no image")
    (tmp_path / "torn/args.json").write_text('{"method": "fed')
    (tmp_path / "other").mkdir()
    (tmp_path / "other/args.json").write_text('{"method": "fedavg", "name": "fedavg", "flags": {}}')
    before = sorted(p for p in tmp_path.rglob("*"))
    with pytest.raises(SystemExit) as end:
        runs.launch(f"{method.__name__}.py", lambda: method.main(flags.split(" ")))
    lines = capsys.readouterr().err.strip().splitlines()
    assert end.value.code == 2
    assert len(lines) == 1 and says in lines[0] and lines[0].startswith(f"{method.__name__}.py: ")
    after = sorted(p for p in tmp_path.rglob("*") if "empty" not in p.parts)
    assert after == before, "torchvision may make its own empty folder, but nothing else appears"


def test_the_words_of_flags_are_read_back_as_these_flags():
    for words in (
        "--dataset glyphs --rotate -50 0.1 120 --test-domain -50 --lr 1e-12",
        "--partition silos --silos 3 0 1 --rotate 0 1 2 --no-compare --small --dataset mnist",
        "--pretrained --model resnet18 --dataset -x",
    ):
        args = vars(parse(fedavg, *words.replace("--dataset -x", "--dataset=-x").split()))
        again = flags.typed({flag: value for flag, value in args.items() if flag not in ("method", "name")})
        assert vars(parse(fedavg, *again)) == args


def test_a_resumed_run_keeps_its_flags(start, whole, capsys):
    before = outcome(whole(fedavg))
    with pytest.raises(SystemExit):
        runs.launch("fedavg.py", lambda: start(fedavg, "--resume whole --lr 3"))
    assert "was run with --lr 0.1, not 3.0" in capsys.readouterr().err
    assert outcome(Path("whole")) == before


@pytest.mark.parametrize("damage", ["empty", "garbage", "cut", "a bit", "of another format"])
def test_a_damaged_checkpoint_is_refused(start, whole, capsys, damage):
    folder = whole(fedavg)
    before, content = (folder / "metrics.csv").read_bytes(), (folder / "checkpoint.pt").read_bytes()
    middle = len(content) // 2
    damaged = {
        "empty": b"",
        "garbage": b"not a checkpoint",
        "cut": content[:-1],
        "a bit": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
        "of another format": content[:-32],
    }[damage]
    (folder / "checkpoint.pt").write_bytes(damaged)
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        runs.launch("fedavg.py", lambda: start(fedavg, "--resume whole"))
    said = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and len(said) == 1 and "checkpoint.pt is damaged or was changed" in said[0]
    assert (folder / "metrics.csv").read_bytes() == before and (folder / "checkpoint.pt").read_bytes() == damaged


def change(file, **entries):
    """Replaces entries of a checkpoint, and its checksum."""
    content = BytesIO()
    torch.save({**torch.load(file), **entries}, content)
    file.write_bytes(content.getvalue() + hashlib.sha256(content.getvalue()).digest())


def test_a_checkpoint_that_belongs_elsewhere_is_refused(start, whole, capsys):
    folder = whole(fedavg)
    good = torch.load(folder / "checkpoint.pt")
    for entries, says in [
        ({"flags": {**good["flags"], "seed": 1}}, "have different flags, so they belong to different runs"),
        ({"data": good["data"] + 1}, "belongs to other data"),
        ({"version": 3}, "was written by another version of this project"),
    ]:
        change(folder / "checkpoint.pt", **entries)
        with pytest.raises(SystemExit):
            runs.launch("fedavg.py", lambda: start(fedavg, "--resume whole"))
        assert says in capsys.readouterr().err
        change(folder / "checkpoint.pt", **good)
    start(fedavg, "--resume whole")


@pytest.mark.parametrize(
    ("flag", "value", "says"),
    [
        ("lr", 0.5, "have different flags, so they belong to different runs"),
        ("width", 0, "--width: 0 is out of range"),
        ("seed", -1, "--seed: -1 is out of range"),
        ("selection", "Random", "--selection: invalid choice: 'Random'"),
        ("lr", float("nan"), "--lr: nan is out of range"),
        ("rounds", 4.5, "--rounds: invalid whole number value: '4.5'"),
        ("rotate", [], "--rotate: expected at least one argument"),
        ("rotate", {"0": 1}, "--rotate"),
        ("unknown", 1, "--unknown"),
    ],
)
def test_flags_that_were_edited_are_read_as_if_they_were_typed(start, whole, capsys, flag, value, says):
    folder = whole(fedavg)
    before, args = outcome(folder), json.loads((folder / "args.json").read_text())
    args["flags"][flag] = value
    (folder / "args.json").write_text(json.dumps(args))
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        runs.launch("fedavg.py", lambda: start(fedavg, "--resume whole"))
    said = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and len(said) == 1 and says in said[0]
    assert outcome(folder) == before


@pytest.mark.parametrize("content", [None, "", "round\n", "round,seconds\n1,0.5\n4,2\n", "\ufeffround\n1\n"])
def test_metrics_that_were_changed_are_whole_again_at_the_end(start, whole, monkeypatch, content):
    """While the run writes them, or before it is resumed. None: deleted."""
    expected = outcome(whole(fedavg))
    record = runs.Run.record

    def damage(file):
        file.unlink() if content is None else file.write_text(content)

    def record_and_damage(self, *args, **values):
        record(self, *args, **values)
        if self.t < 4:
            damage(self.folder / "metrics.csv")

    with monkeypatch.context() as patch:
        patch.setattr(runs.Run, "record", record_and_damage)
        folder = start(fedavg, CUTS[fedavg] + "--no-compare --out run") / "run"
    assert outcome(folder) == expected
    before = (folder / "metrics.csv").read_bytes()
    damage(folder / "metrics.csv")
    start(fedavg, "--resume run")
    assert (folder / "metrics.csv").read_bytes() == before


def test_evaluations_come_every_so_many_rounds_and_after_the_last(start):
    found = read_rows(start(fedavg, CUTS[fedavg] + "--evaluate-every 3 --no-compare --out run") / "run")
    assert [r["round"] for r in found if r["id_accuracy"]] == ["3", "4"]
    assert all(bool(r["id_accuracy"]) == bool(r["ood_accuracy"]) and r["train_loss"] for r in found)


@pytest.mark.parametrize(
    ("where", "says"), [("Run.record", "stopped; continue with --resume run"), ("check_free", "stopped")]
)
def test_ctrl_c_is_one_line_that_says_how_to_go_on(start, capsys, monkeypatch, where, says):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore Ctrl-C
    monkeypatch.setattr(f"common.runs.{where}", lambda *args, **values: signal.raise_signal(signal.SIGINT))
    with pytest.raises(SystemExit) as end:
        runs.launch("fedavg.py", lambda: start(fedavg, CUTS[fedavg] + "--out run"))
    assert end.value.code == 130 and capsys.readouterr().err.splitlines()[-1] == f"fedavg.py: {says}"


def test_from_the_shell(tmp_path):
    end = subprocess.run(
        [sys.executable, ROOT / "uefl.py", "--dataset", "nope"], cwd=tmp_path, capture_output=True, text=True
    )
    assert end.returncode == 2 and end.stdout == "" and len(end.stderr.splitlines()) == 1
    assert end.stderr.startswith("uefl.py: --dataset nope: choose from") and not list(tmp_path.iterdir())


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
    (select,) = copied("fedavg.py", "select_power_of_choice")
    (weights,) = copied("common/server.py", "aggregation_weights")
    assert select(torch.tensor([1.0, 4, 3, 2]), 2).tolist() == [1, 2]
    assert weights(torch.tensor([1.0, 3.0]), "size").tolist() == [0.25, 0.75]


def test_uefls_pieces_run_alone():
    names = ("ExtensibleCodebook", "predictive_entropy", "uncertain", "average_codewords")
    codebook_class, entropy, uncertain, average = copied("uefl.py", *names)
    codebook = codebook_class(8, 4, segments=2)
    codebook.extend(torch.randn(8, 2))
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
    (table_class,) = copied("common/server.py", "GradientTable")
    table = table_class.empty(3, 2)
    table.put(torch.tensor([0, 2]), torch.eye(2))
    assert table.known(torch.arange(3)).tolist() == [0, 2]
    assert table.cosines(torch.tensor([0, 2])).tolist() == [[1, 0], [0, 1]]


def test_fediirs_pieces_run_alone():
    loss, gradient_of, average = copied("fediir.py", "fediir_loss", "risk_and_gradient", "moving_average")
    features, classifier = torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)
    x, y = torch.randn(5, 3), torch.randint(2, (5,))
    risk, g = gradient_of(classifier, features(x), y)
    assert loss(features, classifier, x, y, average(0 * g, g, 0.0), 1.0).item() == pytest.approx(risk.item())


@pytest.mark.parametrize("method", CUTS)
def test_every_default_is_one_that_a_user_could_type(method):
    """Typed by hand, the settings of a data set give the same flags: a typo in SETTINGS or SMALL is refused."""
    for small, table in (([], method.SETTINGS), (["--small"], flags.SMALL[method.__name__])):
        for name, settings in table.items():
            dataset = ["--dataset", "." if name == "folder" else name, *small, "--out", "run"]
            assert vars(parse(method, *dataset, *flags.typed(settings))).items() >= settings.items()
            given, typed = (vars(parse(method, *words)) for words in (dataset, [*dataset, *flags.typed(settings)]))
            assert given == typed


@pytest.mark.parametrize(
    "typo", [{"widht": 0.25}, {"model": "cnnn"}, {"rounds": 2.5}, {"lr": 0}, {"weighting": "Size"}]
)
def test_a_typo_in_settings_is_found(monkeypatch, typo):
    monkeypatch.setitem(fedavg.SETTINGS, "mnist", {**fedavg.SETTINGS["mnist"], **typo})
    with pytest.raises(UserError):
        test_every_default_is_one_that_a_user_could_type(fedavg)


@pytest.mark.parametrize("method", CUTS)
def test_small_changes_only_what_its_cut_names(method):
    for name, cut in flags.SMALL[method.__name__].items():
        name = "." if name == "folder" else name
        full, small = (vars(parse(method, "--dataset", name, "--out", "run", *more)) for more in ([], ["--small"]))
        assert {flag for flag in full if full[flag] != small[flag]} <= {"small", *cut}
        assert small.items() >= cut.items()
        assert parse(method, "--dataset", name, "--small", "--rounds", "7").rounds == 7
    with pytest.raises(UserError, match="has no small settings"):
        parse(method, "--small")


@pytest.mark.parametrize("method", [entropy_weighting, minimax_select, convex_hull_select])
def test_on_a_folder_fedavg_has_the_defaults_of_the_method_it_is_compared_with(method):
    baseline, theirs = (vars(parse(m, "--dataset", ".", "--out", "run")) for m in (fedavg, method))
    own = {"selection", "weighting", "server_lr", "method", "name"}
    assert {flag: value for flag, value in baseline.items() if flag not in own}.items() <= theirs.items()


def test_the_first_line_says_what_the_run_works_on(start, capsys):
    start(fedavg, "--width 0.1 --partition iid --clients 6 --rounds 1 --local-epochs 1 --no-compare --out run")
    assert capsys.readouterr().out.startswith(
        "tiny: 180 samples, 3 classes (a, b, c), 2 domains (light, dark); 6 clients (--partition iid), 2 participate; "
        "ID on 8 samples, OOD on 60\n"
    )


def test_a_table_has_no_column_for_what_was_not_measured(start, capsys, monkeypatch):
    data = make_tiny()
    monkeypatch.setattr("common.data.load", lambda name, *args: replace(data, test=data.test[:0]))
    start(fedavg, "--width 0.1 --partition iid --clients 4 --rounds 1 --local-epochs 1 --no-compare --out run")
    header = capsys.readouterr().out.splitlines()[3]
    assert header.split() == ["ID", "ID,", "selected"]
