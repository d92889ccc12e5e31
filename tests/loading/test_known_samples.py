"""Samples are read apart only where that leaves no trace; otherwise the first batch of training shows them."""

import io
import multiprocessing
import queue
import secrets
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, StackDataset, Subset, TensorDataset

from lightning_ga.loading import known_samples as samples_module
from lightning_ga.loading.known_samples import KnownSamples
from lightning_ga.loading.orders import Sequential
from lightning_ga.loading.rebatch import rebatch
from lightning_ga.loading.sample_reader import SAMPLES_AT_ONCE
from lightning_ga.loading.sampler import WindowBatchSampler
from lightning_ga.plan.windows import EpochPlan, RegularWindows
from lightning_ga.snapshot.user_objects import reached_from, untouched

SIZE = 200
COLLATED = list[int]()
ROWS: Any = [(torch.full((3,), float(index)), index) for index in range(24)]


class Counting(Dataset[int]):
    """Counts the reads of each index, in all processes."""

    file: Any = None

    def __init__(self) -> None:
        self.reads = torch.zeros(SIZE, dtype=torch.int64).share_memory_()

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> int:
        self.reads[index] += 1
        return index


class InLists(Counting):
    """Reads several samples at once."""

    def __getitems__(self, indices: list[int]) -> list[int]:
        return [self[index] for index in indices]


def test_no_more_are_read_of_a_dataset_that_reads_lists() -> None:
    """Some are read again in several lists, and fewer others."""
    data = InLists()
    samples = KnownSamples(DataLoader(data, 8))
    assert samples.can_be_read_apart
    assert samples.why_in_step(8) == ""
    assert int(data.reads.sum()) == SAMPLES_AT_ONCE + 1


@pytest.mark.parametrize("workers", [0, 1])
def test_few_samples_are_read_and_one_of_them_twice(workers: int) -> None:
    """From all over the dataset, with its first and its last."""
    data = Counting()
    samples = KnownSamples(DataLoader(data, 8, num_workers=workers))
    found = samples.reader.first
    assert len(set(found)) == len(found) == SAMPLES_AT_ONCE
    assert found[:2] == [0, SIZE - 1]
    assert int(data.reads.sum()) == SAMPLES_AT_ONCE + 1
    assert sorted(data.reads.tolist())[-2:] == [1, 2]
    assert samples.reader.first is found


class OfNoise(Dataset[float]):
    """A sample is noise, drawn from a generator that the first read makes."""

    random: Any = None

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> float:
        self.random = self.random or np.random.default_rng(index)
        return index + float(self.random.random())


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_first_read_of_all_may_draw_other_random_numbers(size: int) -> None:
    """No sample of a small dataset is known twice."""
    data = OfNoise(size)
    found = KnownSamples(DataLoader(data, 8)).reader.first
    assert sorted(map(int, found)) == list(range(size))
    assert data.random is None


class Pops(Dataset[int]):
    """A queue: the index is ignored."""

    def __init__(self, kind: Any) -> None:
        self.left = kind(range(SIZE))

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> int:
        return next(self.left) if isinstance(self.left, Iterator) else self.left.pop()


class Draws(Dataset[float]):
    """Noise of a generator that nobody else knows."""

    def __init__(self) -> None:
        self.draw = np.random.default_rng(3).random

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> float:
        return float(self.draw())


class Waiting(Dataset[int]):
    """A queue of another process's making."""

    def __init__(self) -> None:
        self.queue = multiprocessing.SimpleQueue()
        for number in range(4):
            self.queue.put(number)

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        return self.queue.get()


class Batches(Dataset[Any]):
    """Reads whole batches, as dictionaries, or as lists of two fields."""

    def __init__(self, kind: Any) -> None:
        self.kind = kind

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(index), torch.tensor(-index)

    def __getitems__(self, indices: list[int]) -> Any:
        fields = torch.tensor(indices), -torch.tensor(indices)
        return dict(zip("ab", fields)) if self.kind is dict else list(fields)


class Finishing(DataLoader[Any]):
    """Finishes its batches in the main process."""

    def _get_iterator(self) -> Any:
        return super()._get_iterator()


