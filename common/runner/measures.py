"""The measures: which columns of metrics.csv are shown, where, and how.

A new measure needs one line here, and then it is in the tables and in the pictures.
"""

import re
from typing import NamedTuple


class Measure(NamedTuple):
    """How a column of metrics.csv is shown.

    title   in curves.png; "" if it is not there
    unit    a share is in "percent", so it is shown times 100
    table   what a table takes: the mean of the "last" evaluations or of "all", the number at the
            "end" for what adds up, or "" if it is not there
    """

    title: str
    unit: str = ""
    table: str = ""


MEASURES = {
    "id_accuracy": Measure("ID accuracy", "percent", "last"),
    "ood_accuracy": Measure("OOD accuracy", "percent", "last"),
    "unseen_accuracy": Measure("unseen accuracy", "percent", "last"),
    "unseen_worst": Measure("", "percent", "last"),
    "participation_gap": Measure("", "percent", "last"),
    "neutral_accuracy": Measure("colour-neutral accuracy", "percent", "last"),
    "rare_accuracy": Measure("accuracy, rare classes", "percent", "last"),
    "rare_selected": Measure("", "percent", "all"),
    "turned_accuracy": Measure("accuracy, turned silos", "percent", "last"),
    "turned_extended": Measure("", "percent", "last"),
    "accuracies": Measure("", "percent"),
    "id_selected": Measure("", "percent"),
    "mA": Measure("", "percent"),
    "mE": Measure("mean uncertainty mE", "nats", "last"),
    "mP": Measure("perplexity mP", table="last"),
    "code_loss": Measure("L_code"),
    "gradient_spread": Measure("spread of the clients' gradients"),
    "train_loss": Measure("training loss, all terms", "nats"),
    "samples": Measure("", "samples", "end"),
    "megabytes": Measure("", "MB", "end"),
}
DECIMALS = {"percent": 1, "MB": 1, "samples": 0}  # of other units three


def measure_of(column):
    """The measure of a column, or of "accuracies[3:6]" and "ood_accuracy@id_accuracy"."""
    return MEASURES[re.match(r"\w+", column)[0]]


def in_percent(column):
    """Whether this column is a share."""
    return measure_of(column).unit == "percent"
