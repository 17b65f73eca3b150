"""Rebuilds the tables of the examples on the methods' pages in docs/: python -m results.examples"""

import numpy as np

from results.tables import TITLES, build, differences, pair, read

RUNS = read("examples.csv")
SKILL, RARE = "ood_accuracy id_accuracy", "rare_share rare_accuracy ood_accuracy"
SILOS = "turned_accuracy upright_accuracy"
ROWS = [  # page, block, what is compared, the two experiments, the measures
    ("fedavg", "example", "alpha 0.1, not 1", "fedavg/skew fedavg/skew-alpha-1", SKILL),
    ("fedavg", "example", "alpha 0.1, not 100", "fedavg/skew fedavg/skew-alpha-100", SKILL),
    ("entropy_weighting", "example", "entropy, not equal", "entropy/specialists entropy/specialists-equal", SKILL),
    ("entropy_weighting", "controls", "60 rounds: entropy, not equal", "entropy/longer entropy/longer-equal", SKILL),
    ("entropy_weighting", "controls", "only generalists, ten per round, not entropy",
     "entropy/only-generalists entropy/specialists", SKILL),
    ("entropy_weighting", "controls", "only generalists, three per round, not entropy",
     "entropy/only-generalists-sample-3 entropy/specialists", SKILL),
    ("entropy_weighting", "controls", "Dirichlet: entropy, not equal",
     "entropy/dirichlet entropy/dirichlet-equal", SKILL),
    ("entropy_weighting", "controls", "rare classes: entropy, not equal", "entropy/rare entropy/rare-equal",
     "rare_accuracy ood_accuracy"),
    ("minimax_select", "example", "minimax, not random", "minimax/rare minimax/rare-random", RARE),
    ("minimax_select", "controls", "same mixture: minimax, not random",
     "minimax/iid minimax/iid-random", "ood_accuracy"),
    ("minimax_select", "controls", "twins: minimax, not random", "minimax/twins minimax/twins-random", RARE),
    ("convex_hull_select", "example", "hull, not random", "hull/rare hull/rare-random", RARE),
    ("convex_hull_select", "controls", "same mixture: hull, not random",
     "hull/iid minimax/iid-random", "ood_accuracy"),
    ("convex_hull_select", "controls", "twins: hull, not random", "hull/twins hull/twins-random", RARE),
    ("convex_hull_select", "controls", "unit length, not random", "hull/unit-length hull/rare-random", RARE),
    ("fediir", "example", "FedIIR, not FedAvg", "fediir/colours fediir/colours-fedavg", SKILL),
    ("fediir", "controls", "nothing to detect: FedIIR, not FedAvg", "fediir/control fediir/control-fedavg", SKILL),
    ("fediir", "controls", "batches of 450: FedIIR, not FedAvg", "fediir/batch-450 fediir/batch-450-fedavg", SKILL),
    ("fediir", "controls", "batches of 32: FedIIR, not FedAvg", "fediir/batch-32 fediir/batch-32-fedavg", SKILL),
    ("fediir", "controls", "twelve full steps: FedIIR, not FedAvg",
     "fediir/twelve-steps fediir/twelve-steps-fedavg", SKILL),
    ("fediir", "controls", "moving average 0.95, not FedAvg", "fediir/moving-average fediir/colours-fedavg", SKILL),
    *(("fediir", "grid", f"gamma {g}, batches of {b}, not gamma 50 and all data",
       f"fediir/gamma-{g}-batch-{b} fediir/colours", SKILL)
      for g, b in ((5, 6000), (500, 6000), (5, 450), (500, 450), (5, 32))),
    ("uefl", "example", "UEFL, not static", "uefl/turned uefl/turned-static", SILOS),
    ("uefl", "example", "UEFL, not FedAvg", "uefl/turned uefl/turned-fedavg", SILOS),
    ("uefl", "controls", "UEFL, not twelve words from the start", "uefl/turned uefl/twelve-words", SILOS),
    ("uefl", "controls", "UEFL, not words for everybody", "uefl/turned uefl/shared-words", SILOS),
]  # fmt: skip

for name, runs in RUNS.items():
    for run in runs:
        holders = 6 if "twins" in name else 3  # the first clients hold the rare classes
        share = np.mean([np.mean(np.array(row["selected"]) < holders) for row in run.rows])
        for row in (row for row in run.rows if row["id_accuracy"] is not None):
            row["rare_share"] = share
            if row["accuracies"]:  # of UEFL's silos, of which the first three are upright
                for half, silos in {"upright": slice(3), "turned": slice(3, None)}.items():
                    row[f"{half}_accuracy"] = np.mean(row["accuracies"][silos])
for page in dict.fromkeys(row[0] for row in ROWS):
    blocks: dict[str, list] = {}
    for _, block, what, two, columns in (row for row in ROWS if row[0] == page):
        blocks.setdefault(block, [])
        for column in columns.split():
            last = 1 if page == "uefl" else 5
            found = pair(RUNS, f"{what}: {TITLES.get(column, column)}", "examples", two, column, last=last)
            blocks[block] += [found] * (found.both.shape[1] > 0)
    build(f"../docs/{page}.md", {block: differences(of_block) for block, of_block in blocks.items()})
