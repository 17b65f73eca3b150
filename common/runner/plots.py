"""The pictures. They share one style, and can be read in greyscale and at a README's width."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from scipy.spatial import ConvexHull
from torch import Tensor

from common import ranks
from common.data import Dataset
from common.runner.measures import MEASURES, in_percent, measure_of
from common.splits import Clients

# Those of Okabe and Ito
COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000"]
LINES = ["-", "--", ":", "-."]
BELOW = "outside lower center"  # a legend below the whole figure
STYLE = {
    "font.size": 9,
    "axes.titlesize": 9,
    "figure.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
    "figure.constrained_layout.h_pad": 0.08,  # else a first title touches the edge
    "image.aspect": "auto",
    "image.cmap": "Greys",
    "image.interpolation": "nearest",
    "savefig.dpi": 150,
    "text.parse_math": False,
}


@contextmanager
def picture(file: Path, width: float, height: float) -> Iterator[Figure]:
    """A figure of this size in inches, saved at the end of the block.

    It begins with matplotlib's defaults, because a user's own could turn images upside down.
    """
    with style.context(STYLE, after_reset=True):
        figure = Figure(figsize=(width, height))
        yield figure
        if ranks.RANK == 0:
            figure.savefig(file, metadata={"Software": None})


def curves(file: Path, runs: Mapping[str, Sequence]) -> None:
    """Columns of metrics.csv against rounds, with a vertical line where UEFL's iterations end.

    runs  label -> its runs; drawn are the rounds in which all of them have a number
    """
    (first, *_), *_ = runs.values()
    found = []
    for column, measure in MEASURES.items():
        if not measure.title or not any(column in row for row in first.rows):
            continue
        of_labels = {}
        for label, of_label in runs.items():
            numbers = [{r["round"]: r[column] for r in run.rows if column in r} for run in of_label]
            at = sorted(set.intersection(*map(set, numbers)))
            values = np.array([[of_run[t] for t in at] for of_run in numbers])
            of_labels[label] = at, values * (100 if in_percent(column) else 1)
        found.append((column, measure.title, of_labels))
    *ends, _ = {row.get("iteration"): row["round"] for row in first.rows}.values()
    panels(file, found, len(first.data.classes), ends)


def panels(file: Path, found: Sequence[tuple], classes: int, ends: Sequence[int] = ()) -> None:
    """Curves over the rounds: each label's mean, and a thin line for each run. Dotted is chance.

    found  (column, its name, label -> (rounds, numbers [runs, rounds])) of each panel
    ends   rounds with a vertical line, because UEFL adds words after them
    """
    # In one of the panels is enough, because they have one legend
    several = any(len(values) > 1 for *_, of in found for _, values in of.values())
    with picture(file, 2.6 * len(found), 2.9) as figure:
        all_axes = figure.subplots(1, len(found), squeeze=False)[0]
        for axes, (column, name, of_labels) in zip(all_axes, found, strict=True):
            for i, (label, (at, values)) in enumerate(of_labels.items()):
                mean_and_runs(axes, i, at, values, label)
            if several:
                axes.plot([], color="0.6", lw=0.6, label="each run")
            for end in ends:
                label = "words are added" if end == ends[0] else None
                axes.axvline(end, color="0.7", lw=0.8, label=label)
            if unit := measure_of(column).unit:
                name += f" ({unit})"
            axes.set(title=name, xlabel="round", ylim=(0, 100 if in_percent(column) else None))
            if in_percent(column):
                axes.axhline(100 / classes, color="0.5", ls=":", lw=0.9, label="chance")
            axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        figure.legend(*all_axes[0].get_legend_handles_labels(), loc=BELOW, ncols=2 * len(found))


def mean_and_runs(axes: Axes, i: int, at: Sequence[int], values: np.ndarray, label: str) -> None:
    """The i-th curve of a panel: the mean of values [runs, rounds], and a thin line for each."""
    if len(values) > 1:
        axes.plot(at, values.T, color=COLOURS[i], alpha=0.3, lw=0.6)
    axes.plot(at, values.mean(0), LINES[i % 4], color=COLOURS[i], label=label, zorder=3)


def partition(file: Path, data: Dataset, clients: Clients) -> None:
    """How many training samples of each class a client holds; right of the line nobody trains."""
    m, n, classes = clients.participating, len(clients.train), data.classes
    size = np.clip(0.09 * n + 2, 4.5, 10), 1.4 + 0.16 * min(len(classes), 30)
    with picture(file, *size) as figure:
        axes = figure.subplots()
        figure.colorbar(axes.imshow(clients.label_counts.T.numpy(), vmin=0), label="samples")
        axes.set(xlabel=f"client (0 to {m - 1} participate)", ylabel="class")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if len(classes) <= 20:
            axes.set_yticks(range(len(classes)), classes)
        if m < n:
            axes.axvline(m - 0.5, color=COLOURS[1])


def weights(run, counts: Tensor, entropies: Tensor, alphas: Mapping[str, Tensor]) -> None:
    """The labels and the aggregation weights of clients, ordered by the entropy of their labels.

    counts     [M, C] labels of each client
    entropies  [M] in nats
    alphas     name of a weighting -> [M], sum 1; the weights of the first one are filled
    """
    order = np.lexsort((counts.argmax(1), entropies))  # if equal, by the largest class
    held = (counts / counts.sum(1, keepdim=True))[order].cumsum(1)
    heights = torch.linspace(0.005, 0.995, 100).repeat(len(order), 1)
    with picture(run.folder / "weights.png", 7.0, 4.2) as figure:
        labels, weight = figure.subplots(2, 1, sharex=True)
        labels.imshow(torch.searchsorted(held, heights).T.numpy(), "turbo")
        labels.set(title="what a client holds: a colour is a class", yticks=[])
        edges = np.arange(len(order) + 1) - 0.5
        for i, (name, alpha) in enumerate(alphas.items()):
            weight.stairs(
                100 * alpha[order].numpy(), edges, color=COLOURS[i], ls=LINES[i], lw=1.5,
                label=name, fill=i == 0, baseline=0 if i == 0 else None,  # of others only the top
            )  # fmt: skip
        weight.set(
            title="how much it counts in the average (percent)",
            xlabel="client, from the lowest entropy of labels to the highest",
        )
        figure.legend(loc=BELOW, ncols=4)


@contextmanager
def selections(run, name: str) -> Iterator[tuple[Axes, np.ndarray]]:
    """A picture with free axes at the left, and the colours of the participating clients [M].

    At the right is a bar for each client: in how many rounds it trained. The dotted line is the
    mean. The smallest of the groups of clients stands out.
    """
    m = run.clients.participating
    groups = np.array(run.clients.groups[:m])
    largest_first = [group for group, _ in Counter(groups).most_common()]
    palette = cycle([COLOURS[1], "0.6", *COLOURS[2:]])
    colours = dict(zip(reversed(largest_first), palette, strict=False))
    times = np.bincount([k for row in run.rows for k in row["selected"]], minlength=m)
    with picture(run.folder / name, 7.6, 4.2) as figure:
        left, axes = figure.subplots(1, 2, width_ratios=[1.6, 1])
        yield left, np.array([colours[group] for group in groups])
        for group, colour in colours.items():
            (mine,) = np.nonzero(groups == group)
            label = f"holds {group}" if group else "clients"
            axes.barh(mine, times[mine], color=colour, label=label)
        axes.axvline(times.mean(), color="black", ls=":", lw=0.9)
        axes.set(
            title="rounds in which a client trained\n(dotted: the mean)",
            xlabel="rounds", ylabel="client", ylim=(-1, m),
        )  # fmt: skip
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        figure.legend(loc=BELOW, ncols=4)


def similarity(run, cosines: Tensor) -> None:
    """How similar each client's latest update is to the others', and how often it was selected.

    cosines  of the updates [M, M]
    """
    others = cosines.clone().fill_diagonal_(torch.nan).numpy()
    with selections(run, "similarity.png") as (axes, colours):
        axes.plot(others, run.clients.ids, "|", color="0.85", ms=3)
        largest = np.fmax.reduce(others, axis=1)  # NaN if there is no other client
        axes.scatter(largest, run.clients.ids, s=22, color=colours, zorder=3)
        axes.set(
            title="cosine similarity of a client's update to those\nof the others (dot: largest)",
            xlabel="cosine similarity", ylabel="client", ylim=(-1, len(others)),
        )  # fmt: skip


def hull(run, points: Tensor, vertices: Tensor) -> None:
    """The clients' latest updates with their hull, as a shadow in a plane; how often each trained.

    points    their principal components, in which the hull was built [M, dim]
    vertices  the ids of those on the hull
    """
    dim = points.shape[1]
    xy = F.pad(points, (0, 2))[:, :2].numpy()  # if dim is below 2, what is missing is 0
    corners = vertices.numpy()
    with selections(run, "hull.png") as (axes, colours):
        if dim == 2:  # the shadow of a hull in more dimensions would be a tangle
            axes.fill(*xy[ConvexHull(xy).vertices].T, fc="none", ec="0.8")
        axes.scatter(*xy.T, s=12, color=colours)
        axes.scatter(*xy[corners].T, s=80, color=colours[corners], ec="black")
        axes.set(
            title="the clients' updates after the last round\n"
            f"(large: a corner in {dim} dimensions)",
            xlabel="first principal component", ylabel="second", xticks=[], yticks=[],
        )  # fmt: skip


def uncertainties(run, state: dict) -> None:
    """For UEFL: the silos' uncertainties at the end of each iteration, and who is above the line.

    In the bars are the codewords that a silo has had until then. A silo gets more if its
    uncertainty is above (1 + gamma) times the smallest one. Without a codebook nothing is drawn.
    """
    if not run.args.codebook_size:
        return
    ends = {row["iteration"]: row for row in run.rows if "uncertainties" in row}
    unit = "°" if run.args.rotate else ""
    names = [f"silo {k}, {run.clients.groups[k]}{unit}" for k in run.clients.ids]
    size = max(5, 2.4 * len(ends) + 1), 1.3 + 0.25 * len(names)
    with picture(run.folder / "uncertainties.png", *size) as figure:
        figure.suptitle("a silo whose bar crosses the line gets more words, if the run goes on")
        all_axes = figure.subplots(1, len(ends), squeeze=False, sharex=True, sharey=True)[0]
        for axes, row in zip(all_axes, ends.values(), strict=True):
            e = np.array(row["uncertainties"])
            threshold = (1 + run.args.gamma) * e.min()
            axes.barh(names, e, color=np.where(e > threshold, COLOURS[3], "0.8"))
            for k, n in enumerate(row["codewords"]):
                axes.text(0, k, f" {n:.0f} words", va="center")
            axes.axvline(threshold, color="black", ls=":", lw=0.9)
            axes.set(title=f"after round {row['round']}", xlabel="uncertainty (nats)")
        all_axes[0].invert_yaxis()
