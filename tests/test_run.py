import contextlib
import csv
import errno
import importlib
import itertools
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import (
    METHODS,
    ROOT,
    in_each_round,
    kept,
    outcome,
    parsed,
    read_rows,
    selections,
)
from matplotlib.figure import Figure
from PIL import features

import convex_hull_select
import entropy_weighting
import fedavg
import fediir
import minimax_select
import uefl
from common import UserError, devices, ranks
from common.runner import compare, flags, plots, runs
from common.splits import make_clients
from common.train import ADVICE, Trainer
from results import report

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
BASELINES = """
fedavg alpha-1.0 --dirichlet 1
fedavg alpha-100.0 --dirichlet 100
entropy_weighting equal --weighting equal
minimax_select random --selection random
convex_hull_select random --selection random
fediir fedavg --gamma 0
uefl static --iterations 1 --rounds 4
uefl fedavg --codebook-size 0 --rounds 4
"""  # a method, a sibling of its run, and the same run started by hand


@pytest.fixture
def new_run(tiny, tmp_path, monkeypatch):
    """new_run("--flag value ...") is a Run in the folder `run`, of a model of 2 weights."""
    monkeypatch.chdir(tmp_path)
    clients, model = make_clients(tiny, 0, "iid", clients=3), torch.nn.Linear(1, 1)

    def make(flags=""):
        args = parsed(fedavg, f"--partition iid --out run --rounds 100 {flags}")
        args.name = "FedAvg"
        return runs.Run(args, tiny, clients, model, torch.device("cpu"))

    return make


@pytest.fixture
def whole(start):
    """whole(method) is the folder of a run without baselines."""

    def run(method):
        return start(method, CUTS[method] + "--no-compare --out whole")

    return run


@pytest.fixture
def refused(start, launched):
    """refused(method, "--flag value ...", "text") sees that this ends in one line with the text."""

    def run(method, words, says):
        code, lines = launched(method, words, start)
        assert code == 2 and len(lines) == 1 and says in lines[0], lines

    return run


# ----------------------------------------------------------------------- the same bytes, and resume


@pytest.mark.parametrize("method", CUTS)
def test_a_run_that_was_stopped_goes_on_to_the_same_end(start, start_and_stop, whole, method):
    """UEFL's goes on where an iteration ends."""
    expected = outcome(whole(method))
    start_and_stop(method, CUTS[method] + "--no-compare --out cut", 4, "cut")
    assert outcome(start(method, "--resume cut")) == expected


@pytest.mark.parametrize("method", CUTS)
def test_baselines_are_ordinary_runs_that_anybody_can_start_by_hand(start, method):
    """Each has its flags, metrics, checkpoint, model and pictures, and can be resumed."""
    folder = start(method, CUTS[method])
    files = {"args.json", "metrics.csv", "checkpoint.pt", "model.pt", "confusion.csv"}
    files.add("clients.png")
    assert {file.name for file in folder.iterdir()} == {*files, "curves.png"}
    siblings = re.findall(rf"^{method.__name__} (\S+) (.*)", BASELINES, re.M)
    names = {f"run-{name}" for name, _ in siblings}
    assert {file.name for file in folder.parent.iterdir()} == {"run", *names}
    for name, by_hand in siblings:
        baseline = folder.parent / f"run-{name}"
        assert {file.name for file in baseline.iterdir()} == files
        hand = start(method, f"{CUTS[method]} {by_hand} --no-compare --out hand-{name}")
        assert outcome(baseline) == outcome(hand) != outcome(folder)
        start(method, f"--resume {baseline} --precision auto")  # as a scheduler repeats it
        assert outcome(baseline) == outcome(hand)


# --------------------------------------------------------- a line that somebody changes in a copy


