"""Memory runs out in a step that has changed what users hang on a module: it comes back, or the warning names it."""

import re
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from reference import Regression, Samples, fit
from torch.utils.data import DataLoader

from lightning_ga import AutoAccumulate

BATCH, BATCHES, FAILS = 8, 12, 9
LARGE = 2**18 + 1  # numbers of a tensor that is not copied


class Holds(Regression):
    """Changes what it holds in every step, which runs out of memory after that once."""

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

    def read(self) -> dict[str, Any]:
        """Return what is held, by the paths that a warning would use."""
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

    def read(self) -> dict[str, Any]:
        inner = {"by_name.a": self.by_name["a"], "rows.0": self.rows[0]}
        return {"inplace": self.inplace, "replaced": self.replaced, "late": self.late, **inner}


class Tensors(Holds):
    def prepare(self) -> None:
        self.sums, self.recent = {"a": torch.zeros(1), "nested": [torch.zeros(1)]}, deque(maxlen=1000)
        self.large, self.by_name = torch.zeros(LARGE), {"large": torch.zeros(LARGE)}
        self.rows: list[tuple[int, torch.Tensor]] = []
        self.generator = torch.Generator().manual_seed(3)
        self.register_buffer("queue", torch.zeros(64))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))

    def change(self, values: torch.Tensor) -> None:
        self.sums["a"] += values.sum()
        self.sums["nested"][0] = self.sums["nested"][0] + values.sum()
        self.large += values.sum()
        self.by_name["large"] += values.sum()
        self.recent.extend(values)
        self.rows.extend((1, value) for value in values)
        places = (self.place + torch.arange(len(values))) % 64
        self.queue[places] = values + torch.rand(len(values), generator=self.generator)
        self.place += len(values)

    def read(self) -> dict[str, Any]:
        rows, recent = torch.stack([row[1] for row in self.rows]), torch.stack([*self.recent])
        sums = {"sums.a": self.sums["a"], "sums.nested.0": self.sums["nested"][0]}
        large = {"large": self.large[0], "by_name.large": self.by_name["large"][0]}
        return {"recent": recent, "rows": rows, "queue": self.queue, "place": self.place, **sums, **large}


class Numbers(Holds):
    def prepare(self) -> None:
        self.place, self.losses, self.by_name, self.seen = 0, [], {"a": 0, "b": 1.0}, set()
        self.record, self.same, self.names = Counts(), 7, ["a", "b"]

    def change(self, values: torch.Tensor) -> None:
        self.place = (self.place + len(values)) % 64
        self.losses.append(float(values.mean()))
        self.by_name["a"] += len(values)
        self.seen.add(self.place + 100 * len(values))
        self.record.count += len(values)

    def read(self) -> dict[str, Any]:
        kept = {
            "same": self.same,
            "names": len(self.names),
            "by_name.a": self.by_name["a"],
            "by_name.b": self.by_name["b"],
        }
        counted = {"seen": len(self.seen), "losses": len(self.losses), "record.count": self.record.count}
        return {"place": self.place, **counted, **kept}


@dataclass
class Counts:
    """A number in a record."""

    count: int = 0


def ran(module: Holds, *callbacks: Any, **settings: Any) -> dict[str, Any]:
    data = DataLoader(Samples(BATCH * BATCHES), batch_size=BATCH)
    fit(data, *callbacks, module=module, max_epochs=1, **settings)
    return module.read()


@pytest.mark.parametrize("factor", [1, 4])
@pytest.mark.parametrize("kind", [Arrays, Tensors, Numbers])
def test_what_a_step_gathers_comes_back_or_is_named(kind: Callable[[bool], Holds], factor: int) -> None:
    """What is not named is as without the error, to the rounding of sums over halves."""
    ours = AutoAccumulate(BATCH * factor, micro_batch_size=BATCH, verify=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = ran(kind(True), ours)
    assert ours.oom_events == 1
    (text,) = [str(each.message) for each in caught if "Memory ran out" in str(each.message)]
    names = re.search(r"in attributes \((.*)\) is as the failed attempt left it", text)
    stock = ran(kind(False), accumulate_grad_batches=factor)
    assert set(names[1].split(", ")) == {name for name in stock if differs(found[name], stock[name])}


def differs(one: Any, other: Any) -> bool:
    try:
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    except AssertionError:
        return True
    return False
