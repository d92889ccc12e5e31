"""What a window changes is put back as the window began, or named."""

import random
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from lightning.pytorch import LightningModule
from torch import nn

from lightning_ga.snapshot.copies import SMALL
from lightning_ga.snapshot.savepoint import Savepoint

LARGE = SMALL // 4 + 1  # numbers of a tensor that is not copied


class Net(LightningModule):
    """Parts of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.norm, self.drop = nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout()
        self.teacher = nn.Linear(2, 2).requires_grad_(False)
        self.register_buffer("memory", torch.zeros(LARGE))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))
        self.error = torchmetrics.MeanSquaredError()
        self.generator, self.rng = torch.Generator().manual_seed(1), np.random.default_rng(1)
        self.centre, self.cache = torch.zeros(2), None
        self.outputs: list[torch.Tensor] = [torch.zeros(1)]
        self.history: dict[str, list[torch.Tensor]] = {"losses": []}
        self.sums, self.recent = {"total": torch.zeros(1)}, deque([torch.zeros(1)], maxlen=3)
        self.calls, self.sizes = 0, [1]

    def state(self) -> list[Any]:
        """Everything that comes back, as plain values."""
        numbers = [self.generator.get_state(), torch.get_rng_state(), self.rng.bit_generator.state, random.getstate()]
        flags = [part.training for part in self.modules()], [each.requires_grad for each in self.parameters()]
        kept = [self.outputs, self.history["losses"], self.sums, [*self.recent], self.centre, self.cache]
        counted = [
            self.norm.running_mean,
            self.norm.running_var,
            self.place,
            self.error.total,
            self.error._update_count,
        ]
        return [str(value) for value in [*numbers, *flags, *kept, *counted]]

    def step(self) -> None:
        """Change all of that, and a counter, which stays."""
        self.norm(torch.rand(4, 2, generator=self.generator) + torch.rand(4, 2))
        self.error.update(torch.ones(3), torch.zeros(3))
        self.place += 1
        self.rng.random(), random.random()
        self.drop.eval()
        self.student.requires_grad_(False)
        self.outputs.append(torch.ones(1))
        self.history["losses"].append(torch.ones(1))
        self.sums["total"] += 1
        self.sums["new"] = torch.ones(1)
        self.recent.append(torch.ones(1))
        self.centre, self.cache = self.centre + 1, torch.ones(1)
        self.calls += 1
        self.sizes.append(3)


def test_a_window_begins_again_as_it_began() -> None:
    """However often; numbers, and lists of them, go on counting attempts."""
    module = Net()
    savepoint = Savepoint(module)
    for window in range(3):
        savepoint.take()
        before = module.state()
        assert not savepoint.draws_numbers()
        for _ in range(2):
            module.step()
            assert savepoint.draws_numbers()
            assert all(one != other for one, other in zip(module.state()[-5:], before[-5:]))
            assert savepoint.restore() is None
            assert module.state() == before
        assert (module.calls, len(module.sizes)) == (2 * window + window + 2, 2 * window + window + 3)
        module.step()
        module.drop.train()
        module.student.requires_grad_(True)


def test_large_buffers_and_weights_are_told_unless_they_were_seen_to_change() -> None:
    """By their versions, the first of them by its name."""
    for name in ("memory", "teacher.weight", "student.bias"):
        module = Net()
        tensor = dict([*module.named_parameters(), *module.named_buffers()])[name]
        for changing in ((), (name,)):
            savepoint = Savepoint(module, changing)
            savepoint.take()
            before = tensor.clone()
            with torch.no_grad():
                tensor.add_(1)
            lost = savepoint.restore()
            assert lost == (None if changing else f"weights or buffers of which no copies are made ({name})")
            assert torch.equal(tensor, before) == bool(changing)
            assert sum(each.numel() for each in savepoint.tensors()) >= tensor.numel() * len(changing)


def test_hooks_between_batches_have_run_once() -> None:
    """What they had changed is there again where the window comes to the batch before which they ran."""
    module = Net()
    savepoint = Savepoint(module)
    savepoint.take()
    module.outputs.append(torch.ones(1))  # by the first batch
    savepoint.begin_hooks()
    module.place += 5
    module.history["losses"].append(torch.ones(1))
    module.centre = torch.full((2,), 7.0)
    savepoint.mark(1, always=False)
    module.step()  # the second, which fails
    savepoint.restore()
    assert (int(module.place), len(module.outputs), float(module.centre[0])) == (0, 1, 0.0)
    savepoint.go_on(1)
    assert (int(module.place), len(module.outputs), float(module.centre[0])) == (5, 2, 7.0)
    assert len(module.history["losses"]) == 1


@pytest.mark.parametrize("layers", [8, 200])
def test_any_weight_of_many_that_changes_is_told(layers: int) -> None:
    """Or named, if running again changes it too."""
    for changed in range(0, layers, 1 + layers // 5):
        module = nn.Sequential(*(nn.Linear(1, 1) for _ in range(layers)))
        savepoint = Savepoint(module)
        savepoint.take()
        for attempt in range(2):
            with torch.no_grad():
                module[changed].weight.mul_(0.9)
            if attempt == 0:
                told = savepoint.restore() is not None
                state = savepoint.not_put_back(())
        assert told or state.changed() == (f"{changed}.weight",)


def test_nothing_is_put_back_before_anything_is_kept() -> None:
    """Where errors end the run, nothing ever is."""
    module = Net()
    savepoint = Savepoint(module)
    module.step()
    after = module.state()
    assert savepoint.restore() is None
    savepoint.go_on(1)
    assert module.state() == after
    assert not savepoint.draws_numbers()


def test_the_module_is_looked_at_again_if_parts_have_come() -> None:
    module = Net()
    savepoint = Savepoint(module)
    module.late = torchmetrics.MeanSquaredError()
    savepoint.look_again()
    savepoint.take()
    module.late.update(torch.ones(3), torch.zeros(3))
    savepoint.restore()
    assert module.late._update_count == 0


@pytest.mark.parametrize("layers", [8, 200])
def test_what_was_frozen_between_windows_stays_so(layers: int) -> None:
    """Of many parts any one: by a callback that unfreezes layers one by one, say. Of few, a step may change it, too."""
    for frozen in range(0, layers, 1 + layers // 5):
        module = nn.Sequential(*(nn.Dropout() if n % 2 else nn.Linear(1, 1) for n in range(layers)))
        savepoint = Savepoint(module)
        savepoint.take()
        module[frozen].requires_grad_(False).eval()
        savepoint.take()
        if layers == 8:
            module[frozen].requires_grad_(True).train()
        savepoint.restore()
        assert not module[frozen].training
        assert not any(weight.requires_grad for weight in module[frozen].parameters())
