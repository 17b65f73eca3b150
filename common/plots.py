"""The pictures. One style for all, legible in greyscale and at the width of a README."""

import io
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import matplotlib
import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from PIL import Image
from scipy.spatial import ConvexHull
from torch import Tensor

from common import ranks
from common.data import Dataset
from common.splits import Clients

COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000"]  # Okabe and Ito
LINES, MARKERS = ["-", "--", ":", "-."], ["o", "s", "^", "D", "v", "P", "X"]
STYLE = {
    "font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 9, "legend.frameon": False,
    "axes.titlelocation": "left", "figure.constrained_layout.use": True, "savefig.dpi": 150,
}  # fmt: skip


def _save(figure: Figure, file: Path) -> None:
    if ranks.RANK == 0:
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
        figure = Figure(figsize=(3.4 * len(panels), 3.0))
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
            axes.set(title=title, xlabel=f"round{' (dotted: codebooks extended)' * bool(marks)}")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            if axes.get_legend_handles_labels()[1]:
                axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=2)
        _save(figure, file)


def bands(file: Path, runs: Mapping[str, Sequence[Sequence[Mapping[str, str]]]], panels: Mapping[str, str]) -> None:
    """Columns of metrics.csv against rounds: the mean over seeds, and a band of one standard deviation around it.

    runs    label -> for each seed the rows of its run
    panels  column -> title
    """
    with matplotlib.rc_context(STYLE):
        width = 3.4 * len(panels)
        columns = max(1, int(12 * width / (max(map(len, runs)) + 8)))  # of the legend, so that it fits
        figure = Figure(figsize=(width, 2.9 + 0.2 * -(-len(runs) // columns)))
        for axes, (column, title) in zip(np.atleast_1d(figure.subplots(1, len(panels))), panels.items(), strict=True):
            for i, (label, seeds) in enumerate(runs.items()):
                of_round: dict[int, list[float]] = {}
                for row in (row for rows in seeds for row in rows if row.get(column)):
                    of_round.setdefault(int(row["round"]), []).append(float(row[column]))
                t = sorted(of_round)
                mean = np.array([np.mean(of_round[r]) for r in t])
                std = np.array([np.std(of_round[r], ddof=1) if len(of_round[r]) > 1 else 0 for r in t])
                colour = COLOURS[i % len(COLOURS)]
                axes.plot(t, mean, LINES[i % len(LINES)], color=colour, lw=1.2, label=label)
                axes.fill_between(t, mean - std, mean + std, color=colour, alpha=0.15, lw=0)
            axes.set(title=title, xlabel="round")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=columns)
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
        axes.set(xlabel=f"client: {takes_part} participating" + (f" | {others} not" if others else ""))
        ticks = range(0, len(order), len(order) // 20 + 1)
        axes.set_xticks(ticks, [order[i] for i in ticks], fontsize=7)
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
        left.set(title="cosine similarity", xlabel="client", ylabel="client")
        figure.colorbar(image, ax=left)
        last = np.isin(np.arange(m), selected)
        right.barh(np.arange(m)[~last], times[~last], color="0.7", label="not in the last round")
        right.barh(np.arange(m)[last], times[last], color=COLOURS[1], label="in the last round")
        right.set(title="times selected")
        figure.legend(loc="outside lower right", ncols=2)
        ticks = list(range(0, m, max(1, m // 20)))
        left.set_yticks(ticks, clients[ticks].tolist(), fontsize=7)
        left.set_xticks(ticks, clients[ticks].tolist(), fontsize=7, rotation=90)
        _save(figure, file)


def hull_points(round: int, clients: Tensor, components: Tensor, selected: Tensor) -> Tensor:
    """A round's rows for hull_animation(), float64 [M, 5]: round, client, two coordinates, 1 if selected, else 0.

    clients [M], their components [M, any], selected bool [M]
    """
    plane = torch.nn.functional.pad(components[:, :2], (0, max(0, 2 - components.shape[1])))
    columns = [torch.full((len(clients),), round), clients, plane[:, 0], plane[:, 1], selected]
    return torch.column_stack([column.double() for column in columns])


def _frames(points: Tensor) -> dict[int, np.ndarray]:
    """Points as hull_points() gives them -> round -> its rows, turned so that clients stay near where they were."""
    frames, before = {}, None
    for t in points[:, 0].unique().int().tolist():
        now = points[points[:, 0] == t].numpy().copy()
        # orthogonal Procrustes, for principal components are defined only up to sign, and equal ones up to order
        if before is not None:
            _, was, here = np.intersect1d(before[:, 1], now[:, 1], return_indices=True)
            u, _, v = np.linalg.svd(now[here, 2:4].T @ before[was, 2:4])
            now[:, 2:4] = now[:, 2:4] @ (u @ v)
        frames[t] = before = now
    return frames


def _hull(axes, frame: np.ndarray, label: str) -> None:
    xy, chosen = frame[:, 2:4], frame[:, 4] > 0
    if np.linalg.matrix_rank(xy - xy.mean(0)) == 2:
        axes.fill(*xy[ConvexHull(xy).vertices].T, fc="0.93", ec="0.6", lw=0.8, zorder=0)
    axes.scatter(*xy[~chosen].T, s=22, color="white", ec="0.3", lw=0.8, label="not selected")
    axes.scatter(*xy[chosen].T, s=26, color=COLOURS[0], ec="black", lw=0.6, label=label)


def hull_animation(file: Path, points: Tensor, rows: Sequence[Mapping[str, str]], dim: int) -> None:
    """A GIF of the clients' gradients in the plane of their first two principal components, with accuracy beside it.

    Each round has its own scale; of more than 40, as many are shown, evenly spaced.

    points  [n, 5], the rows of all rounds as hull_points() gives them
    rows    of metrics.csv
    dim     in how many dimensions clients were selected: with more than two, some lie inside the hull of the plane
    """
    if ranks.RANK > 0:
        return
    of_round, images = _frames(points), []
    rounds = sorted({round(t) for t in np.linspace(min(of_round), max(of_round), min(40, len(of_round)))})
    accuracy = {
        c: [float(row[c]) for row in rows] for c in ("id_accuracy", "ood_accuracy") if all(row[c] for row in rows)
    }
    with matplotlib.rc_context({**STYLE, "savefig.dpi": 100}):
        for t in rounds:
            figure = Figure(figsize=(7.6, 3.5))
            left, right = figure.subplots(1, 2)
            _hull(left, of_round[t], f"selected, by the hull in {dim} dimensions")
            left.set(title=f"clients' gradients, round {t}", xlabel="first principal component", ylabel="second",
                     xticks=[], yticks=[])  # fmt: skip
            figure.legend(*left.get_legend_handles_labels(), loc="outside lower left", ncols=2, fontsize=8)
            right.xaxis.set_major_locator(MaxNLocator(integer=True))
            for i, (column, values) in enumerate(accuracy.items()):
                name = column.removesuffix("_accuracy").upper()
                right.plot(range(1, len(values) + 1), values, LINES[i], color="0.85")
                right.plot(range(1, t + 1), values[:t], LINES[i], color=COLOURS[i], label=name)
            right.set(xlim=(1, max(2, *rounds)), ylim=(0, 1.08 * max(map(max, accuracy.values()))),
                      title="accuracy", xlabel="round")  # fmt: skip
            right.legend(loc="lower right")
            with io.BytesIO() as png:
                figure.savefig(png, format="png")
                images.append(Image.open(png).convert("RGB"))
    palette = images[-1].quantize(32)
    images = [image.quantize(palette=palette, dither=Image.Dither.NONE) for image in images]
    shown = [200] * (len(images) - 1) + [2500]  # ms
    images[0].save(file, save_all=True, append_images=images[1:], duration=shown, loop=0)


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


def uncertainties(
    file: Path, rows: Sequence[Mapping[str, str]], names: Sequence[str], threshold: Callable[[Tensor], Tensor]
) -> None:
    """UEFL: each client's uncertainty before and after each extension of the codebook.

    rows       of metrics.csv
    names      per client the domain of its data
    threshold  clients' uncertainties [K] -> the one above which a client gets more codewords
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
            axes.axhline(threshold(torch.tensor(was)).item(), color="0.5", ls=":", lw=0.9, label="threshold before")
            axes.vlines(at, was, now, color="0.6", lw=1)
            axes.plot(at, was, "o", color=COLOURS[1], mfc="white", label="before")
            axes.plot(at[~grew], np.array(now)[~grew], "o", color="0.6", label="after")
            axes.plot(at[grew], np.array(now)[grew], "D", color=COLOURS[0], label="after, with more codewords")
            axes.set(title=f"round {before['round']} to {after['round']}", xlabel="client, domain")
            axes.set_ylim(0, 1.05 * max(float(u) for row in ends for u in row["uncertainties"].split()))
            axes.set_xticks(at, [f"{k}\n{name}" for k, name in zip(at, names, strict=True)], fontsize=7)
        all_axes[0].set(ylabel="uncertainty (nats)")
        figure.legend(*all_axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
        _save(figure, file)


def codebook(file: Path, tokens: Sequence[Tensor], names: Sequence[str], codewords: Tensor, allowed: Tensor) -> None:
    """Features and codewords in the plane of the features' first two principal components, a panel a domain.

    tokens     per client its features [n, d / s], cut into segments as the codewords are
    names      per client the domain of its data
    codewords  [V, d]
    allowed    bool [K, V], which client may use which codeword

    Codewords of one channel have no plane, and no picture.
    """
    if codewords.shape[1] < 2:
        return  # a plane has two
    tokens, codewords, allowed = [t.cpu() for t in tokens], codewords.cpu(), allowed.cpu()
    shared, mean = allowed.all(0), torch.cat(tokens).mean(0)
    plane = torch.linalg.eigh(torch.cov(torch.cat(tokens).T))[1][:, -2:].flip(1)
    kinds = list(dict.fromkeys(names))
    of_kind = {}
    for kind in kinds:
        features = torch.cat([t for t, name in zip(tokens, names, strict=True) if name == kind])
        of_kind[kind] = ((features[:: len(features) // 1500 + 1] - mean) @ plane).numpy()
    placed = ((codewords - mean) @ plane).numpy()
    columns = min(3, len(kinds))
    lines = -(-len(kinds) // columns)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(2.6 * columns + 0.6, 2.7 * lines + 0.5))
        all_axes = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).flat
        for axes, kind in zip(all_axes, kinds, strict=False):
            own = (allowed[[name == kind for name in names]].any(0) & ~shared).numpy()
            for other in kinds:
                axes.scatter(*of_kind[other].T, s=2, lw=0, color="0.88" if other != kind else COLOURS[0],
                             alpha=0.5, zorder=1 + (other == kind))  # fmt: skip
            axes.scatter(*placed[shared.numpy()].T, s=22, marker="*", color="white", ec="black", lw=0.6, zorder=3,
                         label="shared codewords")  # fmt: skip
            axes.scatter(*placed[own].T, s=6, marker="D", color=COLOURS[1], alpha=0.7, lw=0, zorder=4,
                         label="own codewords")  # fmt: skip
            axes.set(title=f"domain {kind}: {own.sum()} of its own")
        for axes in list(all_axes)[len(kinds) :]:
            axes.remove()
        figure.supxlabel("first principal component of the features (dots; grey: of the other domains)", fontsize=9)
        figure.supylabel("second", fontsize=9)
        first = figure.axes[0]
        figure.legend(*first.get_legend_handles_labels(), loc="outside upper right", ncols=2)
        _save(figure, file)
