"""The pieces of a batch: the fewest within the limit; after an error at most half of what failed."""

from hypothesis import given
from hypothesis import strategies as st

from lightning_ga.plan.piece_sizes import ceil_div, halved, piece_sizes

COUNTS = st.integers(1, 10**6)


@given(st.integers(0, 10**6), st.integers(10**3, 10**6))
def test_pieces_are_the_fewest_near_equal_ones_within_the_limit(samples: int, limit: int) -> None:
    """A batch without samples is one piece, and so is one without a limit."""
    sizes = piece_sizes(samples, limit)
    assert sum(sizes) == samples
    assert max(sizes) <= limit
    assert max(sizes) - min(sizes) <= 1
    assert len(sizes) == 1 or (len(sizes) - 1) * limit < samples
    assert piece_sizes(samples, None) == (samples,)


@given(COUNTS)
def test_halving_ends_at_one_sample(samples: int) -> None:
    """Each limit is below what failed; one sample leaves nothing to halve."""
    failed, halvings = samples, 0
    while (limit := halved(failed)) is not None:
        assert failed <= 2 * limit <= failed + 1
        assert limit < failed
        failed = limit
        halvings += 1
    assert failed == 1
    assert halvings == (samples - 1).bit_length()


@given(st.integers(0, 10**9), COUNTS)
def test_a_quotient_is_rounded_up(dividend: int, divisor: int) -> None:
    """Without the rounding of floats."""
    quotient = ceil_div(dividend, divisor)
    assert (quotient - 1) * divisor < dividend <= quotient * divisor
