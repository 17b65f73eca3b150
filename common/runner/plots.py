"""The pictures. They share one style, and can be read in greyscale and at a README's width."""

from contextlib import contextmanager

import numpy as np
from matplotlib import style
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from common import first_line, ranks
from common.runner.measures import MEASURES, in_percent, measure_of

# Those of Okabe and Ito
COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000"]
LINES = ["-", "--", ":", "-."]
BELOW = "outside lower center"  # a legend below the whole figure
PER_CLIENT = {  # column of metrics.csv with a number for each client -> its title
    "accuracies": "share of right answers on its held-out samples",
    "uncertainties": "uncertainty (nats)",
    "codewords": "codewords that it may use",
}
STYLE = {
    "font.size": 9,
    "axes.titlesize": 9,
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


def try_to(draw, *what):
    """Draws a picture, or says why not, because a column of yours must not cost run and table."""
    try:
        draw(*what)
    except OSError:
        raise
    except Exception as e:
        ranks.say(f"{draw.__name__}.png cannot be drawn ({first_line(e)})")


@contextmanager
def picture(file, width, height):
    """A figure of this size in inches, saved at the end of the block.

    It begins with matplotlib's defaults, because a user's own could turn images upside down.
    """
    with style.context(STYLE, after_reset=True):
        figure = Figure(figsize=(width, height))
        yield figure
        if not ranks.RANK:
            figure.savefig(file)


def curves(file, runs):
    """Columns of metrics.csv against rounds, with a vertical line where UEFL's iterations end.

    runs  label -> its runs; drawn are the rounds in which all of them have a number
    """
    first = next(iter(runs.values()))[0]
    found = []
    for column, measure in MEASURES.items():
        if not measure.title or not any(column in row for row in first.rows):
            continue
        of_labels = {}
        for label, of_label in runs.items():
            at, values = in_common(of_label, column)
            of_labels[label] = at, values * (100 if in_percent(column) else 1)
        found.append((column, measure.title, of_labels))
    ends = {row.get("iteration"): row["round"] for row in first.rows}  # of UEFL's iterations
    if found:
        panels(file, found, len(first.classes), sorted(ends.values())[:-1])


def in_common(runs, column):
    """The rounds in which all these runs have a number in this column, and these [runs, rounds]."""
    numbers = [{row["round"]: row[column] for row in run.rows if column in row} for run in runs]
    at = sorted(set.intersection(*map(set, numbers)))
    return at, np.array([[of_run[t] for t in at] for of_run in numbers])


def panels(file, found, classes, ends=()):
    """Curves over the rounds: each label's mean, and a thin line for each run. Dotted is chance.

    found  (column, its name, label -> (rounds, numbers [runs, rounds])) of each panel
    ends   rounds with a vertical line, because UEFL adds words after them
    """
    with picture(file, 2.6 * len(found), 2.9) as figure:
        all_axes = figure.subplots(1, len(found), squeeze=False)[0]
        for axes, (column, name, of_labels) in zip(all_axes, found):
            for i, (label, (at, values)) in enumerate(of_labels.items()):
                mean_and_runs(axes, i, at, values, label)
            if any(len(values) > 1 for _, values in of_labels.values()):
                axes.plot([], color="0.6", lw=0.6, label="each run")
            for i, end in enumerate(ends):
                label = None if i else "words are added"  # once in the legend
                axes.axvline(end, color="black", ls="-.", lw=0.8, label=label)
            if unit := measure_of(column).unit:
                name += f" ({unit})"
            low = min([0.0, *(v.min() for _, v in of_labels.values() if v.size)])
            axes.set(title=name, xlabel="round", ylim=(low, 100 if in_percent(column) else None))
            if in_percent(column):
                axes.axhline(100 / classes, color="0.5", ls=":", lw=0.9, label="chance")
            axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        figure.legend(*all_axes[0].get_legend_handles_labels(), loc=BELOW, ncols=2 * len(found))


def mean_and_runs(axes, i, at, values, label):
    """The i-th curve of a panel: the mean of values [runs, rounds], and a thin line for each."""
    colour = COLOURS[i % len(COLOURS)]
    if len(values) > 1:
        axes.plot(at, values.T, color=colour, alpha=0.3, lw=0.6)
    line = LINES[i % len(LINES)] if len(at) > 1 else "o"  # one evaluation is no line
    axes.plot(at, values.mean(0), line, color=colour, label=label, zorder=3)


def clients(run):
    """clients.png: what each client holds, and below how often it trained and how it is served.

    The bars are the last numbers of PER_CLIENT. Right of the line are the clients that never train,
    with bars of another colour.
    """
    clients = run.clients
    classes = run.classes
    n, m = len(clients.train), clients.participating
    bars = {}
    if run.rows:
        selected = [k for row in run.rows for k in row.get("selected", ())]
        bars["rounds in which it trained"] = np.bincount(selected, minlength=m)
    for column, title in PER_CLIENT.items():
        found = [row for row in run.rows if column in row]
        if found:
            bars[title] = [*found[-1][column], *found[-1].get(f"unseen_{column}", [])]
    heights = [0.5 + 0.16 * min(len(classes), 30), *[1] * len(bars)]
    width = np.clip(0.09 * n + 2, 4.5, 10)
    with picture(run.folder / "clients.png", width, 0.9 + 1.1 * sum(heights)) as figure:
        all_axes = figure.subplots(len(heights), sharex=True, height_ratios=heights, squeeze=False)
        held, *others = all_axes.flat
        counts = clients.label_counts.T.numpy()
        held.imshow(counts, vmin=0)
        held.set_title(f"training samples of each class (black: {counts.max():.0f})")
        held.set_ylabel("class")
        if len(classes) <= 20:
            held.set_yticks(range(len(classes)), classes)
        for axes, (title, values) in zip(others, bars.items()):
            axes.bar(range(len(values)), values, color=COLOURS[0])
            axes.bar(range(m, len(values)), values[m:], color=COLOURS[1])
            axes.set_title(title)
        for axes in all_axes.flat:
            axes.axvline(m - 0.5, color="black", lw=0.8)
        if n <= 20 and any(clients.groups):
            axes.set_xticks(range(n), clients.groups)
            axes.set_xlabel("client, by its domain")
        else:
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            others_do = ", others never train" if n > m else ""
            axes.set_xlabel(f"client (0 to {m - 1} participate{others_do})")
