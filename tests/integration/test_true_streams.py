"""Training sees the data that stock Lightning sees: streams that go on, batch samplers with meaning, random numbers."""

from collections.abc import Callable, Iterator
from itertools import count, islice
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from pairing import every_pair
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, IterableDataset, Sampler, default_collate
from true_support import (
    ROUNDING,
    Case,
    Memory,
    Task,
    Trained,
    Way,
    each_cut,
    each_way,
    error,
    one_pass,
    pairs,
    run,
    train,
)

from lightning_ga import AutoAccumulate, UserError

MODES = pytest.mark.parametrize("mode", ["loader", "step"])


class Seen(pl.Callback):
    """Indices of all samples, in the order in which training meets them, and those of each batch."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.batches.append(batch["index"].tolist())

    @property
    def samples(self) -> list[int]:
        return [index for batch in self.batches for index in batch]


class Indexed(Task):
    def loss(self, batch: Any) -> torch.Tensor:
        return mse_loss(self.predict(batch["x"]), batch["y"])


def indexed(samples: int) -> list[dict[str, Any]]:
    return [{"index": index, "x": x, "y": y} for index, (x, y) in enumerate(pairs(samples))]


class IterableSlice:
    """gluonts': so many batches of one stream in each epoch, which goes on where the one before ended."""

    def __init__(self, stream: Iterator[Any], length: int) -> None:
        self.stream, self.length = stream, length

    def __iter__(self) -> Iterator[Any]:
        yield from islice(self.stream, self.length)


class Endless(IterableDataset[Any]):
    """Samples of one stream; an epoch ends after some, and the next goes on."""

    def __init__(self, length: int) -> None:
        self.stream, self.length = endless_samples(), length

    def __iter__(self) -> Iterator[Any]:
        yield from islice(self.stream, self.length)


def endless_samples() -> Iterator[Any]:
    samples = pairs(200)
    return ({"index": n, "x": samples[n][0], "y": samples[n][1]} for n in count())


def endless_batches(size: int = 8) -> Iterator[Any]:
    samples = endless_samples()
    return (default_collate(list(islice(samples, size))) for _ in count())


STREAMS: dict[str, Callable[[], Any]] = {
    "IterableSlice": lambda: IterableSlice(endless_batches(), 4),
    "a dataset of samples": lambda: DataLoader(Endless(32), batch_size=8),
    "a dataset of batches": lambda: DataLoader(SlicedDataset(endless_batches(), 4), batch_size=None),
    "a dictionary of them": lambda: {"only": IterableSlice(endless_batches(), 4)},
}


class SlicedDataset(IterableSlice, IterableDataset[Any]):
    """The same as a dataset."""


class OnlyOne(Indexed):
    """Takes what a dictionary of loaders yields, too."""

    def loss(self, batch: Any) -> torch.Tensor:
        return super().loss(batch.get("only", batch))


class SeenOnlyOne(Seen):
    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(trainer, module, batch.get("only", batch), batch_idx)


def of_stream(name: str, *callbacks: pl.Callback, **settings: Any) -> tuple[Trained, list[int]]:
    seen = SeenOnlyOne()
    return train(OnlyOne(), STREAMS[name](), *callbacks, seen, max_epochs=3, **settings), seen.samples


