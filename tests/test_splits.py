from dataclasses import replace

import numpy as np
import pytest
import torch

import common.data
from common import UserError, random_at
from common.splits import (
    by_domain,
    deal,
    dirichlet,
    draw,
    hold_out,
    iid,
    label_counts,
    one_per_domain,
    silos,
    symmetric_noise,
)


@pytest.fixture
def rng():
    return random_at(0, "test")


def all_once(parts, pool):
    return sorted(torch.cat(parts).tolist()) == sorted(pool.tolist())


def test_iid_divides_all_samples_into_parts_of_equal_size(rng):
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
def test_algorithm_2_divides_whole_domains_into_equal_parts(sizes, clients, rng):
    domain = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    parts = by_domain(domain, clients, rng)
    assert len(parts) == clients and all_once(parts, torch.arange(len(domain)))
    assert all(len(domain[p].unique()) == 1 for p in parts)
    of_domain = [[len(p) for p in parts if domain[p[0]] == d] for d in range(len(sizes))]
    assert all(max(s) - min(s) <= 1 for s in of_domain)
    # greedy: the domain that got the last client had the most samples per client at that moment. So if a domain gave
    # back one client, it would have at least as many samples per client as any other domain has now.
    for d, n in enumerate(sizes):
        if (k := len(of_domain[d])) > 1:
            assert n / (k - 1) >= max(m / len(s) for m, s in zip(sizes, of_domain, strict=True))


def test_algorithm_2_on_a_worked_example(rng):
    domain = torch.tensor([0] * 300 + [1] * 100)
    assert [len(p) for p in by_domain(domain, 4, rng)] == [100, 100, 100, 100]
    with pytest.raises(UserError, match="fewer than the 2 domains"):
        by_domain(domain, 1, rng)


def test_silos(rng):
    domain = torch.tensor([0, 1, 2] * 40)
    parts = silos(domain, [3, 1, 0], 10, rng)
    assert [len(p) for p in parts] == [10, 10, 10, 10]
    assert [domain[p].unique().tolist() for p in parts] == [[0], [0], [0], [1]]
    assert len(torch.cat(parts).unique()) == 40
    with pytest.raises(UserError, match="do not fit"):
        silos(domain, [5, 1, 0], 10, rng)
    with pytest.raises(UserError, match="2 numbers for 3 domains"):
        silos(domain, [1, 1], 10, rng)
    with pytest.raises(UserError, match="no domain a silo"):
        silos(domain, [0, 0, 0], 10, rng)


def test_one_client_for_each_speaker(rng):
    domain = torch.tensor([0] * 20 + [1] * 5 + [2] * 30 + [3] * 10)
    parts = one_per_domain(domain, 3, rng)
    assert [len(p) for p in parts] == [20, 30, 10]
    assert [domain[p].unique().tolist() for p in parts] == [[0], [2], [3]]
    with pytest.raises(UserError, match="only 3"):
        one_per_domain(domain, 4, rng)


def test_participation_and_selection_are_uniform():
    counts = torch.zeros(10)
    for i in range(1000):
        ids = draw(torch.arange(10), 4, random_at(i, "p"))
        chosen = draw(ids, 2, random_at(i, "s"))
        assert ids.tolist() == sorted(set(ids.tolist())) and set(chosen.tolist()) < set(ids.tolist())
        counts[chosen] += 1
    assert ((counts - 200).abs() < 4 * (1000 * 0.2 * 0.8) ** 0.5).all()


def test_hold_out(rng):
    parts = [torch.arange(100), torch.arange(100, 102)]
    train, test = hold_out(parts, 0.2, rng)
    assert [len(t) for t in train] == [80, 1] and [len(t) for t in test] == [20, 1]
    assert all(all_once([a, b], p) for a, b, p in zip(train, test, parts, strict=True))


