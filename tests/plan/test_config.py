"""What the arguments together ask for."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from lightning_ga import AutoAccumulate
from lightning_ga.plan.config import Request, read_request

COUNTS = st.integers(1, 300)
STEPS = st.dictionaries(st.integers(0, 5), COUNTS, min_size=1)


def request(
    effective: Any = None, accumulate: Any = None, micro_batch: Any = "auto", most: int | None = None
) -> Request:
    return read_request(effective, accumulate, micro_batch, most)


@given(STEPS, COUNTS, st.none() | COUNTS, st.integers(1, 6), st.integers(0, 4), st.integers(1, 4))
def test_no_larger_micro_batch_is_probed_than_an_epoch_can_use(steps, recipe, total, world_size, first, epochs):
    """It is the largest chunk of any of these epochs if memory were no limit."""
    asked = request(effective=steps)
    shares = []
    for epoch in range(first, first + epochs):
        effective = asked.effective(epoch) or recipe
        window = effective if total is None else min(effective, total)
        shares.append(-(-window // world_size))
    assert asked.useful_limit(range(first, first + epochs), recipe=recipe, total=total, world_size=world_size) == max(
        shares
    )


@given(STEPS, COUNTS, st.integers(1, 2000), st.integers(1, 6))
def test_a_fixed_factor_leaves_a_full_window_an_epoch(steps, recipe, total, world_size):
    asked = request(accumulate=steps)
    limit = asked.useful_limit(range(8), recipe=recipe, total=total, world_size=world_size)
    largest = max(asked.effective_batch(epoch, limit, world_size) or 0 for epoch in range(8))
    one_more = max(asked.effective_batch(epoch, limit + 1, world_size) or 0 for epoch in range(8))
    assert one_more > total
    assert largest <= total or limit == 1


def test_a_list_of_hydras_names_submodules():
    """``hydra.utils.instantiate`` gives lists of its own kind."""
    assert AutoAccumulate(whole=OmegaConf.create(["one", "other"]))._options.whole == ("one", "other")