@every_pair(name=STREAMS.keys(), micro_batch_size=["auto", 8, 3], mode=["loader", "step"])
def test_a_stream_that_goes_on_loses_nothing(name: str, micro_batch_size: int | str, mode: str) -> None:
    """Three epochs of four batches see the batches 0 to 11, though a probe or a check has looked at some."""
    whole, expected = of_stream(name)
    assert expected == list(range(96))
    ours, seen = of_stream(name, AutoAccumulate(micro_batch_size=micro_batch_size, micro_batching=mode))
    assert seen == expected
    assert error(ours, whole) <= 1e-12
    if micro_batch_size != 3:
        assert torch.equal(ours.weights, whole.weights)


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("fails", [False, True], ids=["windows of two batches", "oom"])
@MODES
def test_a_stream_that_goes_on_in_windows_or_after_an_error_loses_nothing(name: str, fails: bool, mode: str) -> None:
    """Nor does an error cost a batch."""
    whole, expected = of_stream(name, accumulate_grad_batches=1 if fails else 2)
    arguments = {"micro_batch_size": 8} if fails else {"effective_batch_size": 16, "micro_batch_size": 4}
    callback = AutoAccumulate(**arguments, micro_batching=mode)
    ours, seen = of_stream(name, callback, memory=Memory(*([6] if fails else [])))
    assert callback.oom_events == fails
    assert seen == expected
    assert error(ours, whole) <= 1e-12


class TimeIndex(Sampler[list[int]]):
    """Samples of one point in time make up a batch."""

    def __init__(self, groups: int, size: int = 4) -> None:
        self.groups, self.size = groups, size

    def __iter__(self) -> Iterator[list[int]]:
        return ([group + self.groups * k for k in range(self.size)] for group in range(self.groups))

    def __len__(self) -> int:
        return self.groups


class Classes(TimeIndex):
    """P × K: two samples of each of two classes, drawn anew in each epoch."""

    batch_size = 4

    def __iter__(self) -> Iterator[list[int]]:
        batches = list(super().__iter__())
        return (batches[group] for group in torch.randperm(self.groups).tolist())


SAMPLERS = {"equal time index": TimeIndex, "P × K": Classes}
GROUPS = 8


def grouped(kind: Any = TimeIndex) -> Any:
    return DataLoader(indexed(4 * GROUPS), batch_sampler=kind(GROUPS))


class Groups(Indexed):
    """Notes, outside of itself, the groups of each micro-batch of training."""

    noted: list[tuple[int, list[int]]] = []  # noqa: RUF012

    def loss(self, batch: Any) -> torch.Tensor:
        if Memory.in_use is not None and Memory.in_use.armed:
            Groups.noted.append((self.global_step, (batch["index"] % GROUPS).tolist()))
        return super().loss(batch)


