"""Training sees the data that stock Lightning sees: streams that go on, samplers with meaning, data that hold a model.

And programs whose hooks come late or set what a window uses.
"""

from collections import deque
from collections.abc import Callable, Iterator
from itertools import count, islice
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from pairing import every_pair
from reference import quiet_trainer
from torch import Tensor
from torch.nn.functional import mse_loss, pad
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, default_collate
from true_support import (
    FEATURES,
    LOADER,
    ROUNDING,
    STEP,
    Case,
    Memory,
    Task,
    Trained,
    Way,
    cut_rightly,
    each_cut,
    each_way,
    error,
    of_pairs,
    one_pass,
    pairs,
    run,
    told,
    train,
)

from lightning_ga import AutoAccumulate, ExactnessWarning, UserError

MODES = pytest.mark.parametrize("mode", ["loader", "step"])


class Iterated(IterableDataset[Any]):
    """A stream that a function makes anew for each epoch."""

    def __init__(self, begin: Callable[[], Iterator[Any]]) -> None:
        self.begin = begin

    def __iter__(self) -> Iterator[Any]:
        return self.begin()


class Seen(pl.Callback):
    """Indices of all samples, in the order in which training meets them."""

    def __init__(self) -> None:
        self.samples: list[int] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.samples += batch.get("only", batch)["index"].tolist()


class Indexed(Task):
    """Takes what a dictionary of loaders yields, too."""

    def loss(self, batch: Any) -> Tensor:
        batch = batch.get("only", batch)
        return self.regression(batch["x"], batch["y"])


def indexed(samples: int) -> list[dict[str, Any]]:
    return [{"index": index, "x": x, "y": y} for index, (x, y) in enumerate(pairs(samples))]


class IterableSlice:
    """gluonts': so many batches of one stream in each epoch, which goes on where the one before ended."""

    def __init__(self, stream: Iterator[Any], length: int) -> None:
        self.stream, self.length = stream, length

    def __iter__(self) -> Iterator[Any]:
        yield from islice(self.stream, self.length)


class SlicedDataset(IterableSlice, IterableDataset[Any]):
    """The same as a dataset."""


def endless_samples() -> Iterator[Any]:
    samples = indexed(200)
    return (samples[n] for n in count())


def endless_batches(size: int = 8) -> Iterator[Any]:
    samples = endless_samples()
    return (default_collate(list(islice(samples, size))) for _ in count())


STREAMS: dict[str, Callable[[], Any]] = {
    "IterableSlice": lambda: IterableSlice(endless_batches(), 4),
    "a dataset of samples": lambda: DataLoader(SlicedDataset(endless_samples(), 32), batch_size=8),
    "a dataset of batches": lambda: DataLoader(SlicedDataset(endless_batches(), 4), batch_size=None),
    "a dictionary of them": lambda: {"only": IterableSlice(endless_batches(), 4)},
}


def of_stream(name: str, *callbacks: pl.Callback, **settings: Any) -> tuple[Trained, list[int]]:
    seen = Seen()
    return train(Indexed(), STREAMS[name](), *callbacks, seen, max_epochs=3, **settings), seen.samples


@every_pair(name=STREAMS.keys(), micro_batch_size=["auto", 8, 3], mode=["loader", "step"])
def test_a_stream_that_goes_on_loses_nothing(name: str, micro_batch_size: int | str, mode: str) -> None:
    """Three epochs of four batches see the batches 0 to 11, though a probe or a check has looked at some."""
    whole, expected = of_stream(name)
    assert expected == list(range(96))
    ours, seen = of_stream(name, AutoAccumulate(micro_batch_size=micro_batch_size, micro_batching=mode))
    assert seen == expected
    assert error(ours, whole) <= ROUNDING
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
    assert error(ours, whole) <= ROUNDING


# --- batch samplers -----------------------------------------------------------------------------


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

    def loss(self, batch: Any) -> Tensor:
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
        assert error(ours, whole) <= ROUNDING


@each_way
def test_groups_are_trained_as_they_come_where_no_effective_batch_is_asked_for(way: Way) -> None:
    Groups.noted = []
    case = Case(Groups, grouped, 4, 2)
    ours = run(case, way)
    assert all(len(set(groups)) == 1 for _, groups in Groups.noted)
    assert error(ours, one_pass(case)) <= ROUNDING


def in_turn() -> Iterator[Any]:
    """Workers share the samples."""
    worker = torch.utils.data.get_worker_info()
    return islice(iter(pairs(48)), worker.id if worker else 0, None, worker.num_workers if worker else 1)


@each_cut
def test_workers_that_read_a_stream_in_turn_are_told_where_the_loader_cuts(way: Way) -> None:
    case = Case(loader=lambda: DataLoader(Iterated(in_turn), batch_size=8, num_workers=2))
    if way is LOADER:
        told(case, way, "exact|unmeasured", "Several data workers")
    else:
        cut_rightly(case, way)


