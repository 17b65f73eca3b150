"""The pictures. One style for all, legible in greyscale and at the width of a README."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import matplotlib
import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from scipy.spatial import ConvexHull
from torch import Tensor

from common.data import Dataset
from common.splits import Clients
from common.train import RANK

COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000"]  # Okabe and Ito
LINES, MARKERS = ["-", "--", ":", "-."], ["o", "s", "^", "D", "v", "P", "X"]
STYLE = {
    "font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 9, "legend.frameon": False,
    "axes.titlelocation": "left", "figure.constrained_layout.use": True, "savefig.dpi": 150,
}  # fmt: skip


def _save(figure: Figure, file: Path) -> None:
    if RANK == 0:
        figure.savefig(file, metadata={"Software": None})


def curves(
    file: Path, runs: Mapping[str, Sequence[Mapping[str, str]]], panels: Mapping[str, Sequence[str]],
    marks: Sequence[int] = (),
) -> None:  # fmt: skip
    """Columns of metrics.csv against rounds.

    runs    label -> the rows of a run
    panels  title -> the columns drawn in that panel, each for every run that has it
    marks   rounds after which a dotted line is drawn
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(3.4 * len(panels), 2.7))
        for axes, (title, columns) in zip(np.atleast_1d(figure.subplots(1, len(panels))), panels.items(), strict=True):
            for r, (label, rows) in enumerate(runs.items()):
                for c, column in enumerate(columns):
                    points = [(int(row["round"]), float(row[column])) for row in rows if row.get(column)]
                    what = [column.replace("_accuracy", "").upper()] if len(columns) > 1 else []
                    colour = COLOURS[r if len(runs) > 1 else c]
                    line = LINES[c if len(columns) > 1 else r]
                    if points:
                        name = " ".join([label] * (len(runs) > 1) + what)
                        axes.plot(*zip(*points, strict=True), color=colour, ls=line, label=name)
            for mark in marks:
                axes.axvline(mark + 0.5, color="0.5", ls=":", lw=0.9)
            axes.set(title=title, xlabel="round")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            if axes.get_legend_handles_labels()[1]:
                axes.legend()
        _save(figure, file)


def partition(file: Path, data: Dataset, clients: Clients) -> None:
    """Who holds what: training samples of each client by class, and by domain where there are domains."""
    everyone = torch.arange(len(clients.train))
    order = [*clients.participating.tolist(), *everyone[~torch.isin(everyone, clients.participating)].tolist()]
    panels = [("class", data.y, data.classes)]
    if data.domain is not None and len(data.domains) <= 40:
        panels.append(("domain", data.domain, data.domains))
    with matplotlib.rc_context(STYLE):
        sizes = [min(len(names), 30) for _, _, names in panels]
        width = min(10.0, max(4.5, 0.09 * len(order) + 2))
        figure = Figure(figsize=(width, 1.4 + 0.16 * sum(sizes)))
        all_axes = figure.subplots(len(panels), 1, sharex=True, height_ratios=sizes, squeeze=False)[:, 0]
        for axes, (what, values, names) in zip(all_axes, panels, strict=True):
            counts = torch.stack([torch.bincount(values[clients.train[k]], minlength=len(names)) for k in order], 1)
            image = axes.imshow(counts.numpy(), aspect="auto", cmap="Greys", interpolation="nearest", vmin=0)
            if len(clients.participating) < len(order):
                axes.axvline(len(clients.participating) - 0.5, color=COLOURS[1])
            axes.set(ylabel=what)
            if len(names) <= 20:
                axes.set_yticks(range(len(names)), names)
            figure.colorbar(image, ax=axes, label="samples")
        takes_part, others = len(clients.participating), len(order) - len(clients.participating)
        axes.set(xlabel=f"clients in order: {takes_part} participating" + (f" | {others} not" if others else ""))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if len(order) <= 20:
            axes.set_xticks(range(len(order)), order)
        _save(figure, file)


def label_weights(file: Path, counts: Tensor, entropies: Tensor, weights: Mapping[str, Tensor]) -> None:
    """Clients in the order of their entropy: how their labels are distributed, how diverse they are, what they weigh.

    counts     [M, C] labels of each client
    entropies  [M] in nats
    weights    name of a weighting -> [M], sum 1
    """
    order = entropies.argsort()
    shares = (counts / counts.sum(1, keepdim=True))[order]
    at = np.arange(len(order))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.0, 5.4))
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
        _save(figure, file)


