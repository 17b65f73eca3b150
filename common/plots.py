"""The pictures. They share one style, and stay readable in greyscale and at the width of a README."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from scipy.spatial import ConvexHull
from torch import Tensor

from common import ranks
from common.data import Dataset
from common.splits import Clients

Rows = Sequence[Mapping]  # of a run: one dict per round, as in metrics.csv
COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000"]  # Okabe and Ito
LINES, MARKERS = ["-", "--", ":", "-."], ["o", "s", "^", "D", "v", "P", "X"]
STYLE = {
    "font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 9, "legend.frameon": False,
    "axes.titlelocation": "left", "figure.constrained_layout.use": True, "savefig.dpi": 150, "text.parse_math": False,
}  # fmt: skip
PANELS = {  # title -> column of metrics.csv, in pictures of runs; a panel without numbers is left out
    "ID accuracy (percent)": "id_accuracy", "OOD accuracy (percent)": "ood_accuracy",
    "on the rare classes (percent)": "rare_accuracy", "mean uncertainty mE (nats)": "mE", "perplexity mP": "mP",
    "spread of the clients' gradients": "gradient_spread", "training loss, all terms": "train_loss",
}  # fmt: skip


@contextmanager
def drawn(file: Path, width: float, height: float) -> Iterator[Figure]:
    """A figure of this size in inches, saved at the end of the block."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height))
        yield figure
        if ranks.RANK == 0:
            figure.savefig(file, metadata={"Software": None})


def curves(file: Path, runs: Mapping[str, Sequence[Rows]]) -> None:
    """Columns of metrics.csv against rounds: a line for each label, the mean of its runs, and a band over all of them.

    runs  label -> the rows of each run
    """
    rows = next(iter(runs.values()))[0]
    panels = {title: c for title, c in PANELS.items() if any(row.get(c) is not None for row in rows)}
    with drawn(file, 2.6 * len(panels), 2.9) as figure:
        for axes, (title, column) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
            scale = 100 if column.endswith("accuracy") else 1
            for i, (name, of_runs) in enumerate(runs.items()):
                lines = [{row["round"]: row[column] for row in rows if row.get(column) is not None} for rows in of_runs]
                at = sorted(set.intersection(*map(set, lines)))
                values = scale * np.array([[line[t] for t in at] for line in lines])
                axes.plot(at, values.mean(0), LINES[i], color=COLOURS[i], label=name)
                axes.fill_between(at, values.min(0), values.max(0), color=COLOURS[i], alpha=0.15, lw=0)
            axes.set(title=title, xlabel="round", ylim=(0, None))
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(runs))


def partition(file: Path, data: Dataset, clients: Clients) -> None:
    """Which client holds what: training samples of each client by class, and by domain if there are domains."""
    panels = [("class", data.y, data.classes)]
    if data.domain is not None and len(data.domains) <= 40:
        panels.append(("domain", data.domain, data.domains))
    m, n = clients.participating, len(clients.train)
    sizes = [min(len(names), 30) for _, _, names in panels]
    with drawn(file, min(10.0, max(4.5, 0.09 * n + 2)), 1.4 + 0.16 * sum(sizes)) as figure:
        all_axes = figure.subplots(len(panels), 1, sharex=True, height_ratios=sizes, squeeze=False)[:, 0]
        for axes, (what, values, names) in zip(all_axes, panels, strict=True):
            counts = torch.stack([torch.bincount(values[held], minlength=len(names)) for held in clients.train], 1)
            image = axes.imshow(counts.numpy(), aspect="auto", cmap="Greys", interpolation="nearest", vmin=0)
            if m < n:
                axes.axvline(m - 0.5, color=COLOURS[1])
            axes.set(ylabel=what)
            if len(names) <= 20:
                axes.set_yticks(range(len(names)), names)
            figure.colorbar(image, ax=axes, label="samples")
        axes.set(xlabel=f"client: {m} participate" + (f" | {n - m} do not" if m < n else ""))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def label_weights(file: Path, counts: Tensor, entropies: Tensor, weights: Mapping[str, Tensor]) -> None:
    """The labels, the entropy and the aggregation weights of clients, in the order of their entropy.

    counts     [M, C] labels of each client
    entropies  [M] in nats
    weights    name of a weighting -> [M], sum 1
    """
    order, at = entropies.argsort(stable=True), np.arange(len(entropies))
    shares = (counts / counts.sum(1, keepdim=True))[order]
    with drawn(file, 7.0, 5.4) as figure:
        labels, entropy, weight = figure.subplots(3, 1, sharex=True, height_ratios=[2, 1, 1.4])
        image = labels.imshow(shares.T.numpy(), aspect="auto", cmap="Greys", interpolation="nearest", vmin=0, vmax=1)
        labels.set(title="share of each class", ylabel="class")
        figure.colorbar(image, ax=labels)
        entropy.bar(at, entropies[order].numpy(), color="0.5")
        entropy.set(title="entropy of the labels (nats)")
        for i, (name, of_clients) in enumerate(weights.items()):
            weight.plot(at, of_clients[order].numpy(), MARKERS[i], ms=3.5, color=COLOURS[i], label=name)
        weight.set(title="aggregation weight", xlabel="participating client, by entropy", ylim=(0, None))
        weight.legend(ncols=len(weights))