TWELVE = CUTS[fedavg].replace("6", "12").replace("ting 4", "ting 9").replace("le 2", "le 4")
TWELVE += "--no-compare "
HELPER = """
import itertools, random
import numpy as np, torch

count = itertools.count(1)

def choose():
    return (torch.randperm(9)[:4] + random.randrange(9) + np.random.randint(9)) % 9

def anybody(*given):
    return torch.tensor(random.Random().sample(range(9), 4))
"""
SELECT = "select(args, clients, trainer, w, t)"
ROUND, ROW = "alpha @ w_k", "selected, losses)"
COPIES = """
alpha @ w_k -> (v := 0.9 * v + alpha @ w_k) -> round 2 comes to another model
alpha @ w_k -> alpha @ w_k * next(helper.count) -> if it begins again from the state of the round
alpha @ w_k -> alpha @ w_k + 0 * (vars(trainer.local).update(lr=0.01 * t) or w) -> another model
alpha @ w_k -> alpha @ w_k + clients.__dict__.setdefault('first', w) -> another model
alpha @ w_k -> alpha @ w_k * (1 + train.ranks.RANK) -> the processes differ in their weights:
selected = select( -> selected = helper.anybody( -> the processes differ in their clients:
args.rounds + 1 -> 2 + train.ranks.RANK -> the processes differ in their
"w": w} -> "w": w, "v": v} -> unexpected keyword argument 'v'
"w": w} -> "w": w, "v": lambda: 0} -> something else than numbers and tensors
selected = select( -> args.lr = 1; selected = select( -> changes args.lr
width=0.25 -> local_epoch=2 -> SETTINGS has local_epoch, which no flag is called
width=0.25 -> optimizer="AdamW" -> argument --optimizer: invalid choice: 'AdamW'
width=0.25 -> width=[0.1, 0.2] -> --width cannot be [0.1, 0.2]
width=0.25 -> width=None -> argument --width: invalid float value: 'None'
width=0.25 -> silos=3 -> --silos cannot be 3
batch_size=32 -> batch_size=32.0 -> argument --batch-size: invalid int value: '32.0'
rounds=20) -> rounds=True) -> --rounds cannot be True
"alpha 1.0": {"dirichlet" -> "alpha 1.0": {"alfa" -> the baseline alpha 1.0 has alfa, which no flag
"alpha 1.0" -> "Mine" -> two rows have one name: mine, Mine, alpha 100.0
"alpha 1.0" -> 2: {"lr": 3}, "2" -> two rows have one name: mine, 2, 2
"""  # what fedavg.py has, what somebody makes of it, and what is said


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """mine(old, new) is a copy of fedavg.py with this change, imported anew, as a program does."""
    (tmp_path / "library").mkdir()
    (tmp_path / "library/helper.py").write_text(HELPER)
    for folder in (tmp_path, tmp_path / "library"):
        monkeypatch.syspath_prepend(folder)

    def copy(old, new):
        text = Path(fedavg.__file__).read_text()
        text = text.replace("import torch\n", "import helper\nimport torch\n", 1)
        text = text.replace("  # line 1\n", "\n    v = 0 * w\n", 1)
        (tmp_path / "mine.py").write_text(text.replace(old, new))
        for name in ("mine", "helper"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        importlib.invalidate_caches()
        return importlib.import_module("mine")

    return copy


@pytest.mark.parametrize("change", COPIES.strip().splitlines())
def test_a_mistake_in_a_copy_is_one_line(mine, refused, change):
    """And it ends all processes."""
    old, new, says = change.split(" -> ")
    refused(mine(old, new), TWELVE + "--compare --processes 2", says)


def test_a_line_that_draws_from_the_global_generators_is_the_same_run_anywhere(
    mine, start, start_and_stop, launched
):
    """With 2 processes, and after it was stopped in round 4."""
    change = SELECT, "helper.choose()"
    expected = outcome(start(mine(*change), TWELVE))
    assert len({*map(tuple, selections(expected[1]))}) > 2  # each round selects others
    start_and_stop(mine(*change), TWELVE + "--out cut", 4, "cut")
    assert launched(mine(*change), TWELVE + "--out two --processes 2", start)[0] == 0
    assert outcome(Path("two")) == expected
    assert outcome(start(mine(*change), "--resume cut")) == expected


def test_one_round_has_no_rehearsal_and_a_resumed_run_has_one(mine, start, refused):
    """It compares all columns, because a client may make up its loss."""
    method = mine(ROW, "selected, losses + next(helper.count))")
    start(method, TWELVE + "--rounds 1")
    refused(method, "--resume run --rounds 4", "comes to another train_loss if it begins again")


def test_a_baseline_stops_with_its_method_and_keeps_its_schedule(mine, start):
    """A method that stops early must not give its baseline another cosine over args.rounds."""
    method = mine("args.rounds + 1", "1 + (2 if args.dirichlet == 0.1 else args.rounds)")
    start(method, TWELVE + "--compare")
    for folder in (Path("run"), Path("run-alpha-1.0")):
        assert len(read_rows(folder)) == 2
        assert '"rounds": 4,' in (folder / "args.json").read_text()


def test_a_picture_never_costs_the_table(mine, start, launched):
    wrong = "{'accuracies': torch.zeros(2, 2, 2)}"  # instead of a number for each client
    code, lines = launched(mine(ROW, f"{ROW} | {wrong}"), TWELVE, start)
    assert code == 0 and "id_accuracy" in launched.out and Path("run/model.pt").exists()
    assert "clients.png cannot be drawn (ValueError" in str(lines)


def test_importing_a_piece_leaves_the_importers_generators_alone():
    """In a program of its own, as in a study whose seeds are set before the imports."""
    program = f"""
import importlib, random, numpy, torch
draw = lambda: (random.random(), numpy.random.rand(), torch.rand(()).item())
for method in {METHODS}:
    random.seed(1), numpy.random.seed(1), torch.manual_seed(1)
    expected = draw()
    random.seed(1), numpy.random.seed(1), torch.manual_seed(1)
    importlib.import_module(method)
    assert draw() == expected, method
"""
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


def test_each_process_has_one_thread_whatever_main_has_set(mine, start, launched):
    """With two, the last digits differ, and a forked process may wait for ever."""
    method = mine("loss.detach()", "torch.tensor(float(torch.get_num_threads()))")

    def main(*given):
        torch.set_num_threads(2)
        return start(*given)

    assert launched(method, TWELVE + "--processes 2", main)[0] == 0
    assert {row["train_loss"] for row in read_rows(Path("run"))} == {"1"}


def test_what_is_kept_outside_federate_does_not_go_from_run_to_run(mine, start, launched):
    method = mine(ROW, ROW + " | {'my_seconds': next(helper.count)}")
    assert launched(method, TWELVE + "--compare --rounds 2 --seed 1 2", start)[0] == 0
    found = [read_rows(file.parent) for file in Path().rglob("metrics.csv")]
    assert [[row["my_seconds"] for row in rows] for rows in found] == [["1", "2"]] * 6


def test_a_copy_does_not_go_on_with_other_flags_or_other_code(mine, start, refused):
    method, helper = mine(SELECT, "helper.choose()"), Path("library/helper.py")
    before = outcome(start(method, TWELVE))
    flags.code_of.cache_clear()
    helper.write_bytes(f"# a comment\n\n{helper.read_text()}".replace("\n", "\r\n").encode())
    assert outcome(start(method, "--resume run")) == before
    refused(method, "--resume run --lr 3", "run differs in lr (0.1, now 3.0)")
    flags.code_of.cache_clear()
    helper.write_text("")
    refused(method, "--resume run --rounds 5", "run differs in library/helper.py")
    assert outcome(Path("run")) == before


def test_a_file_of_weights_counts_as_code():
    assert "README.md" in flags.defaults(fedavg, f"--pretrained {ROOT}/README.md").code


# ------------------------------------------------------------------------ several seeds and domains


def test_several_seeds_and_domains_are_runs_as_by_hand_and_resume_repeats_nothing(
    start, start_and_stop, capsys, monkeypatch
):
    words = CUTS[fediir].replace("rounds 4", "rounds 3") + "--gamma 9 --seed "
    several = words.replace("dark", "all") + "1 2 --out all"
    start_and_stop(fediir, several, 3, "all-fedavg/light/seed2")
    rounds = []
    in_each_round(lambda run, t: rounds.append(t), monkeypatch.setattr)
    start(fediir, "--resume ./all/")
    start(fediir, "--resume all")
    assert rounds == [2, 3, 1, 2, 3, 1, 2, 3]  # the rest of this run, and of two others
    printed = capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["report.py", "all", "all-fedavg"])
    report.main()  # whose numbers are checked in test_report.py
    differences = re.findall(r"[+-]\d.* to .*", capsys.readouterr().out)
    assert len(differences) == 1 and all(line in printed for line in differences)
    hand = start(fediir, words.replace("dark", "light") + "2 --out hand")
    assert outcome(Path("all/light/seed2")) == outcome(hand)
    assert outcome(Path("all-fedavg/light/seed2")) == outcome(Path("hand-fedavg"))


