"""Rebuilds README.md with the eight main claims, their picture, and their rows on the first page: -m results.claims"""

import numpy as np
from scipy.optimize import brentq
from scipy.stats import nct, t, ttest_1samp

from results.tables import RESULTS, build, draw_pairs, pair, read, show

SIX = " ".join(f"fediir/narrow-{angle}" for angle in range(0, 90, 15))
CLAIMS = [  # panel, comparison, folders, rows, column, the paper, planned seeds, the mean that we expected
    ("UEFL on MNIST, mean accuracy in points", "UEFL instead of FedAvg",
     "uefl/mnist", "uefl fedavg", "mA", "92.0 against 78.0", 5, "-2 to +1"),
    ("UEFL on MNIST, mean uncertainty in nats (less is better)", "UEFL instead of FedAvg",
     "uefl/mnist", "uefl fedavg", "mE", "0.149 against 0.273", 5, "-0.02 to +0.03"),
    ("FedIIR on RotatedMNIST, OOD in points", "FedIIR instead of FedAvg",
     SIX, "fediir fediir-fedavg", "ood_accuracy", "93.0 against 90.8", 3, "-1 to +1"),
    ("Selection on CIFAR-10, OOD in points", "hull instead of ten random clients",
     "wu/cifar10", "hull random", "ood_accuracy", "42.9 against 38.9", 5, "+1 to +5"),
    ("Selection on CIFAR-10, OOD in points", "minimax instead of ten random clients",
     "wu/cifar10", "minimax random", "ood_accuracy", "42.0 against 38.9", 5, "-2 to +2"),
    ("Selection on CIFAR-10, OOD in points", "hull instead of 13 clients by size",
     "wu/cifar10", "hull by-size-13", "ood_accuracy", "", 5, "-3 to +1"),
    ("Weights on MNIST, OOD in points", "by entropy instead of by size",
     "wu/mnist-weighting", "entropy size", "ood_accuracy", "74.9 against 53.1", 8, "+1 to +10"),
    ("Weights on MNIST, OOD in points", "by entropy instead of equal",
     "wu/mnist-weighting", "entropy equal", "ood_accuracy", "74.9 against 70.7", 8, "0 to +3"),
]  # fmt: skip


def holm(p: list[float]) -> np.ndarray:
    """Holm's correction of these p-values: the smallest times their number, the next times one less, and so on."""
    order, corrected = np.argsort(p), np.empty(len(p))
    corrected[order] = np.maximum.accumulate(np.sort(p) * np.arange(len(p), 0, -1)).clip(max=1)
    return corrected


def visible(found: np.ndarray, power: float = 0.8) -> float:
    """The true effect that a paired t-test at 5 % finds with this probability, if seeds vary as much as these."""
    more, limit = len(found) - 1, t.ppf(0.975, len(found) - 1)
    shift = brentq(lambda s: nct.sf(limit, more, s) - power, 0, 2 * limit)
    return shift * found.std(ddof=1) / len(found) ** 0.5


def places(differences: list[np.ndarray], numbers: list[float | None]) -> list[tuple[str, str]]:
    """Where each number lies, seen from the 95 % interval of these differences, with p and Holm's p of its test."""
    p = [1 if n is None or len(d) < 2 else ttest_1samp(d, n).pvalue for d, n in zip(differences, numbers, strict=True)]
    return [
        ("inside" if one > 0.05 else "excluded" if corrected <= 0.05 else "excluded before Holm",
         f"{one:.3f} and {corrected:.3f}")
        for one, corrected in zip(p, holm(p), strict=True)
    ]  # fmt: skip


def says(zero: str, effect: str, what: str) -> str:
    """The answer of a row in words. what: a gain or a loss."""
    seen = {"inside": "no difference seen", "excluded": what}.get(zero, f"a hint of {what}")
    places = {"inside": "is possible", "excluded": "is excluded", "does not fit": "would lead above 100 %"}
    return f"{seen}; one as large as the paper's {places.get(effect, 'is doubtful')}" if effect else seen


FRESH, EARLIER = (
    {experiment: runs for name in ("uefl", "fediir", "wu") for experiment, runs in read(f"{name}.csv", fresh).items()}
    for fresh in (True, False)
)
pairs, before = ([pair(runs, *claim[1:6]) for claim in CLAIMS] for runs in (FRESH, EARLIER))
found = [p.difference for p in pairs]
zeros, effects = places(found, [0] * len(pairs)), places(found, [p.effect for p in pairs])
answers = [["", "the paper", "here (95 % interval)", "zero", "the paper's effect", "so"]]
designs = [["", "fresh seeds", "p and Holm's p", "visible with 80 % power", "earlier seeds", "we expected"]]
panels: dict[str, list] = {}
for claim, p, earlier, (zero, p_values), (effect, _) in zip(CLAIMS, pairs, before, zeros, effects, strict=True):
    label, seeds = f"{claim[0]}: {claim[1]}", len(p.difference)
    paper = show(np.array([p.effect]), p.column, "+") if p.paper else ""
    old = earlier.difference
    so_far = f"not run with fresh seeds; {len(old)} earlier ones: {show(old, p.column, '+')}"
    answers.append([label, paper, so_far if len(old) > 1 else "not run yet", "", "", ""])
    designs.append([label, f"{seeds} of {claim[6]}", "", "", "", claim[7]])
    if len(old) and not claim[2].endswith("weighting"):
        designs[-1][4] = f"{show(old, p.column, '+')}, {len(old)} seeds"
    if seeds > 1:
        what = "a gain" if (p.difference.mean() > 0) == (p.column != "mE") else "a loss"
        if not paper:
            effect = ""
        elif not p.fits:
            effect = "does not fit"
        here = f"{show(p.difference, p.column, '+')}, {seeds} of {claim[6]} seeds"
        answers[-1][2:] = [here, zero, effect, says(zero, effect, what)]
        designs[-1][2:4] = [p_values, show(np.array([visible(p.difference)]), p.column)]
        panels.setdefault(claim[0], []).append(p)
build("README.md", {"answers": answers, "designs": designs})
build("../README.md", {"eight-rows": [[*line[:3], line[5]] for line in answers]})
draw_pairs(RESULTS / "pairs.png", panels)
