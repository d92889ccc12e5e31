"""A number, a mapping or a callable: each becomes the same function of the epoch."""

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hydra.utils import instantiate
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonargparse import ArgumentParser
from omegaconf import OmegaConf

from lightning_ga.errors import UserError
from lightning_ga.schedule import as_schedule, by_samples, by_step, from_lr_decay, geometric, linear

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


def test_a_number_holds_for_every_epoch() -> None:
    for value in (8, {0: 8}, {np.int64(0): np.int32(8)}, lambda _epoch: 8):
        assert as_schedule(value, name="n")(1000) == 8


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (0, "^n=0 must be at least 1"),
        (2.5, "^n=2.5 must be a whole number"),
        ({}, r"^n=\{\} is empty: give at least one epoch, for example \{0: 32\}"),
        ({0: 8, 3: 0}, r"^n\[3\]=0 must be at least 1"),
        ({-1: 8}, "^n has the epoch -1; epochs are whole numbers and start at 0"),
        ({"first": 8}, "^n has the epoch 'first'"),
        ({True: 8}, "^n has the epoch True"),
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


@settings(deadline=None)
@given(COUNTS, COUNTS, st.integers(1, 300), st.integers(0, 400))
def test_a_ramp_is_the_line_between_its_ends(start: int, end: int, steps: int, step: int) -> None:
    """Rounded to the nearest whole number, and its end from there on; a geometric one goes by whole factors."""
    exact = start + (end - start) * min(step, steps) / steps
    assert abs(linear(start, end, steps=steps).at(step, 0) - exact) <= 0.5
    assert len(linear(start, end, steps=10**9).counts) == 1 + abs(end - start)  # whatever the steps are
    counts = geometric(start, end, steps=steps, factor=3)
    assert counts.at(0, 0) == (end if len(counts.counts) == 1 else counts.counts[0])
    assert counts.at(steps, 0) == counts.at(step + steps, 0) == end
    assert all(max(a, b) <= 3 * min(a, b) + 2 or steps < 20 for a, b in pairwise(counts.counts))


@settings(deadline=None)
@given(STEPS, st.integers(0, 40), st.integers(0, 40))
def test_counts_hold_from_their_step_or_sample_on(counts: dict[int, int], step: int, samples: int) -> None:
    """As a mapping from epoch does, but with a beginning."""
    counts = {**counts, 0: 5}
    epochs = as_schedule(counts, name="n")
    assert by_step(counts).at(step, samples) == epochs(step)
    assert by_samples(counts).at(step, samples) == epochs(samples)
    assert by_step(counts).is_settled(step, samples) == (step >= by_step(counts).starts[-1])
    assert as_schedule(by_step(counts), name="n")(3) == max(counts.values())  # the largest, which a plan has to hold


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: by_step({}), r"^by_step=\{\} is empty: give at least one step"),
        (lambda: by_step([8]), r"^by_step.\[8\]. needs a mapping, such as"),  # type: ignore[arg-type]
        (lambda: by_step({5: 8}), "^by_step begins at step 5: say what is valid before, from 0 on"),
        (lambda: by_samples({0: 8, -3: 8}), "^by_samples has the samples -3; samples are whole numbers"),
        (lambda: linear(0, 8, steps=3), "^linear: start=0 must be at least 1"),
        (lambda: geometric(1, 8, steps=3, factor=1), "^geometric.factor=1. never changes"),
        (lambda: from_lr_decay(8, milestones=[4], gamma="0.1"), "^from_lr_decay.gamma='0.1'. must be between 0 and 1"),
        (lambda: from_lr_decay(8, milestones=4), "^from_lr_decay.milestones=4. must be a list of epochs"),
        (lambda: from_lr_decay(8, milestones=[4], gamma=1.0), "^from_lr_decay.gamma=1.0. must be between 0 and 1"),
    ],
)
def test_a_wrong_schedule_by_window_is_refused_when_it_is_made(make: Callable[[], object], message: str) -> None:
    """The message names the function and the rule."""
    with pytest.raises(UserError, match=message):
        make()


def test_schedules_are_built_from_yaml() -> None:
    """By LightningCLI's parser, as ``class_path``, and by Hydra."""
    from lightning_ga import AutoAccumulate

    text = {"class_path": "lightning_ga.schedule.linear", "init_args": {"start": 3, "end": 9, "steps": 3}}
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(AutoAccumulate, "callback")
    for name in ("effective_batch_size", "accumulate"):
        built = parser.instantiate(parser.parse_object({"callback": {name: text}})).callback
        assert repr(built) == f"AutoAccumulate({name}=linear(3, 9, steps=3))"
    content = {"_target_": "lightning_ga.schedule.by_step", "counts": {0: 32, 20: 64}}
    assert instantiate(OmegaConf.create(content)) == by_step({0: 32, 20: 64})
    assert instantiate(
        OmegaConf.create(
            {"_target_": "lightning_ga.schedule.from_lr_decay", "batch": 8, "milestones": [4], "gamma": 0.5}
        )
    ) == (from_lr_decay(8, milestones=[4], gamma=0.5))
