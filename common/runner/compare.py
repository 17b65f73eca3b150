"""Runs a method and its baselines, with one seed or several, and says what came out."""

import traceback
from argparse import Namespace
from functools import lru_cache, partial
from itertools import product
from pathlib import Path

import numpy as np
import torch

from common import (
    RunError,
    UserError,
    chance,
    data,
    devices,
    few,
    models,
    ranks,
    splits,
)
from common.ranks import say
from common.runner import flags, plots, runs, table
from common.train import LocalTraining, Trainer

# Another file is taken for a copy of one of these, and its row has the file's name
METHODS = ["fedavg", "entropy_weighting", "minimax_select", "convex_hull_select", "fediir", "uefl"]
CONTRACT = (
    "what a round needs is in the state that federate() yields; what it draws comes from "
    "random_at, or from the global generators of torch, numpy or Python inside that round"
)


def build_model(args, shape, classes):
    """The model of these flags for images of this shape (channels, height, width)."""
    return models.build(args.model, shape, classes, args.width, pretrained=args.pretrained)


def assemble(args, dataset, build=build_model):
    """The clients and the initial model. Raises UserError if the flags do not fit the data."""
    if len(dataset.classes) == 1:
        raise UserError(f"{dataset.name} has only one class, {dataset.classes[0]}: two are needed")
    with chance.seeded(torch.device("cpu"), args.seed, "model", 0):  # the same on any device
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
    return LocalTraining(
        epochs=args.local_epochs,
        steps=args.local_steps,
        batch_size=args.batch_size,
        lr=args.lr,
        lr_decay=args.lr_decay,
        optimizer=args.optimizer,
        momentum=args.momentum,
        weight_decay=args.weight_decay,
    )


def run(args, federate, label, baselines, example, build=build_model):
    """Runs a method, and then each baseline with as many rounds and other flags.

    federate    called as federate(args, clients, trainer, **state), without a state at the start;
                yields the next state and a row of metrics.csv after each round: see Run.record
    label       what the method is called beside its baselines
    baselines   label -> the flags that change; a baseline that changes nothing here is left out
    example     "prediction": what the idea predicts for the example, against the first baseline;
                "shows_in": where it must show, column of metrics.csv -> "above" or "below"
    build       called as build(args, shape, classes); returns the model

    The method runs first, in the folder args.out, and a baseline in args.out-NAME. With several
    seeds, or --test-domain all, both folders have a folder for each run. Then come the table,
    curves.png, and the verdict. Returns label -> runs. Raises UserError at the end if a run failed;
    the others are run and shown nevertheless. (Without the method's run there is none of its
    baselines, because nobody knows how many rounds they have.)
    """
    sides = sides_of(args, label, baselines)
    if ranks.LOCAL_RANK:  # the first one may download the data
        ranks.barrier()
    dataset = data.load(args.dataset, args.data_dir, args.image_size)
    if not ranks.LOCAL_RANK:
        ranks.barrier()

    @lru_cache(maxsize=1)
    def data_of(seed):
        return data.rotated(dataset, args.rotate, seed) if args.rotate else dataset

    domains = [args.test_domain]
    if args.test_domain == "all":
        domains = data_of(args.seeds[0]).domains or domains
    plans = plans_of(sides, args.seeds, domains)
    ranks.agree({"seeds": args.seeds}, "start all alike")
    for own, *_ in plans[: len(domains)]:  # finds mistakes before anything is written
        clients, _ = assemble(own, data_of(own.seed), build)
        held = clients.label_counts[: clients.participating].sum(0)
        if untrained := [name for name, n in zip(dataset.classes, held) if not n]:
            say(f"no participating client has samples of {few(untrained)}")
        if clients.participating < 2:
            say("only one client participates, so all selections are one: raise --participating")
    if not args.resume and not ranks.RANK:
        for side in sides:
            runs.check_free(Path(side.out))

    count = ranks.how_many(args.processes, args.device, clients.per_round)
    command = args if len(plans) > 1 else None
    # Each run has processes of its own, so that nothing that it keeps goes to the next one
    forks = count > 1 or (count == 1 and len(plans) * len(sides) > 1)

    def one(own):
        work = partial(run_one, own, federate, data_of(own.seed), build, command)
        return ranks.start(work, count) if forks else work()

    try:
        found, failed = run_all(plans, one)
        if found:
            first, *others = found  # the first baseline is the last row, and all compare with it
            table.report({name: found[name] for name in (first, *reversed(others))})
            plots.try_to(plots.curves, Path(args.out) / "curves.png", found)
            print(f"Metrics, models and pictures of {args.dataset} are in {args.out}")
    except (KeyboardInterrupt, OSError) as e:
        if (Path(args.out) / "args.json").exists():
            e.add_note(f"continue with --resume {args.out}")
        raise
    if not failed and len(found) > 1:
        if args.is_example:
            verdict(found, **example)
        else:
            print("No verdict, because the prediction is of the example without flags.")
    if failed and not ranks.RANK:  # which still draws when another one of torchrun's has ended
        raise UserError("; ".join(failed))
    return found


def sides_of(args, label, baselines):
    """The flags of the method, and of each baseline that changes something."""
    if args.method not in METHODS:
        label = args.method
    sides = [changed(args, name=str(args.name or label))]  # a baseline resumed alone keeps its name
    for name, own in baselines.items():
        flags.refuse_unknown(f"the baseline {name}", own, args)
        if args.compare and any(getattr(args, flag) != value for flag, value in own.items()):
            side = changed(args, **own, name=str(name), compare=False)
            side.out += f"-{side.name.lower().replace(' ', '-')}"
            if side.iterations == 1:  # in UEFL this is one long iteration
                side.rounds += (args.iterations - 1) * args.later_rounds
            sides.append(side)
    if len({side.name.lower() for side in sides}) < len(sides):
        raise UserError(f"two rows have one name: {', '.join(side.name for side in sides)}")
    return sides


