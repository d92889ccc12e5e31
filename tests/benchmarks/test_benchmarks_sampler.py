"""The table, the record and the targets of the sampler's benchmark; what it times is left to it."""

from typing import Any

import pytest

from benchmarks import sampler


def cells(**measured: float) -> list[dict[str, Any]]:
    """Every cell of the full table, with numbers as wide as they get."""
    wide = {"first_seconds": 123.456, "next_seconds": 0.99e-3, "peak_bytes": 7.9e9, "held_bytes": 7.9e9} | measured
    return [
        {"samples": size, "sampler": name}
        | ({"skipped": "too large", "needed_bytes": 48 * size} if size == 10**9 else wide)
        for size in sampler.SIZES
        for name in sampler.SAMPLERS
    ]


def test_the_table_fits_80_columns_and_cuts_nothing_off() -> None:
    lines = sampler.text({"ranks": 64, "micro_batch": 32, "cells": cells()}).splitlines()
    assert max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines)
    assert sum("48,000 MB" in line for line in lines) == 3


@pytest.mark.parametrize(
    ("measured", "count"), [({"first_seconds": 4, "peak_bytes": 5e8}, 0), ({"first_seconds": 6}, 2), ({}, 2)]
)
def test_missed_targets_are_named(measured: dict[str, float], count: int) -> None:
    """Time and memory of ours at 10⁸ samples."""
    assert len(list(sampler.missed(cells(**measured)))) == count
