"""What plain attributes hold is looked at, and what has changed is named."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_ga.snapshot.plain import PlainState, hidden_modules


@dataclass
class Record:
    """An object of one's own."""

    count: int = 0
    array: np.ndarray = field(default_factory=lambda: np.zeros(2))
    inner: Any = None


class Net(LightningModule):
    """Holds whatever users hang on a module."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.layer.calls, self.layer.table = 0, torch.zeros(3)
        self.calls, self.same, self.losses, self.rows = 0, 7, [0.5], [torch.zeros(1)]
        self.record, self.array = Record(inner=Record()), np.zeros(3)
        self.by_name: dict[str, Any] = {"a": 0, "deep": [{"b": 1}], "array": np.zeros(2)}
        self.function, self.optimizer = print, torch.optim.SGD(self.layer.parameters(), lr=0.1)
        self.itself = self


def call(module: Net) -> None:
    module.layer.calls += 1


def fill(module: Net) -> None:
    module.layer.table.data.add_(1)


def count(module: Net) -> None:
    module.calls += 1
    module.losses.append(0.25)


def write(module: Net) -> None:
    module.array[1] = 1
    module.record.array += 1
    module.record.inner.count += 1


def enter(module: Net) -> None:
    module.by_name["a"] += 1
    module.by_name["deep"][0]["b"] += 1
    module.by_name["array"][0] = 1


def replace(module: Net) -> None:
    module.rows[0] = module.rows[0] + 1


def leave(module: Net) -> None:
    module.optimizer.param_groups[0]["lr"] = 0.2
    module.same = 7


CHANGES = {
    call: ("layer.calls",),
    fill: ("layer.table",),
    count: ("calls", "losses"),
    write: ("array", "record.array", "record.inner.count"),
    enter: ("by_name.a", "by_name.array", "by_name.deep.0.b"),
    replace: ("rows.0",),
    leave: (),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_has_changed_is_named(change: Callable[[Net], None]) -> None:
    module = Net()
    state = PlainState(module, (), ())
    assert state.changed() == ()
    change(module)
    assert state.changed() == CHANGES[change]


def test_what_is_put_back_is_not_named_but_for_lists_of_numbers() -> None:
    """Which count attempts, and go on."""
    module = Net()
    state = PlainState(module, (), {"array", "calls", "losses"})
    count(module)
    write(module)
    assert state.changed() == ("losses", "record.array", "record.inner.count")


def test_tensors_besides_are_compared_by_what_they_hold() -> None:
    """Versions do not tell of all changes."""
    module = Net()
    state = PlainState(module, [("layer.weight", module.layer.weight)], ())
    module.layer.weight.data.add_(1)
    assert state.changed() == ("layer.weight",)


def test_networks_that_are_no_submodules_are_found() -> None:
    """In lists and objects; what is registered is none."""
    module = Net()
    module.teachers = [nn.Linear(2, 2), module.layer]
    module.record.inner = nn.ReLU()
    assert sorted(path for path, _ in hidden_modules(module)) == ["record.inner", "teachers.0"]