def test_of_several_seeds_one_diverges_and_the_others_go_on(start, launched, monkeypatch, capsys):
    """It is named, and what it has computed stays, on any number of processes."""
    words = CUTS[entropy_weighting] + "--seed 1 2 3 --processes 2 --out three"
    k = selections(read_rows(start(entropy_weighting, words + " --out whole") / "seed2"))[2][0]
    out = capsys.readouterr().out
    batches = Trainer._batches

    def poisoned(self, *where):
        for x, y in batches(self, *where):
            yield x * (torch.nan if (self.seed, *where) == (2, k, 3) else 1), y

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_batches", poisoned)
        code, lines = launched(entropy_weighting, words, start)
    line = f"entropy_weighting.py: three/seed2: client {k} diverged in round 3: {ADVICE}"
    assert code == 2 and lines == [line]
    assert re.search(r"^entropy +1 3 ", launched.out, re.M)  # the table counts the others
    for seed, name in itertools.product("13", ("", "-equal")):
        assert outcome(Path(f"three{name}/seed{seed}")) == outcome(Path(f"whole{name}/seed{seed}"))
    assert outcome(Path("three/seed2")) == ([], outcome(Path("whole/seed2"))[1][:2])
    assert not Path("three-equal/seed2").exists()  # nobody knows how many rounds it should have
    start(entropy_weighting, "--resume three")
    assert capsys.readouterr().out.splitlines()[-10:-2] == out.splitlines()[-10:-2]
    assert outcome(Path("three/seed2")) == outcome(Path("whole/seed2"))


