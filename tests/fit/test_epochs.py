"""Epochs are cut as schedule and limit say, before and after the limit is known."""

from typing import Any

import pytest
from torch.utils.data import DataLoader

from lightning_ga.fit.epochs import effective_batch, optimizer_steps, plan_epoch, recipe_micro_batch
from lightning_ga.loading.recipe_batches import SourceSettings
from lightning_ga.loading.training_source import MicroBatchSource
from lightning_ga.plan.checkpoint import Position
from lightning_ga.plan.config import Request, read_request


def source(samples: int = 100, batch: int = 16, factor: int = 2, **settings: Any) -> MicroBatchSource:
    """A loader of 16 under a Trainer that accumulates 2: an effective batch of 32."""
    loader: DataLoader[int] = DataLoader(range(samples), batch_size=batch)  # type: ignore[arg-type]
    return MicroBatchSource(loader, SourceSettings(factor, settings.pop("world_size", 1), 0, seed=1, **settings))


def request(effective: Any = None, accumulate: Any = None, micro: Any = "auto", most: int | None = None) -> Request:
    return read_request(effective, accumulate, micro, most)


@pytest.mark.parametrize(
    ("asked", "micro_batch", "chunks"),
    [
        (request(), 16, (16, 16)),
        (request(), 12, (11, 11, 10)),
        (request(), 64, (32,)),
        (request(48), 20, (16, 16, 16)),
        (request({0: 8, 2: 64}), 32, (8,)),
        (request(accumulate=3), 10, (10, 10, 10)),
    ],
)
def test_a_window_is_cut_into_the_fewest_micro_batches(
    asked: Request, micro_batch: int, chunks: tuple[int, ...]
) -> None:
    """What the loader feeds is what is trained on, where the loader cuts."""
    planned = plan_epoch(source(), asked, Position(1, 0, 0, 0), micro_batch=micro_batch, windows_done=0)
    assert planned.plan == planned.fed
    assert planned.plan.chunks == (chunks,)


def test_nothing_is_yielded_while_the_limit_is_unknown() -> None:
    """Optimizer steps are counted rightly all the same: the windows are those of training."""
    data = source()
    planned = plan_epoch(data, request(48), Position(1, 0, 0, 0), micro_batch=None, windows_done=0)
    assert (planned.plan.effective_batch_size, planned.plan.factor) == (48, 1)
    assert list(data.loader or ()) == []
    plan_epoch(data, request(48), Position(1, 0, 0, 0), micro_batch=10, windows_done=0)
    assert [len(batch) for batch in data.loader or ()] == [10, 10, 10, 9, 9] * 2 + [4]


def test_batches_that_are_cut_in_the_step_are_fed_whole() -> None:
    """The loader yields the recipe's batches, and the plan says into what they are cut."""
    data = source(cut_in_step=True)
    planned = plan_epoch(data, request(), Position(1, 0, 0, 0), micro_batch=6, windows_done=0)
    assert planned.fed.chunks == ((16, 16),)
    assert planned.plan.factor > planned.fed.factor
    assert [len(batch) for batch in data.loader or ()] == [16] * 6 + [4]


@pytest.mark.parametrize(
    ("asked", "micro_batch", "effective"),
    [
        (request(), 16, None),
        (request(48), 7, 48),
        (request({0: 8, 2: 64}), None, 8),
        (request(accumulate=4), 10, 40),
        (request(accumulate=4), None, 64),
        (request(accumulate=4, most=5), None, 20),
    ],
)
def test_the_effective_batch_follows_what_was_asked(
    asked: Request, micro_batch: int | None, effective: int | None
) -> None:
    """A fixed factor makes it follow the micro-batch: the recipe's until the limit is known."""
    assert effective_batch(source(), asked, 0, micro_batch=micro_batch) == effective


def test_a_fixed_micro_batch_takes_the_place_of_the_recipes() -> None:
    data = source()
    assert [recipe_micro_batch(data, asked, 0) for asked in (request(), request(micro=5), request(most=9))] == [
        16,
        5,
        9,
    ]


@pytest.mark.parametrize(("max_steps", "steps"), [(-1, 13 + 13 + 2 + 2), (20, 20)])
def test_steps_are_counted_over_a_schedule(max_steps: int, steps: int) -> None:
    """Ragged windows included, up to ``max_steps``."""
    asked = request({0: 8, 2: 64})
    assert optimizer_steps(source(), asked, range(4), micro_batch=None, max_steps=max_steps) == steps


def test_samples_of_an_earlier_run_are_left_out() -> None:
    """Those of all ranks are counted, also where each rank has an order of its own."""
    data = source()
    plan_epoch(data, request(), Position(1, 0, 64, 0), micro_batch=16, windows_done=0)
    assert [batch.tolist()[0] for batch in data.loader or ()] == [64, 80, 96]
