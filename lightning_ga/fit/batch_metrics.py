"""Torchmetrics under a batch that runs in pieces: afterwards each metric has seen one batch, and shows its value.

``Metric.forward`` does two things: it adds a batch to the metric's state, and returns the value of that
batch alone. Called for pieces it would return values of pieces, so the state of the batch is collected
separately, piece by piece, and the value is computed from it at the end of the batch.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torchmetrics import MeanMetric, Metric
from torchmetrics.metric import CompositionalMetric
from torchmetrics.wrappers.abstract import WrapperMetric

from lightning_ga.compat.patching import shadowed
from lightning_ga.snapshot.state import beside_states, metric_state, set_metric_state


@contextmanager
def whole_batch_metrics(metrics: Sequence[Metric], samples: Callable[[], tuple[int, int]]) -> Iterator[None]:
    """Return a context in which metrics treat the pieces that they are called with as one batch.

    A mean of losses weighs the current piece by its share of the batch: ``samples`` are those of both.
    """
    wrappers = [metric for metric in metrics if isinstance(metric, WrapperMetric)]
    within = {id(part) for wrapper in wrappers for part in wrapper.modules() if part is not wrapper}
    apart = (WrapperMetric, CompositionalMetric)
    with ExitStack() as shadows:
        for mean in [metric for metric in metrics if isinstance(metric, MeanMetric)]:
            shadows.enter_context(shadowed(mean, "update", partial(_weighted, mean.update, samples)))
        batches = [_BatchOf(each) for each in metrics if id(each) not in within and not isinstance(each, apart)]
        for batch in batches:
            shadows.enter_context(shadowed(batch.metric, "forward", batch))
        yield
        for batch in batches:
            batch.close()


def _weighted(
    update: Callable[..., Any], samples: Callable[[], tuple[int, int]], value: Any, *weight: Any, **named: Any
) -> Any:
    """Let one number of a piece, such as its loss, weigh what the piece does, if it has no weight of its own.

    A row of one number may be the losses of the samples, if the piece holds one.
    """
    number, (here, whole) = torch.as_tensor(value), samples()
    if weight or named or number.numel() != 1 or (number.dim() and here == 1):
        return update(value, *weight, **named)
    return update(value, torch.full((), here / whole, device=number.device))  # made there: nothing waits for a copy


class _BatchOf:
    """Replaces a metric's ``forward`` while one batch runs."""

    def __init__(self, metric: Metric) -> None:
        self.metric = metric
        self._forward: Callable[..., Any] = metric.forward
        self._before = metric_state(metric)
        self._first: int = metric._update_count
        self._state: dict[str, Any] = {}  # of the batch so far
        self._count = -1  # the metric's updates after the last piece, which tell whether the user's code has reset it

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Run ``forward`` on a piece and return the piece's value to the user's code."""
        metric, seen, count = self.metric, metric_state(self.metric), self.metric._update_count
        if count < self._first:  # the user's code has reset the metric
            self._before, self._first = seen, count
        if count == self._count:
            set_metric_state(metric, self._state)
        else:
            metric.reset()
        value = self._forward(*arguments, **named)
        # Without the graphs of a forward pass that computes states with gradients enabled.
        self._state = apply_to_collection(metric_state(metric), torch.Tensor, torch.Tensor.detach)
        if metric.full_state_update is False:  # its states can be added
            set_metric_state(metric, self._state)
            metric._update_count = self._first + 1
            with torch.no_grad():
                metric._reduce_states({name: self._before[name] for name in metric._defaults})
        else:
            beside = beside_states(metric)
            set_metric_state(metric, seen)
            metric.update(*arguments, **named)
            vars(metric).update(beside)  # as ``forward`` left them
        metric._update_count, metric._computed, metric._forward_cache = count + 1, None, value
        self._count = count + 1
        return value

    def close(self) -> None:
        """End the batch: the metric counts one update, and shows the batch's value."""
        metric = self.metric
        if metric._update_count == self._count:
            metric._forward_cache = self._value()
        if metric._update_count > self._first:
            metric._update_count = self._first + 1

    @torch.no_grad()
    def _value(self) -> Any:
        """Compute the metric from the state of the batch alone."""
        metric, seen = self.metric, metric_state(self.metric)
        to_sync, metric._to_sync = metric._to_sync, metric.dist_sync_on_step
        try:
            set_metric_state(metric, {**self._state, "_computed": None})
            return metric.compute()
        finally:
            metric._to_sync = to_sync
            vars(metric).update({**seen, "_computed": None, "_is_synced": False})  # not copied: that takes no memory