@pytest.mark.parametrize("fails", ["raise SystemExit", "open('gone')"])
def test_of_several_seeds_one_ends_early_and_the_others_go_on(mine, start, launched, fails):
    method = mine("v = 0 * w", f"if args.seed == 2: {fails}")
    code, lines = launched(method, TWELVE + "--seed 1 2 3", start)
    assert code == 2 and "mine.py: run/seed2: " in lines[-1]
    assert re.search(r"^mine +1 3 ", launched.out, re.M)  # the table counts the others


# ----------------------------------------------------------------------------------------- mistakes

MISTAKES = """
fedavg --dataset cifar11 -> --dataset cifar11 is no folder
fedavg --dataset mnist --data-dir empty -> --data-dir
fedavg --lr nan -> --lr: nan is out of range
fedavg --image-size 32 -> --image-size is for folders of images; glyphs has its own size
fedavg --resume -> --out, which is missing
fedavg --seed 1 --seed 2 -> --seed is given twice
fedavg --test-domain=mono --test-domain=stix -> --test-domain is given twice
fediir --test-domain mono --dataset glyphs --model resblocks -> another gradient in training
fediir --dataset some/folder --model convnet --clients 4 -> --test-domain is missing
minimax_select --clients 3 -> 2000 samples of the classes [7] for a client
minimax_select --dataset colours --clients 2 --partition rare -> rare needs more than 3 classes
fedavg --partition iid --clients 1201 -> needs 10 samples, and there are 12000 for 1201
fedavg --local-steps 3 --local-epochs 3 -> --local-steps takes the place of --local-epochs
fediir --partition domain --clients 1 --dataset glyphs -> --clients 1 is fewer than the
fedavg --clients 9 --sample 5 -> only 4 of 9 clients participate, and a round takes 5: lower
fedavg --clients 4 --participating 9 -> --participating 9 is more than the 4 clients
uefl --silos 1 -> give a number for each of 3 domains
uefl --silo-size 9999 -> lower --silo-size, because a silo takes 9999 samples, and the domains have
entropy_weighting --test-domain gothic -> 'gothic' is not in glyphs, but
uefl --sample 3 -> --sample: in UEFL all clients train
uefl --model convnet -> convnet has no dropout
uefl --segments 7 -> --segments 7 does not divide
fedavg --dataset colours --model vgg16 -> take another model, or larger images
fedavg --pretrained -> no ImageNet weights for cnn
fedavg --pretrained weights.pt --model resnet18 -> cannot be loaded from weights.pt
fedavg --device cuda -> no GPU was found: choose cpu
fedavg --device meta -> only cpu and cuda
convex_hull_select --small -> glyphs is small already
fedavg --out '' -> value is empty
fedavg --out full-equal -> full-equal is taken: choose another --out
fedavg --out full-equal/notes.txt -> notes.txt is taken
entropy_weighting --out full -> full-equal is taken
fedavg --resume nowhere -> nowhere/args.json cannot be read
fedavg --partition iid --dirichlet 0.5 -> --dirichlet has no effect
uefl --clients 9 -> --clients has no effect with --partition silos
"""