@every_pair(kind=SAMPLERS, micro_batch_size=["auto", 3, 4, 8], effective=[4, 8, 16], mode=["loader", "step"])
def test_windows_are_whole_batches_of_a_batch_sampler(
    kind: Any, micro_batch_size: int | str, effective: int, mode: str
) -> None:
    """As many whole groups as the effective batch holds; no micro-batch holds samples of two of them."""
    Groups.noted = []
    callback = AutoAccumulate(effective, micro_batch_size=micro_batch_size, micro_batching=mode)
    ours = train(Groups(), grouped(kind), callback)
    assert all(len(set(groups)) == 1 for _, groups in Groups.noted)
    assert all(len(groups) <= 4 for _, groups in Groups.noted)
    windows: dict[int, list[int]] = {}
    for step, groups in Groups.noted:
        windows.setdefault(step, []).extend(groups)
    assert [len(window) for window in windows.values()] == [effective] * (4 * GROUPS // effective)
    for window in windows.values():
        assert all(window.count(group) == 4 for group in window)
    assert callback.plan.effective_batch_size == effective
    if kind is TimeIndex:
        whole = train(Groups(), grouped(kind), accumulate_grad_batches=effective // 4)
        assert error(ours, whole) <= 1e-12


@pytest.mark.parametrize("kind", SAMPLERS.values(), ids=SAMPLERS.keys())
@pytest.mark.parametrize("effective", [2, 6, 18])
@MODES
def test_an_effective_batch_that_would_cut_a_batch_samplers_groups_is_refused(
    kind: Any, effective: int, mode: str
) -> None:
    memory = Memory()
    with pytest.raises(UserError, match=rf"effective_batch_size={effective}\b.*\b4\b"):
        train(Groups(), grouped(kind), AutoAccumulate(effective, micro_batching=mode), memory=memory)
    assert memory.sizes == []


@each_way
def test_groups_are_trained_as_they_come_where_no_effective_batch_is_asked_for(way: Way) -> None:
    Groups.noted = []
    case = Case(Groups, grouped, 4, 2)
    ours = run(case, way)
    assert all(len(set(groups)) == 1 for _, groups in Groups.noted)
    assert error(ours, one_pass(case)) <= 1e-12


class Shared(IterableDataset[Any]):
    """Its workers share the samples."""

    def __iter__(self) -> Iterator[Any]:
        worker = torch.utils.data.get_worker_info()
        return islice(iter(pairs(48)), worker.id if worker else 0, None, worker.num_workers if worker else 1)


@each_cut
def test_workers_that_read_a_stream_in_turn_are_told_where_the_loader_cuts(way: Way) -> None:
    case = Case(Task, lambda: DataLoader(Shared(), batch_size=8, num_workers=2))
    ours = run(case, way)
    assert [text for text in ours.told if "Several data workers" in text] == (ours.told if way.mode == "loader" else [])
    assert len(ours.told) == (way.mode == "loader")
    assert (error(ours, one_pass(case)) > 1e-3) is (way.mode == "loader")


class Growing(Task):
    """Batches of 6, of 12 and of 18 samples."""

    def train_dataloader(self) -> Any:
        return DataLoader(pairs(36), batch_size=6 * (self.trainer.current_epoch + 1))


@MODES
@pytest.mark.parametrize("arguments", [{}, {"max_micro_batch_size": 12}], ids=["no bound", "bound"])
def test_a_loader_whose_batches_grow_has_its_limit_looked_for_again(arguments: dict[str, Any], mode: str) -> None:
    settings = {"max_epochs": 3, "reload_dataloaders_every_n_epochs": 1}
    ours = train(Growing(), None, AutoAccumulate(micro_batching=mode, cache=False, **arguments), **settings)
    assert ours.memory.sizes == 6 * [6] + 3 * [12] + (4 * [9] if arguments else 2 * [18])
    assert error(ours, train(Growing(), None, **settings)) <= ROUNDING


class EmptyAtFirst(IterableDataset[Any]):
    """Yields nothing in the first epoch."""

    epochs = 0

    def __iter__(self) -> Iterator[Any]:
        return iter(pairs(48) if self.epochs else [])


class CountsEpochs(pl.Callback):
    def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.train_dataloader.dataset.epochs += 1


def test_a_stream_that_is_empty_at_first_trains_later_where_the_loader_cuts() -> None:
    callback = AutoAccumulate(micro_batch_size=3)
    ours = train(Task(), DataLoader(EmptyAtFirst(), batch_size=8), callback, CountsEpochs(), max_epochs=2)
    stock = train(Task(), DataLoader(EmptyAtFirst(), batch_size=8), CountsEpochs(), max_epochs=2)
    assert len(stock.gradients) == 6
    assert error(ours, stock) <= ROUNDING


def test_a_stream_that_is_empty_at_first_is_refused_in_step_mode() -> None:
    callback = AutoAccumulate(micro_batch_size=3, micro_batching="step")
    with pytest.raises(UserError, match=r"the loader yields no sample in the first epoch: let that epoch have some"):
        train(Task(), DataLoader(EmptyAtFirst(), batch_size=8), callback, max_epochs=2)


@MODES
def test_a_growing_loader_and_memory_that_has_run_out(mode: str) -> None:
    """A limit that an error has found stays."""
    settings = {"max_epochs": 3, "reload_dataloaders_every_n_epochs": 1}
    ours = train(Growing(), None, AutoAccumulate(micro_batching=mode, cache=False), memory=Memory(2), **settings)
    assert max(ours.memory.sizes[2:]) == 3
    assert error(ours, train(Growing(), None, **settings)) <= ROUNDING
