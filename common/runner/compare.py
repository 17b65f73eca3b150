"""Runs a method and its baselines, with one seed or several, and says what came out."""

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from common import devices, ranks
from common.runner import plots, table
from common.runner.runs import Run, check_free, write_args
from common.runner.setup import assemble, build_model, load, prepare

Runs = Mapping[str, Sequence[Run]]  # label -> its runs, in the order of the plans


def run(
    args: Namespace,
    federate: Callable,
    label: str,
    baselines: Mapping[str, dict],
    prediction: str,
    shows_in: Mapping[str, str],
    build: Callable = build_model,
    draw: Callable[[Run, dict], None] | None = None,
    choose: str | None = None,
) -> Runs | None:
    """Runs a method, and then each baseline with as many rounds and other flags.

    federate    called as federate(args, clients, trainer, state); yields the state and a row of
                metrics.csv after each round: see Run.record
    label       what the method is called beside its baselines
    baselines   label -> the flags that change; a baseline that changes nothing here is left out
    prediction  what the idea predicts for the example, against the first baseline: a sentence
    shows_in    where it must show: column of metrics.csv -> "above" or "below"
    build       called as build(args, shape, classes); returns the model
    draw        draws the method's picture, from a run and its last state
    choose      see Run

    The method runs first, in the folder args.out, and a baseline in args.out-NAME. With several
    seeds, or --test-domain all, this is repeated for each seed and domain, in folders inside
    args.out. Then come the table, curves.png, and the verdict. If there are several processes, they
    are forked here, and do all of this together. Returns the runs, or None if others have run them.
    """
    label = getattr(args, "name", label)  # a baseline that is resumed alone keeps its name
    changes = {label: {}}
    for name, flags in baselines.items():
        if args.compare and any(getattr(args, flag) != value for flag, value in flags.items()):
            changes[name] = flags
    plans = plans_of(args)
    of_domains = {plan.test_domain: plan for plan in plans}
    for plan in of_domains.values():  # finds mistakes before anything is written
        _, clients, _ = assemble(plan, build)
    if ranks.RANK == 0 and not args.resume:
        for name in changes if len(plans) == 1 else [label]:
            check_free(folder_of(args.out, name, label))

    def run_one(args: Namespace) -> Run:
        clients, trainer, run = prepare(args, build, choose)
        for state, row in federate(run.args, clients, trainer, run.state):
            run.record(state, row)
        return run.finish(draw)

    def work() -> Runs:
        runs = run_all(args, run_one, label, changes, plans)
        show(args, runs)
        if args.is_example and len(runs) > 1:
            verdict(runs, prediction, shows_in)
        return runs

    count = ranks.how_many(args.processes, args.device, clients.per_round)
    try:
        return work() if count == 1 else ranks.start(work, count)
    except (KeyboardInterrupt, OSError) as e:
        if (Path(args.out) / "args.json").exists():
            e.add_note(f"continue with --resume {args.out}")
        raise


def plans_of(args: Namespace) -> list[Namespace]:
    """The flags of the method's run for each seed and test domain."""
    domains = [args.test_domain]
    if args.test_domain == "all":
        domains = load(changed(args, seed=args.seed[0])).domains or domains
    plans = []
    for seed in dict.fromkeys(args.seed):
        for domain in domains:
            plans.append(changed(args, seed=seed, test_domain=domain))
    if len(plans) > 1:
        for plan in plans:
            of_domain = f"/{plan.test_domain}" * (len(domains) > 1)
            plan.out = f"{args.out}{of_domain}/seed{plan.seed}"
    return plans


