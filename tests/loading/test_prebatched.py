"""Batches that come ready-made are counted in samples, and never cut or mixed by the loader."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lightning_ga.errors import UserError
from lightning_ga.loading.prebatched import Batches, PrebatchedSource
from lightning_ga.loading.recipe_batches import SourceSettings

EACH = 4


def source(batches: int, factor: int, world_size: int = 1) -> PrebatchedSource:
    """Batches of four samples."""
    data = [[torch.zeros(EACH, 3), torch.zeros(EACH)] for _ in range(batches)]

    def start() -> Iterator[Any]:
        return iter(data)

    settings = SourceSettings(factor, world_size, rank=0, seed=1)
    return PrebatchedSource(Batches([data], lambda parts: parts[0], start, len(data)), settings)


@pytest.mark.parametrize(
    ("world_size", "effective", "counts"),
    [
        (1, None, [4, 4, 4, 4]),
        (1, 8, [4, 4, 4, 4]),
        (2, None, [4, 4, 4, 4, 0, 0]),  # other ranks may need the rest of the last window
        (2, 16, [4, 4, 4, 4]),
    ],
)
def test_a_micro_batch_is_a_whole_batch(world_size: int, effective: int | None, counts: list[int]) -> None:
    """In a last window of fewer batches too; a rank that has none left runs stand-ins of no weight."""
    data = source(4, 3, world_size)
    data.arrange(0, effective, EACH)
    chunks = [data.chunk(index) for index in range(data.length or 0)]
    assert [chunk.count for chunk in chunks] == counts
    assert [data.batches_after(index) for index in range(len(chunks))] == [1, 2, 3, 4, 4, 4][: len(counts)]
    assert [len(labels) for _, labels in data.loader or ()] == [EACH] * 4


def test_training_goes_on_with_a_whole_batch() -> None:
    """Where a run of other batches ended within one, that one is trained on again."""
    data = source(4, 1)
    data.arrange(0, None, EACH, samples_done=2 * EACH + 1)
    assert (data.epoch_plan.done, data.chunk(2).count) == (2, EACH)


def test_an_effective_batch_is_a_whole_number_of_batches() -> None:
    """On every rank."""
    with pytest.raises(UserError, match=r"no whole number of batches.*multiple of 8\."):
        source(4, 1, world_size=2).check_effective(12)
