"""Batches for trials and measurements: of the heaviest samples, of unlike ones, and without a trace."""

import random
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from reference import StreamOf
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, Subset

from lightning_ga.loading.known_samples import KnownSamples
from lightning_ga.loading.rebatch import SourceSettings
from lightning_ga.loading.source import LoaderSource, read_source
from lightning_ga.loading.trial_batches import BatchCutter, TrialBatches

SIZE = 40


class Counting(Dataset[tuple[torch.Tensor, int]]):
    """Sequences of unequal lengths, augmented at random; counts what it reads and keeps some."""

    def __init__(self) -> None:
        self.reads, self.cache = 0, dict[int, int]()
        self.generator = torch.Generator().manual_seed(1)

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.reads += 1
        self.cache[index] = self.reads
        noise = torch.rand(()) + torch.rand((), generator=self.generator) + random.random() + np.random.rand()
        return torch.full((1 + index % 9,), float(noise)), index % 3


class Collate:
    """Pads, and counts its batches."""

    def __init__(self) -> None:
        self.batches = 0

    def __call__(self, samples: list[Any]) -> Any:
        self.batches += 1
        return pad_sequence([x for x, _ in samples], batch_first=True), torch.tensor([y for _, y in samples])


def states() -> list[Any]:
    return [torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()]  # type: ignore[index, call-overload]


class Plain:
    """Moves nothing."""

    owners = ()
    split_batch = None

    def to_device(self, batch: Any) -> Any:
        return batch


def trials_of(loader: DataLoader[Any], *, in_step: str = "", batch: Any = None) -> TrialBatches:
    """The batches for trials of a loader."""
    source = read_source(loader, SourceSettings(1, 1, 0, 7), why=in_step)
    cutter = BatchCutter([source.samples], lambda batches: batches[0], Plain())
    if isinstance(source, LoaderSource):
        return TrialBatches(cutter, source.largest_micro_batch(0), known=source.samples)
    if batch is not None:
        source.see(batch, cutter)
    most = source.batch_size or 1
    if batch is None and source.samples.can_be_read_apart:
        return TrialBatches(cutter, most, known=source.samples, in_step=True)
    return TrialBatches(cutter, most, batch=batch, planned=most)


@pytest.mark.parametrize(("in_step", "workers"), [("", 1), ("LBFGS", 0)])
def test_batches_of_the_heaviest_samples_leave_no_trace(in_step: str, workers: int) -> None:
    data, collate = Counting(), Collate()
    generator = data.generator.get_state()
    loader = DataLoader(Subset(data, range(SIZE)), 6, collate_fn=collate, num_workers=workers)
    before, moved = states(), list[Any]()

    def move(batch: Any) -> Any:
        moved.append(batch)
        return batch

    trials = trials_of(loader, in_step=in_step)
    assert not trials.empty
    batch, whole = trials.make(4, move)
    assert batch[0].shape == (4, 9)
    assert trials.most == (6 if in_step else SIZE)
    assert trials.largest is not None
    assert trials.largest.complete
    if in_step:
        assert whole[0].shape == (6, 9)
        assert batch[0].untyped_storage().data_ptr() == whole[0].untyped_storage().data_ptr()
    else:
        assert whole is None
    telling = trials.batch_in_two_parts(5, move)
    assert telling.sizes == (3, 2)
    assert len(telling.whole[1]) == 5
    assert [len(part[1]) for part in telling.parts] == [3, 2]
    widths = [part[0].shape[1] for part in telling.parts]
    assert (widths[0] == widths[1]) == bool(in_step)  # apart, each is padded by itself
    assert sum((part[1].tolist() for part in telling.parts), []) == telling.whole[1].tolist()
    assert len(moved) == (2 if in_step else 4)
    assert states() == before
    assert (data.reads, data.cache, collate.batches) == (0, {}, 0)
    assert torch.equal(data.generator.get_state(), generator)


def test_a_batch_that_training_will_see_is_cut() -> None:
    """It is left as it is; without one there is nothing to try."""
    loader = DataLoader(StreamOf(range(12)), 5)
    assert trials_of(loader).empty
    first = next(iter(loader))
    trials = trials_of(loader, batch=first)
    assert (trials.empty, trials.most) == (False, 5)
    part, whole = trials.make(3, lambda batch: batch.mul_(1))
    assert (part.tolist(), whole.tolist()) == ([0, 1, 2], [0, 1, 2, 3, 4])
    assert whole is not first
    telling = trials.batch_in_two_parts(4, lambda batch: batch.neg_())
    assert telling is not None
    assert [part.tolist() for part in telling.parts] == [[0, -1], [-2, -3]]
    assert first.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("left", "most"), [(5, 5), (3, 3), (1, 1), (0, 0)])
