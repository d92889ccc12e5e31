"""The plan of one window, against what the words promise: exact, near-equal, fewest."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_ga.errors import UserError
from lightning_ga.plan.accumulation import (
    LEAST_GAIN,
    AccumulationPlan,
    ceil_div,
    halved,
    micro_batch_sizes,
    plan_accumulation,
    plan_in_step,
    plan_unequal_shares,
    ratio_of_speeds,
    split_evenly,
    split_in_proportion,
)

WORLD_SIZES = st.integers(1, 9)
LIMITS = st.integers(1, 70)
COUNTS = st.integers(1, 10**6)


@st.composite
def requests(draw: st.DrawFn) -> tuple[int, int, int]:
    """Effective batch, limit and ranks that can be planned."""
    world_size = draw(WORLD_SIZES)
    return draw(st.integers(world_size, 600)), draw(LIMITS), world_size


@given(total=st.integers(0, 10_000), parts=st.integers(1, 200))
def test_an_even_split_is_exact_and_sorted(total: int, parts: int) -> None:
    sizes = split_evenly(total, parts)
    assert len(sizes) == parts
    assert sum(sizes) == total
    assert max(sizes) - min(sizes) <= 1
    assert list(sizes) == sorted(sizes, reverse=True)


@given(requests())
def test_a_plan_is_exact_fits_and_is_the_same_on_all_ranks(request_: tuple[int, int, int]) -> None:
    """Chunks sum to the effective batch, whatever divides; with one chunk fewer the largest share would not fit."""
    effective, limit, world_size = request_
    plan = plan_accumulation(effective, micro_batch=limit, world_size=world_size)
    shares = [sum(rank) for rank in plan.chunks]
    assert sum(shares) == plan.effective_batch_size == effective
    assert plan.world_size == len(plan.chunks) == world_size
    assert plan.micro_batch_size == max(max(rank) for rank in plan.chunks) <= limit
    assert plan.factor * limit >= max(shares) > (plan.factor - 1) * limit
    assert {len(rank) for rank in plan.chunks} == {plan.factor}
    assert max(shares) - min(shares) <= 1
    assert all(max(rank) - min(rank) <= 1 for rank in plan.chunks)


@given(st.integers(1, 50), st.integers(1, 5), LIMITS, WORLD_SIZES, st.integers(1, 3))
def test_batches_cut_in_the_step_keep_their_samples(
    units: int, batches: int, limit: int, world_size: int, weight: int
) -> None:
    """Each is cut into the fewest near-equal pieces that fit, on every rank."""
    plan = plan_in_step(units, batches=batches, micro_batch=limit, weight=weight, world_size=world_size)
    pieces = tuple(weight * size for size in split_evenly(units, -(-units // limit)))
    assert plan.chunks == (pieces * batches,) * world_size
    assert plan.effective_batch_size == units * weight * batches * world_size == sum(map(sum, plan.chunks))
    assert plan.micro_batch_size == pieces[0] <= limit * weight
    assert plan.factor == len(pieces) * batches


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 4, 1), "effective_batch_size=0 must be at least 1"),
        ((8, 0, 1), "micro_batch=0 must be at least 1"),
        ((8, 4, -2), "world_size=-2 must be at least 1"),
        ((8.5, 4, 1), "effective_batch_size=8.5 must be a whole number"),
        ((8, True, 1), "micro_batch=True must be a whole number"),
        ((10**12, 8, 2), "effective_batch_size=1000000000000 would need 62,500,000,000 micro-batches of 8 for one"),
        ((3, 4, 4), r"effective_batch_size=3 is below the number of ranks, 4: .* Use effective_batch_size=4 or fewer"),
    ],
)
def test_what_cannot_be_planned_is_refused_with_the_way_out(arguments: tuple[int, int, int], message: str) -> None:
    effective, limit, world_size = arguments
    with pytest.raises(UserError, match=message):
        plan_accumulation(effective, micro_batch=limit, world_size=world_size)


def test_a_plan_reads_as_a_sentence_and_cannot_be_changed() -> None:
    """Equal chunks are a product, a few others a sum; many are counted, and ranks named where there are several."""
    assert str(plan_accumulation(7, micro_batch=3)) == "effective batch 7 = 3 + 2 + 2, factor 3"
    assert str(plan_accumulation(20, micro_batch=2, world_size=2)) == (
        "effective batch 20 = 2 × 5 × 2 (micro-batch × factor × ranks)"
    )
    assert str(plan_accumulation(19, micro_batch=2, world_size=2)) == (
        "effective batch 19 in 5 micro-batches of at most 2 on each of 2 ranks, factor 5"
    )
    assert str(plan_accumulation(19, micro_batch=10, world_size=2)) == (
        "effective batch 19 in 1 micro-batch of at most 10 on each of 2 ranks, factor 1"
    )
    assert str(plan_accumulation(9, micro_batch=2)) == "effective batch 9 in 5 micro-batches of at most 2, factor 5"
    with pytest.raises(AttributeError):
        AccumulationPlan(1, 1, 1, 1, ((1,),)).factor = 2  # type: ignore[misc]


SPEEDS = st.lists(st.floats(1e-3, 1e6), min_size=2, max_size=6)


@given(SPEEDS, st.data())
def test_shares_follow_speeds_if_a_window_is_shorter(speeds: list[float], data: st.DataObject) -> None:
    """No window lasts longer than with the shares before, or than the best by more than what is worth no change."""
    before = tuple(data.draw(st.lists(st.integers(1, 9), min_size=len(speeds), max_size=len(speeds))))
    ratio = ratio_of_speeds(speeds, before=before)
    assert ratio_of_speeds(speeds, before=ratio) == ratio, "a second time changes nothing"

    def seconds(parts: tuple[int, ...]) -> float:
        return max(part / sum(parts) / speed for part, speed in zip(parts, speeds))

    best = 1 / sum(speeds)
    if ratio == before:
        assert seconds(before) <= best * (1 + LEAST_GAIN) * (1 + 1e-9)
    elif min(speeds) * 10_000 > sum(speeds):
        assert seconds(ratio) < seconds(before)


def test_an_unknown_speed_leaves_the_ratio() -> None:
    assert ratio_of_speeds((0.0, 8.0), before=(2, 1)) == (2, 1)


@given(st.integers(0, 500), st.lists(st.integers(1, 50), min_size=1, max_size=5), st.integers(1, 4))
def test_a_split_in_proportion_is_near_it(total: int, ratio: list[int], multiple: int) -> None:
    """Off by a multiple at most; if the ratio is that of limits which hold all, within these."""
    sizes = split_in_proportion(total, tuple(ratio), multiple)
    assert sum(sizes) == total
    assert all(abs(size - total * part / sum(ratio)) < 2 * multiple for size, part in zip(sizes, ratio))
    if multiple == 1 and total <= sum(ratio):
        assert all(size <= part for size, part in zip(sizes, ratio))


@given(st.integers(4, 300), st.lists(st.integers(1, 40), min_size=2, max_size=4), st.data())
def test_a_rank_cuts_its_share_within_its_own_limit(effective: int, limits: list[int], data: st.DataObject) -> None:
    ratio = tuple(data.draw(st.lists(st.integers(1, 99), min_size=len(limits), max_size=len(limits))))
    rank = data.draw(st.integers(0, len(limits) - 1))
    plan = plan_unequal_shares(effective, limits=tuple(limits), ratio=ratio, rank=rank, multiple=1)
    assert [sum(chunks) for chunks in plan.chunks] == [*split_in_proportion(effective, ratio)]
    assert all(max(chunks) <= limit for chunks, limit in zip(plan.chunks, limits))
    assert (plan.micro_batch_size, plan.factor) == (plan.chunks[rank][0], len(plan.chunks[rank]))


@given(st.integers(0, 10**6), st.integers(10**3, 10**6))
def test_pieces_are_the_fewest_near_equal_ones_within_the_limit(samples: int, limit: int) -> None:
    """A batch without samples is one piece."""
    sizes = micro_batch_sizes(samples, limit)
    assert sum(sizes) == samples
    assert max(sizes) <= limit
    assert max(sizes) - min(sizes) <= 1
    assert len(sizes) == 1 or (len(sizes) - 1) * limit < samples


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
