"""Batches of the step are counted and cut by their layout, or by the module's hook; the user's batches are kept."""

from typing import Any

import pytest
import torch
from reference import StreamOf
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler, TensorDataset

from lightning_ga.batch.layout import LayoutError
from lightning_ga.errors import UserError
from lightning_ga.loading.known_samples import KnownSamples
from lightning_ga.loading.rebatch import SourceSettings
from lightning_ga.loading.source import read_source
from lightning_ga.loading.step_source import StepSource
from lightning_ga.loading.trial_batches import BatchCutter

SIZE = 24
ROWS: Any = [(torch.full((3,), float(index)), index) for index in range(SIZE)]


class Move:
    """The way of a batch to the step; ``split_batch`` as the module defines it."""

    def __init__(self, split_batch: Any = None) -> None:
        self.split_batch, self.moved = split_batch, 0
        self.owners = ()

    def to_device(self, batch: Any) -> Any:
        self.moved += 1
        return batch


def cutter(*loaders: Any, hook: Any = None, combine: Any = None) -> BatchCutter:
    return BatchCutter(list(map(KnownSamples, loaders)), combine or (lambda batches: batches[0]), Move(hook))


def time_first(batch: list[Any]) -> Any:
    return torch.stack([row for row, _ in batch], dim=1)


def packed(batch: list[Any]) -> dict[str, Any]:
    """Rows of all samples and where they end."""
    rows = [torch.full((index % 3 + 1, 2), float(index)) for _, index in batch]
    return {"rows": torch.cat(rows), "ends": torch.tensor([len(each) for each in rows]).cumsum(0)}


def test_a_batch_is_cut_in_two_halves() -> None:
    """Along whichever axis collating puts samples."""
    loader = DataLoader(ROWS, 8, collate_fn=time_first)
    batch, cut = next(iter(loader)), cutter(loader)
    for given, most in ((batch[:, :5], 8), (batch, 5)):
        halves = cut.halves(given, most)
        assert halves is not None
        assert halves.whole.shape[1] == 5
        assert (halves.sizes, [each.shape[1] for each in halves.parts]) == ((3, 2), [3, 2])
    assert cut.halves(batch, 1) is None
    assert cut.halves(batch[:, :1], 8) is None


def test_batches_of_several_loaders_out_of_proportion_are_refused() -> None:
    one, three = DataLoader(ROWS, 2), DataLoader(ROWS, 6)
    cut = cutter(one, three, combine=lambda batches: dict(zip("ab", batches)))
    odd = {"a": [each[:1] for each in next(iter(one))], "b": [each[:4] for each in next(iter(three))]}
    with pytest.raises(LayoutError, match="its loaders give 1 and 4 of them"):
        cut.cut(odd, 0, 1)


def test_what_cannot_be_read_is_refused_or_cut_by_the_hook() -> None:
    loader = DataLoader(ROWS, 8, collate_fn=packed)
    batch, cut = next(iter(loader)), cutter(loader)
    for _ in range(2):
        with pytest.raises(LayoutError, match="depends on where in the batch a sample is, .*: define"):
            cut.count(batch)
    by_hook = cutter(loader, hook=lambda batch, sizes: [f"{size} samples" for size in sizes])
    batch["rows"] = batch["rows"][:8]
    assert (by_hook.count(batch), by_hook.cut(batch, 2, 5)) == (8, "3 samples")

    def broken(batch: list[Any]) -> Any:
        raise KeyError("image")

    with pytest.raises(LayoutError, match=r"collating a few of them apart ended in KeyError: 'image'.*split_batch"):
        cutter(DataLoader(ROWS, 8, collate_fn=broken)).count(None)

    def full(batch: list[Any]) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        cutter(DataLoader(ROWS, 8, collate_fn=full)).count(None)


