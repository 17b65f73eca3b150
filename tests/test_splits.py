from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import ten_classes

from common import UserError
from common.chance import random_at, sample
from common.splits import by_domain, dirichlet, hold_out, make_clients, shards


def all_once(parts, pool):
    return sorted(torch.cat(parts).tolist()) == sorted(pool.tolist())


# ---------------------------------------------------------------- the partitions


def test_dirichlet_shares_have_the_mean_and_variance_of_the_distribution(monkeypatch):
    clients, alpha, draws, shares = 5, 0.5, 600, []
    labels = torch.arange(2).repeat_interleave(400)
    monkeypatch.setattr("common.splits.MIN_SIZE", 0)
    for i in range(draws):
        parts = dirichlet(labels, clients, alpha, random_at(i, "deal"))
        shares.append(torch.stack([labels[part].bincount(minlength=2) / 400 for part in parts]))
    shares = torch.stack(shares)
    variance = (1 / clients) * (1 - 1 / clients) / (clients * alpha + 1)
    assert ((shares.mean(0) - 1 / clients).abs() < 4 * (variance / draws) ** 0.5).all()
    assert torch.allclose(shares.var(0), torch.tensor(variance), rtol=0.25)
    between_classes = torch.corrcoef(shares[:, 0].T)[0, 1]
    assert between_classes.abs() < 4 / draws**0.5  # each class has its own draw


def test_no_client_has_fewer_than_ten_samples(rng):
    parts = dirichlet(torch.arange(2).repeat_interleave(400), 80, 1e-12, rng)
    assert all_once(parts, torch.arange(800)) and {*map(len, parts)} == {10}


def test_algorithm_2_divides_whole_domains_into_equal_parts(rng):
    """PACS: the domain with the last client had the most samples per client at that moment."""
    sizes = [2048, 2344, 1670, 3929]
    domain = torch.repeat_interleave(torch.arange(4), torch.tensor(sizes))
    parts = by_domain(domain, 50, rng)
    assert len(parts) == 50 and all_once(parts, torch.arange(len(domain)))
    of_domain = [[len(p) for p in parts if (domain[p] == d).all()] for d in range(4)]
    assert [sum(s) for s in of_domain] == sizes and all(max(s) - min(s) <= 1 for s in of_domain)
    most = max(sum(s) / len(s) for s in of_domain)
    assert all(sum(s) / (len(s) - 1) >= most for s in of_domain if len(s) > 1)


def test_two_shards_of_equal_size_have_few_labels(rng):
    labels = torch.from_numpy(rng.permutation(np.repeat(np.arange(10), 600)))
    parts = shards(labels, 100, rng)
    assert all_once(parts, labels.argsort()) and {len(part) for part in parts} == {60}
    held = [len(labels[part].unique()) for part in parts]
    assert max(held) == 2  # 600 samples are 20 whole shards
    assert held.count(1) < 30  # the second is drawn from all: of 199 others 19 have this label
    parts = shards(labels[15:], 100, rng)  # 199.5 shards' worth
    assert all_once(parts, torch.arange(5985)) and {*map(len, parts)} <= {58, 59, 60}


# ---------------------------------------------------------------- random draws


def test_a_sample_is_by_size_and_without_replacement_in_ascending_order(rng):
    ids, sizes = torch.tensor([4, 5, 6]), torch.tensor([10.0, 30, 60])
    drawn = torch.cat([sample(ids, 1, rng, sizes) for _ in range(5000)])
    shares = (drawn[:, None] == ids).float().mean(0)
    assert (shares - sizes / 100).abs().max() < 0.028  # 4 standard deviations
    assert sample(ids, 3, rng).equal(ids)


def test_generators_at_different_addresses_differ():
    addresses = [(0, "a"), (0, "b"), (0, "a", 0)]  # other seeds and rounds are tested by runs
    assert len({random_at(*at).integers(2**62) for at in addresses}) == len(addresses)


# ---------------------------------------------------------------- from flags to clients


def held_by(clients):
    """All samples of each client."""
    return [torch.cat(parts) for parts in zip(clients.train, clients.test)]


@pytest.mark.parametrize("test_domain", [None, "dark"])
@pytest.mark.parametrize(
    "partition", ["iid", "dirichlet", "shards", "domain", "silos", "rare", "specialists"]
)
def test_no_sample_has_two_owners_and_a_seed_gives_the_same_clients(partition, test_domain):
    data = ten_classes()
    flags = {"clients": 13, "silo_numbers": [4, 3], "silo_size": 150, "test_domain": test_domain}
    pool, ood = data.train, data.test
    if partition == "silos":  # are tested on the test set
        pool, ood = torch.arange(len(data.y)), data.test[:0]
    if test_domain:  # the training and the test set are one
        flags["silo_numbers"] = [4]
        pool, ood = (torch.nonzero(data.domain == d).flatten() for d in (0, 1))
    clients, again, other = (make_clients(data, seed, partition, **flags) for seed in (5, 5, 6))
    held = torch.cat(held_by(clients))
    assert len(held.unique()) == len(held) and torch.isin(held, pool).all()
    assert torch.equal(clients.tests.get("ood", data.test[:0]), ood)
    if partition in ("iid", "dirichlet", "shards", "domain"):
        assert all_once([held], pool)
    assert torch.equal(held, torch.cat(held_by(again)))
    assert not torch.equal(clients.train[0], other.train[0])


