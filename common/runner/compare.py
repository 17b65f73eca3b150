"""Runs a method and its baselines, with one seed or several, and says what came out."""

import traceback
from argparse import Namespace
from functools import lru_cache, partial
from itertools import product
from pathlib import Path

import numpy as np
import torch

from common import RunError, UserError, data, devices, models, ranks, splits
from common.folders import few, say
from common.runner import plots, table
from common.runner.runs import Run, check_free, own_modules, write_args
from common.runner.watch import Watch
from common.train import LocalTraining, Trainer


class State(dict):
    """The state that federate() gets. Where it reads the round, that round's draws begin.

    So they do not depend on what it has drawn before, which is the same after a resume.
    """

    def get(self, name, default=None):
        if name == "t":
            self.begin()
        return super().get(name, default)


def build_model(args, shape, classes):
    """The model of these flags for images of this shape (channels, height, width)."""
    return models.build(args.model, shape, classes, args.width, pretrained=args.pretrained)


def assemble(args, dataset, build=build_model):
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


def local_training(args):
    """How a client trains, from these flags."""
    return LocalTraining(args.local_epochs, args.batch_size, args.lr, args.optimizer, args.momentum)


def run(args, federate, label, baselines, prediction, shows_in, build=build_model):
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
    modules = own_modules()
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
        if several and not ranks.RANK:  # after Run(), which may have refused the flags
            write_args(Path(args.out), {"flags": {**vars(args), "precision": own.precision}}, True)
        look_once = lru_cache(lambda t: watch.look(rounds, None))

        def progress(t, share):
            run.progress(t, share)
            look_once(t)

        trainer = Trainer(
            dataset, clients, model, device, local_training(own), own.seed, own.precision,
            own.evaluate_every, own.rounds, progress,
        )  # fmt: skip
        watch = Watch(modules, trainer, run.kept)
        if run.rows:
            vars(trainer).update({name: run.rows[-1].get(name, 0) for name in trainer.cost()})
        else:
            plots.clients(run)
        state = State(run.state)
        state.begin = partial(devices.seed_all, own.seed, "round", run.t + 1)
        rounds = () if run.ended else federate(own, clients, trainer, state)
        devices.seed_all(own.seed, "start")
        try:
            for state, row in rounds:
                watch.look(rounds, state)
                run.record(state, row)
                devices.seed_all(own.seed, "round", run.t + 1)
        except SystemExit as e:
            raise UserError("sys.exit() has ended it, so return from federate() instead") from e
        return run.finish()

    runs, failed = {}, []
    try:
        for plan in plans:
            rounds = args.rounds
            for own in plan:
                own.rounds = rounds
                try:
                    data_of(own.seed)  # here, because all of a seed's runs need the same
                    one = partial(run_one, own)
                    # In processes of its own, so that nothing that it keeps goes to the next one
                    run = ranks.start(one, count) if count * len(sides) * len(plans) > 1 else one()
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


def plans_of(sides, seeds, domains):
    """For each seed and test domain the flags of a run of each side: the method, its baselines."""
    plans = []
    for seed, domain in product(seeds, domains):
        place = f"/{domain}" if len(domains) > 1 else ""
        if len(seeds) * len(domains) > 1:
            place += f"/seed{seed}"
        here = {"seed": seed, "seeds": [seed], "test_domain": domain}
        plans.append([changed(side, out=f"{side.out}{place}", **here) for side in sides])
    return plans


def changed(args, **changes):
    """The same flags, but for these changes."""
    return Namespace(**(vars(args) | changes))


def verdict(runs, prediction, shows_in):
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
