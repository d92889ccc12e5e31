"""Memory runs out in a step that has updated metrics: they see the pieces of the batch, and none of them twice."""

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
METRICS: dict[str, Callable[[], Any]] = {
    "tracker": lambda: torchmetrics.MetricTracker(MeanSquaredError(), maximize=False),
    "groups": lambda: torchmetrics.MetricCollection(
        {"a": MeanSquaredError(), "b": MeanSquaredError(squared=False), "c": MeanAbsoluteError()}
    ),
    "running": lambda: Running(MeanSquaredError(), window=2),
}


class Measured(Regression):
    """Notes what a metric has come to with each window.

    Args:
        operation: Of the metric, at which memory runs out in the third attempt; 0 is after it, None is never.
        pieces: The metric sees batches from the third on in halves, as after an error.
    """

    def __init__(self, kind: str, operation: int | None = None, *, pieces: bool = False) -> None:
        super().__init__()
        self.metric, self.operation, self.pieces = METRICS[kind](), operation, pieces
        self.attempts, self.values = 0, list[Any]()
        if kind == "tracker":
            self.metric.increment()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.attempts += 1
        predicted, fails = self.net(batch[0]), self.attempts == FAILS and self.operation is not None
        size = BATCH // 2 if self.pieces and batch_idx >= FAILS - 1 else BATCH
        with out_of_memory_at(self.operation if fails else 0):
            for piece in zip(predicted.detach().split(size), batch[1].split(size)):
                self.metric(*piece)
        if fails and self.operation == 0:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return torch.nn.functional.mse_loss(predicted, batch[1])

    def on_train_batch_end(self, *_: Any) -> None:
        if not self.trainer.fit_loop._should_accumulate():
            self.values.append(self.metric.compute())


def train_measured(module: Measured, *callbacks: Any) -> list[Any]:
    fit(DataLoader(Samples(BATCH * BATCHES), batch_size=BATCH), *callbacks, module=module, max_epochs=1)
    return module.values


@pytest.mark.parametrize("mode", ["loader", "step"])
@pytest.mark.parametrize("kind", METRICS)
def test_a_metric_counts_each_sample_once(kind: str, mode: str) -> None:
    """Also where memory runs out within it: what ``forward`` sets while it runs is as before."""
    expected = train_measured(Measured(kind, pieces=kind == "running"))
    for operation in (0, 1, 7, 19):
        ours = AutoAccumulate(micro_batch_size=BATCH, verify=False, micro_batching=mode)
        module = Measured(kind, operation)
        torch.testing.assert_close(train_measured(module, ours), expected, rtol=1e-6, atol=1e-9)
        assert ours.oom_events == 1
        for metric in (part for part in module.metric.modules() if isinstance(part, torchmetrics.Metric)):
            assert (metric._enable_grad, metric._should_unsync, metric._to_sync) == (False, True, True)