def _group_colours(clients: Clients) -> tuple[np.ndarray, dict[str, str]]:
    """A colour for each participating client, and group -> colour."""
    groups = clients.groups[: clients.participating]
    colours = dict(zip(sorted(set(groups), key=groups.count), [COLOURS[1], "0.6", *COLOURS[2:]], strict=False))
    return np.array([colours.get(group, "0.6") for group in groups]), colours


def _times_selected(axes: Axes, rows: Rows, clients: Clients) -> None:
    """A bar for each client: in how many rounds it was selected. The dotted line is the mean."""
    colours, of_group = _group_colours(clients)
    times = np.bincount([k for row in rows for k in row["selected"]], minlength=len(colours))
    axes.barh(np.arange(len(colours)), times, color=colours)
    axes.axvline(times.mean(), color="black", ls=":", lw=0.9)
    axes.set(title="rounds in which a client trained\n(dotted: the mean)", ylabel="client", xlabel="rounds")
    for group, colour in of_group.items():
        axes.barh([0], [0], color=colour, label=f"holds {group}" if group else "clients")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=len(of_group))


def similarity(file: Path, cosines: Tensor, clients: Clients, rows: Rows) -> None:
    """The cosine similarities of the clients' latest updates [M, M], and how often each client was selected."""
    with drawn(file, 7.6, 4.2) as figure:
        left, right = figure.subplots(1, 2, width_ratios=[1.6, 1])
        off_diagonal = cosines.cpu().masked_fill(torch.eye(len(cosines), dtype=torch.bool), torch.nan).numpy()
        image = left.imshow(off_diagonal, cmap="viridis", interpolation="nearest", aspect="auto", origin="lower")
        left.set(title="cosine similarity of the clients' latest updates", xlabel="client", ylabel="client")
        figure.colorbar(image, ax=left)
        _times_selected(right, rows, clients)


def hull(file: Path, known: Tensor, points: Tensor, vertices: Tensor, clients: Clients, rows: Rows) -> None:
    """The clients' updates after the last round, as points in a plane, and how often each client was selected.

    known     the ids of the clients with an update [n]
    points    their first two principal components [n, up to 2]
    vertices  of the hull, int64, indices into `known`; with more than two dimensions, some lie inside the drawn hull
    """
    xy, colours = np.zeros((len(points), 2)), _group_colours(clients)[0][known.numpy()]
    xy[:, : points.shape[1]] = points.cpu().numpy()
    with drawn(file, 7.6, 4.2) as figure:
        left, right = figure.subplots(1, 2, width_ratios=[1.6, 1])
        if np.linalg.matrix_rank(xy - xy.mean(0)) == 2:
            left.fill(*xy[ConvexHull(xy).vertices].T, fc="0.95", ec="0.6", lw=0.8, zorder=0)
        left.scatter(*xy.T, s=26, color=colours)
        left.scatter(*xy[vertices.numpy()].T, s=60, color="none", ec="black", zorder=3)
        left.set(title="the clients' latest updates in a plane\nblack circle: a corner of the hull", xticks=[])
        left.set(xlabel="first principal component", ylabel="second", yticks=[])
        _times_selected(right, rows, clients)


def extensions(folder: Path, runs: Mapping[str, Sequence]) -> None:
    """extensions.png for UEFL: who gets codewords in each iteration, and what became of the clients' accuracies.

    runs  label -> its Runs, of which the first is drawn; the first label is UEFL's, the others are baselines
    """
    ours, rows = next(iter(runs.values()))[0], {name: of[0].rows for name, of in runs.items()}
    groups, gamma = ours.clients.groups[: ours.clients.participating], ours.args.gamma
    ends = list({row["iteration"]: row for row in ours.rows if "uncertainties" in row}.values())
    at = np.arange(len(groups))
    with drawn(folder / "extensions.png", 2.6 * len(ends) + 3.4, 3.1) as figure:
        *panels, right = figure.subplots(1, len(ends) + 1, width_ratios=[1] * len(ends) + [1.4])
        for axes, row, after in zip(panels, ends, [*ends[1:], None], strict=True):
            e = np.array(row["uncertainties"])
            grows = np.array(after["codewords"]) > np.array(row["codewords"]) if after else e > np.inf
            axes.bar(at, e, color=np.where(grows, COLOURS[1], "0.6"))
            axes.axhline((1 + gamma) * e.min(), color="black", ls=":", lw=0.9)
            title = f"uncertainty in round {row['round']} (nats)"
            title += f"\n{grows.sum()} clients get codewords" * bool(after)
            axes.set(title=title, ylim=(0, 1.05 * e.max()))
        for i, (name, of_run) in enumerate(rows.items()):
            width = 0.8 / len(rows)
            places = at + (i + 0.5) * width - 0.4
            right.bar(places, 100 * np.array(of_run[-1]["accuracies"]), width, color=COLOURS[i], label=name)
        right.set(title="accuracy at the end (percent)", ylim=(0, 100))
        figure.legend(*right.get_legend_handles_labels(), loc="outside lower right", ncols=len(runs))
        for axes in (*panels, right):
            axes.set_xticks(at, [f"{k}\n{group}" for k, group in zip(at, groups, strict=True)], fontsize=7)
            axes.set(xlabel="client, domain")
