"""Long lists of cases: some run by default, all with `-m "long or not long"`."""

import random

import pytest


def thinned(cases, share: int) -> list:
    """`cases` for `parametrize`, of which one in `share`, drawn once and for all, is not marked `long`."""
    cases = list(cases)
    kept = set(random.Random(0).sample(range(len(cases)), max(len(cases) // share, 1)))
    values = (case if isinstance(case, tuple) else (case,) for case in cases)
    marks = ([] if i in kept else pytest.mark.long for i in range(len(cases)))
    return [pytest.param(*value, marks=mark) for value, mark in zip(values, marks, strict=True)]