class Counted(Iterated):
    """With a length."""

    def __len__(self) -> int:
        return 48


def test_workers_whose_batches_are_joined_are_told() -> None:
    """Each reads 24 samples, as 20 and 4, and the epoch ends after three of these batches."""
    loader = DataLoader(Counted(in_turn), batch_size=4, num_workers=2)
    ours = AutoAccumulate(20, micro_batch_size=20, verify=False)
    with pytest.warns(ExactnessWarning, match=r"Several data workers .* and an epoch may end before its last samples"):
        quiet_trainer(ours, max_epochs=1).fit(Task(), loader)


# --- epochs that differ -------------------------------------------------------------------------


class Growing(Task):
    """Batches of 6, of 12 and of 18 samples."""

    def train_dataloader(self) -> Any:
        return of_pairs(36, 6 * (self.trainer.current_epoch + 1))


@MODES
@pytest.mark.parametrize(
    ("arguments", "at", "sizes"),
    [({}, (), [18, 18]), ({"max_micro_batch_size": 12}, (), [9, 9, 9, 9]), ({}, (2,), [3] * 12)],
    ids=["no bound", "bound", "oom"],
)
def test_a_loader_whose_batches_grow_has_its_limit_looked_for_again(
    arguments: dict[str, Any], at: tuple[int, ...], sizes: list[int], mode: str
) -> None:
    """A limit that an error has found stays."""
    settings = {"max_epochs": 3, "reload_dataloaders_every_n_epochs": 1}
    callback = AutoAccumulate(micro_batching=mode, cache=False, **arguments)
    ours = train(Growing(), None, callback, memory=Memory(*at), **settings)
    assert ours.memory.sizes[-len(sizes) :] == sizes
    assert max(ours.memory.sizes[2:]) == (max(sizes) if at else max(12, *sizes))
    assert error(ours, train(Growing(), None, **settings)) <= ROUNDING


def empty_at_first() -> Any:
    """Nothing in the first epoch."""
    data = Iterated(lambda: iter(pairs(48) if data.epochs else []))
    data.epochs = 0
    return DataLoader(data, batch_size=8)


class CountsEpochs(pl.Callback):
    def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.train_dataloader.dataset.epochs += 1


def test_a_stream_that_is_empty_at_first_trains_later_where_the_loader_cuts() -> None:
    """And is refused in step mode."""
    ours = train(Task(), empty_at_first(), LOADER.callback(8, 3), CountsEpochs(), max_epochs=2)
    stock = train(Task(), empty_at_first(), CountsEpochs(), max_epochs=2)
    assert len(stock.gradients) == 6
    assert error(ours, stock) <= ROUNDING
    with pytest.raises(UserError, match=r"the loader yields no sample in the first epoch: let that epoch have some"):
        train(Task(), empty_at_first(), STEP.callback(8, 3), max_epochs=2)


# --- data that hold the model, or read batches --------------------------------------------------


class Policy(Task):
    """What it does are its samples: it is reached by the dataset itself, by a method, or by a function around it."""

    def train_dataloader(self) -> DataLoader[Any]:
        net = self.net
        acts = {"net": self.net, "method": self.act, "function": lambda state: net(state)}
        return DataLoader(Rollouts(acts[self.how]), batch_size=8)

    def act(self, state: Tensor) -> Tensor:
        return self.net(state)


class Rollouts(IterableDataset):
    """What a policy does, drawn while it learns."""

    def __init__(self, act: Any) -> None:
        self.act = act

    def __iter__(self) -> Iterator[Any]:
        state = torch.linspace(-1, 1, FEATURES, dtype=torch.float64)
        for number in range(40):
            with torch.no_grad():
                state = torch.sin(state + number + self.act(state))
            yield state, state[:1]


@each_way
@pytest.mark.parametrize("how", ["net", "method", "function"])
def test_samples_that_the_model_makes_are_those_of_whole_batches(
    how: str, way: Way, caplog: pytest.LogCaptureFixture
) -> None:
    """Micro-batches of a loader would be read later, when the model has learned: they are cut in the step, as told."""
    with caplog.at_level("INFO"):
        ours = run(Case(lambda: Policy(how=how), lambda: None), way)
    assert error(ours, train(Policy(how=how), None)) <= ROUNDING
    assert ours.told == []
    if way is LOADER:
        assert "cuts batches in the training step" in caplog.text
        assert "The dataset holds the model" in caplog.text


class Augmenting(pl.LightningDataModule):
    """A dataset has a method of its datamodule, which holds the Trainer."""

    def augment(self, number: int) -> Any:
        return pairs(16)[number]

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Transformed(self.augment), batch_size=8)


