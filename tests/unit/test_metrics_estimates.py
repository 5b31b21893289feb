"""pass@k against its definition, standard errors against the textbook, and the vote."""

from __future__ import annotations

import itertools
import math
import random
import statistics

import pytest

from hybridrl.metrics.estimates import majority_score, mean_of, pass_at_k


def test_pass_at_k_is_the_share_of_subsets_with_a_right_one_on_100_random_tables() -> None:
    draw = random.Random(0)
    for _ in range(100):
        n = draw.randint(1, 12)
        right = [draw.random() < 0.3 for _ in range(n)]
        c = sum(right)
        for k in range(1, n + 1):
            subsets = list(itertools.combinations(right, k))
            share = sum(any(subset) for subset in subsets) / len(subsets)
            assert pass_at_k(n, c, k) == pytest.approx(share, abs=1e-15)
            formula = 1 - math.comb(n - c, k) / math.comb(n, k)
            assert pass_at_k(n, c, k) == pytest.approx(formula, abs=1e-15)


def test_pass_at_k_of_many_samples_is_the_stable_product() -> None:
    for n, c, k in ((1000, 3, 100), (5000, 4999, 17), (512, 1, 512), (512, 0, 1)):
        product = math.prod(1 - k / i for i in range(n - c + 1, n + 1))
        assert pass_at_k(n, c, k) == pytest.approx(1 - product, abs=1e-12)


def test_standard_error_is_that_of_a_mean() -> None:
    values = [1.0, 0.0, 0.25, 1.0, 0.5]
    found = mean_of(values)
    assert found.value == pytest.approx(statistics.mean(values))
    assert found.stderr == pytest.approx(statistics.stdev(values) / math.sqrt(5))
    assert mean_of([0.5]) == (0.5, None) and str(mean_of([0.5])) == "0.5000"
    assert str(found) == "0.5500 ± 0.2000"


def test_majority_is_the_score_of_the_most_frequent_answer() -> None:
    assert majority_score(["7", "8", "7"], [1, 0, 1]) == 1
    assert majority_score(["8", "7", "8", None, None, None], [1, 0, 1, 0, 0, 0]) == 1
    assert majority_score(["7", "8"], [1, 0]) == 0.5  # a tie: each counts alike
    assert majority_score([None, None], [0, 0]) == 0
