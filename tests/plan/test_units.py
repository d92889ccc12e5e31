"""Memory budgets as they are written."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_ga.errors import UserError
from lightning_ga.plan.units import least_budget, parse_budget


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        (1, 1),
        (123456, 123456),
        (1.0, 1000),
        (0.25, 250),
        ("80%", 800),
        ("0.8", 800),
        ("12.5 %", 125),
        ("100", 100),
        ("100 B", 100),
        ("2k", 2000),
        ("512 MB", 512_000_000),
        ("512MiB", 512 * 2**20),
        (" 1.5 gib ", 3 * 2**29),
        ("10G", 10**10),
        ("1TiB", 2**40),
        (".5KiB", 512),
        (np.int64(100), 100),
        (np.float32(0.5), 500),
    ],
)
def test_budgets_are_read(value: int | float | str | None, expected: int | None) -> None:
    assert parse_budget(value, 1000) == expected


@pytest.mark.parametrize(
    "value", [0, -1, True, 0.0, -0.5, 1.5, float("nan"), "", "GiB", "ten", "10 XB", "-5GB", "0%", "120%", "0", "1 2"]
)
def test_bad_budgets_name_the_value_the_rule_and_the_way_out(value: int | float | str) -> None:
    with pytest.raises(UserError) as caught:
        parse_budget(value, 1000)
    message = str(caught.value)
    assert message.startswith(f"memory_budget={value!r} must be ")
    assert "'10GiB'" in message
    assert "\n" not in message


@pytest.mark.parametrize("wrong", ["much", "", 0, -1, 0.5, True, "80%", [16]])
def test_a_memory_that_cannot_be_read_is_refused(wrong: object):
    with pytest.raises(UserError, match=r"memory_budget=.+ must be a whole number of bytes .*'10GiB'"):
        parse_budget(wrong)


@pytest.mark.parametrize("typed", [16, "16", "16 B"])
def test_a_number_without_its_unit_is_told(typed: object) -> None:
    with pytest.raises(UserError, match=rf"^memory_budget={typed} is a number of bytes: write memory_budget='16GiB'"):
        parse_budget(typed, least=1000)


@given(st.integers(1, 10**15))
def test_what_is_proposed_is_enough(needed: int) -> None:
    assert needed <= parse_budget(least_budget(needed)) <= 1.01 * needed + 1
