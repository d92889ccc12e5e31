"""Limits of shorter samples, against the memory that a model of steps takes."""

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ga.plan.size_cuts import SizeLimits
from lightning_ga.probe.size_limits import limits_by_size

WEIGHTS = st.integers(0, 50)


@settings(deadline=None)
@given(WEIGHTS, st.integers(1, 20), WEIGHTS, st.integers(2, 60), st.data())
def test_whatever_the_limits_allow_fits(fixed, by_size, squared, longest, data):
    """A sample takes memory for itself, for its size and for the square of that; each micro-batch fits in the room."""

    def needs(samples: int, size: int) -> int:
        return samples * (100 * fixed + 10 * by_size * size + squared * size * size)

    room = data.draw(st.integers(needs(1, longest), needs(40, longest)))
    limit = room // max(1, needs(1, longest))
    high = data.draw(st.integers(limit, 5 * limit + 100))
    shorter = data.draw(st.integers(min(longest, -(-limit * longest // high)), longest))

    def confirm(sizes: Sequence[int]) -> tuple[int, int]:
        assert list(sizes) == sorted(sizes, reverse=True)
        assert sizes[-1] > limit  # fewer are known to fit
        return next((size for size in sizes if needs(size, shorter) <= room), 0), 1

    found, _ = limits_by_size(confirm, limit, longest=longest, shorter=shorter)
    assert limit <= found.samples <= max(limit, high)
    for size in range(1, longest + 1):
        samples = min(found.samples, found.budget // (size + found.offset))
        assert needs(samples, size) <= room
    assert found.budget // (longest + found.offset) == limit


def test_nothing_is_tried_where_all_fits_at_the_longest() -> None:
    def confirm(sizes: Sequence[int]) -> tuple[int, int]:
        raise AssertionError

    assert limits_by_size(confirm, 64, longest=9, shorter=9) == (SizeLimits(576, 64), 0)