def test_label_noise_flips_the_requested_share_evenly_to_the_other_classes(rng):
    labels = torch.full((20_000,), 2)
    clients = list(torch.arange(20_000).split(1000))
    noisy = symmetric_noise(labels, clients, 0.5, 0.4, 5, rng)
    flipped = torch.stack([(noisy[samples] != 2).float().mean() for samples in clients])
    assert 3 <= (flipped > 0).sum() <= 17
    assert ((flipped[flipped > 0] - 0.4).abs() < 0.07).all(), "a client is either noisy or clean"
    to = torch.bincount(noisy[noisy != 2], minlength=5) / (noisy != 2).sum()
    assert torch.allclose(to, torch.tensor([0.25, 0.25, 0, 0.25, 0.25]), atol=0.03)
    assert (labels == 2).all(), "the clean labels stay"
    assert torch.equal(symmetric_noise(labels, clients, 0.0, 1.0, 5, rng), labels)
    assert (symmetric_noise(labels, clients[:3], 1.0, 1.0, 5, rng)[:3000] != 2).all()
    assert (symmetric_noise(labels, clients[:3], 1.0, 1.0, 5, rng)[3000:] == 2).all(), "samples of nobody stay clean"


def test_label_counts_on_a_worked_example(tiny):
    tiny.y[:4] = torch.tensor([0, 2, 2, 1])
    assert label_counts(tiny, [torch.tensor([0, 1, 2]), torch.tensor([3])]).tolist() == [[1, 0, 2], [0, 1, 0]]


