"""Runs a method and its baselines, with one seed or several, and says what came out."""

import json
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path

import numpy as np
from scipy.stats import t as student

from common import UserError, plots, ranks
from common.runs import Run, check_free
from common.setup import assemble

SHOWN = {  # column of metrics.csv -> what it is called
    "id_accuracy": "ID", "ood_accuracy": "OOD", "id_selected": "ID of the selected", "rare_accuracy": "rare classes",
    "rare_selected": "share of rare clients in the selected", "neutral_accuracy": "colour-neutral",
    "turned_accuracy": "turned silos", "turned_extended": "share of turned silos with own words",
}  # fmt: skip
Runs = Mapping[str, Sequence[Run]]  # label -> its runs, in the order of seeds and domains


def compare(
    args: Namespace, federate: Callable[[Namespace], Run], label: str, baselines: Mapping[str, dict], *,
    prediction: str = "", shows_in: Mapping[str, str] = {}, against: str = "",
    draw: Callable[[Path, Runs], None] = lambda folder, runs: None,
) -> Runs | None:  # fmt: skip
    """Runs federate(args), and then each baseline with as many rounds and other flags.

    label       what the method is called beside its baselines
    baselines   label -> the flags that change; a baseline that changes nothing here is left out
    prediction  what the method's idea predicts for the example, a sentence
    shows_in    the columns of metrics.csv in which it must show: column -> "above" or "below" the baselines
    against     the baseline to which the prediction refers, if not to all
    draw        called with the folder and the runs, for a picture of the method's own

    With --seeds or --test-domain all, everything runs for each seed and domain, in folders inside args.out. Returns the
    runs, or None if other processes have run them.
    """
    first = _changed(args, test_domain=None) if args.test_domain == "all" else args
    data, clients, _ = assemble(first)  # here, because this finds the user's mistakes before anything is written
    domains = data.domains if args.test_domain == "all" else [args.test_domain]
    if not domains:
        raise UserError(f"--test-domain all: {data.name} has no domains; make some with --rotate")
    baselines = {
        name: changes for name, changes in baselines.items()
        if args.compare and any(getattr(args, flag) != value for flag, value in changes.items())
    }  # fmt: skip
    if not args.resume:
        for name in ["", *baselines]:
            check_free(Path(_folder(args.out, name)))

    def work() -> Runs:
        runs = _run(args, federate, label, baselines, list(product(args.seeds or [args.seed], domains)))
        folder = Path(args.out)
        plots.curves(folder / "curves.png", {name: [run.rows for run in of] for name, of in runs.items()})
        draw(folder, runs)
        report(runs, folder)
        if prediction and args.is_example and len(runs) == len(baselines) + 1:
            verdict(runs, prediction, shows_in, [against] if against else [*baselines])
        return runs

    count = ranks.how_many(args.processes, args.device, clients.sample)
    try:
        return work() if count == 1 else ranks.start(work, count)
    except (KeyboardInterrupt, OSError) as e:
        if (Path(args.out) / "args.json").exists():
            e.add_note(f"continue with --resume {args.out}")
        raise


def _run(args: Namespace, federate, label: str, baselines: Mapping[str, dict], plans: list[tuple]) -> Runs:
    """The runs for each (seed, domain) of the plans."""
    runs: dict[str, list[Run]] = {name: [] for name in [label, *baselines]}
    several, began = bool(args.seeds) or args.test_domain == "all", time.monotonic()
    if several and ranks.RANK == 0:
        Path(args.out).mkdir(parents=True, exist_ok=True)
        (Path(args.out) / "args.json").write_text(json.dumps({"flags": vars(args)}, indent=1))
    for i, (seed, domain) in enumerate(plans):
        out = str(Path(args.out, f"seed{seed}" + f"-{domain}" * bool(domain))) if several else args.out
        own = _changed(args, seed=seed, seeds=None, test_domain=domain, out=out, name=label)
        runs[label].append(federate(own))
        rounds = runs[label][-1].t
        for name, changes in baselines.items():
            baseline = {**changes, "rounds": rounds, "name": name, "out": _folder(out, name), "compare": False}
            runs[name].append(federate(_changed(own, **baseline)))
        left = (time.monotonic() - began) / (i + 1) * (len(plans) - i - 1)
        if left:
            print(f"{i + 1} of {len(plans)} comparisons have run; the others take about {left / 60:.0f} min")
    return runs


def _changed(args: Namespace, **changes) -> Namespace:
    return Namespace(**vars(args) | changes)


def _folder(out: str, name: str) -> str:
    return out + f"-{name.lower().replace(' ', '-')}" * bool(name)


def interval(differences: Sequence[float]) -> tuple[float, float, float]:
    """The mean of paired differences, and the bounds of its 95 % interval by Student's t; NaN bounds for one pair."""
    values = np.array(differences)
    n = len(values)
    half = student.ppf(0.975, n - 1) * values.std(ddof=1) / n**0.5 if n > 1 else np.nan
    return values.mean(), values.mean() - half, values.mean() + half


def percent(share: float | None) -> str:
    """A share as percent with one decimal."""
    return "" if share is None else f"{100 * share:.1f}"


def report(runs: Runs, folder: Path) -> None:
    """Prints how the runs ended, and with several seeds or domains the paired differences to the first row's runs."""
    ours, *others = runs
    columns = [c for c in SHOWN if all(run.mean_of_last(c) is not None for of in runs.values() for run in of)]
    values = {name: np.array([[run.mean_of_last(c) for c in columns] for run in of]) for name, of in runs.items()}
    rows = [["", *(SHOWN[c] for c in columns)]]
    rows += [[name, *map(percent, of.mean(0))] for name, of in values.items()]
    if len(values[ours]) > 1:
        for name in others:
            bounds = [interval(column) for column in (values[ours] - values[name]).T]
            rows.append([f"{ours} - {name}", *("{} ({} to {})".format(*map(percent, bound)) for bound in bounds)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print("\nPercent, mean of up to 5 last evaluations; in brackets the 95 % interval of the mean paired difference")
    for row in rows:
        print("  ".join([row[0].ljust(widths[0]), *(c.rjust(n) for c, n in zip(row[1:], widths[1:], strict=True))]))
    print("ID: held-out samples of the participating clients, or of the selected ones; OOD: the test set, or the")
    print(f"domain left out. Metrics, models and pictures are in {folder}")


def verdict(runs: Runs, prediction: str, shows_in: Mapping[str, str], baselines: Sequence[str]) -> None:
    """Prints what the idea predicts for the example, and what these runs gave."""
    ours, holds, found = next(iter(runs)), True, []
    for column, side in shows_in.items():
        means = {name: np.mean([run.mean_of_last(column) for run in of]) for name, of in runs.items()}
        sign = 1 if side == "above" else -1
        holds &= all(sign * (means[ours] - means[name]) > 0 for name in baselines)
        found.append(f"{SHOWN[column]} " + ", ".join(f"{percent(means[name])} ({name})" for name in [ours, *baselines]))
    print(f"\nPrediction: {prediction}.\nThis run: {'; '.join(found)}.", end=" ")
    print("As predicted." if holds else "This is NOT as predicted.")
