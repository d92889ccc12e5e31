"""Steps and hooks that read iterators: a second loader, a schedule made by yield."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from timm.data.loader import MultiEpochsDataLoader
from torch.utils.data import DataLoader
from true_support import Case, Memory, Task, Way, comes_from_memory, each, each_cut, error, pairs, run, touch, train

from lightning_ga import AutoAccumulate, UserError


def batches() -> DataLoader[Any]:
    return DataLoader(pairs(28), batch_size=8)


def others() -> DataLoader[Any]:
    return DataLoader([(inputs.flip(0), targets) for inputs, targets in pairs(44)], batch_size=8)


def endless() -> Iterator[Any]:
    while True:
        for batch in others():
            touch("generator", 8)
            yield batch


class Reading(Task):
    """Each step reads a batch of another loader."""

    def __init__(self, make: Callable[[], Iterator[Any]]) -> None:
        super().__init__()
        self.others = make()

    def more(self) -> torch.Tensor:
        return next(self.others)[0]

    def loss(self, batch: Any) -> torch.Tensor:
        return super().loss(batch) + 0.1 * self.net(self.more()).square().mean()


ITERATORS = {"generator": endless, "loader": lambda: iter(others()), "cycle": lambda: itertools.cycle(others())}


def behind_a_name(make: Callable[[], Iterator[Any]]) -> Task:
    others = make()

    class Behind(Reading):
        def more(self) -> torch.Tensor:
            return next(others)[0]

    return Behind(make)


@pytest.mark.parametrize("mode", ["loader", "step"])
@pytest.mark.parametrize("kind", [Reading, behind_a_name])
@pytest.mark.parametrize("name", ITERATORS)
def test_what_the_check_reads_of_an_iterator_is_read_in_training(name: str, kind: Any, mode: str) -> None:
    """Nothing is cut, so the run is the stock run bit for bit."""
    ours = train(kind(ITERATORS[name]), batches(), AutoAccumulate(micro_batching=mode))
    assert error(ours, train(kind(ITERATORS[name]), batches())) == 0.0
    assert ours.told == []


@each_cut
def test_a_step_that_reads_an_iterator_is_told(way: Way) -> None:
    ours = run(Case(lambda: Reading(endless), batches), way)
    assert error(ours, train(Reading(endless), batches())) > 1e-6
    assert len(ours.told) == 1


def test_an_error_within_a_generator_does_not_end_the_epoch() -> None:
    """A generator ends with the error, and Lightning takes ``StopIteration`` for the end of the data."""
    with pytest.raises(UserError, match="after the step had changed a generator") as caught:
        train(Reading(endless), batches(), AutoAccumulate(), memory=Memory(1, place="generator"), max_epochs=9)
    assert comes_from_memory(caught.value)


class Scheduled(Task):
    """A setting of the optimizer follows a schedule made by yield, read once a step or once a batch."""

    def __init__(self, setting: str, hook: str) -> None:
        super().__init__()
        self.values = (0.1 / (1 + number) for number in range(40))
        self.setting, self.hook = setting, hook

    def read(self) -> None:
        for group in self.trainer.optimizers[0].param_groups:
            group[self.setting] = next(self.values)

    def on_train_batch_start(self, *_: Any) -> None:
        if self.hook == "batch":
            self.read()

    def optimizer_step(self, *given: Any, **settings: Any) -> None:
        if self.hook == "step":
            self.read()
        super().optimizer_step(*given, **settings)


@pytest.mark.parametrize("setting", ["lr", "weight_decay"])
@each("loader", "step", "oom", "oom in step mode")
def test_a_schedule_that_is_read_with_the_optimizers_step_is_exact(setting: str, way: Way) -> None:
    ours = run(Case(lambda: Scheduled(setting, "step"), batches), way)
    assert error(ours, train(Scheduled(setting, "step"), batches())) <= 1e-12
    assert ours.told == []


@pytest.mark.parametrize("setting", ["lr", "momentum", "weight_decay"])
def test_a_setting_that_a_hook_of_batches_moves_is_told_where_micro_batches_are_counted(setting: str) -> None:
    ours = train(Scheduled(setting, "batch"), batches(), AutoAccumulate(micro_batch_size=3))
    assert error(ours, train(Scheduled(setting, "batch"), batches())) > 1e-6
    assert len(ours.told) == 1
    ours = train(Scheduled(setting, "batch"), batches(), AutoAccumulate(micro_batch_size=3, micro_batching="step"))
    assert error(ours, train(Scheduled(setting, "batch"), batches())) <= 1e-12
    assert ours.told == []


class Repeated:
    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        return itertools.chain.from_iterable(iter(self.sampler) for _ in itertools.count())


class Infinite(DataLoader[Any]):
    """It begins one iterator when it is made, and goes on with that in every epoch, as in YOLO."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        object.__setattr__(self, "batch_sampler", Repeated(self.batch_sampler))
        self.iterator = super().__iter__()

    def __len__(self) -> int:
        return len(self.batch_sampler.sampler)

    def __iter__(self) -> Any:
        return itertools.islice(self.iterator, len(self))


@pytest.mark.parametrize("kind", [Infinite, MultiEpochsDataLoader])
@each_cut
def test_loaders_that_keep_their_workers_by_one_endless_iterator_are_cut_in_the_step(kind: Any, way: Way) -> None:
    stock = train(Task(), kind(pairs(28), batch_size=8), max_epochs=2)
    ours = train(Task(), kind(pairs(28), batch_size=8), way.callback(8, 3), max_epochs=2)
    assert error(ours, stock) <= 1e-12
    assert ours.told == []
