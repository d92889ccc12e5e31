"""Rows of parameters in which every two values meet."""

import doctest
from itertools import combinations, product

import pairing
import pytest
from pairing import covering, every_pair


def test_doctests() -> None:
    assert doctest.testmod(pairing).failed == 0


@pytest.mark.parametrize("sizes", [[2, 2], [2, 2, 2], [5, 3, 2], [2, 4, 3, 2], [1, 3], [4]], ids=str)
def test_every_two_values_meet(sizes: list[int]) -> None:
    """In hardly more rows than the two largest parameters have values together."""
    rows = covering(sizes)
    for a, b in combinations(range(len(sizes)), 2):
        assert {(row[a], row[b]) for row in rows} == set(product(range(sizes[a]), range(sizes[b])))
    largest = sorted([1, *sizes])[-2:]
    assert len(rows) <= largest[0] * largest[1] * 1.5 or len(sizes) == 1
    assert rows == covering(sizes)


def test_rows_have_the_names_of_their_values() -> None:
    """Of a dictionary the keys, of a function its own, of anything else how it is written."""
    (names, rows) = every_pair(kind=[int, str], way={"one": 1, "two": 2}).args
    assert names == ("kind", "way")
    assert [(row.id, row.values) for row in rows][:2] == [("int-one", (int, 1)), ("int-two", (int, 2))]
    assert len(rows) == 4
