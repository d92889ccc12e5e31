"""What a window changes is put back as the window began, or named."""

from collections import deque
from typing import Any

import pytest
import torch
import torchmetrics
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from torch import nn

from lightning_ga.snapshot.copies import SMALL
from lightning_ga.snapshot.window_savepoint import Savepoint

LARGE = SMALL // 4 + 1  # numbers of a tensor that is not copied


class Net(LightningModule):
    """Parts of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.norm = nn.Linear(2, 2), nn.BatchNorm1d(2)
        self.teacher = nn.Linear(2, 2).requires_grad_(False)
        self.register_buffer("memory", torch.zeros(LARGE))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))
        self.register_buffer("queue", torch.zeros(2, 2))
        self.error, self.spread = torchmetrics.MeanSquaredError(), torchmetrics.CatMetric()
        self.centre, self.cache, self.state = torch.zeros(2), None, (torch.zeros(1), torch.zeros(1))
        self.outputs: list[Any] = [torch.zeros(1)]
        self.history: dict[str, list[Any]] = {"losses": []}
        self.sums, self.recent, self.seen = {"total": torch.zeros(1)}, deque([1], maxlen=3), {1}
        self.total: Any = 0.0
        self.calls = 0

    def values(self) -> list[str]:
        """All that comes back, as plain values."""
        kept = [self.outputs, self.history, self.sums, [*self.recent], self.seen, self.centre, self.cache, self.state]
        buffers = [self.norm.running_mean, self.norm.num_batches_tracked, self.place, self.queue, hasattr(self, "new")]
        metrics = [self.error.total, self.error._update_count, self.spread.value, self.spread._update_count]
        return [str(value) for value in [*kept, *buffers, *metrics, self.total, self._current_fx_name]]

    def step(self) -> None:
        """Change all of that, and a counter, which stays."""
        self.norm(torch.rand(4, 2))
        self.error(torch.ones(3), torch.zeros(3))
        self.spread.update(torch.ones(3))
        self.place += 1
        self.queue = self.queue + 1
        self.outputs.append(torch.ones(1))
        self.history["losses"].append(torch.ones(1))
        self.sums["total"] += 1
        self.sums["new"] = torch.ones(1)
        self.recent.append(2)
        self.seen.add(2)
        self.centre, self.cache, self.new = self.centre.add_(1) * 2, torch.ones(1), [1]
        self.state[0].add_(1)
        self.total = self.total + torch.ones(1)
        self.calls += 1
        self._current_fx_name = "training_step"


def test_a_window_begins_again_as_it_began() -> None:
    """However often; numbers go on counting attempts."""
    module = Net()
    savepoint = Savepoint(module, dict)
    for window in range(3):
        savepoint.take()
        before, queue = module.values(), module.queue
        for _ in range(2):
            module.step()
            assert window or all(one != other for one, other in zip(module.values(), before))
            assert savepoint.restore() is None
            assert module.values() == before
            assert module.queue is queue
        assert module.calls == 3 * window + 2
        module.step()
        del module.new


@pytest.mark.parametrize("name", ["memory", "teacher.weight", "student.bias"])
def test_large_buffers_and_weights_that_move_are_named(name: str) -> None:
    module = Net()
    tensor = dict([*module.named_parameters(), *module.named_buffers()])[name]
    savepoint = Savepoint(module, dict)
    savepoint.take()
    assert savepoint.restore() is None
    with torch.no_grad():
        tensor.add_(1)
    assert savepoint.restore() == name
    savepoint.take()
    assert savepoint.restore() is None


def test_logged_results_are_as_they_were() -> None:
    """Also metrics that are no parts of the module, and entries that an attempt has made."""
    results, apart = _ResultCollection(training=True), torchmetrics.MeanSquaredError()

    def step(value: float, *names: str) -> None:
        results.batch = torch.zeros(3)
        for name in names:
            results.log("training_step", name, torch.tensor(value), on_step=True, on_epoch=True)
        apart.update(torch.full((2,), value), torch.zeros(2))
        results.log("training_step", "apart", apart, on_epoch=True)

    step(1.0, "loss")
    savepoint = Savepoint(Net(), lambda: results)
    savepoint.take()
    before = {name: str(value) for name, value in results.metrics(on_step=False)["callback"].items()}
    for _ in range(2):
        step(5.0, "loss", "late")
        savepoint.restore()
        results["training_step.loss"]._computed = apart._computed = None
        assert {name: str(value) for name, value in results.metrics(on_step=False)["callback"].items()} == before
    assert list(results) == ["training_step.loss", "training_step.apart"]