def broken(index: int) -> Any:
    raise OSError("no such file")


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(Pops(list), 4),
        lambda: DataLoader(Pops(deque), 4),
        lambda: DataLoader(Pops(iter), 4),
        lambda: DataLoader(Pops(lambda numbers: (number for number in numbers)), 4),
        lambda: DataLoader(Pops(list), 4, num_workers=1),
        lambda: DataLoader(Draws(), 4),
        lambda: DataLoader(Waiting(), 4),
        lambda: DataLoader(Batches(dict), 4, collate_fn=len),
        lambda: DataLoader(Batches(list), 4, collate_fn=len),
        lambda: Finishing(TensorDataset(torch.zeros(8, 3)), 4),
        lambda: DataLoader(TensorDataset(torch.zeros(0, 3)), 4),
        lambda: [torch.zeros(3)],
    ],
    ids=["list", "deque", "iterator", "generator", "worker", "noise", "queue", "dicts", "lists", "own", "none", "bare"],
)
def test_data_that_reading_would_change_are_left_to_training(make: Any) -> None:
    """They are what they were."""
    loader = make()
    assert KnownSamples(loader).reader.first == []
    data = getattr(loader, "dataset", None)
    if isinstance(data, Pops):
        assert len([data[0] for _ in range(SIZE)]) == SIZE
    if isinstance(data, Waiting):
        assert [data[0] for _ in range(4)] == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", [list, deque, iter])
def test_a_dataset_that_ignores_the_index_hands_its_samples_out(kind: Any) -> None:
    """One that draws random numbers does not; workers have datasets of their own."""
    assert KnownSamples(DataLoader(Pops(kind), 4)).reader.are_handed_out
    assert not KnownSamples(DataLoader(Draws(), 4)).reader.are_handed_out
    assert not KnownSamples(DataLoader(Counting(), 4)).reader.are_handed_out
    assert not KnownSamples(DataLoader(Pops(list), 4, num_workers=1)).reader.are_handed_out
    with tempfile.TemporaryFile() as file:
        reader = Counting()
        reader.file = file
        assert not KnownSamples(DataLoader(reader, 4)).reader.are_handed_out
        assert KnownSamples(DataLoader(reader, 4)).reader.first == []


class Reads:
    """No torch dataset: a sample is what ``read`` returns of its own state."""

    def __init__(self, read: Any, state: Any) -> None:
        self.read, self.state = read, state

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        return self.read(self.state, index)


class ReadsAsDataset(Reads, Dataset[Any]):
    """The same as a dataset."""


def noisy(state: Any, index: int) -> Any:
    return float(state.random())


def counted(state: Any, index: int) -> Any:
    state["seen"][index] += 1
    return index


def first_of(state: Any, index: int) -> Any:
    return next(state[0])


def from_queue(state: Any, index: int) -> Any:
    return state.queue.get(timeout=5)


def next_line(file: Any, index: int) -> int:
    return int(next(file))


def line_read(file: Any, index: int) -> int:
    return int(file.readline())


def line_at(file: Any, index: int) -> int:
    file.seek(4 * index)
    return int(file.readline())


@pytest.mark.parametrize("mode", ["r", "rb", "memory"])
@pytest.mark.parametrize("read", [next_line, line_read, line_at])
def test_a_file_is_read_on_from_where_it_was(read: Any, mode: str, tmp_path: Path) -> None:
    """Training gets each line of one that is read line by line; one that is sought in by the index is read apart."""
    (tmp_path / "lines").write_text("".join(f"{number:03}\n" for number in range(SIZE)))
    is_by_index = read is line_at
    with io.BytesIO((tmp_path / "lines").read_bytes()) if mode == "memory" else (tmp_path / "lines").open(mode) as file:
        for line in range(2):
            reader = KnownSamples(DataLoader(ReadsAsDataset(read, file), 4)).reader
            assert reader.are_handed_out != is_by_index
            assert len(reader.first) == (SAMPLES_AT_ONCE if is_by_index else 0)
            assert int(file.readline()) == line
        other = KnownSamples(DataLoader(ReadsAsDataset(read, file), 4, num_workers=1)).reader
        assert (other.first, other.are_handed_out) == ([], False)  # a worker would read on in the same file


HOLDERS: Any = {
    "helper": lambda read, state: ReadsAsDataset(lambda helper, index: read(helper.state, index), Reads(None, state)),
    "list": lambda read, state: ReadsAsDataset(lambda helpers, index: read(helpers[0].state, index), [Reads(0, state)]),
    "subset": lambda read, state: Subset(Reads(read, state), range(SIZE)),  # type: ignore[arg-type]
    "stack": lambda read, state: StackDataset(a=ReadsAsDataset(read, state), b=range(SIZE)),
    "closure": lambda read, state: ReadsAsDataset(lambda _, index: read(state, index), None),
    "partial": lambda read, state: ReadsAsDataset(partial(lambda own, _, index: read(own, index), state), None),
}


