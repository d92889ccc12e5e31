"""Training alone reads its data: each sample as often as stock Lightning does, in the same order, in the same process.

Only a few samples of a map-style dataset that gives the same ones again are read apart, to find large ones.
"""

import io
import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from reference import Regression, Samples, SizedStreamOf, fit, worst_error
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, default_collate, get_worker_info

from lightning_ga import AutoAccumulate
from lightning_ga.loading import largest, sample_reader

SIZE = 300
APART = 66  # samples that may be read apart


class Noted(Dataset[Any]):
    """Writes down which process reads which sample."""

    def __init__(self, folder: Path, *, draws: bool = False) -> None:
        self.samples = Samples(SIZE)
        self.file = folder / "reads.txt"
        self.file.write_text("")
        self.noise = np.random.default_rng(5).random if draws else None

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        with self.file.open("a") as file:
            worker = get_worker_info()
            file.write(f"{os.getpid()} {'main' if worker is None else worker.id} {index}\n")
        inputs, targets, number = self.samples[index]
        return inputs + (0.0 if self.noise is None else 1e-3 * self.noise()), targets, number

    def reads(self) -> list[tuple[str, str, int]]:
        """Return process, worker and index of each read."""
        rows = [line.split() for line in self.file.read_text().splitlines()]
        return [(process, worker, int(index)) for process, worker, index in rows]