def run_all(args, run_one, label, changes, plans) -> Runs:
    """Runs the method and its baselines by each plan."""
    runs: dict[str, list[Run]] = {name: [] for name in changes}
    device = devices.pick_device(args.device)
    args.precision = devices.pick_precision(args.precision, device, args.model)  # of all runs
    if len(plans) > 1 and ranks.RANK == 0 and not args.resume:
        write_args(Path(args.out), {"flags": vars(args)}, False)
    for i, plan in enumerate(plans, start=1):
        rounds = plan.rounds
        for name, flags in changes.items():
            out = str(folder_of(plan.out, name, label))
            own = changed(
                plan, **flags, rounds=rounds, name=name, out=out, precision=args.precision
            )
            if name != label:
                own.compare = False  # a resumed baseline has no baselines
                own.method_rounds = plan.rounds  # its own may depend on the seed
            runs[name].append(run_one(own))
            rounds = runs[name][-1].t  # a baseline stops when the method has stopped
        if len(plans) > 1:
            print(f"{i} of {len(plans)} done", flush=True)
        if len(plans) > 1 and ranks.RANK == 0 and args.resume:  # its flags fitted the first run
            write_args(Path(args.out), {"flags": vars(args)}, True)
    return runs


def show(args: Namespace, runs: Runs) -> None:
    """Draws the curves, and prints the table and what the models do."""
    plots.curves(Path(args.out) / "curves.png", runs)
    table.report(run for of_name in runs.values() for run in of_name)
    errors(next(iter(runs.values()))[0])
    for name, of_name in runs.items():
        describe(name, of_name)
    print(f"Metrics, models and pictures are in {args.out}")


def changed(args: Namespace, **changes) -> Namespace:
    """The same flags, but for these changes."""
    return Namespace(**{**vars(args), **changes})


def folder_of(out: str, name: str, label: str) -> Path:
    """The folder of a run: that of a baseline stands beside that of the method."""
    return Path(out if name == label else f"{out}-{name.lower().replace(' ', '-')}")


def percent(share: float) -> str:
    """A share as percent with one decimal."""
    return f"{100 * share:.1f}"


def errors(run: Run) -> None:
    """Prints chance, and the sampling error of a share of 50 % on each of the test sets."""
    tests = {"ID": run.clients.held_out, **run.clients.tests}
    chance = percent(1 / len(run.data.classes))
    # 98 / sqrt(n) is 1.96 standard errors at 50 %, where they are largest
    found = [f"± {98 / len(x) ** 0.5:.1f} {name}" for name, x in tests.items() if len(x)]
    found = ", ".join(found).replace("ood", "OOD")
    print(f"Chance: {chance}. Sampling error (95 %), in points: at most {found}.")


def describe(name: str, runs: Sequence[Run]) -> None:
    """Prints what the models do at the end, class by class, on the OOD or else the ID samples."""
    if any(run.confusion is None for run in runs):
        return
    classes = runs[0].data.classes
    for run in runs:
        answers = run.confusion.sum(0)
        if answers.max() > 0.9 * answers.sum():
            answer = classes[answers.argmax()]
            print(f"{run.folder} nearly always answers {answer}: as good as a constant answer")
    confusion = sum(run.confusion for run in runs)
    labels = confusion.sum(1)
    shares = confusion.diagonal() / labels.clamp(min=1)  # a class may have no test image
    right = [f"{c}: {percent(share)}" for c, share in zip(classes, shares, strict=True)]
    print(f"{name}, right in the last round, by class: {', '.join(right[:20])}")
    constant = percent(labels.max() / labels.sum())
    print(f"  (always answering {classes[labels.argmax()]}: {constant})")


def verdict(runs: Runs, prediction: str, shows_in: Mapping[str, str]) -> None:
    """Prints what the idea predicts for the example, and what these runs gave."""
    label, name, *_ = runs
    found, holds = [], True
    for column, side in shows_in.items():
        scores = [[table.score(run, column) for run in of_name] for of_name in runs.values()]
        here, there, *_ = (round(np.mean(of_name), 1) for of_name in scores)
        # What is printed as equal is a tie
        holds = holds and (here > there if side == "above" else here < there)
        found.append(f"{column} is {here:.1f} ({label}) and {there:.1f} ({name})")
    print(f"\nPrediction: {prediction}.\nThis run: {', '.join(found)}.", end=" ")
    print("As predicted." if holds else "This is NOT as predicted.")