@pytest.mark.parametrize("holder", HOLDERS.values(), ids=HOLDERS)
@pytest.mark.parametrize("kind", ["generator", "tensor", "array", "dictionary"])
def test_what_reading_changes_at_any_depth_is_put_back(holder: Any, kind: str) -> None:
    """Generators, counts in containers, tensors and arrays."""
    states: Any = {"tensor": torch.zeros(SIZE), "array": np.zeros(SIZE), "dictionary": dict.fromkeys(range(SIZE), 0)}
    if kind == "generator":
        state: Any = np.random.default_rng(3)
        samples = KnownSamples(DataLoader(holder(noisy, state), 4))
    else:
        state = {"seen": states[kind]}
        samples = KnownSamples(DataLoader(holder(counted, state), 4))
    assert len(samples.reader.first) > 2 or kind == "generator"
    if kind == "generator":
        assert state.random() == np.random.default_rng(3).random()
    else:
        assert all(state["seen"][index] == 0 for index in range(SIZE))


@pytest.mark.parametrize("holder", HOLDERS.values(), ids=HOLDERS)
@pytest.mark.parametrize("kind", ["iterator", "queue"])
def test_what_reading_uses_up_at_any_depth_is_left_to_training(holder: Any, kind: str) -> None:
    """A bounded queue, say."""
    if kind == "iterator":
        samples = KnownSamples(DataLoader(holder(first_of, numbers := [iter(range(SIZE))]), 4))
        assert samples.reader.first == []
        assert next(numbers[0]) == 0
    else:
        waiting = SimpleNamespace(queue=queue.Queue())
        waiting.queue.put(7)
        samples = KnownSamples(DataLoader(holder(from_queue, waiting), 4))
        assert samples.reader.first == []
        assert waiting.queue.get(timeout=1) == 7
    assert samples.reader.are_handed_out


@pytest.mark.parametrize("bound", ["closure", "partial", "helper"])
def test_what_a_collate_function_draws_from_is_put_back(bound: str) -> None:
    generator = torch.Generator().manual_seed(3)

    class Collates:
        def __init__(self) -> None:
            self.helper = {"generator": generator}

        def __call__(self, batch: list[Any]) -> Any:
            return collate(batch, self.helper["generator"])

    def collate(batch: list[Any], drawn: torch.Generator) -> Any:
        return torch.rand(len(batch), generator=drawn)

    ways: Any = {"closure": lambda batch: collate(batch, generator), "partial": partial(collate, drawn=generator)}
    samples = KnownSamples(DataLoader(ROWS, 4, collate_fn=ways.get(bound) or Collates()))
    before = generator.get_state()
    assert samples.collate(samples.reader.first, 2).shape == (2,)
    assert torch.equal(before, generator.get_state())


def test_only_so_much_is_looked_at_and_put_back() -> None:
    """Long lists are data, and large arrays; an array that cannot be written to stays as it is."""
    data = ReadsAsDataset(None, {"rows": [[number] for number in range(10**5)], "seen": np.zeros(10**6)})
    assert len(reached_from(data)) < 10
    frozen = np.zeros(3)
    frozen.flags.writeable = False
    with untouched([data, frozen]):
        data.state["seen"][0] = data.state["rows"][0][0] = 1
    assert data.state["seen"][0] == data.state["rows"][0][0] == 1


def test_an_error_of_reading_is_left_to_training() -> None:
    class Broken(Counting):
        def __getitem__(self, index: int) -> int:
            raise OSError("no such file")

    assert KnownSamples(DataLoader(Broken(), 4)).reader.first == []


class Stream(IterableDataset[Any]):
    """Counts how often it is iterated, in all processes."""

    def __init__(self) -> None:
        self.begun = torch.zeros((), dtype=torch.int64).share_memory_()

    def __iter__(self) -> Iterator[Any]:
        self.begun += 1
        return iter(ROWS)


def second_axis(batch: list[Any]) -> Any:
    return torch.stack([row for row, _ in batch], dim=1)