def test_a_draw_by_size():
    """Two of three clients: client i is drawn first or second, with p_i + sum over j of p_j p_i / (1 - p_j)."""
    sizes, rng = torch.tensor([10.0, 30.0, 60.0]), np.random.default_rng(0)
    p = (sizes / sizes.sum()).tolist()
    drawn = torch.stack([draw(torch.tensor([4, 5, 6]), 2, rng, sizes) for _ in range(20000)])
    assert (drawn[:, 0] < drawn[:, 1]).all()
    for i in range(3):
        expected = p[i] + sum(p[j] * p[i] / (1 - p[j]) for j in range(3) if j != i)
        assert (drawn == 4 + i).any(1).float().mean().item() == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize(
    ("partition", "n", "options"),
    [("iid", 8, {}), ("dirichlet", 8, {"alpha": 1.0}), ("domain", 8, {}), ("speaker", 2, {})],
)
def test_the_participating_clients_come_first_and_are_those_of_the_draw(tiny, partition, n, options):
    m = max(1, n // 3)
    everybody = deal(tiny, 1, partition, clients=n, participating=n, **options)
    some = deal(tiny, 1, partition, clients=n, participating=m, **options)
    drawn = draw(torch.arange(n), m, random_at(1, "participate")).tolist()
    others = [k for k in range(n) if k not in drawn]
    assert drawn != list(range(m)), "the draw changes the order"
    for found, expected in ((some.train, everybody.train), (some.test, everybody.test)):
        assert all(torch.equal(a, expected[k]) for a, k in zip(found, drawn + others, strict=True))
    assert some.domains == [everybody.domains[k] for k in drawn + others]
    assert some.participating == m and some.ids.tolist() == list(range(m))
    assert some.sizes.tolist() == [len(everybody.train[k]) for k in drawn + others]
    assert torch.equal(some.held_out, torch.cat([everybody.test[k] for k in drawn]))
    if partition in ("domain", "speaker"):
        for domain, train, test in zip(some.domains, some.train, some.test, strict=True):
            assert {tiny.domains[d] for d in tiny.domain[torch.cat([train, test])]} == {domain}
        assert len(set(some.domains)) == 2


def test_more_participating_clients_than_clients_are_refused(tiny):
    with pytest.raises(UserError, match="--participating 13 is more than the 12 clients"):
        deal(tiny, 0, "iid", clients=12, participating=13)


@pytest.mark.parametrize("partition", ["iid", "domain"])
def test_clients_of_less_than_ten_samples_are_refused(tiny, partition):
    assert len(deal(tiny, 0, partition, clients=12).train) == 12
    with pytest.raises(UserError, match=r"a client would have [89] samples, and needs 10: lower --clients"):
        deal(tiny, 0, partition, clients=13)


@pytest.mark.parametrize(("partition", "clients", "m"), [("iid", 10, 4), ("iid", 1, 1), ("domain", 6, 6)])
def test_by_default_4_in_10_clients_participate_or_those_of_all_domains(tiny, partition, clients, m):
    assert deal(tiny, 0, partition, clients=clients).participating == m


def test_a_left_out_domain_is_seen_by_no_client(tiny):
    clients = deal(tiny, 0, "domain", test_domain="dark", clients=4)
    held = torch.cat(clients.train + clients.test)
    assert (tiny.domain[held] == 0).all() and set(clients.domains) == {"light"}
    assert set(clients.ood.tolist()) == set(torch.nonzero(tiny.domain == 1).flatten().tolist())
    assert len(held) + len(clients.ood) == len(tiny.x), "the standard test images join the training images"


@pytest.mark.parametrize("partition", ["domain", "dirichlet", "speaker", "silos"])
def test_a_left_out_domain_must_leave_another_one(tiny, partition):
    only = replace(tiny, domain=torch.zeros_like(tiny.domain), domains=["light"])
    with pytest.raises(UserError, match="no domain is left to train on"):
        deal(only, 0, partition, clients=2, silos_per_domain=[1], test_domain="light")


def test_an_unknown_domain_is_named(tiny):
    with pytest.raises(UserError, match="no domain 'grey' in tiny: give one of light, dark"):
        deal(tiny, 0, "domain", test_domain="grey")
    with pytest.raises(UserError, match="it has none"):
        deal(replace(tiny, domain=None, domains=[]), 0, "iid", test_domain="grey")


def test_speakers_are_tested_on_what_the_clients_speakers_say(tiny):
    clients = deal(tiny, 0, "speaker", clients=1)
    speaker = tiny.domain[clients.train[0][0]]
    assert torch.equal(clients.ood, tiny.test[tiny.domain[tiny.test] == speaker]) and len(clients.ood) == 30


def test_label_skew_is_tested_on_the_standard_test_set(tiny):
    clients = deal(tiny, 0, "dirichlet", clients=5, participating=3)
    assert torch.equal(clients.ood, tiny.test) and clients.participating == 3
    assert all_once(clients.train + clients.test, tiny.train)


def test_silos_are_tested_on_their_own_domain_of_the_standard_test_set(tiny):
    clients = deal(tiny, 0, "silos", silos_per_domain=[2, 1], silo_size=20)
    assert clients.participating == 3 and clients.domains == ["light", "light", "dark"]
    assert [len(t) for t in clients.train] == [20, 20, 20]
    assert set(torch.cat(clients.test).tolist()) <= set(tiny.test.tolist())
    assert [tiny.domain[t].unique().tolist() for t in clients.test] == [[0], [0], [1]]
    assert len({len(t) for t in clients.test}) == 1 and len(torch.cat(clients.test).unique()) == 45
    assert len(clients.ood) == 0


def test_another_seed_gives_other_clients(tiny):
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


def test_a_speakers_test_windows_share_no_text_with_its_training_windows(tmp_path):
    rng = random_at(0, "play")
    said = "".join(rng.choice(list("abcdefghij"), 4000))
    (tmp_path / "play.txt").write_text(f"ROMEO:\n{said}\n")
    data = common.data.plays(tmp_path / "play.txt")
    clients = deal(data, 0, "speaker", clients=1, participating=1)
    begins = [said.index("".join(data.classes[c] for c in x)) for x in data.x.tolist()]
    train, test = ([begins[i] for i in part[0]] for part in (clients.train, clients.test))
    assert train and test and max(train) + 81 <= min(test)
    assert len(train) + len(test) + data.gap == len(data.train)


def test_more_clients_than_samples_are_refused_at_once(tiny):
    for partition in ("domain", "iid", "dirichlet"):
        with pytest.raises(UserError, match=r"too few for \d+ clients"):
            deal(tiny, 0, partition, clients=100_000_000)
