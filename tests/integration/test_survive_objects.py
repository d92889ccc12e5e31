"""Memory runs out in a step that has changed what users hang on a module: it comes back, or the warning names it."""

import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from reference import Regression, Samples, fit
from torch.utils.data import DataLoader

from lightning_ga import AutoAccumulate

BATCH, BATCHES, FAILS = 8, 12, 9
LARGE = 2**18 + 1  # numbers of a tensor that is not copied


@dataclass
class Sums:
    """A record with tensors and a number."""

    total: torch.Tensor = field(default_factory=lambda: torch.zeros(1))
    largest: torch.Tensor | None = None
    batches: list[torch.Tensor] = field(default_factory=list)
    array: np.ndarray = field(default_factory=lambda: np.zeros(1))

    def add(self, values: torch.Tensor) -> None:
        self.total += values.sum()
        self.largest = values.max() if self.largest is None else torch.maximum(self.largest, values.max())
        self.batches.append(values)
        self.array += values.numpy().sum()

    def read(self) -> list[Any]:
        return [self.total, self.largest, torch.cat(self.batches), self.array]


class Shadow:
    """Averages of tensors, in an object of one's own."""

    def __init__(self, numbers: int = 3) -> None:
        self.shadow = {"sum": torch.zeros(numbers)}
        self.inner = Sums()

    def add(self, values: torch.Tensor) -> None:
        self.shadow["sum"] += values.sum()
        self.inner.add(values)

    def read(self) -> list[Any]:
        return [self.shadow["sum"], *self.inner.read()]


class Holds(Regression):
    """Changes what it holds in every step, which runs out of memory after that once.

    Args:
        fails: Whether it does.
    """

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.attempts, self.at = iter(range(1, 1000)), FAILS if fails else 0
        self.prepare()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        attempt, predicted = next(self.attempts), self.net(batch[0])
        self.change(predicted.detach().flatten().float())
        if attempt == self.at:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return torch.nn.functional.mse_loss(predicted, batch[1])

    def prepare(self) -> None:
        raise NotImplementedError

    def change(self, values: torch.Tensor) -> None:
        raise NotImplementedError

    def read(self) -> list[Any]:
        raise NotImplementedError


class Arrays(Holds):
    def prepare(self) -> None:
        self.inplace, self.replaced, self.late = np.zeros(2), np.zeros(2), None
        self.by_name, self.rows = {"a": np.zeros(2)}, [np.zeros(2)]

    def change(self, values: torch.Tensor) -> None:
        array = values.double().numpy()
        self.inplace += array.sum()
        self.replaced = self.replaced + array.sum()
        self.late = array.max() * np.ones(1) if self.late is None else np.maximum(self.late, array.max())
        self.by_name["a"] += array.sum()
        self.rows[0] += array.sum()

    def read(self) -> list[Any]:
        return [self.inplace, self.replaced, self.late, self.by_name["a"], self.rows[0]]


class Tensors(Holds):
    def prepare(self) -> None:
        self.sums, self.recent = {"a": torch.zeros(1), "nested": [torch.zeros(1)]}, deque(maxlen=1000)
        self.rows: list[tuple[int, torch.Tensor]] = []
        self.generator = torch.Generator().manual_seed(3)
        self.register_buffer("queue", torch.zeros(64))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))

    def change(self, values: torch.Tensor) -> None:
        self.sums["a"] += values.sum()
        self.sums["nested"][0] = self.sums["nested"][0] + values.sum()
        self.recent.extend(values)
        self.rows.extend((1, value) for value in values)
        places = (self.place + torch.arange(len(values))) % 64
        self.queue[places] = values + torch.rand(len(values), generator=self.generator)
        self.place += len(values)

    def read(self) -> list[Any]:
        rows = torch.stack([row[1] for row in self.rows])
        return [self.sums["a"], *self.sums["nested"], torch.stack([*self.recent]), rows, self.queue, self.place]


class Objects(Holds):
    def prepare(self) -> None:
        self.sums, self.shadow, self.several = Sums(), Shadow(), [Sums()]

    def change(self, values: torch.Tensor) -> None:
        for each in (self.sums, self.shadow, *self.several):
            each.add(values)

    def read(self) -> list[Any]:
        return [*self.sums.read(), *self.shadow.read(), *self.several[0].read()]


def ran(module: Holds, *callbacks: Any) -> Holds:
    fit(DataLoader(Samples(BATCH * BATCHES), batch_size=BATCH), *callbacks, module=module, max_epochs=1)
    return module


@pytest.mark.parametrize("factor", [1, 4])
@pytest.mark.parametrize("kind", [Arrays, Tensors, Objects])
def test_what_a_step_gathers_comes_back(kind: Callable[[bool], Holds], factor: int) -> None:
    """The same as without the error, to the rounding of sums over halves; and nothing is said to have stayed."""
    ours = AutoAccumulate(BATCH * factor, micro_batch_size=BATCH, verify=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = ran(kind(True), ours).read()
    assert ours.oom_events == 1
    stock, trainer = kind(False), {"accumulate_grad_batches": factor}
    fit(DataLoader(Samples(BATCH * BATCHES), batch_size=BATCH), module=stock, max_epochs=1, **trainer)
    torch.testing.assert_close(found, stock.read(), rtol=1e-5, atol=1e-5)
    assert not [each for each in caught if "is as the failed attempt left it" in str(each.message)]


class Numbers(Holds):
    """What is plain Python stays, and so do large tensors."""

    def prepare(self) -> None:
        self.place, self.losses, self.by_name, self.seen = 0, [], {"a": 0, "b": 1.0}, set()
        self.record, self.large = Counts(), torch.zeros(LARGE)
        self.same, self.names = 7, ["a", "b"]

    def change(self, values: torch.Tensor) -> None:
        self.place = (self.place + len(values)) % 64
        self.losses.append(float(values.mean()))
        self.by_name["a"] += 1
        self.seen.add(float(values[0]))
        self.record.count += 1
        self.large += values.sum()


@dataclass
class Counts:
    """A number in a record."""

    count: int = 0


@pytest.mark.parametrize("factor", [1, 4])
def test_what_does_not_come_back_is_named(factor: int) -> None:
    """In the warning of the error that was survived; what has not changed is not."""
    ours = AutoAccumulate(BATCH * factor, micro_batch_size=BATCH, verify=False)
    names = r"\(by_name, large, losses, place, record.count, seen\) is as the failed attempt left it"
    with pytest.warns(UserWarning, match=names):
        ran(Numbers(True), ours)