@pytest.mark.parametrize("workers", [0, 1])
def test_the_first_batch_of_a_stream_shows_what_it_was_collated_from(workers: int) -> None:
    """Its samples, copied; the stream is not iterated again, and later batches show nothing."""
    data = Stream()
    samples = KnownSamples(DataLoader(data, 4, num_workers=workers, collate_fn=second_axis))
    copied = samples.with_shown_batch()
    first, second, *_ = copied
    assert first.shape == second.shape == (3, 4)
    assert [number for _, number in samples.examples] == [0, 1, 2]
    assert samples.collate(samples.examples, 5).shape == (3, 5)
    list(copied)
    assert [number for _, number in samples.examples] == [0, 1, 2]
    assert int(data.begun) == 2  # both by this test
    plain = DataLoader(data, 4)
    assert KnownSamples(plain).with_shown_batch() is plain
    assert KnownSamples(plain).examples == []


class Drawn(Dataset[Any]):
    """Samples that are never the same again."""

    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, index: int) -> Any:
        return ROWS[index][0] + secrets.randbelow(2**30), index


def test_the_first_batch_of_a_subset_shows_its_samples_too() -> None:
    """Every ``Subset`` has a method ``__getitems__``, whatever it contains."""
    samples = KnownSamples(DataLoader(Subset(Drawn(), range(8)), 4, collate_fn=second_axis))
    next(iter(samples.with_shown_batch()))
    assert [number for _, number in samples.examples] == [0, 1, 2]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_first_batch_of_which_nothing_is_left_shows_nothing(workers: int) -> None:
    """The next one shows its samples."""

    class BrokenAtFirst(Stream):
        def __iter__(self) -> Iterator[Any]:
            rows = super().__iter__()
            return (None if number < 4 else row for number, row in enumerate(rows))

    samples = KnownSamples(DataLoader(BrokenAtFirst(), 4, num_workers=workers, collate_fn=second_axis_of_some))
    reads = iter(samples.with_shown_batch())
    assert next(reads) is None
    if not workers:  # a worker reads ahead
        assert samples.examples == []
    next(reads)
    assert [number for _, number in samples.examples] == [4, 5, 6]


def second_axis_of_some(batch: list[Any]) -> Any:
    left = [sample for sample in batch if sample is not None]
    return second_axis(left) if left else None


def test_nothing_is_settled_before_the_first_batch() -> None:
    """Samples that it will show are asked for earlier, too; whether batches can be joined stays as planned."""

    def keep_even(batch: list[Any]) -> Any:
        return torch.stack([row for row, index in batch if index % 2 == 0])

    samples = KnownSamples(DataLoader(Stream(), 4, collate_fn=keep_even))
    loader = samples.with_shown_batch()
    for _ in range(2):
        assert (samples.examples, samples.were_seen_dropped, samples.joins_batches(4)) == ([], False, False)
    next(iter(loader))
    assert [number for _, number in samples.examples] == [0, 2]
    assert samples.were_seen_dropped
    assert not samples.joins_batches(4)


def test_looking_at_samples_uses_up_no_random_numbers() -> None:
    """A pass over the copy uses up as many as one over the user's loader: seeds of workers."""
    size = 11
    loader = DataLoader(TensorDataset(torch.arange(size)), 3, shuffle=False)
    with torch.random.fork_rng():
        assert len(list(loader)) == 4
        after = torch.get_rng_state()
    before = torch.get_rng_state()
    samples = KnownSamples(loader)
    samples.collate(samples.reader.first, 2)
    assert torch.equal(torch.get_rng_state(), before)
    cut = WindowBatchSampler(Sequential(size), rank=0)
    cut.arrange(0, EpochPlan(RegularWindows(size, 4), 2), start=0, enabled=True)
    with torch.random.fork_rng():
        assert len(list(rebatch(loader, cut))) == 6
        assert torch.equal(torch.get_rng_state(), after)


def time_first(batch: list[Any]) -> Any:
    return torch.stack([row for row, _ in batch], dim=1)


def flattened(batch: list[Any]) -> dict[str, Any]:
    """The rows of all samples, where samples begin, and a part that they share."""
    rows = [torch.full((index % 3 + 1, 2), float(index)) for _, index in batch]
    ends = torch.tensor([0, *(len(each) for each in rows)]).cumsum(0)
    return {"rows": torch.cat(rows), "ends": ends, "scale": torch.ones(5)}


def twice(batch: list[Any]) -> Any:
    return torch.stack([row for row, _ in batch] * 2)