def test_the_participating_clients_come_first_and_are_those_of_the_draw(tiny):
    everybody = make_clients(tiny, 1, "domain", clients=8, participating=8)
    some = make_clients(tiny, 1, "domain", clients=8, participating=2)
    drawn = sample(torch.arange(8), 2, random_at(1, "participate")).tolist()
    assert drawn != [0, 1]  # the draw changes the order
    order = drawn + [k for k in range(8) if k not in drawn]
    for i, k in enumerate(order):
        assert torch.equal(some.train[i], everybody.train[k])
        assert torch.equal(some.test[i], everybody.test[k])
        assert some.groups[i] == everybody.groups[k]
        counts = tiny.y[some.train[i]].bincount(minlength=3)
        assert torch.equal(some.label_counts[i], counts.float())


def test_by_default_4_in_10_clients_participate_or_those_of_all_domains():
    for n, partition, clients, m, k in (
        (1200, "shards", 40, 16, 4),
        (120, "domain", 6, 6, 2),
        (10, "iid", None, 1, 1),  # the least that docs/data.md names
        (209, "iid", None, 2, 2),
        (210, "iid", None, 3, 2),  # and from where a selection has a choice
    ):
        found = make_clients(ten_classes(n), 0, partition, clients=clients)
        assert (found.participating, found.per_round) == (m, k)


def test_how_much_is_held_out(tiny, rng):
    train, test = hold_out([torch.arange(100), torch.arange(100, 102)], 0.2, rng)
    assert [len(t) for t in train + test] == [80, 1, 20, 1]
    for partition, share, n in (("iid", 0.3, 9), ("iid", None, 6), ("domain", None, 3)):
        clients = make_clients(tiny, 0, partition, clients=4, held_out=share)
        assert {len(samples) for samples in clients.test} == {n}  # of 30


def test_a_silo_has_its_size_for_training_and_is_tested_on_its_own_domain(tiny):
    """Without a test set, a fifth of all samples is for testing."""
    for data, from_there in ((tiny, tiny.test), (replace(tiny, test=tiny.test[:0]), tiny.train)):
        clients = make_clients(data, 0, "silos", silo_numbers=[2, 1], silo_size=20)
        assert clients.participating == clients.per_round == 3
        assert clients.groups == ["light", "light", "dark"]
        assert [len(samples) for samples in clients.train] == [20, 20, 20]
        [tested_on] = {len(samples) for samples in clients.test}
        assert tested_on >= 5
        domains = [{*tiny.domain[samples].tolist()} for samples in held_by(clients)]
        assert domains == [{0}, {0}, {1}]
        assert torch.isin(torch.cat(clients.test), from_there).all()


def test_further_test_sets_are_left_out_where_clients_train_on_their_images(tiny):
    data = replace(tiny, extra={"neutral": tiny.test})
    assert torch.equal(make_clients(data, 0, "iid", clients=4).tests["neutral"], tiny.test)
    assert "neutral" not in make_clients(data, 0, "iid", clients=4, test_domain="dark").tests
    only_test = tiny.domain.clone().index_fill(0, tiny.test, 2)
    data = replace(data, domain=only_test, domains=["light", "dark", "test"])
    assert "neutral" in make_clients(data, 0, "domain", test_domain="test").tests


def test_a_rare_class_is_held_by_one_client_that_holds_nothing_else():
    data = ten_classes()
    clients = make_clients(data, 3, "rare", clients=20, test_domain="dark")
    held = [set(data.y[samples].tolist()) for samples in held_by(clients)]
    for c in (7, 8, 9):
        assert [labels for labels in held if c in labels] == [{c}]
    assert held.count(set(range(7))) == 17
    ood = clients.tests["ood"]
    assert clients.tests["rare"].tolist() == [i for i in ood.tolist() if data.y[i] >= 7]


def test_three_of_four_specialists_hold_one_class():
    data = ten_classes()
    clients = make_clients(data, 0, "specialists", clients=40)
    counts = [data.y[held].bincount(minlength=10) for held in held_by(clients)]
    counts = torch.stack(counts)
    is_alone = (counts > 0).sum(1) == 1
    shares = (counts[is_alone] > 0).sum(0)
    assert is_alone.sum() == 30
    assert shares.max() - shares.min() <= 1  # every class has as many specialists as any other
    p, of_others = data.y[data.train].bincount() / len(data.train), counts[~is_alone].sum(0)
    expected = p * of_others.sum()
    error = (of_others - expected).abs()
    assert (error < 4 * (expected * (1 - p)).sqrt()).all()  # a random sample of all classes


def test_without_a_test_set_a_fifth_of_the_samples_is_drawn_for_ood():
    data = ten_classes(n=700, n_test=0)
    clients = make_clients(data, 3, clients=4)
    ood = clients.tests["ood"]
    assert len(ood) == 140
    assert all_once([*held_by(clients), ood], data.train)


def test_what_does_not_fit_is_refused(tiny):
    """Mistakes in flags are in test_run.py."""
    for few, test, held_out, says in (
        (7, tiny.test, None, "of few has 7 samples, and needs 10: .* remove a domain with so few"),
        (30, tiny.test[:0], 0, "nothing to test on: raise --held-out"),
    ):
        domain = (torch.arange(180) >= few).long()
        data = replace(tiny, domain=domain, domains=["few", "many"], test=test)
        with pytest.raises(UserError, match=says):
            make_clients(data, 0, "domain", held_out=held_out)
