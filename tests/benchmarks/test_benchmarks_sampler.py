"""The table, the record and the targets of the sampler's benchmark; what it times is left to it."""

import doctest
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[2]))  # benchmarks are not installed

from benchmarks import sampler


def cells(**measured: float) -> list[dict[str, Any]]:
    """Every cell of the full table, with numbers as wide as they get."""
    wide = {"first_seconds": 123.456, "next_seconds": 0.99e-3, "peak_bytes": 7.9e9, "held_bytes": 7.9e9} | measured
    return [{"samples": size, "sampler": name, **wide} for size in sampler.SIZES for name in sampler.SAMPLERS]


def test_doctests() -> None:
    """Examples in docstrings hold."""
    assert doctest.testmod(sampler).failed == 0


def test_the_table_fits_80_columns_and_cuts_nothing_off() -> None:
    """With the widest numbers."""
    lines = sampler.text({"ranks": 64, "micro_batch": 32, "cells": cells()}).splitlines()
    assert max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines)
    assert sum("7,900.0 MB" in line for line in lines) == len(cells())


@pytest.mark.parametrize("name", sampler.SAMPLERS)
def test_a_cell_measures_what_it_says(name: str) -> None:
    """In this process, on a small epoch."""
    measured = sampler.measure(name, 10_000)
    assert all(value >= 0 for value in measured.values())
    assert measured["process_bytes"] > measured["peak_bytes"]


def test_a_cell_keeps_the_shortest_time_and_the_largest_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three processes."""
    runs = iter([{"first_seconds": 1.0, "peak_bytes": 7}, {"first_seconds": 3.0, "peak_bytes": 9}] * 2)
    monkeypatch.setattr(sampler, "in_fresh_process", lambda command: next(runs))
    found = sampler.cell("RandomSampler", 100)
    assert (found["first_seconds"], found["peak_bytes"]) == (1.0, 9)


@pytest.mark.parametrize(
    ("measured", "count"), [({"first_seconds": 4, "peak_bytes": 5e8}, 0), ({"first_seconds": 6}, 2), ({}, 2)]
)
def test_missed_targets_are_named(measured: dict[str, float], count: int) -> None:
    """Time and memory of ours at 10⁸ samples."""
    assert len(list(sampler.missed(cells(**measured)))) == count
