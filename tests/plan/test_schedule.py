"""A number, a mapping or a callable: each becomes the same function of the epoch."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_ga.errors import UserError
from lightning_ga.plan.schedule import as_schedule

COUNTS = st.integers(1, 10_000)
STEPS = st.dictionaries(st.integers(0, 30), COUNTS, min_size=1)


@given(STEPS)
def test_a_mapping_holds_from_its_epoch_on(steps: dict[int, int]) -> None:
    """The last entry that has begun counts; before the first there is none, as without a schedule."""
    schedule, turned = (as_schedule(each, name="n") for each in (steps, {str(e): steps[e] for e in reversed(steps)}))
    current = None
    for epoch in range(40):
        current = steps.get(epoch, current)
        assert schedule(epoch) == turned(epoch) == current
    assert as_schedule(None, name="n")(3) is None


def test_the_callers_mapping_is_neither_changed_nor_watched() -> None:
    steps = {0: 4}
    schedule = as_schedule(steps, name="n")
    assert schedule(9) == 4
    steps[0] = 8
    assert schedule(9) == 4
    assert steps == {0: 8}


def test_epochs_may_be_of_numpy() -> None:
    assert as_schedule({np.int64(0): np.int32(8)}, name="n")(3) == 8


@given(COUNTS, st.integers(0, 1000))
def test_a_number_holds_for_every_epoch(count: int, epoch: int) -> None:
    for value in (count, {0: count}, lambda _epoch: count):
        assert as_schedule(value, name="n")(epoch) == count


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (0, "^n=0 must be at least 1"),
        (True, "^n=True must be a whole number"),
        (2.5, "^n=2.5 must be a whole number"),
        ("8", "^n='8' must be a whole number"),
        ({}, r"^n=\{\} is empty: give at least one epoch, for example \{0: 32\}"),
        ({0: 8, 3: 0}, r"^n\[3\]=0 must be at least 1"),
        ({-1: 8}, "^n has the epoch -1; epochs are whole numbers and start at 0"),
        ({"first": 8}, "^n has the epoch 'first'"),
        ({True: 8}, "^n has the epoch True"),
        ({0.0: 8}, "^n has the epoch 0.0"),
        (lambda: 8, r"^n is a function with the arguments \(\), and it is called with the epoch alone"),
        (lambda epoch, step: 8, r"^n is a function with the arguments \(epoch, step\)"),
    ],
)
def test_a_wrong_schedule_is_refused_at_once(value: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        as_schedule(value, name="n")  # type: ignore[arg-type]


@pytest.mark.parametrize("returned", [0, 1.5, None])
def test_a_callable_is_checked_when_it_answers(returned: object) -> None:
    with pytest.raises(UserError, match=rf"n\(epoch=7\)={returned} must be"):
        as_schedule(lambda _epoch: returned, name="n")(7)  # type: ignore[arg-type, return-value]
