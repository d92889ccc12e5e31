"""Parameters whose values do not depend on each other: each value of one meets each value of every other."""

from collections.abc import Iterable
from itertools import combinations, product
from typing import Any

import pytest


def every_pair(**values: Any) -> Any:
    """Parametrize a test with a few rows that hold every pair of values, instead of with all rows.

    A mistake shows in one value, or where two values meet; that it takes three is rare
    (Kuhn, Wallace and Gallo, "Software fault interactions and implications for software testing", 2004).

    Args:
        values: For each parameter its values, or a dictionary of them by their names.

    Examples:
        >>> len(every_pair(mode=["loader", "step"], oom=[False, True], epochs=[1, 2]).args[1])
        4
    """
    named = {name: list(each.items() if isinstance(each, dict) else zip(map(label, each), each))
             for name, each in values.items()}  # fmt: skip
    rows = [
        pytest.param(*(value for _, value in row), id="-".join(name for name, _ in row))
        for row in (
            [named[name][place] for name, place in zip(named, places)]
            for places in covering([len(each) for each in named.values()])
        )
    ]
    return pytest.mark.parametrize(tuple(named), rows)


def label(value: Any) -> str:
    """The name of a value in the name of a test."""
    return getattr(value, "__name__", None) or str(value)


def covering(sizes: list[int]) -> list[tuple[int, ...]]:
    """Rows of numbers below the sizes in which every pair of numbers occurs; greedy, the same every time."""
    rows = list(product(*map(range, sizes)))
    missing = {pair for row in rows for pair in pairs(row)}
    found = []
    while missing:
        best = max(rows, key=lambda row: len(missing.intersection(pairs(row))))
        missing -= pairs(best)
        found.append(best)
    return sorted(found)


def pairs(row: Iterable[int]) -> set[Any]:
    """Each two places of a row with what is there."""
    return set(combinations(enumerate(row), 2))