def similarity(file: Path, cosines: Tensor, selections: Sequence[Sequence[int]], clients: Tensor) -> None:
    """Cosines between clients' gradients [M, M], the rows selected last marked, and how often each was selected.

    selections  of each round, as rows; clients  their ids [M]
    """
    m, selected = len(cosines), selections[-1]
    times = np.bincount([i for of_round in selections for i in of_round], minlength=m)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.6, 4.0))
        left, right = figure.subplots(1, 2, sharey=True, width_ratios=[2.2, 1])
        off_diagonal = cosines.cpu().masked_fill(torch.eye(m, dtype=torch.bool), torch.nan).numpy()
        image = left.imshow(off_diagonal, cmap="viridis", interpolation="nearest", aspect="auto")
        left.plot([-1.2] * len(selected), selected, ">", color=COLOURS[1], ms=4, clip_on=False)
        left.set(
            title="cosine similarity (arrows: selected last)", xlabel="client", ylabel="client", xlim=(-0.5, m - 0.5)
        )
        figure.colorbar(image, ax=left)
        right.barh(np.arange(m), times, color="0.5")
        right.set(title="times selected")
        ticks = list(range(0, m, max(1, m // 20)))
        left.set_yticks(ticks, clients[ticks].tolist(), fontsize=7)
        left.set_xticks(ticks, clients[ticks].tolist(), fontsize=7, rotation=90)
        _save(figure, file)


def hulls(file: Path, frames: Mapping[int, Mapping[str, Tensor]], dim: int) -> None:
    """Clients' gradients in the plane of their first two principal components, the hull drawn, the selected filled.

    frames  round -> points [M, at most 2], selected bool [M]
    dim     in how many dimensions they were selected: with more than two, some lie inside the hull of the plane
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(3.6 * len(frames), 3.4))
        all_axes = figure.subplots(1, len(frames), squeeze=False)[0]
        for axes, (t, frame) in zip(all_axes, frames.items(), strict=True):
            points = torch.nn.functional.pad(frame["points"].cpu(), (0, 2 - frame["points"].shape[1])).numpy()
            chosen = frame["selected"].cpu().numpy()
            if np.linalg.matrix_rank(points - points.mean(0)) == 2:
                hull = ConvexHull(points)
                axes.fill(*points[hull.vertices].T, fc="0.93", ec="0.6", lw=0.8, zorder=0)
            axes.scatter(*points[~chosen].T, s=22, color="white", ec="0.3", lw=0.8, label="not selected")
            label = f"selected, by the hull in {dim} dimensions"
            axes.scatter(*points[chosen].T, s=26, color=COLOURS[0], ec="black", lw=0.6, label=label)
            axes.set(title=f"round {t}", xlabel="first principal component")
        all_axes[0].set(ylabel="second")
        figure.legend(*all_axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
        _save(figure, file)


def heatmaps(file: Path, matrices: Mapping[str, Tensor], axis: str, scale: str) -> None:
    """Square matrices [n, n] of numbers in -1..1, side by side; `axis` names their rows and columns."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(2.7 * len(matrices) + 0.9, 3.0))
        all_axes = figure.subplots(1, len(matrices), sharey=True, squeeze=False)[0]
        for axes, (title, matrix) in zip(all_axes, matrices.items(), strict=True):
            image = axes.imshow(matrix.cpu().numpy(), cmap="RdGy_r", vmin=-1, vmax=1, interpolation="nearest")
            off_diagonal = matrix[~torch.eye(len(matrix), dtype=torch.bool, device=matrix.device)].mean().item()
            axes.set(title=f"{title}: mean {off_diagonal:.2f}", xlabel=axis)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        figure.colorbar(image, ax=all_axes, label=scale)
        _save(figure, file)


def accuracy_curves(file: Path, runs: Mapping[str, Sequence[Mapping[str, str]]]) -> None:
    """ID and OOD accuracy, and training loss, of runs label -> rows of metrics.csv."""
    curves(file, runs, {"accuracy": ["id_accuracy", "ood_accuracy"], "training loss": ["train_loss"]})


def learning_curves(file: Path, runs: Mapping[str, Sequence[Mapping[str, str]]]) -> None:
    """UEFL's three measures; dotted lines where the first run extended its codebook."""
    panels = {"mean accuracy mA": ["mA"], "mean uncertainty mE (nats)": ["mE"], "codebook perplexity mP": ["mP"]}
    ends = _iteration_ends(next(iter(runs.values())))
    curves(file, runs, panels, [int(row["round"]) for row in ends[:-1]])


def _iteration_ends(rows: Sequence[Mapping[str, str]]) -> list[Mapping[str, str]]:
    return list({row["iteration"]: row for row in rows}.values())


def uncertainties(file: Path, rows: Sequence[Mapping[str, str]], names: Sequence[str]) -> None:
    """UEFL: each client's uncertainty at the end of every iteration but the last, and of the one that followed.

    rows   of metrics.csv; names  per client the domain of its data
    """
    ends = _iteration_ends(rows)
    if len(ends) < 2:
        return
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(max(3.4, 2.2 * len(ends) - 1.2), 2.8))
        all_axes = figure.subplots(1, len(ends) - 1, sharey=True, squeeze=False)[0]
        for axes, (before, after) in zip(all_axes, pairwise(ends), strict=True):
            was, now = ([float(u) for u in row["uncertainties"].split()] for row in (before, after))
            words = [np.array(row["codewords"].split(), dtype=int) for row in (before, after)]
            at, grew = np.arange(len(was)), words[1] > words[0]
            axes.vlines(at, was, now, color="0.6", lw=1)
            axes.plot(at, was, "o", color=COLOURS[1], mfc="white", label="before")
            axes.plot(at[~grew], np.array(now)[~grew], "o", color="0.6", label="after")
            axes.plot(at[grew], np.array(now)[grew], "D", color=COLOURS[0], label="after, with more codewords")
            axes.set(title=f"round {before['round']} to {after['round']}", xlabel="client, domain")
            axes.set_ylim(0, 1.05 * max(float(u) for row in ends for u in row["uncertainties"].split()))
            axes.set_xticks(at, [f"{k}\n{name}" for k, name in zip(at, names, strict=True)], fontsize=7)
        all_axes[0].set(ylabel="uncertainty (nats)")
        figure.legend(*all_axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
        _save(figure, file)


def codebook(file: Path, tokens: Sequence[Tensor], names: Sequence[str], codewords: Tensor, allowed: Tensor) -> None:
    """Features and codewords in the plane of the features' first two principal components.

    tokens     per client its features [n, d / s], cut into segments as the codewords are
    names      per client the domain of its data, which gives the colour
    codewords  [V, d]
    allowed    bool [K, V], which client may use which codeword
    """
    tokens, codewords, allowed = [t.cpu() for t in tokens], codewords.cpu(), allowed.cpu()
    shared, mean = allowed.all(0), torch.cat(tokens).mean(0)
    plane = torch.linalg.eigh(torch.cov(torch.cat(tokens).T))[1][:, -2:].flip(1)
    kinds = list(dict.fromkeys(names))
    size = 30 / max(1, len(codewords) / 100) ** 0.5
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(6.4, 4.2))
        axes = figure.subplots()
        for k, kind in enumerate(kinds):
            of_kind = torch.cat([t for t, name in zip(tokens, names, strict=True) if name == kind])
            of_kind = (of_kind[:: len(of_kind) // 1500 + 1] - mean) @ plane
            axes.scatter(*of_kind.T.numpy(), s=3, alpha=0.3, lw=0, color=COLOURS[k % 7],
                         label=f"features, domain {kind}")  # fmt: skip
        placed = (codewords - mean) @ plane
        for k, kind in enumerate(kinds):
            own = allowed[[name == kind for name in names]].any(0) & ~shared
            if own.any():
                axes.scatter(*placed[own].T.numpy(), s=size, marker=MARKERS[k % 7], color=COLOURS[k % 7], ec="black",
                             lw=0.4, label=f"own codewords, domain {kind}")  # fmt: skip
        axes.scatter(*placed[shared].T.numpy(), s=2 * size, marker="*", color="white", ec="black", lw=0.8,
                     label="shared codewords")  # fmt: skip
        axes.set(xlabel="first principal component", ylabel="second")
        legend = axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
        for handle in legend.legend_handles:
            handle.set(alpha=1, sizes=[25])
        _save(figure, file)
