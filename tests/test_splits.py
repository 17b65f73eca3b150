import numpy as np
import pytest
import torch

from common import UserError, random_at
from common.splits import (
    by_domain,
    deal,
    dirichlet,
    draw,
    hold_out,
    iid,
    one_per_domain,
    participate,
    silos,
    symmetric_noise,
)


@pytest.fixture
def rng():
    return random_at(0, "test")


def all_once(parts, pool):
    return sorted(torch.cat(parts).tolist()) == sorted(pool.tolist())


def test_iid_deals_all_samples_into_parts_of_equal_size(rng):
    pool = torch.arange(100, 203)
    parts = iid(pool, 10, rng)
    assert all_once(parts, pool)
    assert {len(p) for p in parts} == {10, 11}


@pytest.mark.parametrize("alpha", [0.03, 0.1, 100.0])
def test_dirichlet_uses_every_sample_once_and_leaves_nobody_under_the_minimum(alpha, rng):
    labels = torch.from_numpy(rng.integers(0, 10, 10_000))
    parts = dirichlet(labels, 500, alpha, rng)
    assert all_once(parts, torch.arange(10_000))
    assert min(map(len, parts)) >= 10


def test_dirichlet_shares_have_the_mean_and_variance_of_the_distribution():
    clients, alpha, draws = 5, 0.5, 600
    labels = torch.arange(2).repeat_interleave(400)
    deals = [dirichlet(labels, clients, alpha, random_at(i, "deal"), min_size=0) for i in range(draws)]
    shares = torch.stack([torch.stack([torch.bincount(labels[p], minlength=2) / 400 for p in d]) for d in deals])
    variance = (1 / clients) * (1 - 1 / clients) / (clients * alpha + 1)
    standard_error = (variance / draws) ** 0.5
    assert ((shares.mean(0) - 1 / clients).abs() < 4 * standard_error).all()
    assert torch.allclose(shares.var(0), torch.tensor(variance), rtol=0.25)
    between_classes = torch.corrcoef(shares[:, 0].T)[0, 1]
    assert between_classes.abs() < 4 / draws**0.5, "each class has its own draw"


def test_dirichlet_refuses_too_many_clients(rng):
    with pytest.raises(UserError, match="--clients"):
        dirichlet(torch.zeros(99, dtype=torch.long), 10, 0.1, rng)


@pytest.mark.parametrize("sizes", [[300, 100], [1000, 999, 10], [50, 50, 50, 50, 50, 50], [2048, 2344, 1670, 3929]])
@pytest.mark.parametrize("clients", [6, 50])
def test_algorithm_2_deals_whole_domains_in_equal_parts(sizes, clients, rng):
    domain = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    parts = by_domain(domain, clients, rng)
    assert len(parts) == clients and all_once(parts, torch.arange(len(domain)))
    assert all(len(domain[p].unique()) == 1 for p in parts)
    of_domain = [[len(p) for p in parts if domain[p[0]] == d] for d in range(len(sizes))]
    assert all(max(s) - min(s) <= 1 for s in of_domain)
    # greedy: whoever got the last client had most samples a client before, so taking it back never helps another
    for d, n in enumerate(sizes):
        if (k := len(of_domain[d])) > 1:
            assert n / (k - 1) >= max(m / len(s) for m, s in zip(sizes, of_domain, strict=True))


def test_algorithm_2_on_a_worked_example(rng):
    domain = torch.tensor([0] * 300 + [1] * 100)
    assert [len(p) for p in by_domain(domain, 4, rng)] == [100, 100, 100, 100]


def test_silos(rng):
    domain = torch.tensor([0, 1, 2] * 40)
    parts = silos(domain, [3, 1, 0], 10, rng)
    assert [len(p) for p in parts] == [10, 10, 10, 10]
    assert [domain[p].unique().tolist() for p in parts] == [[0], [0], [0], [1]]
    assert len(torch.cat(parts).unique()) == 40
    with pytest.raises(UserError, match="do not fit"):
        silos(domain, [5, 1, 0], 10, rng)


