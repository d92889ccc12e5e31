"""Metrics of torchmetrics under a batch that runs in pieces: afterwards each has seen one batch, and shows its value.

``Metric.forward`` does two things: it adds a batch to what the metric has seen, and returns the value
of that batch alone. Called for pieces it would return values of pieces, so the states of the batch
are gathered apart, piece by piece, and the value is computed from them when the batch is over.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torchmetrics import Metric
from torchmetrics.metric import CompositionalMetric
from torchmetrics.wrappers.abstract import WrapperMetric

from lightning_ga.snapshot.metrics import metric_state, set_metric_state


@contextmanager
def whole_batch_metrics(metrics: Sequence[Metric]) -> Iterator[None]:
    """Within, pieces of one batch are given to metrics."""
    batches = [_BatchOf(metric) for metric in metrics if not isinstance(metric, (WrapperMetric, CompositionalMetric))]
    try:
        yield
        for batch in batches:
            batch.close()
    finally:
        for batch in batches:
            batch.release()


class _BatchOf:
    """Takes the place of a metric's ``forward`` while one batch runs.

    The states of the batch are kept by the number of updates after which they were: an attempt that
    fails has the metric put back (``snapshot.attempt``), its number of updates too, and so is forgotten here.
    """

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        self._forward: Callable[..., Any] = metric.forward
        self._before = metric_state(metric)
        self._first: int = metric._update_count
        self._states: dict[int, dict[str, Any]] = {}
        vars(metric)["forward"] = self

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """One call of ``forward``: the value of the piece, as the user's code sees it."""
        metric, seen, count = self._metric, metric_state(self._metric), self._metric._update_count
        if count in self._states:
            set_metric_state(metric, self._states[count])
        else:
            metric.reset()
        value = self._forward(*arguments, **named)
        self._states[count + 1] = _without_graph(metric_state(metric))
        if metric.full_state_update is False:  # its states can be added
            before = self._before if count >= self._first else seen  # the user's code has reset the metric
            set_metric_state(metric, self._states[count + 1])
            metric._update_count = self._first + 1
            with torch.no_grad():
                metric._reduce_states({name: before[name] for name in metric._defaults})
        else:
            set_metric_state(metric, seen)
            metric.update(*arguments, **named)
        metric._update_count, metric._computed, metric._forward_cache = count + 1, None, value
        return value

    def close(self) -> None:
        """The batch is over: one update, and its value."""
        metric = self._metric
        batch = self._states.get(metric._update_count)
        if batch is not None:
            metric._forward_cache = self._value(batch)
        if metric._update_count > self._first:
            metric._update_count = self._first + 1

    def release(self) -> None:
        """Give the metric its own ``forward`` back."""
        vars(self._metric).pop("forward", None)

    @torch.no_grad()
    def _value(self, batch: dict[str, Any]) -> Any:
        """What the metric computes from these states alone."""
        metric, seen = self._metric, metric_state(self._metric)
        set_metric_state(metric, {**batch, "_computed": None})
        to_sync, metric._to_sync = metric._to_sync, metric.dist_sync_on_step
        try:
            return metric.compute()
        finally:
            metric._to_sync = to_sync
            set_metric_state(metric, {**seen, "_computed": None, "_is_synced": False})


def _without_graph(state: dict[str, Any]) -> dict[str, Any]:
    """States of a piece, which ``forward`` computes with gradients enabled."""
    return {
        name: [thing.detach() if isinstance(thing, torch.Tensor) else thing for thing in value]
        if isinstance(value, list)
        else value
        for name, value in state.items()
    }
