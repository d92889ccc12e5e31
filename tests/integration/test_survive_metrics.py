"""Memory runs out in a step that has updated metrics: wrappers see pieces, others one batch, and none sees it twice."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchmetrics
from reference import Regression, Samples, fit
from torch.utils.data import DataLoader
from torchmetrics.regression import MeanAbsoluteError, MeanSquaredError
from torchmetrics.wrappers import Running

from lightning_ga import AutoAccumulate
from lightning_ga.testing import out_of_memory_at

pytestmark = pytest.mark.filterwarnings("ignore:Memory ran out in:UserWarning")
BATCH, BATCHES, FAILS = 8, 6, 3


class Plain(torchmetrics.Metric):
    """Keeps more than its states: numbers, tensors, containers."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="sum")
        self.samples, self.share, self.is_used = 0, 0.0, False
        self.largest: torch.Tensor | None = None
        self.squares = torch.zeros((), dtype=torch.float64)
        self.by_kind = {"sum": torch.zeros((), dtype=torch.float64), "count": 0}

    def update(self, predicted: torch.Tensor, targets: torch.Tensor) -> None:
        self.total += predicted.sum()
        self.samples += len(predicted)
        self.share += len(predicted) / BATCH
        self.is_used = True
        largest = predicted.max()
        self.largest = largest if self.largest is None else torch.maximum(self.largest, largest)
        self.squares += predicted.square().sum()
        self.by_kind["sum"] += targets.sum()
        self.by_kind["count"] += len(targets)

    def compute(self) -> torch.Tensor:
        counts = self.samples + self.share + self.is_used + self.by_kind["count"]
        return self.total + self.largest + self.squares + self.by_kind["sum"] + counts


class OfTheLoss(torch.nn.Module):
    """A metric of the loss of a batch."""

    def __init__(self, metric: Any) -> None:
        super().__init__()
        self.metric = metric

    def forward(self, predicted: torch.Tensor, targets: torch.Tensor) -> Any:
        return self.metric(torch.nn.functional.mse_loss(predicted, targets))

    def compute(self) -> Any:
        return self.metric.compute()


METRICS: dict[str, Callable[[], Any]] = {
    "tracker": lambda: torchmetrics.MetricTracker(MeanSquaredError(), maximize=False),
    "groups": lambda: torchmetrics.MetricCollection(
        {"a": MeanSquaredError(), "b": MeanSquaredError(squared=False), "c": MeanAbsoluteError()}
    ),
    "plain": Plain,
    "mean": lambda: OfTheLoss(torchmetrics.MeanMetric()),
}
OF_PIECES: dict[str, Callable[[], Any]] = {
    "running": lambda: Running(MeanSquaredError(), window=2),
    "cat": lambda: OfTheLoss(torchmetrics.CatMetric()),
}
ALL = {**METRICS, **OF_PIECES}


class Measured(Regression):
    """Notes a metric's value of each batch, and what it has come to."""

    def __init__(
        self,
        metric: Callable[[], Any],
        at: int = 0,
        updates: bool = False,
        operation: int | None = None,
        pieces: tuple[int, int] = (BATCHES, 0),
    ) -> None:
        super().__init__()
        self.metric, self.updates, self.operation = metric(), updates, operation
        self.at, self.attempts, self.pieces = at, 0, pieces
        self.values: list[Any] = []
        if isinstance(self.metric, torchmetrics.MetricTracker):
            self.metric.increment()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.attempts += 1
        predicted = self.net(batch[0])
        size = len(predicted) if batch_idx < self.pieces[0] else self.pieces[1]
        with out_of_memory_at(self.operation or 0 if self.attempts == self.at else 0):
            for piece in zip(predicted.detach().split(size), batch[1].split(size)):
                (self.metric.update if self.updates else self.metric)(*piece)
        if self.attempts == self.at and self.operation is None:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return torch.nn.functional.mse_loss(predicted, batch[1])

    def on_train_batch_end(self, *_: Any) -> None:
        self.values.append(self.metric.compute())


def train(module: Measured, *callbacks: Any) -> Measured:
    fit(DataLoader(Samples(BATCH * BATCHES), batch_size=BATCH), *callbacks, module=module, max_epochs=1)
    return module


def close(ours: Any, stock: Any) -> None:
    torch.testing.assert_close(ours, stock, rtol=1e-6, atol=1e-9)


def expected(kind: str, *, since: int, size: int, updates: bool = False) -> list[Any]:
    """Return the values without an error: where wrappers see pieces since a batch, of pieces of this size."""
    pieces = (since, size) if kind in OF_PIECES else (BATCHES, 0)
    return train(Measured(ALL[kind], updates=updates, pieces=pieces)).values


ONLY_CALLED = ("mean", "cat")
ROWS = [(kind, updates) for kind in ALL for updates in (False, True) if not (updates and kind in ONLY_CALLED)]


@pytest.mark.parametrize(("kind", "updates"), ROWS)
def test_a_metric_counts_each_batch_once(kind: str, updates: bool) -> None:
    ours = AutoAccumulate(micro_batch_size=BATCH, verify=False)
    module = train(Measured(ALL[kind], FAILS, updates), ours)
    assert ours.oom_events == 1
    close(module.values, expected(kind, since=FAILS - 1, size=BATCH // 2, updates=updates))


@pytest.mark.parametrize("kind", [pytest.param("groups", marks=pytest.mark.slow), "plain", "running"])
def test_memory_runs_out_at_any_operation_of_a_metric(kind: str) -> None:
    """What ``forward`` sets while it runs, whether ranks are asked and graphs are kept, is as before too."""
    survived = expected(kind, since=FAILS - 1, size=BATCH // 2)
    for operation in range(1, 80):
        ours = AutoAccumulate(micro_batch_size=BATCH, verify=False)
        module = train(Measured(ALL[kind], FAILS, operation=operation), ours)
        if not ours.oom_events:
            break
        close(module.values, survived)
        for metric in (part for part in module.metric.modules() if isinstance(part, torchmetrics.Metric)):
            assert (metric._enable_grad, metric._should_unsync, metric._to_sync) == (False, True, True)
    assert 5 < operation < 79