@pytest.mark.parametrize(
    ("collate", "joins"),
    [
        (None, True),
        (time_first, True),
        (flattened, True),
        (twice, True),
        (list, True),
        (lambda batch: {"rows": time_first(batch), "first": batch[0][0]}, True),
        (lambda batch: batch[0], False),
        (lambda batch: torch.stack([row for row, _ in batch[:4]]), False),
        (lambda batch: torch.stack([row for row, _ in batch[: len(batch) * 3 // 4 + 1]]), False),
        (lambda batch: torch.stack([row for row, _ in batch]).sum(0), False),
        (lambda batch: torch.stack([row for row, _ in batch]).view(4, 3), False),
    ],
)
def test_whether_samples_of_two_batches_make_one(collate: Any, joins: bool) -> None:
    """If a batch grows with its samples, up to two batches, as it does with few; parts may be shared."""
    assert KnownSamples(DataLoader(ROWS, 4, collate_fn=collate)).joins_batches(4) is joins
    if collate is None or joins:
        assert KnownSamples(DataLoader(ROWS, 1, collate_fn=collate)).joins_batches(1)


def test_large_batches_are_not_collated_to_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that looking takes little memory: a few show if some are left out, and never that two batches make one."""
    monkeypatch.setattr(samples_module, "_MOST_ELEMENTS", 64)
    monkeypatch.setattr(sys.modules[__name__], "COLLATED", [])  # no object that is put back

    def collate(batch: list[Any]) -> Any:
        COLLATED.append(len(batch))
        return time_first(batch)

    known = KnownSamples(DataLoader(ROWS, 8, collate_fn=collate))
    assert known.joins_batches(8)
    assert COLLATED[-4:] == [2, 3, 4, 64 // 4]
    assert not known.joins_batches(9)
    assert not known.takes_only_some(64)
    assert max(COLLATED) == 64 // 4


def test_a_function_that_takes_one_batch_joins_no_two_of_large_samples() -> None:
    """What it leaves out of two batches would show only in a batch that is too large to look at."""
    for size in (2**22, 4):
        samples = torch.zeros(1, size).expand(64, size)
        loader = DataLoader(samples, 20, collate_fn=lambda batch: torch.stack(batch[:20]))  # type: ignore[arg-type]
        assert not KnownSamples(loader).joins_batches(20)


def test_none_can_be_joined_if_none_can_be_read() -> None:
    assert not KnownSamples(DataLoader([None] * 8, 4, collate_fn=list)).joins_batches(4)  # type: ignore[arg-type]

    def full(batch: list[Any]) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        KnownSamples(DataLoader(ROWS, 4, collate_fn=full)).joins_batches(4)


def test_samples_that_collating_leaves_out_are_known() -> None:
    """Those that are nothing, and those of which it makes nothing or an error."""

    def keep_even(batch: list[Any]) -> Any:
        return torch.stack([row for row, index in batch if index % 2 == 0])

    samples = KnownSamples(DataLoader([*ROWS[:7], None], 4, collate_fn=keep_even))  # type: ignore[arg-type]
    assert samples.were_seen_dropped
    assert all(index % 2 == 0 for _, index in samples.examples)
    assert not KnownSamples(DataLoader(ROWS, 4)).were_seen_dropped


class SlowAtFirst(Dataset[int]):
    """Its first samples take longer to read than those after them."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> int:
        if index < 4:
            time.sleep(0.05)
        return index


def test_samples_are_read_in_order_whatever_the_loader_says() -> None:
    """Sizes are told apart by it."""
    loader = DataLoader(SlowAtFirst(), 4, num_workers=2, in_order=False)
    lists = [[*range(start, start + 4)] for start in range(0, 24, 4)]
    with KnownSamples(loader).reader.fetched(lists, list, workers=2) as reads:
        assert [*reads] == lists


def test_short_samples_that_share_a_row_are_not_taken_for_dropped_ones() -> None:
    """A batch of two of them is no larger than one of one."""

    def packed(batch: list[Any]) -> torch.Tensor:
        rows = [torch.zeros(0)]
        for sample in batch:
            if len(rows[-1]) + len(sample) > 8:
                rows.append(torch.zeros(0))
            rows[-1] = torch.cat([rows[-1], sample])
        return torch.stack([torch.nn.functional.pad(row, (0, 8 - len(row))) for row in rows])

    rows: Any = [torch.ones(8 if number % 2 else 2) for number in range(20)]
    known = KnownSamples(DataLoader(rows, 4, collate_fn=packed))
    assert not known.were_seen_dropped
    assert {len(example) for example in known.examples} == {2, 8}