def run_all(plans, one):
    """Runs all plans by one(flags). Returns label -> runs, and a line for each run that failed."""
    found = {}
    failed = []
    for plan in plans:
        stop = None
        for own in plan:
            own.stop = stop
            try:
                run = one(own)
            except Exception as e:
                # A full disk is a plain OSError. All of torchrun's ranks meet a RunError
                ends_all = type(e) is OSError or ranks.COUNT > 1 or len(plans) == 1
                ends_this_one = isinstance(e, RunError)
                if ends_all and not ends_this_one:
                    raise
                if not isinstance(e, UserError | OSError):
                    traceback.print_exc()
                why = str(e).strip().split("\n")[-1]  # below another process's traceback
                failed.append(f"{own.out}: {why}")
                if own is plan[0]:  # nobody knows how many rounds its baselines would have
                    break
            else:
                found.setdefault(own.name, []).append(run)
                stop = run.t  # a baseline stops when the method has stopped
    return found, failed


def run_one(own, federate, dataset, build, command):
    """One run, in each of its ranks: federate() with these flags. Returns the Run.

    command  the flags of the command if it has several runs, or None

    The second round is rehearsed: it begins again, as in a new program, from a copy of the state
    that the first one has yielded. See compare_rounds.
    """
    device, own.precision = devices.set_up(own.device, own.precision, own.model)
    clients, model = assemble(own, dataset, build)
    setup = f"clients: {len(clients.train)}, participating: {clients.participating}"
    # Without --sample the hull trains all corners, and nobody knows yet how many. UEFL trains all
    if own.sample or ("hull_dim" not in own and "codebook_size" not in own):
        setup += f", in a round: {clients.per_round}"
    ranks.say_once(f"{setup}; {device}, {own.precision}, processes: {ranks.COUNT}")
    run = runs.Run(own, dataset, clients, model, device, command)

    def begin(clients, model, state, progress):
        trainer = Trainer(
            dataset, clients, model, device, local_training(own), own.seed, own.precision,
            own.evaluate_every, run.total, progress,
        )  # fmt: skip
        if run.rows:
            trainer.samples = run.rows[-1].get("samples", 0)
            trainer.megabytes = run.rows[-1].get("megabytes", 0)
        try:
            return federate(own, clients, trainer, **state)
        except TypeError as e:
            raise UserError(f"{e}: its parameters after trainer are what it yields as state") from e

    def rehearse(before, *of_round):
        old = runs.weights_in(before).clone()  # federate() may change it in place
        again = begin(*assemble(own, dataset, build), before, lambda t, share: run.progress(t, 0))
        chance.seed_all(own.seed, "round", run.t + 1)
        compare_rounds(old, of_round, next(iter(again), ({}, {})))

    try:
        if not run.rows:
            plots.try_to(plots.clients, run)
        rounds = () if run.ended else begin(clients, model, run.state, run.progress)
        chance.seed_all(own.seed, "round", run.t + 1)
        for i, (state, row) in enumerate(rounds, 1):
            if i == 1:
                copy = runs.copied(state, device)
            if i == 2:
                rehearse(copy, state, row)
                copy = None  # a table may be large
            run.record(state, row)
            if run.t == own.stop:
                break
            chance.seed_all(own.seed, "round", run.t + 1)
        return run.finish()
    except SystemExit as e:
        raise UserError("sys.exit() has ended it, so return from federate() instead") from e
    finally:
        if run.bar:
            run.bar.close()


def compare_rounds(old, first, second):
    """Raises UserError if a round comes out otherwise when it begins from the state alone.

    old            the weights before it [P]
    first, second  the state and the row that it yields

    On a CPU both must be the same, but for a clock. A GPU's sums may come in another order, so
    there the weights may differ by a hundredth of what the round has changed.
    """
    (state, row), (other, other_row) = first, second
    w = runs.weights_in(state)
    may_differ = 0.01 * (w - old).norm() if w.is_cuda else 0.0
    differ = []
    if not other or (w - runs.weights_in(other)).norm() > may_differ:
        differ.append("model")
    if not w.is_cuda:
        here, there = runs.cells(row), runs.cells(other_row)
        differ += [column for column in here if here[column] != there.get(column)]
    for of_rank in ranks.exchange(differ):  # in all processes, or the others would wait
        if of_rank:
            raise UserError(
                f"round {state['t']} comes to another {few(of_rank)} if it begins again from the "
                f"state of the round before: {CONTRACT}"
            )


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


def verdict(found, prediction, shows_in):
    """Prints what the idea predicts for the example, and what these runs gave."""
    label, baseline, *_ = found
    texts = []
    holds = True
    for column, side in shows_in.items():
        scores = [[table.score(run, column) for run in found[name]] for name in (label, baseline)]
        here, there = np.mean(scores, axis=1).round(1)  # what is printed as equal is a tie
        holds = holds and (here > there if side == "above" else here < there)
        texts.append(f"{column} is {here:.1f} ({label}) and {there:.1f} ({baseline})")
    print(f"\nPrediction: {prediction}.\nThis run: {', '.join(texts)}.", end=" ")
    print("As predicted." if holds else "This is NOT as predicted.")
