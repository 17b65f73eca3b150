"""Runs a method and its baselines, with one seed or several, and says what came out."""

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np

from common import RunError, UserError, data, devices, ranks
from common.runner import plots, table
from common.runner.runs import Run, check_free, write_args
from common.runner.setup import assemble, build_model, prepare

Runs = Mapping[str, Sequence[Run]]  # label -> its runs, in the order of the plans


def run(
    args: Namespace,
    federate: Callable,
    label: str,
    baselines: Mapping[str, dict],
    prediction: str,
    shows_in: Mapping[str, str],
    build: Callable = build_model,
    picture: Callable[[Run, dict], None] | None = None,
) -> Runs | None:
    """Runs a method, and then each baseline with as many rounds and other flags.

    federate    called as federate(args, clients, trainer, state); yields the state and a row of
                metrics.csv after each round: see Run.record
    label       what the method is called beside its baselines
    baselines   label -> the flags that change; a baseline that changes nothing here is left out
    prediction  what the idea predicts for the example, against the first baseline: a sentence
    shows_in    where it must show: column of metrics.csv -> "above" or "below"
    build       called as build(args, shape, classes); returns the model
    picture     draws the method's picture, from a run and its last state

    The method runs first, in the folder args.out, and a baseline in args.out-NAME. With several
    seeds, or --test-domain all, both folders have a folder for each run. Then come the table,
    curves.png, and the verdict. If there are several processes, they are forked here, and do all of
    this together. Returns the runs, or None if others have run them. Raises UserError at the end,
    if a run has diverged or is damaged; the others are run and shown nevertheless. (Without the
    method's run there is none of its baselines, because nobody knows how many rounds they have.)
    """
    label = args.name or label  # a baseline that is resumed alone keeps its name
    changes, folders = {label: {}}, {label: args.out}
    for name, flags in baselines.items():
        if args.compare and any(getattr(args, flag) != value for flag, value in flags.items()):
            changes[name] = flags
            folders[name] = f"{args.out}-{name.lower().replace(' ', '-')}"
    for is_first in (True, False):  # if the data are downloaded, then once on each machine
        if is_first == (ranks.LOCAL_RANK == 0):
            dataset = data.load(args.dataset, args.data_dir, args.image_size)
        ranks.exchange(None)

    @lru_cache(maxsize=1)
    def data_of(seed: int) -> data.Dataset:
        return data.rotated(dataset, args.rotate, seed) if args.rotate else dataset

    plans = plans_of(args, data_of(args.seeds[0]).domains)
    for plan in plans.values():  # finds mistakes before anything is written
        if plan.seed == args.seeds[0]:
            clients, _ = assemble(plan, data_of(plan.seed), build)
    if ranks.RANK == 0 and not args.resume:
        for folder in folders.values():
            check_free(Path(folder))

    def run_one(args: Namespace) -> Run:
        clients, trainer, run = prepare(args, data_of(args.seed), build)
        devices.seed_all(args.seed, "round", run.t + 1)
        for state, row in federate(args, clients, trainer, run.state):
            run.record(state, row)
            devices.seed_all(args.seed, "round", run.t + 1)
        return run.finish(picture)

    def work() -> Runs:
        runs, failed = run_all(args, run_one, changes, plans, folders)
        if runs:
            show(args, runs)
        if args.is_example and not failed and len(runs) > 1:
            verdict(runs, prediction, shows_in)
        if failed:
            ranks.exchange(None)  # the first rank still draws, and ends as soon as another one does
            raise UserError("; ".join(failed))
        return runs

    count = ranks.how_many(args.processes, args.device, clients.per_round)
    try:
        return work() if count == 1 else ranks.start(work, count)
    except (KeyboardInterrupt, OSError) as e:
        if (Path(args.out) / "args.json").exists():
            e.add_note(f"continue with --resume {args.out}")
        raise


def plans_of(args: Namespace, domains: Sequence[str]) -> dict[str, Namespace]:
    """The flags of one run for each seed and test domain, by its place in the method's folder."""
    if args.test_domain != "all" or not domains:
        domains = [args.test_domain]
    several = len(args.seeds) * len(domains) > 1
    plans = {}
    for seed in args.seeds:
        for domain in domains:
            place = f"/{domain}" * (len(domains) > 1) + f"/seed{seed}"
            plans[place if several else ""] = changed(args, seed=seed, test_domain=domain)
    return plans


def run_all(args, run_one, changes, plans, folders) -> tuple[Runs, list[str]]:
    """Runs the method and its baselines by each plan, and says which of them have failed."""
    runs: dict[str, list[Run]] = {name: [] for name in changes}
    failed = []
    _, args.precision = devices.set_up(args.device, args.precision, args.model)  # of all runs
    if len(plans) > 1 and ranks.RANK == 0:
        write_args(Path(args.out), {"flags": vars(args)}, bool(args.resume))
    for i, (place, plan) in enumerate(plans.items(), start=1):
        rounds = plan.rounds
        for name, flags in changes.items():
            own = changed(
                plan, **flags, rounds=rounds, name=name, out=f"{folders[name]}{place}",
                precision=args.precision, compare=args.compare and not flags,
            )  # fmt: skip
            if flags:
                own.method_rounds = plan.rounds  # its own may depend on the seed
            try:
                runs[name].append(run_one(own))
            except RunError as e:
                failed.append(f"{own.out}: {e}")
                if not flags:  # nobody knows how many rounds its baselines would have
                    break
            else:
                rounds = runs[name][-1].t  # a baseline stops when the method has stopped
        if len(plans) > 1:
            print(f"{i} of {len(plans)} done", flush=True)
    return {name: of_name for name, of_name in runs.items() if of_name}, failed


def show(args: Namespace, runs: Runs) -> None:
    """Draws the curves, and prints the table and what the models do."""
    plots.curves(Path(args.out) / "curves.png", runs)
    label, *baselines = runs  # the first baseline comes last, because a table compares with that
    table.report({name: runs[name] for name in (label, *reversed(baselines))})
    for name, of_name in runs.items():
        describe(name, of_name)
    print(f"Metrics, models and pictures are in {args.out}")


def changed(args: Namespace, **changes) -> Namespace:
    """The same flags, but for these changes."""
    return Namespace(**{**vars(args), **changes})


def describe(name: str, runs: Sequence[Run]) -> None:
    """Prints what the models do at the end, class by class, on the OOD or else the ID samples."""
    if any(run.confusion is None for run in runs):
        return
    classes = runs[0].data.classes
    confusion = sum(run.confusion for run in runs)
    labels = confusion.sum(1)
    shares = (100 * confusion.diagonal() / labels).tolist()
    right = [
        f"{c}: {table.show(share, 'accuracies')}" for c, share in zip(classes, shares, strict=True)
    ]
    print(f"{name}, right in the last round, by class: {', '.join(right[:20])}")
    constant = 100 * labels.max() / labels.sum()
    print(f"  (always answering {classes[labels.argmax()]}: {constant:.1f})")


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