def test_a_batch_of_training_has_the_samples_that_were_left_in_it(left: int, most: int) -> None:
    """No more are tried; one that is smaller because ranks share a window unequally lost nothing."""
    loader = DataLoader(StreamOf(range(12)), 5)
    cutter = BatchCutter([KnownSamples(loader)], lambda batches: batches[0], Plain())
    batch = torch.arange(left)
    trials = TrialBatches(cutter, 5, batch=batch, planned=5)
    assert (trials.most, trials.at_most(2), trials.at_most(7)) == (most, min(2, most), most)
    assert trials.empty == (not left)
    part, whole = trials.make(2, lambda batch: batch)
    assert (len(part), len(whole)) == (min(2, left), left)
    assert TrialBatches(cutter, 5, batch=batch, planned=left).most == 5
    uncuttable = TrialBatches(cutter, 5, batch=["text"], planned=5)
    assert (uncuttable.most, uncuttable.at_most(7)) == (5, 5)


def test_samples_that_tell_differ_in_what_losses_ignore_and_in_labels() -> None:
    """The halves differ most: one holds the targets that are ignored."""
    rows = [{"x": torch.zeros(4), "y": torch.full((4,), -100 if n % 2 else n)} for n in range(0, SIZE)]
    telling = trials_of(DataLoader(rows, 4)).batch_in_two_parts(6, lambda batch: batch)  # type: ignore[arg-type]
    assert telling is not None
    ignored = [int((part["y"] < 0).sum()) for part in telling.parts]
    assert ignored == [0, 12]
    labels = [(torch.zeros(3), n % 5) for n in range(SIZE)]
    telling = trials_of(DataLoader(labels, 4)).batch_in_two_parts(5, lambda batch: batch)  # type: ignore[arg-type]
    assert telling is not None
    assert telling.whole[1].tolist() == [0, 1, 2, 3, 4]
    single = trials_of(DataLoader(labels[:1], 4))  # type: ignore[arg-type]
    assert single.batch_in_two_parts(5, lambda batch: batch) is None


class Doubled(DataLoader[Any]):
    """Yields each batch twice over."""

    def __iter__(self) -> Any:
        return (batch.repeat(2) for batch in super().__iter__())


def test_a_loader_that_makes_its_batches_itself_is_tried_with_one_of_them() -> None:
    loader = Doubled(range(12), 4)  # type: ignore[arg-type]
    trials = trials_of(loader, batch=next(iter(loader)))
    assert trials.make(8, lambda batch: batch)[0].tolist() == [0, 1, 2, 3] * 2


@pytest.mark.parametrize("short", [1, 2, 5, 20, 39])
@pytest.mark.parametrize("fields", [1, 2])
def test_one_half_of_the_measured_samples_is_padded_less(short: int, fields: int) -> None:
    """However few samples are shorter than the longest, and in both of two fields."""
    rows = [tuple(torch.zeros(3 if index < short else 8 + field) for field in range(fields)) for index in range(SIZE)]
    loader = DataLoader(
        rows, 8, collate_fn=lambda batch: [pad_sequence(part, batch_first=True) for part in zip(*batch)]
    )  # type: ignore[arg-type]
    cut = trials_of(loader).batch_in_two_parts(7, lambda batch: batch)
    assert cut is not None
    assert cut.sizes == (4, 3)
    assert [part.shape[1] for part in cut.whole] == [8 + field for field in range(fields)]
    lengths = [[part.shape[1] for part in half] for half in cut.parts]
    assert [3] * fields in lengths


@pytest.mark.parametrize("in_step", ["", "micro_batching='step'"])
def test_parts_of_few_samples_are_multiples(in_step: str) -> None:
    """Of ten samples, eight are in a batch of multiples of four."""
    rows: Any = [torch.full((2,), float(number)) for number in range(10)]
    found = trials_of(DataLoader(rows, 16), in_step=in_step).batch_in_two_parts(12, lambda batch: batch, multiple=4)
    assert found is not None
    assert found.sizes == (4, 4)


@pytest.mark.parametrize(("lengths", "multiple"), [((1, 2, 3, 9, 9, 9), 2), ((1, 1, 2, 2, *[9] * 8), 4)])
def test_the_first_part_is_padded_less_whatever_the_multiple(lengths: tuple[int, ...], multiple: int) -> None:
    rows = [torch.ones(length) for length in lengths]
    loader = DataLoader(rows, 4, collate_fn=partial(pad_sequence, batch_first=True))  # type: ignore[arg-type]
    telling = trials_of(loader).batch_in_two_parts(len(rows), lambda batch: batch, multiple=multiple)
    assert telling is not None
    first, second = telling.parts
    assert len(first) % multiple == 0
    assert first.shape[1] < second.shape[1] == 9


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int64, torch.bool])
def test_labels_of_any_type_tell_samples_apart(dtype: torch.dtype) -> None:
    labels = [(torch.zeros(3), torch.tensor(n % 2).to(dtype)) for n in range(8)]
    telling = trials_of(DataLoader(labels, 4)).batch_in_two_parts(4, lambda batch: batch)  # type: ignore[arg-type]
    assert telling is not None
    assert [{int(label) for label in part[1]} for part in telling.parts] == [{0}, {1}]
