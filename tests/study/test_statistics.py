"""Means, deviations, pairs and the exact test, against numbers worked out by hand."""

import math

import pytest

from gva_jax.study.statistics import compare, mean, sample_sd, sign_flip


def test_the_deviation_divides_by_n_minus_one():
    # Squared distances from the mean 4: 9 + 1 + 16 = 26 over 2.
    assert mean([1, 3, 8]) == 4
    assert sample_sd([1, 3, 8]) == pytest.approx(math.sqrt(13))
    assert sample_sd([2.5]) is None


def test_pairs_are_formed_by_seed_and_not_by_order():
    found = compare({1: 60.0, 2: 50.0, 3: 40.0}, {3: 39.0, 1: 57.0, 2: 51.0})
    assert found.differences == {1: -3.0, 2: 1.0, 3: -1.0}
    assert found.mean == -1 and found.sd == 2  # squared distances 4 + 4 + 0 over 2
    assert found.improved == 2
    assert found.change == pytest.approx(49 / 50 - 1)
    # Of the 8 sums +-3 +-1 +-1 the 6 with |sum| >= 3: 5, 3, 3 and their negatives (1 and -1 are nearer).
    assert found.p == 0.75


def test_a_pair_without_its_half_is_refused():
    with pytest.raises(ValueError, match=r"\[1, 2\] and \[1, 3\]"):
        compare({1: 1.0, 2: 1.0}, {1: 1.0, 3: 1.0})


@pytest.mark.parametrize(
    ("differences", "p"),
    [
        ([-1.0, -2.0, -3.0], 2 / 8),  # the least that three pairs allow
        ([-0.1] * 5, 2 / 32),
        ([1.0, -1.0], 1.0),
        ([-4.0], 1.0),
        ([0.1, 0.2, -0.3, 0.01], 1.0),  # 0.1 + 0.2 - 0.3 is not quite 0, so equal sums differ by rounding
        ([-4.0, -3.0, -2.0, 1.0], 4 / 16),  # |sum| >= 8: -10, -8 and 10, 8
    ],
)
def test_sign_flip_counts_all_choices_of_signs(differences, p):
    assert sign_flip(differences) == p


def test_too_many_pairs_are_not_enumerated():
    with pytest.raises(ValueError, match="at most 20"):
        sign_flip([1.0] * 21)
