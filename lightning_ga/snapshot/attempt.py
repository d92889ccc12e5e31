"""What an attempt at a step changes before it fails, and how it is put back: as if it had never been.

Gradients are put back by ``gradient_marks``, as that depends on where in a window the attempt was.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.nn import Module
from torchmetrics import Metric

from lightning_ga.snapshot.attributes import AttributeStash, BatchMarks, BufferStash, WeightStash
from lightning_ga.snapshot.state import RandomState


class AttemptState:
    """Random numbers, buffers, weights, attributes, metrics and the batch before an attempt.

    Args:
        module: The LightningModule.
    """

    def __init__(self, module: Module) -> None:
        self.buffers = BufferStash(module)
        self.weights = WeightStash(module)
        self._attributes = AttributeStash(module)
        self._batch = BatchMarks(None)
        self._writes_batch = False  # without raising versions
        self._metrics = [part for part in module.modules() if isinstance(part, Metric)]
        self._random: RandomState | None = None
        self._kept: list[dict[str, Any]] = []

    @property
    def metrics(self) -> list[Metric]:
        """The metrics of the module."""
        return self._metrics

    def tensors(self) -> Iterator[Tensor]:
        """The copies that lie where the module does."""
        yield from self.buffers.tensors()
        yield from self.weights.tensors()
        yield from self._attributes.tensors()

    def keep(self, batch: Any) -> None:
        """Remember everything as it is now, before an attempt at these samples."""
        self._random = RandomState()
        self._batch = BatchMarks(batch, by_value=self._writes_batch or self.weights.is_learning)
        self.buffers.keep()
        self.weights.keep()
        self._attributes.keep()
        self._kept = [metric_state(metric) for metric in self._metrics]

    def learn(self) -> None:
        """An attempt went through: what changes in one shows."""
        self._writes_batch = self._writes_batch or self._batch.changes_unseen()
        self.buffers.learn()
        self.weights.learn()

    def draws_numbers(self) -> bool:
        """Whether random numbers were drawn since."""
        return self._random is not None and (not self._random.is_current() or self._attributes.draws_numbers())

    def put_back(self) -> str | None:
        """Set everything back to what was kept; what cannot be, in words."""
        assert self._random is not None, "nothing was kept"
        self._random.restore()
        self._batch.put_back()
        self.buffers.put_back()
        self.weights.put_back()
        self._attributes.put_back()
        for metric, state in zip(self._metrics, self._kept):
            set_metric_state(metric, state)
        return self._batch.lost() or self.weights.lost() or self.buffers.lost() or self._attributes.lost()


def metric_state(metric: Metric) -> dict[str, Any]:
    """Copies of the attributes of a metric that an update may change."""
    states = {name: _copied(getattr(metric, name)) for name in metric._defaults}
    return {**states, **{name: vars(metric)[name] for name in _COUNTERS if name in vars(metric)}}


def set_metric_state(metric: Metric, state: dict[str, Any]) -> None:
    """Give a metric copies of what ``metric_state`` took: updates change states in place."""
    for name, value in state.items():
        setattr(metric, name, value if name in _COUNTERS else _copied(value))


def _copied(state: Any) -> Any:
    """A tensor of one state, or the list that updates append to; what is in the list never changes."""
    return list(state) if isinstance(state, list) else state.clone()


# What torchmetrics 1.9 keeps of a metric besides its states (``metric.py``, ``reset`` and ``forward``).
_COUNTERS = ("_update_count", "_forward_cache", "_computed", "_cache", "_is_synced")
