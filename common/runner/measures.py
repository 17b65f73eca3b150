"""The measures: which columns of metrics.csv are shown, where, and how.

A new measure needs one line here, and then it is in the tables and in the pictures.
"""

import re
from collections.abc import Iterable
from typing import NamedTuple


class Measure(NamedTuple):
    """How a column of metrics.csv is shown.

    title   in curves.png
    unit    a share is in "percent", so it is shown times 100
    better  1 if larger is better, and -1 if smaller is better
    where   "table", at the end of a run and in results.report; "curves", that is curves.png
    bar     its name on the progress bar; "" if it is not there
    rounds  "last" if a table has the mean of the last evaluations, "all" if that of all of them
    """

    title: str
    unit: str
    better: int
    where: str
    bar: str = ""
    rounds: str = "last"


BOTH = "table curves"
MEASURES = {
    "id_accuracy": Measure("ID accuracy", "percent", 1, BOTH, "ID"),
    "ood_accuracy": Measure("OOD accuracy", "percent", 1, BOTH, "OOD"),
    "neutral_accuracy": Measure("colour-neutral accuracy", "percent", 1, BOTH),
    "rare_accuracy": Measure("accuracy, rare classes", "percent", 1, BOTH),
    "rare_selected": Measure("selected holders of a rare class", "percent", 1, "table", "", "all"),
    "turned_accuracy": Measure("accuracy, turned silos", "percent", 1, BOTH),
    "turned_extended": Measure("turned silos with own codewords", "percent", 1, "table"),
    "accuracies": Measure("accuracy of each client", "percent", 1, ""),
    "worst_tenth": Measure("accuracy, worst tenth of clients", "percent", 1, ""),
    "mA": Measure("mean accuracy mA", "percent", 1, ""),
    "mE": Measure("mean uncertainty mE", "nats", -1, BOTH),
    "mP": Measure("perplexity mP", "", 1, "curves"),
    "code_loss": Measure("L_code", "", -1, "curves"),
    "gradient_spread": Measure("spread of the clients' gradients", "", -1, "curves"),
    "train_loss": Measure("training loss, all terms", "nats", -1, "curves", "loss"),
}


def measure_of(column: str) -> Measure:
    """The measure of a column, or of "accuracies[3:6]" and "ood_accuracy@id_accuracy"."""
    return MEASURES[re.match(r"\w+", column)[0]]


def in_percent(column: str) -> bool:
    """Whether this column is a share."""
    return measure_of(column).unit == "percent"


def shown(where: str) -> list[str]:
    """The columns that are shown there, in their order."""
    return [column for column, measure in MEASURES.items() if where in measure.where]


def span(numbers: Iterable) -> str:
    """The smallest and the largest of these numbers, or the only one; "" if there is none."""
    ordered = sorted({int(n) for n in numbers})
    return " to ".join(map(str, ordered[:1] + ordered[1:][-1:]))
