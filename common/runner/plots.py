"""The pictures. They share one style, and can be read in greyscale and at a README's width."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import cycle, pairwise
from pathlib import Path

import matplotlib
import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from scipy.spatial import ConvexHull
from torch import Tensor

from common import ranks
from common.data import Dataset
from common.runner.measures import in_percent, measure_of, shown
from common.splits import Clients

# Those of Okabe and Ito
COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000"]
LINES = ["-", "--", ":", "-."]
STYLE = {
    "font.size": 9,
    "axes.titlesize": 9,
    "figure.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
    "savefig.dpi": 150,
    "text.parse_math": False,
    "text.usetex": False,
}


@contextmanager
def picture(file: Path, width: float, height: float) -> Iterator[Figure]:
    """A figure of this size in inches, saved at the end of the block."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height))
        yield figure
        if ranks.RANK == 0:
            figure.savefig(file, metadata={"Software": None})


def curves(file: Path, runs: Mapping[str, Sequence]) -> None:
    """Columns of metrics.csv against rounds, with a vertical line where UEFL's iterations end.

    runs  label -> its runs. With several test domains, each of these has a panel of its OOD
          accuracy, and nothing else is drawn
    """
    ours = next(iter(runs.values()))
    first = ours[0].rows
    domains = dict.fromkeys(run.args.test_domain for run in ours)
    wanted = [(c, "", domains) for c in shown("curves") if any(c in row for row in first)]
    if len(domains) > 1:
        wanted = [("ood_accuracy", f", {domain}", [domain]) for domain in domains]
    found = []
    for column, domain, of_panel in wanted:
        of_labels = {}
        for label, of_label in runs.items():
            mine = [run for run in of_label if run.args.test_domain in of_panel]
            of_labels[label] = series(mine, column)
        found.append((column, measure_of(column).title + domain, of_labels))
    ends = [a["round"] for a, b in pairwise(first) if a.get("iteration") != b.get("iteration")]
    panels(file, found, len(ours[0].data.classes), ends)


def panels(file: Path, found: Sequence[tuple], classes: int, ends: Sequence[int] = ()) -> None:
    """Curves over the rounds: each label's mean, and a thin line for each run. Dotted is chance.

    found  (column, its name, label -> (rounds, numbers [runs, rounds])) of each panel
    ends   rounds with a vertical line, because UEFL adds words after them
    """
    with picture(file, 2.6 * len(found), 2.9) as figure:
        all_axes = figure.subplots(1, len(found), squeeze=False)[0]
        for axes, (column, name, of_labels) in zip(all_axes, found, strict=True):
            for i, (label, (at, values)) in enumerate(of_labels.items()):
                mean_and_runs(axes, i, at, values, label)
            if any(len(values) > 1 for _, values in of_labels.values()):
                axes.plot([], color="0.6", lw=0.6, label="each run")
            for end in ends:
                label = "words are added" if end == ends[0] else None
                axes.axvline(end, color="0.7", lw=0.8, label=label)
            unit = f" ({unit})" if (unit := measure_of(column).unit) else ""
            axes.set(title=name + unit, xlabel="round", ylim=(0, None))
            if in_percent(column):
                axes.axhline(100 / classes, color="0.5", ls=":", lw=0.9, label="chance")
                axes.set(ylim=(0, 100))
            axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        legend_below(all_axes[0], 2 * len(found))


def mean_and_runs(axes: Axes, i: int, at: Sequence[int], values: np.ndarray, label: str) -> None:
    """The i-th curve of a panel: the mean of values [runs, rounds], and a thin line for each."""
    if len(values) > 1:
        axes.plot(at, values.T, color=COLOURS[i], alpha=0.3, lw=0.6)
    axes.plot(at, values.mean(0), LINES[i % 4], color=COLOURS[i], label=label, zorder=3)


def legend_below(axes: Axes, columns: int) -> None:
    """The legend of these axes, below the whole figure."""
    handles = axes.get_legend_handles_labels()
    axes.figure.legend(*handles, loc="outside lower center", ncols=columns)


def series(runs: Sequence, column: str) -> tuple[list[int], np.ndarray]:
    """The rounds in which all runs have a number in this column, and the numbers [runs, rounds].

    Shares are in percent.
    """
    found = [{row["round"]: row[column] for row in run.rows if column in row} for run in runs]
    at = sorted(set.intersection(*map(set, found)))
    values = np.array([[of_run[t] for t in at] for of_run in found])
    return at, values * (100 if in_percent(column) else 1)


