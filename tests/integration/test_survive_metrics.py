"""Memory runs out in a step that has updated metrics: they end as in the same training without the error."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchmetrics
from reference import Regression, Samples, fit, quiet_trainer
from torch.utils.data import DataLoader
from torchmetrics.regression import MeanAbsoluteError, MeanSquaredError
from torchmetrics.wrappers import ClasswiseWrapper, MinMaxMetric, MultioutputWrapper, Running

from lightning_ga import AutoAccumulate, UserError
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


class PlainFull(Plain):
    """Its ``forward`` updates twice, the attributes that are no states too."""

    full_state_update = True


class Two(torch.nn.Module):
    """Predictions and targets of two outputs, for a metric of one."""

    def __init__(self) -> None:
        super().__init__()
        self.metric = MultioutputWrapper(MeanSquaredError(), 2)

    def forward(self, predicted: torch.Tensor, targets: torch.Tensor) -> Any:
        return self.metric(torch.cat([predicted, 2 * predicted], 1), torch.cat([targets, targets], 1))

    def compute(self) -> Any:
        return self.metric.compute()


class Classes(Two):
    """A metric by class."""

    def __init__(self) -> None:
        super().__init__()
        kind = torchmetrics.classification.MulticlassAccuracy(3, average=None)
        self.metric = ClasswiseWrapper(kind)

    def forward(self, predicted: torch.Tensor, targets: torch.Tensor) -> Any:
        scores = torch.cat([predicted, -predicted, predicted * 0.5], 1)
        return self.metric(scores, (targets.flatten() > 0).long())


class OfTheLoss(Two):
    """Metrics of the loss of a batch."""

    def __init__(self, kind: Callable[[], Any]) -> None:
        super().__init__()
        self.metric = kind()

    def forward(self, predicted: torch.Tensor, targets: torch.Tensor) -> Any:
        return self.metric(torch.nn.functional.mse_loss(predicted, targets))


METRICS: dict[str, Callable[[], Any]] = {
    "running": lambda: Running(MeanSquaredError(), window=2),
    "running collection": lambda: torchmetrics.MetricCollection(
        {"squares": Running(MeanSquaredError(), window=2), "all": MeanSquaredError()}
    ),
    "extremes": lambda: MinMaxMetric(MeanSquaredError()),
    "several outputs": Two,
    "classes": Classes,
    "tracker": lambda: torchmetrics.MetricTracker(MeanSquaredError(), maximize=False),
    "groups": lambda: torchmetrics.MetricCollection(
        {"a": MeanSquaredError(), "b": MeanSquaredError(squared=False), "c": MeanAbsoluteError()}
    ),
    "plain": Plain,
    "plain, full": PlainFull,
    "mean": lambda: OfTheLoss(torchmetrics.MeanMetric),
    "running mean": lambda: OfTheLoss(lambda: torchmetrics.RunningMean(window=2)),
}


class Measured(Regression):
    """Notes a metric's value of each batch, and what it has come to.

    Args:
        metric: Makes the metric.
        at: The attempt that runs out of memory, from 1; 0 for none.
        updates: Whether the step updates it, and asks for no value.
        operation: The operation of the metric in which it does so; ``None`` for after it.
    """

    def __init__(
        self, metric: Callable[[], Any], at: int = 0, updates: bool = False, operation: int | None = None
    ) -> None:
        super().__init__()
        self.metric, self.updates, self.operation = metric(), updates, operation
        self.at, self.attempts = at, 0
        self.values: list[Any] = []
        if isinstance(self.metric, torchmetrics.MetricTracker):
            self.metric.increment()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.attempts += 1
        predicted = self.net(batch[0])
        with out_of_memory_at(self.operation or 0 if self.attempts == self.at else 0):
            (self.metric.update if self.updates else self.metric)(predicted.detach(), batch[1])
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


ONLY_CALLED = ("several outputs", "classes", "mean", "running mean")
ROWS = [(kind, updates) for kind in METRICS for updates in (False, True) if not (updates and kind in ONLY_CALLED)]


@pytest.mark.parametrize(("kind", "updates"), ROWS)
def test_a_metric_counts_each_batch_once(kind: str, updates: bool) -> None:
    """In the failed attempt, and in the pieces that follow: wrappers, and attributes beside the states, too."""
    stock = train(Measured(METRICS[kind], updates=updates))
    ours = AutoAccumulate(micro_batch_size=BATCH, verify=False)
    module = train(Measured(METRICS[kind], FAILS, updates), ours)
    assert ours.oom_events == 1
    close(module.values, stock.values)


@pytest.mark.parametrize("kind", METRICS)
def test_a_metric_sees_pieces_as_one_batch(kind: str) -> None:
    """Of unequal sizes, without an error."""
    stock = train(Measured(METRICS[kind]))
    ours = AutoAccumulate(micro_batch_size=3, micro_batching="step", verify=False)
    close(train(Measured(METRICS[kind]), ours).values, stock.values)


@pytest.mark.parametrize("kind", ["groups", "plain", "plain, full", "extremes", "running"])
def test_memory_runs_out_at_any_operation_of_a_metric(kind: str) -> None:
    """What ``forward`` sets while it runs, whether ranks are asked and graphs are kept, is as before too."""
    stock = train(Measured(METRICS[kind]))
    for operation in range(1, 80):
        ours = AutoAccumulate(micro_batch_size=BATCH, verify=False)
        module = train(Measured(METRICS[kind], FAILS, operation=operation), ours)
        close(module.values, stock.values)
        for metric in (part for part in module.metric.modules() if isinstance(part, torchmetrics.Metric)):
            assert (metric._enable_grad, metric._should_unsync, metric._to_sync) == (False, True, True)
        if not ours.oom_events:
            break
    assert 5 < operation < 79


class Tracked(Measured):
    """Metrics are added where epochs begin, and where validation does."""

    def __init__(self, at: int = 0) -> None:
        super().__init__(lambda: torchmetrics.MetricTracker(Running(MeanSquaredError(), 2), maximize=False), at)
        self.validated = torchmetrics.MetricTracker(MeanSquaredError(), maximize=False)
        self.evaluations, self.fails_in_validation = 0, at > 0

    def on_train_epoch_start(self) -> None:
        self.metric.increment()

    def on_validation_epoch_start(self) -> None:
        self.validated.increment()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.evaluations += 1
        self.validated(self.net(batch[0]), batch[1])
        if self.evaluations == 5 and self.fails_in_validation:
            raise torch.OutOfMemoryError("CUDA out of memory")


def test_metrics_that_come_where_an_epoch_begins_count_each_batch_once() -> None:
    """As those of a tracker."""

    def tracked(module: Tracked, *callbacks: Any) -> list[Any]:
        data = DataLoader(Samples(BATCH * BATCHES), batch_size=BATCH)
        trainer = quiet_trainer(*callbacks, limit_val_batches=3)
        trainer.fit(module, data, data)
        return [
            *module.values,
            *(metric.compute() for metric in [*list(module.metric)[2:], *list(module.validated)[1:]]),
        ]

    stock, ours = tracked(Tracked()), AutoAccumulate(micro_batch_size=BATCH, verify=False)
    close(tracked(Tracked(BATCHES + 3), ours), stock)
    assert ours.oom_events == 2


class AddsWithin(Measured):
    """A metric comes within an epoch."""

    comes = 4

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.comes:
            self.late = MeanSquaredError()


class AddsEarly(AddsWithin):
    """A metric comes with one of the first batches."""

    comes = 1


def test_a_metric_that_came_within_an_epoch_is_told() -> None:
    """What it held before is not known."""
    with pytest.raises(UserError, match=r"\(late\)"):
        train(AddsWithin(Plain, 5), AutoAccumulate(micro_batch_size=BATCH, verify=False))


def test_a_metric_that_came_with_one_of_the_first_batches_is_kept() -> None:
    train(AddsEarly(Plain, FAILS), ours := AutoAccumulate(micro_batch_size=BATCH, verify=False))
    assert ours.oom_events == 1
