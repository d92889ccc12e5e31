"""What is said and done when memory runs out is true: of limits, results, random numbers and what a step gathers."""

from typing import Any

import pytest
from pairing import every_pair
from torch.utils.data import DataLoader
from true_support import (
    Case,
    ClassWeighted,
    Contrastive,
    Memory,
    Normalized,
    Queued,
    Summed,
    Task,
    Way,
    each_oom,
    error,
    one_pass,
    pairs,
    parts_of_at_most,
    train,
)

from lightning_ga import AutoAccumulate

MODES = pytest.mark.parametrize("mode", ["loader", "step"])


def loader(batch: int, samples: int = 48) -> Any:
    return DataLoader(pairs(samples), batch_size=batch)


@every_pair(mode=["loader", "step"], place=["forward", "backward"], at=[1, 2, 3])
def test_the_limit_falls_below_what_failed(mode: str, place: str, at: int) -> None:
    """Batches of 24 in micro-batches of 12, of which the first or the second or a later one fails."""
    memory, callback = Memory(at, place=place), AutoAccumulate(24, micro_batch_size=12, micro_batching=mode)
    ours = train(Task(), loader(24), callback, memory=memory, max_epochs=2)
    assert parts_of_at_most(ours.ran_out) < 12
    failed = next(index for index, size in enumerate(memory.sizes) if size < 12) - 1
    assert memory.sizes[: failed + 1] == [12] * (failed + 1)
    assert max(memory.sizes[failed + 1 :]) < 12
    assert callback.plan.micro_batch_size < 12
    assert error(ours, train(Task(), loader(24), max_epochs=2)) <= 1e-12


@MODES
def test_the_limit_falls_below_what_failed_each_time(mode: str) -> None:
    memory, callback = Memory(2, 5, place="forward"), AutoAccumulate(24, micro_batch_size=12, micro_batching=mode)
    ours = train(Task(), loader(24), callback, memory=memory)
    assert max(memory.sizes[5:]) < 6
    assert error(ours, train(Task(), loader(24))) <= 1e-12


INEXACT = {
    "batch_norm": (Normalized, "BatchNorm"),
    "coupled": (Contrastive, "coupl|compar|with each other"),
    "sum": (Summed, "sum"),
    "weighted": (ClassWeighted, "weight|mean over"),
    "stateful": (Queued, "queue"),
}


@each_oom
@pytest.mark.parametrize("cause", INEXACT)
def test_an_inexact_result_is_never_called_the_same(cause: str, way: Way) -> None:
    """At factor 1 nothing is said at the start, and the warning about memory names the verdict."""
    module, words = INEXACT[cause]
    ours = train(module(), loader(8), way.callback(8, 3), memory=way.memory())
    assert (ours.callback.oom_events, ours.callback.plan.factor, ours.told) == (1, 1, [])
    (text,) = ours.ran_out
    assert "same result" not in text
    assert _mentions(words, text), text
    assert ours.cause == cause


def _mentions(words: str, text: str) -> bool:
    return any(word.lower() in text.lower() for word in words.split("|"))


@each_oom
def test_what_was_not_measured_is_not_called_the_same(way: Way) -> None:
    case = Case(Task, lambda: loader(8))
    ours = train(case.module(), case.loader(), way.callback(8, 3, verify=False), memory=way.memory())
    assert error(ours, one_pass(case)) <= 1e-12
    assert "same result" not in ours.ran_out[0]