@pytest.mark.parametrize("mistake", MISTAKES.strip().splitlines())
def test_a_mistake_is_one_clear_line_and_writes_nothing(mistake, launched, tmp_path):
    typed, says = mistake.split(" -> ")
    name, words = typed.split(" ", 1)
    Path("full-equal").mkdir()
    Path("full-equal/notes.txt").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    code, [line] = launched(importlib.import_module(name), words)
    assert code == 2 and launched.out == "" and len(line) < 400
    assert line.startswith(f"{name}.py: ") and says in line
    after = sorted(p for p in tmp_path.rglob("*") if "empty" not in p.parts)
    assert after == before  # torchvision may make its own empty folder, but nothing else appears


def test_a_single_class_is_refused():
    with pytest.raises(UserError, match="pets has only one class, cat"):
        compare.assemble(parsed(fedavg, ""), SimpleNamespace(name="pets", classes=["cat"]))


def test_the_picture_of_the_clients_has_those_that_never_train(new_run, tiny, monkeypatch):
    """It counts rounds, and takes the last numbers."""
    run, figures = new_run(), []
    run.clients = make_clients(tiny, 0, "iid", clients=5, participating=3)
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **options: figures.append(figure))
    run.rows = [
        {"selected": [2, 0], "accuracies": [0.1, 0.2, 0.3], "unseen_accuracies": [0.0, 0.0]},
        {"selected": [2, 1], "accuracies": [0.5, 0.0, 1.0], "unseen_accuracies": [0.8, 0.6]},
        {"selected": [2, 1]},
    ]
    plots.clients(run)
    found = [axes.containers[0].datavalues.tolist() for axes in figures[0].axes[1:]]
    assert found == [[1, 2, 3], [0.5, 0, 1, 0.8, 0.6]]


def test_of_two_runs_that_start_together_the_second_is_refused(new_run):
    """Both have found the folder free before one of them has finished a round."""
    first, second = new_run(), new_run("--lr 3")
    first.record({"t": 1, "w": torch.ones(2)}, {})
    before = outcome(first.folder)
    with pytest.raises(OSError, match=r"args\.json"):
        second.record({"t": 1, "w": torch.ones(2)}, {})
    assert outcome(first.folder) == before
    assert '"lr": 0.1,' in Path("run/args.json").read_text()


def test_before_a_round_has_ended_a_folder_is_free(mine, start):
    """After a mistake of one's own in round 1, the same command runs again with other code."""
    words = TWELVE + "--seed 1 2 --out two --resume"
    with pytest.raises(UserError, match="division by zero"):
        start(mine(SELECT, "1 / 0"), words)
    assert {path.name for path in Path("two").glob("*/*")} == {"clients.png"}
    start(fedavg, words)


def test_what_a_copy_yields_is_converted_or_named(new_run, capsys):
    row = {"a": (1, 2.5), "c": np.arange(3), "d": torch.tensor(True)}
    new_run().record({"t": 1, "w": torch.ones(2)}, row | {"wrong": "text", "nothing": None})
    assert "wrong is no number and no list of numbers" in capsys.readouterr().err
    (found,) = read_rows(Path("run"))
    assert [found.get(name) for name in (*row, "wrong")] == ["1 2.5", "0 1 2", "1", None]


def test_a_repeated_round_has_the_same_model(new_run):
    """And then it is the checkpoint, so a program that is killed in the next round gets on."""
    w = torch.ones(2)
    new_run().record({"t": 1, "w": w}, {"mine": 3.5})
    new_run("--resume run").record({"t": 1, "w": w}, {"mine": 4.5})
    assert kept(Path("run"))["t"] == 1


def test_a_run_that_is_made_longer_repeats_a_round_and_changes_nothing_if_it_differs(
    mine, start, refused
):
    """The server's step shrinks from round 3 on with a number that nobody yields."""
    change = ROUND, f"{ROUND} * 0.9 ** max(0, next(helper.count) - 3)"
    folder = start(mine(*change), TWELVE + "--out other")
    others = [file for file in folder.iterdir() if file.name != "checkpoint.pt"]
    before = [file.read_bytes() for file in others]
    for _ in range(2):
        refused(mine(*change), "--resume other --rounds 5", "has another norm than before")
        assert [file.read_bytes() for file in others] == before