def test_a_layout_is_not_settled_before_the_first_batch() -> None:
    """Which shows it, if samples cannot be read apart."""
    known = KnownSamples(DataLoader(StreamOf(ROWS), 8, collate_fn=time_first))
    cut = BatchCutter([known], lambda batches: batches[0], Move())
    loader = known.with_shown_batch()
    assert cut.left(torch.zeros(3, 4), 8) == 8
    batch = next(iter(loader))
    assert (cut.left(batch, 8), cut.left(batch[:, :5], 8), cut.count(batch)) == (8, 5, 8)


class Once(IterableDataset[int]):
    """A stream that cannot be copied, and loses what is read of it."""

    def __init__(self) -> None:
        self.source = (number for number in range(SIZE))

    def __iter__(self) -> Any:
        return self.source


def test_a_stream_loses_nothing() -> None:
    """It is not read: its batches are read as ready-made ones, as those of no loader are."""
    for dataset in (StreamOf(range(SIZE)), Once()):
        loader = DataLoader(dataset, 4)
        cut, batches = cutter(loader), iter(loader)
        assert cut.cut(torch.arange(6), 1, 3).tolist() == [1, 2]
        assert next(batches).tolist() == [0, 1, 2, 3]
    assert cutter([torch.zeros(8, 3)]).count([torch.zeros(8, 3), torch.zeros(8)]) == 8
    assert cutter(DataLoader(TensorDataset(torch.zeros(0, 3)), 4)).count([torch.zeros(5, 3)]) == 5


def settings_of(world_size: int = 1) -> SourceSettings:
    return SourceSettings(2, world_size, 0, 7)


def test_a_sample_dropped_of_the_first_batch_makes_no_other_windows() -> None:
    """The batch sampler says how many there were; it is asked for a copy of its first list."""
    asked: list[int] = []

    class Pairs(Sampler[list[int]]):
        def __iter__(self) -> Any:
            asked.append(id(self))
            return iter([[0, 1], [2, 3], [4, 5]])

    def without_zero(samples: list[int]) -> torch.Tensor:
        return torch.tensor([[sample] for sample in samples if sample != 0])

    loader = DataLoader(range(6), batch_sampler=Pairs(), collate_fn=without_zero)  # type: ignore[arg-type]
    source = read_source(loader, settings_of())
    first = next(iter(loader))
    assert len(first) == 1
    source.see(first, cutter(loader))
    assert (source.batch_size, source.units, source.factor_for(4)) == (2, 2, 2)
    assert asked.count(id(loader.batch_sampler)) == 1  # by the loader


def test_windows_of_batches_that_are_kept() -> None:
    """A whole number of them; if a loader does not tell how many samples they hold, the first one does."""
    known = read_source(DataLoader(StreamOf(range(SIZE)), 4), settings_of(2))
    assert isinstance(known, StepSource)
    assert known.batch_size == 4
    assert known.factor_for(24) == 3
    with pytest.raises(UserError, match=r"=12 is no whole number of batches: with an iterable dataset, .* of 8"):
        known.factor_for(12)
    unknown = read_source([torch.zeros(6, 2), torch.zeros(6, 2)], settings_of())
    assert unknown.batch_size is None
    unknown.see(torch.zeros(6, 2), cutter([torch.zeros(6, 2)]))
    assert (unknown.batch_size, unknown.factor_for(18)) == (6, 3)
    turned = DataLoader(ROWS, batch_sampler=[range(6)], collate_fn=time_first)
    own = read_source(turned, settings_of())
    own.see(next(iter(turned)), cutter(turned))
    assert own.batch_size == 6


@pytest.mark.parametrize("written", [{"batch_size": 8}, {"batch_sampler": BatchSampler(range(5), 8, drop_last=False)}])
def test_fewer_samples_than_a_batch_make_one_as_it_was_written(written: Any) -> None:
    """The effective batch is a multiple of the batch size, in whichever way that was given."""
    source = read_source(DataLoader(ROWS[:5], **written), SourceSettings(1, 1, 0, 7), why="micro_batching='step'")
    assert isinstance(source, StepSource)
    assert (source.batch_size, source.factor_for(8)) == (5, 1)
    with pytest.raises(UserError, match="batches of 8 samples"):
        source.factor_for(5)
