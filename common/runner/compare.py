"""Runs a method and its baselines, with one seed or several, and says what came out."""

import ast
import inspect
import pickle
import traceback
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from io import BytesIO
from itertools import product
from pathlib import Path
from textwrap import dedent
from types import FunctionType

import numpy as np
import torch

from common import RunError, UserError, data, devices, models, ranks, splits
from common.folders import few, say
from common.runner import flags, plots, table
from common.runner.runs import Run, check_free, write_args
from common.train import LocalTraining, Trainer


def build_model(args: Namespace, shape: tuple, classes: int) -> models.Classifier:
    """The model of these flags for images of this shape (channels, height, width)."""
    return models.build(args.model, shape, classes, args.width, pretrained=args.pretrained)


def assemble(args: Namespace, dataset: data.Dataset, build: Callable = build_model) -> tuple:
    """The clients and the initial model. Raises UserError if the flags do not fit the data."""
    if len(dataset.classes) == 1:
        raise UserError(f"{dataset.name} has only one class, {dataset.classes[0]}: two are needed")
    with devices.seeded(torch.device("cpu"), args.seed, "model", 0):  # the same on any device
        clients = splits.make_clients(
            dataset,
            args.seed,
            args.partition,
            clients=args.clients,
            participating=args.participating,
            per_round=args.sample,
            alpha=args.dirichlet,
            silo_numbers=args.silos or (),
            silo_size=args.silo_size,
            test_domain=args.test_domain,
            held_out=args.held_out,
        )
        model = build(args, tuple(dataset.x.shape[1:]), len(dataset.classes))
    return clients, model


def local_training(args: Namespace) -> LocalTraining:
    """How a client trains, from these flags."""
    return LocalTraining(args.local_epochs, args.batch_size, args.lr, args.optimizer, args.momentum)


def run(
    args: Namespace,
    federate: Callable,
    label: str,
    baselines: Mapping,
    prediction: str,
    shows_in: Mapping,
    build: Callable = build_model,
) -> dict:
    """Runs a method, and then each baseline with as many rounds and other flags.

    federate    called as federate(args, clients, trainer, state); yields the state and a row of
                metrics.csv after each round: see Run.record
    label       what the method is called beside its baselines
    baselines   label -> the flags that change; a baseline that changes nothing here is left out
    prediction  what the idea predicts for the example, against the first baseline: a sentence
    shows_in    where it must show: column of metrics.csv -> "above" or "below"
    build       called as build(args, shape, classes); returns the model

    The method runs first, in the folder args.out, and a baseline in args.out-NAME. With several
    seeds, or --test-domain all, both folders have a folder for each run. Then come the table,
    curves.png, and the verdict. Returns label -> runs. Raises UserError at the end if a run failed;
    the others are run and shown nevertheless. (Without the method's run there is none of its
    baselines, because nobody knows how many rounds they have.)
    """
    sides = [changed(args, name=args.name or label)]  # a baseline resumed alone keeps its name
    for name, own in baselines.items():
        if args.compare and any(getattr(args, flag) != value for flag, value in own.items()):
            side = changed(args, **own, name=name, compare=False, method_rounds=args.rounds)
            side.out += f"-{name.lower().replace(' ', '-')}"
            sides.append(side)  # its own rounds may be fewer, as many as its method came to
    modules = flags.own_modules()
    if ranks.LOCAL_RANK:  # the first one may download the data
        ranks.exchange(None)
    dataset = data.load(args.dataset, args.data_dir, args.image_size)
    if not ranks.LOCAL_RANK:
        ranks.exchange(None)

    @lru_cache(maxsize=1)
    def data_of(seed):
        return data.rotated(dataset, args.rotate, seed) if args.rotate else dataset

    domains = [args.test_domain]
    if args.test_domain == "all":
        domains = data_of(args.seeds[0]).domains or domains
    plans = plans_of(sides, args.seeds, domains)
    ranks.agree({"seeds": args.seeds}, "", "start all alike")
    for method, *_ in plans[: len(domains)]:  # finds mistakes before anything is written
        clients, _ = assemble(method, data_of(method.seed), build)
        held = clients.label_counts[: clients.participating].sum(0)
        if untrained := [dataset.classes[c] for c in torch.nonzero(held == 0)]:
            say(f"no participating client has samples of {few(untrained)}")
    if not args.resume and not ranks.RANK:
        for side in sides:
            check_free(Path(side.out))

    count = ranks.how_many(args.processes, args.device, clients.per_round)
    several = len(plans) > 1

    def run_one(own):
        device, own.precision = devices.set_up(own.device, own.precision, own.model)
        dataset = data_of(own.seed)
        clients, model = assemble(own, dataset, build)
        run = Run(own, dataset, clients, model, device)
        if several and own is plans[0][0] and not ranks.RANK:  # Run() may have refused the flags
            write_args(Path(args.out), {"flags": {**vars(args), "precision": own.precision}}, True)
        first, say_once = {}, lru_cache(say)

        def look(state):
            if late := flags.own_modules().keys() - modules.keys():
                raise UserError(
                    f"{few(sorted(late))} is imported in a function, where a run does not see its "
                    "code: import it at the top of the file"
                )
            now = kept_aside({**modules, "trainer.local": trainer.local}, rounds, state)
            changed = [name for name in now if now[name] != first.setdefault(name, now[name])]
            if changed:
                say_once(
                    f"\n{few(changed)} changes, but is not in the state that federate() yields: a "
                    "resumed run lacks it, and each process has its own"
                )

        look_once = lru_cache(lambda t: look(None))

        def progress(t, share):
            run.progress(t, share)
            look_once(t)

        trainer = Trainer(
            dataset, clients, model, device, local_training(own), own.seed, own.precision,
            own.evaluate_every, own.rounds, progress,
        )  # fmt: skip
        if run.rows:
            vars(trainer).update({name: run.rows[-1].get(name, 0) for name in trainer.cost()})
        else:
            plots.clients(run)
        rounds = () if run.ended else federate(own, clients, trainer, run.state)
        devices.seed_all(own.seed, "round", run.t + 1)
        try:
            for state, row in rounds:
                run.record(state, row)
                look(state)
                devices.seed_all(own.seed, "round", run.t + 1)
        except SystemExit as e:
            raise UserError("sys.exit() has ended it, so return from federate() instead") from e
        return run.finish()

    def in_processes(own):
        """One run, in processes of its own, so that nothing that it keeps goes to the next one."""
        data_of(own.seed)  # here, because all of a seed's runs need the same
        return ranks.start(lambda: run_one(own), count) if count else run_one(own)

    runs, failed = {}, []
    try:
        for plan in plans:
            rounds = args.rounds
            for own in plan:
                own.rounds = rounds
                try:
                    run = in_processes(own)
                except Exception as e:
                    # A full disk is a plain OSError. All of torchrun's ranks meet a RunError
                    ends_all = type(e) is OSError or ranks.COUNT > 1 or not several
                    if ends_all and not isinstance(e, RunError):
                        raise
                    if not isinstance(e, UserError | OSError):
                        traceback.print_exc()
                    *_, why = str(e).strip().split("\n")  # below the traceback of another process
                    failed.append(f"{own.out}: {why}")
                    if own is plan[0]:  # nobody knows how many rounds its baselines would have
                        break
                else:
                    runs.setdefault(own.name, []).append(run)
                    rounds = run.t  # a baseline stops when the method has stopped
        if runs:
            plots.curves(Path(args.out) / "curves.png", runs)
            first, *others = runs  # the first baseline is the last row, with which all are compared
            table.report({name: runs[name] for name in (first, *reversed(others))})
            print(f"Metrics, models and pictures of {args.dataset} are in {args.out}")
    except (KeyboardInterrupt, OSError) as e:
        if (Path(args.out) / "args.json").exists():
            e.add_note(f"continue with --resume {args.out}")
        raise
    if args.is_example and not failed and len(runs) > 1:
        verdict(runs, prediction, shows_in)
    if failed and not ranks.RANK:  # which still draws when another one of torchrun's has ended
        raise UserError("; ".join(failed))
    return runs