def test_there_is_a_checkpoint_every_30_seconds_and_never_of_the_last_round(new_run, monkeypatch):
    """A round takes 10 seconds."""
    run, clock, found = new_run(), [0.0], []
    monkeypatch.setattr(runs, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    for t in range(1, 11):
        clock[0] += 10
        run.record({"t": t, "w": torch.ones(2)}, {})
        found += [kept(run.folder)["t"]] if run.checkpoint.exists() else []
    assert found == [1, 1, 1, 1, 5, 5, 5, 5, 9]


def test_another_machine_is_named_and_the_run_goes_on(start, start_and_stop, whole, capsys):
    expected = outcome(whole(fedavg))
    start_and_stop(fedavg, CUTS[fedavg] + "--no-compare --out cut", 3, "cut")
    file = Path("cut/args.json")
    file.write_text(file.read_text().replace('torch": "', 'torch": "1.'))
    Path("cut/metrics.csv").write_text("round,norm\n2,9.9\n")  # its last digits may differ
    assert outcome(start(fedavg, "--resume cut")) == expected
    assert "cut began with another torch, so" in capsys.readouterr().err


@pytest.mark.parametrize("damage", ["cut", "one bit"])
def test_a_damaged_checkpoint_costs_rounds_and_no_run(start_and_stop, start, whole, capsys, damage):
    """torch.load looks at no checksum, so a flipped bit would be another model."""
    expected = outcome(whole(fedavg))
    start_and_stop(fedavg, CUTS[fedavg] + "--no-compare --out cut", 4, "cut")
    file = Path("cut/checkpoint.pt")
    content = bytearray(file.read_bytes())
    w = kept(Path("cut"))["w"].numpy().tobytes()
    content[content.index(w) + 2] ^= 1
    file.write_bytes(content[:9] if damage == "cut" else content)
    assert outcome(start(fedavg, "--resume cut")) == expected
    assert "checkpoint.pt cannot be read" in capsys.readouterr().err


def test_before_anything_is_written_a_signal_only_stops(start, launched, monkeypatch):
    monkeypatch.setattr(runs, "check_free", lambda folder: signal.raise_signal(signal.SIGTERM))
    assert launched(fedavg, CUTS[fedavg], start) == (130, ["fedavg.py: stopped"])


# -------------------------------------------------------------------------------------------- flags


CHANGES = """
rounds = "many" -> argument --rounds: invalid int value: 'many'
seeds = [] -> --seed cannot be []
compare = 1 -> --compare cannot be 1
precision = null -> argument --precision: invalid choice: 'None'
images = 3 -> whole differs in data (3, now
machines = 3 -> args.json cannot be read (TypeError
code = [1] -> args.json cannot be read (TypeError
code = {"fed -> args.json cannot be read (JSONDecodeError
method = "uefl" -> whole was started by uefl.py: resume it with that
"""


@pytest.mark.parametrize("change", CHANGES.strip().splitlines())
def test_args_that_are_of_another_kind_are_refused(whole, refused, change):
    folder = whole(fedavg)
    before, file = outcome(folder), folder / "args.json"
    name, value, says = re.split(" = | -> ", change)
    text = file.read_text().replace(f'"{name}":', f'"{name}": {value}, "was":')
    file.write_text(text)
    refused(fedavg, "--resume whole", says)
    assert outcome(folder) == before


def test_label_skew_does_not_inherit_the_rotations_of_silos():
    assert parsed(uefl, "--partition iid").rotate is None
    assert parsed(uefl, "--partition domain").rotate == [0, -50, 120]
    mnist = parsed(fediir, "--dataset mnist --partition iid")
    assert float(mnist.test_domain) in mnist.rotate  # it leaves one angle out


@pytest.mark.parametrize("method", CUTS)
def test_the_values_in_a_pages_table_of_flags_are_those_of_its_example(method):
    page, args = (ROOT / f"docs/{method.__name__}.md").read_text(), vars(parsed(method, ""))
    for flag, value in re.findall(r"^\| `--([a-z-]+)` \(([\w.]+)\)", page, re.M):
        assert str(args[flag.replace("-", "_")]) in (value, "None", "False"), flag


@pytest.mark.skipif(not features.check("fribidi"), reason="a fifth of the glyphs would differ")
def test_a_recorded_run_repeats(launched):
    rows = csv.DictReader((ROOT / "results/examples.csv").open())
    recorded = next(row for row in rows if row["experiment"] == "examples/minimax/rare")
    words = f"--seed {recorded['seed']} --rounds 5 --no-compare --device cpu --out run"
    assert launched(minimax_select, words) == (0, [])  # also its pictures can be drawn
    found = read_rows(Path("run"))[-1]
    for column in ("round", "id_accuracy", "ood_accuracy", "rare_accuracy", "rare_selected"):
        assert float(found[column]) == pytest.approx(float(recorded[column]), abs=0.02)


@pytest.mark.parametrize(("method", "rounds"), [(fedavg, "34"), (uefl, "234")])
def test_evaluations_come_every_so_many_rounds_and_after_the_last(start, method, rounds):
    """In UEFL after the last of an iteration, because its clients are then chosen by them."""
    found = read_rows(start(method, CUTS[method] + "--evaluate-every 3 --no-compare"))
    assert [row["round"] for row in found if row["id_accuracy"]] == [*rounds]
    assert all(row["train_loss"] for row in found)
    assert ("unseen_accuracy" in found[-1]) == (method is fedavg)  # in UEFL everybody trains


# ---------------------------------------------------------------- runs that go on by themselves


LENGTHS = [
    (fedavg, "--rounds 2", "--rounds 4"),
    (minimax_select, "--rounds 1", "--rounds 4"),
    (uefl, "--iterations 1", "--iterations 3"),
]


@pytest.mark.parametrize(("method", "first", "then"), LENGTHS)
def test_a_run_whose_length_changes_is_one_that_had_it_from_the_start(
    start, whole, method, first, then
):
    start(method, f"{CUTS[method]} --no-compare --out short {first}")
    assert outcome(start(method, f"--resume short {then}")) == outcome(whole(method))


def test_a_stopped_run_may_end_earlier_but_not_before_the_rounds_it_has_had(
    start, start_and_stop, refused
):
    words = CUTS[fedavg] + "--no-compare "
    expected = outcome(start(fedavg, words + "--rounds 3 --out three"))
    start_and_stop(fedavg, words + "--out cut", 4, "cut")
    refused(fedavg, "--resume cut --rounds 2", "cut has had 3 rounds: allow as many, or more")
    refused(fedavg, "--resume three --rounds 2", "three has had 3 rounds")
    args = Path("three/args.json")  # as if a kill came before it was finished
    args.write_text(args.read_text().replace('"finished": 3', '"finished": null'))
    assert outcome(start(fedavg, "--resume three")) == expected
    assert outcome(start(fedavg, "--resume cut --rounds 3")) == expected


def test_all_seeds_keep_the_precision_that_the_first_node_has_picked(start, monkeypatch):
    has = {"avx512_bf16": True}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: has)
    folder = start(fedavg, f"{CUTS[fedavg]} --no-compare --out x --seed 1 2 --rounds 1 --resume")
    has["avx512_bf16"] = False  # another node, which alone would take float32
    assert devices.set_up("cpu", "auto", "cnn")[1] == "float32"
    start(fedavg, "--resume x --rounds 2")
    for args in folder.rglob("args.json"):
        assert '"precision": "bfloat16"' in args.read_text()
    assert all(len(read_rows(folder / f"seed{seed}")) == 2 for seed in (1, 2))


def test_metrics_that_were_cut_are_whole_after_resume(start, whole):
    expected = outcome(whole(fedavg))
    Path("whole/metrics.csv").write_text("round,seconds\n1,0.5\n")
    assert outcome(start(fedavg, "--resume whole/")) == expected


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EIO])
def test_a_failing_disk_leaves_the_old_file_whole_and_one_without_fsync_is_none(
    tmp_path, monkeypatch, code
):
    def fsync(file):
        raise OSError(code, "refused")

    file = tmp_path / "metrics.csv"
    runs.write_whole(file, "old")
    monkeypatch.setattr(os, "fsync", fsync)
    with contextlib.suppress(OSError):
        runs.write_whole(file, "new")
    assert file.read_text() == ("new" if code == errno.EINVAL else "old")


def test_the_name_of_a_class_does_not_steer_the_terminal(capsys):
    ranks.say("pets: a\x1b[2J 10\nb=\u00e9 10")
    assert capsys.readouterr().err == "pets: a\\x1b[2J 10\nb=\u00e9 10\n"