def partition(file: Path, data: Dataset, clients: Clients) -> None:
    """Which client holds what: its training samples by class, and by domain if there are any."""
    panels = [("class", data.y, data.classes)]
    if data.domain is not None:
        panels.append(("domain", data.domain, data.domains))
    m, n = clients.participating, len(clients.train)
    sizes = [min(len(names), 30) for *_, names in panels]
    width = np.clip(0.09 * n + 2, 4.5, 10)
    with picture(file, width, 1.4 + 0.16 * sum(sizes)) as figure:
        all_axes = figure.subplots(len(panels), 1, sharex=True, height_ratios=sizes, squeeze=False)
        for axes, (what, values, names) in zip(all_axes[:, 0], panels, strict=True):
            counts = [torch.bincount(values[held], minlength=len(names)) for held in clients.train]
            heat(axes, torch.stack(counts, 1), "samples")
            axes.set(ylabel=what)
            if len(names) <= 20:
                axes.set_yticks(range(len(names)), names)
            if m < n:
                axes.axvline(m - 0.5, color=COLOURS[1])
        axes.set(xlabel=f"client: {m} participate" + f" | {n - m} do not" * (m < n))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def samples(file: Path, data: Dataset, title: str) -> None:
    """Ten images from all over the first ten domains, one row for each, with their classes.

    title  of a row, in which {} is the domain's name
    """
    width, domains = data.x.shape[3], min(len(data.domains), 10)
    with picture(file, 7.5, 1.3 * domains + 0.2) as figure:
        figure.get_layout_engine().set(h_pad=0.08)  # the first title else touches the edge
        all_axes = figure.subplots(domains, 1, squeeze=False)[:, 0]
        for d, axes in enumerate(all_axes):
            positions = torch.nonzero(data.domain == d).flatten()  # folders are sorted by class
            positions = positions[torch.linspace(0, len(positions) - 1, 10).long()]
            tiles = F.pad(data.x[positions], (1, 1), value=255)  # with a gap
            row = torch.cat([*tiles], dim=2)  # side by side
            axes.imshow(row.permute(1, 2, 0).numpy(), cmap="gray")
            middles = (width + 2) * (np.arange(10) + 0.5)
            names = [
                data.classes[c] + only_colour(x)
                for x, c in zip(data.x[positions], data.y[positions], strict=True)
            ]
            axes.set_xticks(middles, names, fontsize=7)
            axes.set(title=title.format(data.domains[d]), yticks=[])
            axes.spines[:].set_visible(False)


def only_colour(image: Tensor) -> str:
    """ ", red" if an image [3, H, W] has no other, for those who cannot tell it from green."""
    lit = [name for name, x in zip(("red", "green", "blue"), image, strict=False) if x.any()]
    return f"\n{lit[0]}" if len(image) == 3 and len(lit) == 1 else ""


def heat(axes: Axes, values: Tensor, label: str) -> None:
    """A matrix as grey squares, with a scale beside it that begins at zero."""
    image = axes.imshow(
        values.numpy(), aspect="auto", cmap="Greys", interpolation="nearest", vmin=0
    )
    axes.figure.colorbar(image, ax=axes, label=label)


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
        classes = torch.searchsorted(held, heights).T.numpy()
        labels.imshow(classes, "turbo", aspect="auto", interpolation="nearest")
        labels.set(title="what a client holds: a colour is a class", yticks=[])
        edges = np.arange(len(order) + 1) - 0.5
        for i, (name, of_clients) in enumerate(alphas.items()):
            heights = 100 * of_clients[order].numpy()
            weight.stairs(
                heights, edges, color=COLOURS[i], ls=LINES[i], fill=i == 0, label=name, lw=1.5,
                baseline=None if i else 0,
            )  # fmt: skip
        weight.set(title="how much it counts in the average (percent)")
        weight.set(xlabel="client, from the lowest entropy of labels to the highest")
        legend_below(weight, len(alphas))


def confusion(file: Path, counts: Tensor, classes: Sequence[str]) -> None:
    """Which share of the samples of a class is called what: counts [C, C], a row for each class."""
    shares = 100 * counts / counts.sum(1, keepdim=True).clamp(min=1)
    size = min(12.0, 3 + 0.3 * len(classes))
    with picture(file, size + 1, size) as figure:
        axes = figure.subplots()
        heat(axes, shares, "percent of the samples of a class")
        axes.set(xlabel="answer of the model", ylabel="class")
        if len(classes) <= 20:
            axes.set_xticks(range(len(classes)), classes, rotation=90)
            axes.set_yticks(range(len(classes)), classes)
            for (i, j), n in np.ndenumerate(counts.numpy()):
                colour = "white" if shares[i, j] > 50 else "black"
                axes.text(j, i, n, color=colour, ha="center", va="center", fontsize=7)


def group_colours(clients: Clients) -> dict[str, str]:
    """A colour for each group of participating clients. The smallest group stands out."""
    groups = clients.groups[: clients.participating]
    by_size = sorted(sorted(set(groups)), key=groups.count)
    return dict(zip(by_size, cycle([COLOURS[1], "0.6", *COLOURS[2:]]), strict=False))


def client_colours(clients: Clients) -> np.ndarray:
    """The colour of each participating client's group."""
    colours = group_colours(clients)
    return np.array([colours[clients.groups[k]] for k in clients.ids])