def kept_aside(modules, rounds, state):
    """A dict of hashes of what a method may keep beside the state, by the variable's name.

    These are the variables of the modules but common/, functions included, for their attributes;
    and after a round, those of federate() from before its loop. Left out are models, whose weights
    somebody sets, and what cannot be pickled.

    modules  by name
    rounds   what federate() has returned
    state    what it has yielded in this round, or None while clients train
    """
    kept, found = {}, {}
    for place, module in modules.items():
        if "common" not in place:
            kept |= {f"{place}.{name}": value for name, value in vars(module).items()}
    with suppress(Exception):  # no generator, or no source
        here, source = rounds.gi_frame.f_locals, inspect.getsource(rounds.gi_code)
        for statement in ast.parse(dedent(source)).body[0].body:
            parts = [*ast.walk(statement)]
            if any(isinstance(part, ast.For | ast.While | ast.Yield) for part in parts):
                continue
            for part in parts:
                name = getattr(part, "id", "")
                if name in here.keys() - {*state} and isinstance(part.ctx, ast.Store):
                    kept[f"{name} of federate()"] = here[name]
    for name, value in kept.items():
        with suppress(Exception):
            if ".__" not in name and not isinstance(value, torch.nn.Module | torch.nn.Parameter):
                Contents(text := BytesIO()).dump(value)
                found[name] = hash(text.getvalue())
    return found


class Contents(pickle.Pickler):
    """Writes what a function keeps, too, where pickle writes its name, or refuses a lambda."""

    def reducer_override(self, value):
        if not isinstance(value, FunctionType):
            return NotImplemented
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        return tuple, ([value.__qualname__, value.__defaults__, vars(value), cells],)


def plans_of(sides: Sequence, seeds: Sequence, domains: Sequence) -> list:
    """For each seed and test domain the flags of a run of each side: the method, its baselines."""
    plans = []
    for seed, domain in product(seeds, domains):
        place = f"/{domain}" if len(domains) > 1 else ""
        if len(seeds) * len(domains) > 1:
            place += f"/seed{seed}"
        here = {"seed": seed, "seeds": [seed], "test_domain": domain}
        plans.append([changed(side, out=f"{side.out}{place}", **here) for side in sides])
    return plans


def changed(args: Namespace, **changes) -> Namespace:
    """The same flags, but for these changes."""
    return Namespace(**(vars(args) | changes))


def verdict(runs: Mapping, prediction: str, shows_in: Mapping):
    """Prints what the idea predicts for the example, and what these runs gave."""
    label, baseline, *_ = runs
    found, holds = [], True
    for column, side in shows_in.items():
        here, there = (
            round(np.mean([table.score(run, column) for run in runs[name]]), 1)
            for name in (label, baseline)
        )
        # What is printed as equal is a tie
        holds = holds and (here > there if side == "above" else here < there)
        found.append(f"{column} is {here:.1f} ({label}) and {there:.1f} ({baseline})")
    print(f"\nPrediction: {prediction}.\nThis run: {', '.join(found)}.", end=" ")
    print("As predicted." if holds else "This is NOT as predicted.")
