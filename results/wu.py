"""Rebuilds wu.md and its pictures: python -m results.wu"""

from results.tables import RESULTS, build, curves, differences, group, pairs, read, tables

RUNS, FRESH, WEIGHTINGS = read("wu.csv"), read("wu.csv", fresh=True), "entropy size equal"
SHORT = ["id_accuracy", "ood_accuracy"]
SIZES, SELECTED = ["vertices", "selected_size", *SHORT], ["id_selected", *SHORT]
ALL = ["vertices", "selected_size", *SELECTED]
TABLES = {  # block: folder, rows, columns, the row to compare with
    "learning-rate": ("wu/learning-rate", "0.001 0.01 0.1", SHORT, ""),
    "cifar10": ("wu/cifar10", "hull minimax by-size random", ALL, "random"),
    "cifar10-many": ("wu/cifar10", "hull by-size-more largest-as-many random-as-many", SIZES, "random-as-many"),
    "glyphs-many": ("wu/glyphs", "hull by-size-more largest-as-many random-as-many", ALL, "random-as-many"),
    "glyphs": ("wu/glyphs", "minimax by-size random", ALL, "random"),
    "glyphs-longer": ("wu/glyphs-longer", "hull by-size-more random-as-many", SIZES, "random-as-many"),
    "equal-steps-many": ("wu/glyphs-equal-steps", "hull random-as-many", SIZES, "random-as-many"),
    "equal-steps": ("wu/glyphs-equal-steps", "minimax by-size random", SIZES, "random"),
    "noise": ("wu/glyphs-noise", "hull-trim hull minimax-trim minimax entropy-tv entropy", SHORT, ""),
    "trim": ("wu/glyphs", "hull-trim hull minimax-trim minimax", SHORT, ""),
    "glyphs-weighting": ("wu/glyphs-weighting", WEIGHTINGS, SELECTED, "size"),
    "cifar10-weighting": ("wu/cifar10-weighting", WEIGHTINGS, SELECTED, "size"),
    "mnist-weighting": ("wu/mnist-weighting", WEIGHTINGS, SELECTED, "size"),
    "mnist-lr": ("wu/mnist-lr", " ".join(f"{w}-{lr}" for w in WEIGHTINGS.split() for lr in (0.1, 0.01, 0.001)),
                 SHORT, ""),
    "dimensions": ("wu/glyphs", "hull 2-dimensions 4-dimensions unit-length", SIZES, "hull"),
}  # fmt: skip
HULL, MINIMAX = "hull random-as-many, hull by-size-more", "minimax random, minimax by-size, by-size random"
TRIM = "hull-trim hull, minimax-trim minimax"
ROWS = [  # folder, data, note, rows that are compared
    ("wu/glyphs", ", glyphs", "settings chosen here, seeds added", f"{HULL}, hull largest-as-many"),
    ("wu/glyphs", ", glyphs", "seeds added", MINIMAX),
    ("wu/glyphs", ", glyphs", "row added", "unit-length random-as-many"),
    ("wu/glyphs-equal-steps", ", glyphs, equal steps", "planned later", "hull random-as-many, minimax random"),
    ("wu/glyphs-longer", ", glyphs, 75 rounds", "planned later", HULL),
    ("wu/cifar10", ", CIFAR-10", "settings chosen here", f"{HULL}, hull largest-as-many"),
    ("wu/cifar10", ", CIFAR-10", "", MINIMAX),
    ("wu/glyphs-weighting", ", glyphs", "seeds added", "entropy size"),
    ("wu/glyphs-weighting", ", glyphs", "row and seeds added", "entropy equal"),
    ("wu/cifar10-weighting", ", CIFAR-10", "seeds added", "entropy size"),
    ("wu/cifar10-weighting", ", CIFAR-10", "row and seeds added", "entropy equal"),
    ("wu/glyphs", ", glyphs", "planned later", TRIM),
    ("wu/glyphs-noise", ", glyphs, wrong labels", "", f"{TRIM}, entropy-tv entropy"),
]
FRESH_ROWS = [
    ("wu/glyphs", ", glyphs", "", f"{HULL}, {MINIMAX}, random-size random"),
    ("wu/cifar10", ", CIFAR-10", "",
     "hull random-as-many, hull by-size, minimax by-size, by-size random, random-size random"),
]  # fmt: skip

more = {}
for block, runs, of_block in [("rows", RUNS, ROWS), ("fresh", FRESH, FRESH_ROWS)]:
    found = (pairs(runs, folder, names, ["ood_accuracy"], about, note) for folder, about, note, names in of_block)
    more[block] = differences([pair for of_folder in found for pair in of_folder])
build("wu.md", {**tables(RUNS, TABLES), **more})
names = "hull random-as-many by-size-more largest-as-many minimax random"
for data, of_data in {"cifar10": names, "glyphs": names, "glyphs-longer": "hull by-size-more random-as-many"}.items():
    curves(RESULTS / f"wu-{data}.png", group(RUNS, f"wu/{data}", of_data), [*SHORT, "train_loss"])