def times_selected(axes: Axes, run) -> None:
    """A bar for each client: in how many rounds it was selected. The dotted line is the mean."""
    clients, m = run.clients, run.clients.participating
    colours = group_colours(clients)
    times = np.bincount([k for row in run.rows for k in row["selected"]], minlength=m)
    for group, colour in colours.items():
        mine = [k for k in range(m) if clients.groups[k] == group]
        axes.barh(mine, times[mine], color=colour, label=f"holds {group}" if group else "clients")
    axes.axvline(times.mean(), color="black", ls=":", lw=0.9)
    axes.set(title="rounds in which a client trained\n(dotted: the mean)")
    axes.set(ylabel="client", xlabel="rounds")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    legend_below(axes, len(colours))


def similarity(run, cosines: Tensor) -> None:
    """How similar each client's latest update is to the others', and how often it was selected.

    cosines  of the updates [M, M]
    """
    others = cosines.numpy().copy()
    np.fill_diagonal(others, np.nan)
    ids = range(len(others))
    title = "cosine similarity of a client's update to those\nof the others (dot: largest)"
    with picture(run.folder / "similarity.png", 7.6, 4.2) as figure:
        left, right = figure.subplots(1, 2, width_ratios=[1.6, 1], sharey=True)
        left.plot(others, ids, "|", color="0.85", ms=3)
        largest = np.fmax.reduce(others, axis=1)  # NaN if there is no other client
        left.scatter(largest, ids, s=22, color=client_colours(run.clients), zorder=3)
        left.set(title=title, xlabel="cosine similarity", ylabel="client")
        times_selected(right, run)


def hull(run, points: Tensor, vertices: Tensor) -> None:
    """The clients' latest updates with their hull, as a shadow in a plane; how often each trained.

    points    their principal components, in which the hull was built [M, dim]
    vertices  the ids of those on the hull
    """
    dim = points.shape[1]
    xy = F.pad(points, (0, 2))[:, :2].numpy()  # if dim is below 2, what is missing is 0
    colour = client_colours(run.clients)
    title = f"the clients' updates after the last round\n(large: a corner in {dim} dimensions)"
    on_hull = np.isin(run.clients.ids, vertices.numpy())
    order = sorted(range(len(xy)), key=lambda k: (colour[k] != "0.6", on_hull[k]))  # grey below
    with picture(run.folder / "hull.png", 7.6, 4.2) as figure:
        left, right = figure.subplots(1, 2, width_ratios=[1.6, 1])
        if dim == 2:  # the shadow of a hull in more dimensions would be a tangle
            for edge in ConvexHull(points.numpy()).simplices:
                left.plot(*xy[edge].T, color="0.8", lw=0.7, zorder=0)
        sizes, edges = np.where(on_hull, 80, 12), np.where(on_hull, "black", "none")
        left.scatter(*xy[order].T, s=sizes[order], color=colour[order], ec=edges[order])
        left.set(title=title, xlabel="first principal component", ylabel="second")
        left.set(xticks=[], yticks=[])
        times_selected(right, run)


def uncertainties(run, state: dict) -> None:
    """For UEFL: the silos' uncertainties at the end of each iteration, and who is above the line.

    Beside the bars are the codewords that a silo has had until then. A silo gets more if its
    uncertainty is above (1 + gamma) times the smallest one. Without a codebook nothing is drawn.
    """
    if not run.args.codebook_size:
        return
    ends = {row["iteration"]: row for row in run.rows if "uncertainties" in row}
    kind = "silo {}, turned {}°" if run.args.rotate else "silo {}, {}"
    file, m = run.folder / "uncertainties.png", run.clients.participating
    names = [kind.format(k, run.clients.groups[k]) for k in range(m)]
    found = [row["uncertainties"] for row in ends.values()]
    largest = max(max(*e, (1 + run.args.gamma) * min(e)) for e in found)
    with picture(file, max(5, 2.4 * len(ends) + 1), 1.3 + 0.25 * m) as figure:
        figure.suptitle("a silo whose bar crosses the dotted line then gets more words (codewords)")
        all_axes = figure.subplots(1, len(ends), squeeze=False, sharex=True, sharey=True)[0]
        for axes, row in zip(all_axes, ends.values(), strict=True):
            e = np.array(row["uncertainties"])
            threshold = (1 + run.args.gamma) * e.min()
            axes.barh(names, e, color=np.where(e > threshold, COLOURS[3], "0.8"))
            for k, n in enumerate(row["codewords"]):
                axes.text(1.45 * largest, k, f"{n:.0f} words", ha="right", va="center")
            axes.axvline(threshold, color="black", ls=":", lw=0.9)
            end = " (the end)" if row is run.rows[-1] else ""
            axes.set(title=f"after round {row['round']}{end}", xlabel="uncertainty (nats)")
            axes.set(xlim=(0, 1.45 * largest))
        all_axes[0].invert_yaxis()
