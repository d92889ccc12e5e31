"""What the arguments together ask for."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from lightning_ga import AutoAccumulate
from lightning_ga.errors import UserError
from lightning_ga.plan.config import Options, Request, rate_ratio, read_arguments, read_request
from lightning_ga.schedule import by_step

COUNTS = st.integers(1, 300)
STEPS = st.dictionaries(st.integers(0, 5), COUNTS, min_size=1)


def request(
    effective: Any = None, accumulate: Any = None, micro_batch: Any = "auto", most: int | None = None
) -> Request:
    sizes = {"effective_batch_size": effective, "accumulate": accumulate}
    given = {"micro_batch_size": micro_batch, "max_micro_batch_size": most, "micro_batch_multiple": 1}
    return read_request({**sizes, **given})


@given(STEPS, COUNTS, st.none() | COUNTS, st.integers(1, 6), st.integers(0, 4), st.integers(1, 4))
def test_no_larger_micro_batch_is_probed_than_an_epoch_can_use(steps, recipe, total, world_size, first, epochs):
    """It is the largest chunk of any of these epochs if memory were no limit."""
    asked = request(effective=steps)
    shares = []
    for epoch in range(first, first + epochs):
        effective = asked.asked_effective(epoch) or recipe
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


def options(**given: Any) -> Options:
    return read_arguments({**AutoAccumulate()._given, **given})[1]


@pytest.mark.parametrize("names", [OmegaConf.create(["one", "other"]), ["one", "other"], ("one", "other")])
def test_lists_of_any_kind_name_submodules(names: Any) -> None:
    """``hydra.utils.instantiate`` gives lists of its own kind; one name needs no list."""
    assert options(whole=names).whole == ("one", "other")
    assert options(whole="one") == options(whole=["one"])
    assert options().whole == options(whole="").whole == ()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"objective": "throughput", "size_of": len}, "size_of is a function with the arguments"),
        ({"objective": "throughput", "size_of": "auto"}, "^size_of= and objective='throughput' do not go together"),
        ({"micro_batching": "step", "size_of": "auto"}, "^size_of= and micro_batching='step' do not go together"),
        ({"accumulate": 2, "size_of": "auto"}, "^size_of= and accumulate= do not go together"),
        ({"accumulate": 2, "whole": ("a",)}, r"^whole=\(.a.,\) and accumulate= do not go together"),
        ({"effective_batch_size": by_step({0: 4, 9: 8}), "size_of": "x"}, "^size_of= and effective_batch_size=by_step"),
        ({"whole": [1]}, r"^whole=\[1\] must be a tuple of names"),
    ],
)
def test_arguments_that_do_not_go_together_are_refused(given: dict[str, Any], message: str) -> None:
    """In one sentence that names both; single values are in ``test_public.py``."""
    with pytest.raises(UserError, match=message):
        options(**given)


@pytest.mark.parametrize(("rule", "ratio"), [("none", 1.0), ("linear", 4.0), ("sqrt", 2.0)])
def test_learning_rates_follow_the_batch(rule: Any, ratio: float) -> None:
    assert rate_ratio(rule, 256, 64) == ratio