class Transformed(Dataset):
    def __init__(self, make: Callable[[int], Any]) -> None:
        self.make = make

    def __len__(self) -> int:
        return 16

    def __getitem__(self, number: int) -> Any:
        return self.make(number)


def test_a_dataset_that_holds_its_datamodule_is_cut_in_the_loader() -> None:
    """The model is behind the Trainer, which is not looked through."""
    callback = LOADER.callback(8, 4)
    train(Task(), Augmenting(), callback)
    assert callback._fit is not None
    assert not callback._fit.source.cut_in_step


class Padded(Dataset):
    """A batched transform pads to the longest sample that is read."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        samples = [torch.full((1 + number % 5, FEATURES), number / 24, dtype=torch.float64) for number in indices]
        longest = max(map(len, samples))
        return [(pad(each, (0, 0, 0, longest - len(each))), len(each), each[0, :1]) for each in samples]


def over_tokens(task: Task, batch: Any) -> Tensor:
    """A mean over tokens, or over padding too."""
    tokens, lengths, targets = batch
    hidden = task.predict(tokens.flatten(0, 1)).view(*tokens.shape[:2])
    if task.masks:
        hidden = hidden * (torch.arange(hidden.shape[1]) < lengths[:, None])
    return mse_loss(hidden.sum(1, keepdim=True), targets)


@each_way
@pytest.mark.parametrize("masks", [True, False])
def test_datasets_that_pad_what_they_read_at_once_are_measured(masks: bool, way: Way) -> None:
    """A model that sees its padding is told; in step mode, parts have that of their batch."""
    case = Case(lambda: Task(over_tokens, masks=masks), lambda: DataLoader(Padded(), batch_size=8))
    if way is LOADER and not masks:
        told(case, way, "coupled")
    elif masks or way is STEP:
        cut_rightly(case, way)


class Multiscale:
    """Every few batches, samples get another size."""

    calls = 0

    def __init__(self, every: int) -> None:
        self.every = every

    def __call__(self, samples: list[Any]) -> Any:
        self.calls += 1
        scale = 1 + self.calls // self.every % 3
        return scale * torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])


@each_cut
@pytest.mark.parametrize("every", [1, 10, 1000])
def test_a_collate_function_that_counts_its_batches_is_told_if_it_matters(every: int, way: Way) -> None:
    case = Case(loader=lambda: of_pairs(96, collate_fn=Multiscale(every)))
    if way is STEP or every == 1000:
        cut_rightly(case, way)
    else:
        ours = run(case, way)
        assert error(ours, one_pass(case)) > 0.01
        assert ours.cause == "stateful"
        assert "collate function" in ours.told[0]


class Replayed(IterableDataset):
    """Samples of a replay buffer."""

    def __init__(self, buffer: deque[Any]) -> None:
        self.buffer = buffer

    def __iter__(self) -> Iterator[Any]:
        return (self.buffer[number * 7 % len(self.buffer)] for number in range(40))


class Playing(Task):
    """Each step adds a sample to a replay buffer, which the data may read."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.buffer.append((batch[0][0] + 1, batch[1][0]))
        return super().training_step(batch, batch_idx)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Replayed(self.buffer if self.is_read else deque(self.buffer)), batch_size=8)


@each_cut
@pytest.mark.parametrize("is_read", [True, False])
def test_a_replay_buffer_that_steps_fill_is_told(is_read: bool, way: Way) -> None:
    """Parts of a batch fill it faster than one pass."""

    def playing() -> Task:
        return Playing(buffer=deque(pairs(20), maxlen=20), is_read=is_read)

    ours, stock = run(Case(playing, lambda: None), way), train(playing(), None)
    assert (error(ours, stock) > 0.01) == is_read
    assert ours.cause == ("stateful" if is_read else "exact")
    assert len(ours.told) == is_read


# --- programs -----------------------------------------------------------------------------------


class WarmedUp(Task):
    """The learning rate is set before the optimizer's step, in which the last backward pass of a window runs."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.param_groups[0]["lr"] = 0.01 * (1 + self.trainer.global_step)
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)


@each_way
def test_rates_that_are_set_in_the_optimizers_step_are_as_in_one_pass(way: Way) -> None:
    cut_rightly(Case(WarmedUp), way)


@each_cut
def test_lazy_modules_are_refused_with_a_way_out_that_works(way: Way) -> None:
    def lazy() -> Task:
        torch.manual_seed(3)
        net = torch.nn.Sequential(torch.nn.LazyLinear(7), torch.nn.Tanh(), torch.nn.Linear(7, 1))
        return Task(net=net.double())

    with pytest.raises(UserError, match="lazy module.*verify=False"):
        run(Case(lazy), way)
    ours = run(Case(lazy), way, arguments={"verify": False})
    assert error(ours, train(lazy(), of_pairs())) <= ROUNDING
