import csv
import math

import pytest
import torch
from test_train import sgd_by_hand

import fedavg
from common import flags
from common.splits import deal
from common.train import Trainer, get_weights, set_weights

CUT = "--model cnn --width 0.125 --local-epochs 2 --batch-size 16 --lr 0.1 --device cpu --out run "


def rows(folder):
    with open(folder / "metrics.csv", newline="") as f:
        return list(csv.DictReader(f))


def final_weights(folder):
    return torch.cat([t.flatten() for t in torch.load(folder / "model.pt").values()])


def initial_model(dataset_flags):
    return flags.prepare(flags.parse(fedavg.__doc__, fedavg.SETTINGS, fedavg.own_flags, (CUT + dataset_flags).split()))[
        2
    ]


def test_one_client_that_holds_everything_is_sgd(start, tiny):
    one = "--partition iid --clients 1 --participating 1 --rounds 3"
    folder = start(fedavg, CUT + one) / "run"
    trainer = Trainer(tiny, torch.device("cpu"), seed=0, epochs=2, batch_size=16, lr=0.1)
    samples = deal(tiny, 0, "iid", clients=1, participating=1).train[0]
    model = initial_model(one)
    for t in (1, 2, 3):
        set_weights(model, sgd_by_hand(model, trainer, samples, t, 0))
    assert torch.allclose(final_weights(folder), get_weights(model), atol=1e-5)


def test_a_round_is_the_mean_of_the_clients_weighted_by_their_samples(start, tiny):
    three = "--partition dirichlet --dirichlet 0.5 --clients 3 --participating 3 --selection full --rounds 1"
    folder = start(fedavg, CUT + three) / "run"
    trainer = Trainer(tiny, torch.device("cpu"), seed=0, epochs=2, batch_size=16, lr=0.1)
    clients = deal(tiny, 0, "dirichlet", alpha=0.5, clients=3, participating=3)
    ends = [sgd_by_hand(initial_model(three), trainer, clients.train[k], 1, k) for k in range(3)]
    n = [len(samples) for samples in clients.train]
    assert len(set(n)) > 1
    mean = sum(n_k * w_k for n_k, w_k in zip(n, ends, strict=True)) / sum(n)
    assert torch.allclose(final_weights(folder), mean, atol=1e-5)


def test_server_step_of_a_half_goes_half_way(start):
    four = "--partition iid --clients 4 --participating 4 --rounds 1 --server-lr "
    full, half = (
        final_weights(start(fedavg, CUT.replace("run", f"run{x}") + four + x) / f"run{x}") for x in ("1", "0.5")
    )
    begin = get_weights(initial_model(four + "1"))
    assert torch.allclose(half, (begin + full) / 2, atol=1e-6)


def test_weights_on_a_worked_example():
    sizes = torch.tensor([10.0, 30.0, 60.0])
    assert torch.allclose(fedavg.aggregation_weights(sizes, "size"), torch.tensor([0.1, 0.3, 0.6]))
    assert torch.allclose(fedavg.aggregation_weights(sizes, "equal"), torch.tensor([1 / 3] * 3))


def test_power_of_choice_takes_the_largest_losses_and_breaks_ties_by_id():
    losses = torch.tensor([0.5, 0.9, 0.5, 0.1, 0.5])
    assert fedavg.select_power_of_choice(losses, 3).tolist() == [0, 1, 2]


@pytest.mark.parametrize("selection", ["random", "full", "power_of_choice", "by_size"])
def test_it_learns_and_leaves_a_complete_folder(start, selection, capsys):
    folder = (
        start(
            fedavg,
            f"{CUT} --clients 8 --participating 6 --dirichlet 1 --lr 0.3 --rounds 12 --selection {selection}"
            f"{'' if selection == 'full' else ' --sample 3'}",
        )
        / "run"
    )
    found = rows(folder)
    columns = "round seconds train_loss id_accuracy ood_accuracy id_selected selected_size selected left_out"
    assert list(found[0]) == columns.split()
    assert [int(r["round"]) for r in found] == list(range(1, 13))
    assert all(len(r["selected"].split()) == (6 if selection == "full" else 3) for r in found)
    assert (
        float(found[-1]["train_loss"]) < 0.8 * float(found[0]["train_loss"]) and float(found[-1]["ood_accuracy"]) > 0.5
    )
    assert {f.name for f in folder.iterdir()} >= {
        "args.json",
        "model.pt",
        "checkpoint.pt",
        "curves.png",
        "partition.png",
    }
    assert "mean of last 5" in capsys.readouterr().out


def test_the_accuracies_are_those_of_the_saved_model(start, tiny):
    split = "--clients 4 --participating 2 --sample 2 --dirichlet 1 --rounds 2"
    last = rows(start(fedavg, CUT + split) / "run")[-1]
    model = initial_model(split)
    model.load_state_dict(torch.load("run/model.pt"))
    clients = deal(tiny, 0, "dirichlet", alpha=1, clients=4, participating=2)
    for column, samples in (
        ("id_accuracy", clients.held_out),
        ("ood_accuracy", tiny.test),
    ):
        right = [model(tiny.x[i : i + 1].float() / 127.5 - 1).argmax().item() == tiny.y[i].item() for i in samples]
        assert math.isclose(float(last[column]), sum(right) / len(right), abs_tol=1e-5)


def test_of_nine_clients_four_participate_and_two_are_sampled(start):
    cut = "--model cnn --width 0.1 --partition iid --clients 9 --rounds 1 --local-epochs 1 --out run"
    assert len(rows(start(fedavg, cut) / "run")[0]["selected"].split()) == 2