def by_worker(reads: list[tuple[str, str, int]], processes: set[str]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for process, worker, index in reads:
        if process in processes:
            found.setdefault(worker, []).append(index)
    return found


def reads_of(loader: DataLoader[Any], *callbacks: Any, **settings: Any) -> tuple[Regression, list[Any]]:
    module, _ = fit(loader, *callbacks, max_epochs=2, **settings)
    return module, loader.dataset.reads()  # type: ignore[attr-defined]


@pytest.mark.parametrize("draws", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_samples_are_read_as_by_stock_lightning(workers: int, draws: bool, tmp_path: Path) -> None:
    """Of a dataset that draws random numbers of its own, one sample shows that, and no others are read."""
    made = []
    for name in ("stock", "ours"):
        (tmp_path / name).mkdir()
        data = Noted(tmp_path / name, draws=draws)
        made.append(DataLoader(data, 20, num_workers=workers))
    stock, expected = reads_of(made[0])
    accumulate = AutoAccumulate(cache=False)
    ours, found = reads_of(made[1], accumulate)
    assert str(accumulate.fits).startswith("20 samples take")  # type: ignore[attr-defined]
    more = Counter(index for *_, index in found) - Counter(index for *_, index in expected)
    assert more.total() <= (5 if draws else APART)
    if workers:  # samples that are read apart are read by another worker
        pids = {process for process, *_ in found}
        counts = {pid: sum(process == pid for process, *_ in found) for pid in pids}
        training = set(sorted(pids, key=counts.__getitem__)[-4:])
        assert sum(counts[pid] for pid in pids - training) <= APART
        assert by_worker(found, training) == by_worker(expected, {process for process, *_ in expected})
    else:
        assert [index for *_, index in found][more.total() :] == [index for *_, index in expected]
    assert [sorted(indices) for _, indices in ours.micro_batches] == [
        sorted(indices) for _, indices in stock.micro_batches
    ]
    if not draws:
        assert worst_error(ours.gradients, stock.gradients) == 0.0


class Queue(Dataset[Any]):
    """Hands its samples out one after the other, whatever the index is: patches of images, say."""

    def __init__(self, kind: Any) -> None:
        self.kind = kind
        self.samples = Samples(48)
        self.left: Any = kind(range(48)) if kind is lines else None

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> Any:
        if self.left is None or (self.kind is list and not self.left):
            self.left = self.kind(range(48))
        number = self.left.pop() if self.kind is list else int(next(self.left))
        if self.kind is not list and number == 47:
            self.left = None
        return self.samples[number]


def generated(numbers: range) -> Iterator[int]:
    yield from numbers


def lines(numbers: range) -> io.BytesIO:
    """A file that is read line by line."""
    return io.BytesIO("".join(f"{number}\n" for number in numbers).encode())


@pytest.mark.parametrize("kind", [list, iter, generated, lines])
@pytest.mark.parametrize("mode", ["loader", "step"])
@pytest.mark.parametrize("limit", [{}, {"micro_batch_size": 5}])
def test_a_queue_loses_nothing(kind: Any, mode: Any, limit: dict[str, int]) -> None:
    """Each sample comes once an epoch, as in stock Lightning, also in micro-batches that are measured."""
    stock, _ = fit(DataLoader(Queue(kind), 8), max_epochs=2)
    accumulate = AutoAccumulate(micro_batching=mode, cache=False, **limit)
    ours, _ = fit(DataLoader(Queue(kind), 8), accumulate, max_epochs=2)
    assert accumulate.plan is not None
    expected = [index for _, indices in stock.micro_batches for index in indices]
    assert [index for _, indices in ours.micro_batches for index in indices] == expected
    assert worst_error(ours.gradients, stock.gradients) <= 1e-12
    if limit:
        assert accumulate.exactness is not None
        assert accumulate.exactness.cause == "exact"
    else:
        assert accumulate.probe is None


class Goes(IterableDataset[Any]):
    """A stream with a length that goes on where it was left, over epochs and fits."""

    def __init__(self) -> None:
        self.samples = Samples(48)
        self.number = 0

    def __len__(self) -> int:
        return 48

    def __iter__(self) -> Iterator[Any]:
        for _ in range(48):
            self.number += 1
            yield self.samples[self.number % 48]


@pytest.mark.parametrize("kind", [Goes, partial(Queue, iter)])
@pytest.mark.parametrize("limit", [{}, {"micro_batch_size": 5}])
def test_a_second_fit_loses_nothing_of_a_stream_or_queue(kind: Any, limit: dict[str, int]) -> None:
    """The loop starts its iterator anew in a second fit: before the first batch is looked at, not after."""

    def train(*callbacks: Any) -> tuple[list[int], Any]:
        data = DataLoader(kind(), 8)
        torch.manual_seed(3)
        module, trainer = fit(data, *callbacks, max_epochs=1)
        trainer.fit_loop.max_epochs = 3
        trainer.fit(module, data)
        return [index for _, indices in module.micro_batches for index in indices], torch.get_rng_state()

    stock, random_numbers = train()
    ours, random_numbers_here = train(AutoAccumulate(cache=False, **limit))
    assert ours == stock
    assert torch.equal(random_numbers_here, random_numbers)


class Augmented(Samples):
    """Its transform draws from a generator of its own, and counts its calls in an array, in place."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.transforms = [SimpleNamespace(noise=np.random.default_rng(5), calls=np.zeros(1))]

    def __getitem__(self, index: int) -> Any:
        (transform,) = self.transforms
        transform.calls += 1
        inputs, *others = super().__getitem__(index)
        return inputs + 0.1 * transform.noise.standard_normal() + transform.calls[0] // 32, *others


class OrderFrom(Sampler[int]):
    """Counts its epochs in the dataset, and cannot be copied."""

    def __init__(self, data: Any) -> None:
        self.data, self.lock, self.epochs = data, threading.Lock(), {"begun": 0}
        self.data.begun = 0

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Iterator[int]:
        self.epochs["begun"] += 1
        self.data.begun += 1
        seed = 10 * self.epochs["begun"] + self.data.begun
        return iter(torch.randperm(len(self), generator=torch.Generator().manual_seed(seed)).tolist())


@pytest.mark.parametrize("kind", ["transform", "collate", "sampler"])
def test_what_lies_deeper_in_dataset_collate_function_or_sampler_is_as_in_stock_lightning(kind: str) -> None:
    """Generators, counts and epochs, after a start that looks at samples and at the order."""

    def loader() -> DataLoader[Any]:
        if kind == "collate":
            return DataLoader(Samples(48), 8, collate_fn=partial(noisy, draw=np.random.default_rng(3)))
        data = Augmented(48) if kind == "transform" else Samples(48)
        return DataLoader(data, 8, sampler=OrderFrom(data) if kind == "sampler" else None)

    stock, _ = fit(loader(), max_epochs=2)
    ours, _ = fit(loader(), AutoAccumulate(cache=False), max_epochs=2)
    assert ours.micro_batches == stock.micro_batches
    assert worst_error(ours.gradients, stock.gradients) <= 1e-12


def noisy(batch: list[Any], draw: Any) -> Any:
    inputs, *others = default_collate(batch)
    return inputs + draw.standard_normal(), *others


class FailsOnce(Regression):
    """Runs out of memory in the fourth step, once."""

    has_failed = False

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_step == 3 and not self.has_failed:
            self.has_failed = True
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("kind", [list, iter, generated, lines])
def test_an_error_loses_nothing_of_a_queue(kind: Any) -> None:
    """Its batches are kept: indices would not give them again."""
    stock, _ = fit(DataLoader(Queue(kind), 8), max_epochs=2)
    accumulate = AutoAccumulate(cache=False)
    with pytest.warns(UserWarning, match="Memory ran out in training with 8"):
        ours, _ = fit(DataLoader(Queue(kind), 8), accumulate, module=FailsOnce(), max_epochs=2)
    assert worst_error(ours.gradients, stock.gradients) <= 1e-12


class CountsEpochs(IterableDataset[Any]):
    """A stream whose order depends on how often it was begun, which all processes share."""

    def __init__(self) -> None:
        self.samples = Samples(48)
        self.epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        start, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        epoch = int(self.epoch)
        if worker is None or worker.id == step - 1:
            self.epoch += 1
        order = torch.randperm(48 // step, generator=torch.Generator().manual_seed(epoch)).tolist()
        return (self.samples[start + step * place] for place in order)


def second_axis(batch: list[Any]) -> Any:
    return [torch.stack([sample[part] for sample in batch], dim=1) for part in (0, 1)], [each[2] for each in batch]


class OfSecondAxis(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        (inputs, targets), indices = batch
        return super().training_step(
            (inputs.transpose(0, 1), targets.transpose(0, 1), torch.tensor(indices)), batch_idx
        )


@pytest.mark.filterwarnings("ignore:.*(many workers|Length of IterableDataset)")
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("limit", [{}, {"micro_batch_size": 3}])
def test_a_stream_is_iterated_once_an_epoch(workers: int, own: bool, limit: dict[str, int]) -> None:
    """Where it counts its epochs in shared memory, its orders are stock Lightning's; also with samples elsewhere."""

    def train(*callbacks: Any) -> Regression:
        data = CountsEpochs()
        loader = DataLoader(data, 8, num_workers=workers, collate_fn=second_axis if own else None)
        module, _ = fit(loader, *callbacks, module=OfSecondAxis() if own else Regression(), max_epochs=3)
        assert int(data.epoch) == 3
        return module

    stock = train()
    accumulate = AutoAccumulate(cache=False, **limit)
    ours = train(accumulate)
    assert sum((each for _, each in ours.micro_batches), []) == sum((each for _, each in stock.micro_batches), [])
    assert worst_error(ours.gradients, stock.gradients) <= 1e-12
    if limit:
        assert accumulate.exactness is not None
        assert accumulate.exactness.cause == "exact"
        assert max(len(indices) for _, indices in ours.micro_batches) == 3


class RemembersEpochs(CountsEpochs):
    """The same, each process with a count of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.epoch = torch.zeros((), dtype=torch.int64)


@pytest.mark.filterwarnings("ignore:.*(many workers|Length of IterableDataset)")
@pytest.mark.parametrize("limit", [{}, {"micro_batch_size": 3}])
def test_a_worker_of_a_loader_that_is_set_up_again_goes_on(limit: dict[str, int]) -> None:
    """Also if the collate function is shown: persistent workers keep what their copy of the stream knows."""

    def train(*callbacks: Any) -> Regression:
        settings = {"num_workers": 1, "persistent_workers": True, "collate_fn": second_axis}
        loader = DataLoader(RemembersEpochs(), 8, **settings)
        settings = {"max_epochs": 3, "reload_dataloaders_every_n_epochs": 1}
        return fit(loader, *callbacks, module=OfSecondAxis(), **settings)[0]

    stock = train()
    ours = train(AutoAccumulate(cache=False, **limit))
    assert sum((each for _, each in ours.micro_batches), []) == sum((each for _, each in stock.micro_batches), [])
    assert worst_error(ours.gradients, stock.gradients) <= 1e-12


def test_the_first_batch_of_training_takes_as_much_in_a_trial_as_one_that_is_made() -> None:
    """The batch counts, whether it is collated for the trial or copied from the one that training reads."""
    peaks = []
    for data in (Samples(48), SizedStreamOf(Samples(48))):
        accumulate = AutoAccumulate(cache=False, memory_budget="1MiB")
        fit(DataLoader(data, 8), accumulate, max_epochs=1)
        assert accumulate.probe is not None
        assert accumulate.probe.limit == 8
        peaks.append(accumulate.probe.peak_bytes)
    assert peaks[0] == peaks[1]


class Slow(Dataset[Any]):
    """Takes a tenth of a second for each sample, by a clock of its own; samples are of unequal size."""

    def __init__(self) -> None:
        self.reads = torch.zeros((), dtype=torch.int64).share_memory_()  # but those by the several workers of training

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        worker = get_worker_info()
        if worker is None or worker.num_workers == 1:
            self.reads += 1
        return torch.full((1 + index % 7,), float(index))

    def clock(self) -> float:
        return float(self.reads) / 10


class Pooled(LightningModule):
    """Notes how many samples were read before its first step."""

    def __init__(self, data: Slow) -> None:
        super().__init__()
        self.net = torch.nn.Linear(1, 1)
        self.data = data
        self.read_before: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch.mean(1, keepdim=True)).square().mean()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.read_before.append(int(self.data.reads))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01)


def padded(batch: list[Any]) -> Any:
    return pad_sequence(batch, batch_first=True)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("settings", [{}, {"memory_budget": "1 GB"}, {"memory_budget": "1 GB", "verify": False}])
def test_slow_samples_are_read_for_one_more_batch_at_most(
    settings: dict[str, Any], workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first step, with the batch that it takes; the search for the largest reads no others, and says so.

    Those are four: one sample, another twice, and a third. If there are workers, another worker reads these, and none
    in advance.
    """
    data = Slow()
    for module in (sample_reader, largest):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=data.clock))
    monkeypatch.setattr(sample_reader, "FIRST_SECONDS", 0.15)
    monkeypatch.setattr(largest, "LOOK_SECONDS", 5.0)
    module = Pooled(data)
    loader = DataLoader(data, 8, collate_fn=padded, num_workers=workers)
    told = pytest.warns(UserWarning, match="there was time to read") if "memory_budget" in settings else nullcontext()
    with told:
        fit(loader, AutoAccumulate(cache=False, **settings), module=module, max_steps=1)
    of_training = 0 if workers else 8
    assert module.read_before[0] - of_training == 4