def test_one_client_a_speaker(rng):
    domain = torch.tensor([0] * 20 + [1] * 5 + [2] * 30 + [3] * 10)
    parts = one_per_domain(domain, 3, rng)
    assert [len(p) for p in parts] == [20, 30, 10]
    with pytest.raises(UserError, match="only 3"):
        one_per_domain(domain, 4, rng)


def test_participation_and_selection_are_uniform():
    counts = torch.zeros(10)
    for i in range(1000):
        ids = participate(10, 4, random_at(i, "p"))
        chosen = draw(ids, 2, random_at(i, "s"))
        assert ids.tolist() == sorted(set(ids.tolist())) and set(chosen.tolist()) < set(ids.tolist())
        counts[chosen] += 1
    assert ((counts - 200).abs() < 4 * (1000 * 0.2 * 0.8) ** 0.5).all()
    with pytest.raises(UserError, match="41 of 40"):
        participate(40, 41, random_at(0, "p"))


def test_hold_out(rng):
    parts = [torch.arange(100), torch.arange(100, 102)]
    train, test = hold_out(parts, 0.2, rng)
    assert [len(t) for t in train] == [80, 1] and [len(t) for t in test] == [20, 1]
    assert all(all_once([a, b], p) for a, b, p in zip(train, test, parts, strict=True))


def test_label_noise_flips_the_asked_share_evenly_to_the_other_classes(rng):
    labels = torch.full((20_000,), 2)
    clients = list(torch.arange(20_000).split(1000))
    noisy, bad = symmetric_noise(labels, clients, 0.5, 0.4, 5, rng)
    assert 3 <= bad.sum() <= 17
    for samples, is_noisy in zip(clients, bad, strict=True):
        flipped = (noisy[samples] != 2).float().mean()
        assert abs(flipped - 0.4) < 0.07 if is_noisy else flipped == 0
    to = torch.bincount(noisy[noisy != 2], minlength=5) / (noisy != 2).sum()
    assert torch.allclose(to, torch.tensor([0.25, 0.25, 0, 0.25, 0.25]), atol=0.03)
    assert (labels == 2).all(), "the clean labels stay"


def test_a_left_out_domain_is_seen_by_no_client(tiny):
    clients = deal(tiny, 0, "domain", test_domain="dark", clients=4)
    held = torch.cat(clients.train + clients.test)
    assert (tiny.domain[held] == 0).all() and set(clients.domains) == {"light"}
    assert set(clients.ood.tolist()) == set(torch.nonzero(tiny.domain == 1).flatten().tolist())
    assert len(held) + len(clients.ood) == len(tiny.x), "the standard test images join the training images"


def test_label_skew_is_tested_on_the_standard_test_set(tiny):
    clients = deal(tiny, 0, "dirichlet", clients=5, participating=3)
    assert torch.equal(clients.ood, tiny.test) and len(clients.participating) == 3
    assert all_once(clients.train + clients.test, tiny.train)


def test_silos_are_tested_on_their_own_domain_of_the_standard_test_set(tiny):
    clients = deal(tiny, 0, "silos", silos_per_domain=[2, 1], silo_size=20)
    assert clients.domains == ["light", "light", "dark"] and [len(t) for t in clients.train] == [20, 20, 20]
    assert set(torch.cat(clients.test).tolist()) <= set(tiny.test.tolist())
    assert [tiny.domain[t].unique().tolist() for t in clients.test] == [[0], [0], [1]]
    assert len({len(t) for t in clients.test}) == 1 and len(torch.cat(clients.test).unique()) == 45


def test_another_seed_is_another_deal(tiny):
    a, b, c = (deal(tiny, seed, "iid", clients=4) for seed in (0, 0, 1))
    assert all(torch.equal(x, y) for x, y in zip(a.train, b.train, strict=True))
    assert not all(torch.equal(x, y) for x, y in zip(a.train, c.train, strict=True))


def test_generators_at_different_addresses_differ():
    draws = [
        random_at(*at).integers(2**62)
        for at in ((0, "a"), (0, "b"), (1, "a"), (0, "a", 0), (0, "a", 1), (0, "a", 0, 1))
    ]
    assert len(set(draws)) == len(draws)
    assert np.array_equal(random_at(0, "a", 3).random(5), random_at(0, "a", 3).random(5))
