"""Means, sample standard deviations, paired differences and an exact paired test. Pure Python."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MOST_PAIRS = 20  # of which all 2^n choices of signs are enumerated


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def sample_sd(values: Sequence[float]) -> float | None:
    """With n - 1 in the denominator; None for fewer than two values."""
    if len(values) < 2:
        return None
    centre = mean(values)
    return math.sqrt(math.fsum((x - centre) ** 2 for x in values) / (len(values) - 1))


@dataclass(frozen=True)
class Comparison:
    """Pairs by seed: variant minus baseline, lower is better.

    Attributes:
      differences: by seed.
      change: of the variant's mean relative to the baseline's.
      improved: in how many pairs the variant is lower.
      p: of the exact sign-flip test, two-sided.
    """

    differences: dict[int, float]
    change: float
    improved: int
    p: float

    @property
    def mean(self) -> float:
        return mean(list(self.differences.values()))

    @property
    def sd(self) -> float | None:
        return sample_sd(list(self.differences.values()))


def compare(baseline: Mapping[int, float], variant: Mapping[int, float]) -> Comparison:
    """Pair two rows of values by seed.

    Raises:
      ValueError: their seeds differ: a pair lacks its half.
    """
    if set(baseline) != set(variant) or not baseline:
        raise ValueError(f"seeds {sorted(baseline)} and {sorted(variant)} do not pair")
    differences = {seed: variant[seed] - baseline[seed] for seed in baseline}
    return Comparison(
        differences=differences,
        change=mean(list(variant.values())) / mean(list(baseline.values())) - 1,
        improved=sum(difference < 0 for difference in differences.values()),
        p=sign_flip(list(differences.values())),
    )


def sign_flip(differences: Sequence[float]) -> float:
    """Two-sided p of the exact sign-flip permutation test of a mean difference of 0.

    Were variant and baseline exchangeable within a pair, each difference could as well have the other sign: p is the
    share of all 2^n choices of signs whose sum is at least as far from 0 as the observed one. The least it can be is
    2^(1 - n): 0.25 for three pairs, 0.0625 for five.

    Raises:
      ValueError: more than `MOST_PAIRS` pairs, too many to enumerate.
    """
    if len(differences) > MOST_PAIRS:
        raise ValueError(f"{len(differences)} pairs: an exact test enumerates at most {MOST_PAIRS}")
    least = abs(math.fsum(differences)) * (1 - 1e-12)  # sums that are equal but for rounding count
    sums = (math.fsum(s * d for s, d in zip(signs, differences, strict=True))
            for signs in itertools.product((1, -1), repeat=len(differences)))  # fmt: skip
    return sum(abs(total) >= least for total in sums) / 2 ** len(differences)
