from itertools import combinations

import pytest
import scipy.stats
import torch
from common.oracle import compared_with_oracle, oracle_clients


def by_scipy(counts, by="oracle"):
    """For each client the smallest H(P_i, P_j) = H(P_i) + KL(P_i || P_j), or KL, or only H(P_i)."""
    if by == "oracle-entropy":
        return [scipy.stats.entropy(row) for row in counts]
    p = (counts + 1) / (counts + 1).sum(1, keepdims=True)
    own = [0 if by == "oracle-kl" else scipy.stats.entropy(row) for row in p]
    m = range(len(p))
    return [min(own[i] + scipy.stats.entropy(p[i], p[j]) for j in m if j != i) for i in m]


@pytest.mark.parametrize("by", ["oracle", "oracle-kl", "oracle-entropy"])
def test_no_other_k_clients_have_a_larger_sum_or_leave_out_less(by, rng):
    for _ in range(20):
        counts = rng.integers(1, 9, (7, 3))
        values = by_scipy(counts, by)
        best = max(sum(some) for some in combinations(values, 3))
        table = torch.from_numpy(counts)
        found = [values[i] for i in oracle_clients(table, 3, by)]
        assert sum(found) == pytest.approx(best)
        terms = by_scipy(counts)
        for some in combinations(range(7), 3):
            row = compared_with_oracle(table, torch.tensor(some))
            left_out = sum(terms[i] for i in range(7) if i not in some) / 3
            assert row["left_out"].item() == pytest.approx(left_out)
            oracle = oracle_clients(table, 3).tolist()
            assert row["shared_with_oracle"] == len({*some} & {*oracle})
