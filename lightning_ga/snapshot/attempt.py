"""Keep what an attempt at a step may change, and restore it after one that failed: as if it had never been.

Taken before every attempt, so it has to cost next to nothing: what is small is copied, and of what is
large the version (``_version``) tells whether it has changed, or its values where versions do not tell.
What has changed and was not copied is told, not undone. Gradients are restored by ``gradients``, as
that depends on where in a window the attempt was.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.nn import Module
from torchmetrics import Metric

from lightning_ga.snapshot.attributes import AttributeSnapshot
from lightning_ga.snapshot.batch import BatchSnapshot
from lightning_ga.snapshot.buffers import BufferSnapshot
from lightning_ga.snapshot.random_numbers import RandomState
from lightning_ga.snapshot.weights import WeightSnapshot


class AttemptSnapshot:
    """Random numbers, buffers, weights, attributes, those of metrics too, and the batch before an attempt."""

    def __init__(self, module: Module) -> None:
        self._module, self._parts = module, [*module.modules()]
        self.buffers = BufferSnapshot(module)
        self.weights = WeightSnapshot(module)
        self.metrics = [part for part in self._parts if isinstance(part, Metric)]  # kept with the attributes
        self._attributes = AttributeSnapshot(module)
        self._batch = BatchSnapshot(None)
        self._writes_batch = False  # without raising versions
        self.is_learning = True  # whether the attempts are still to come that show what changes
        self._random = RandomState()

    def tensors(self) -> Iterator[Tensor]:
        """Yield the copies."""
        yield from self.buffers.tensors()
        yield from self.weights.tensors()
        yield from self._attributes.tensors()

    def take(self, batch: Any, *, anew: bool = True) -> None:
        """Remember what an attempt at a batch may change; not ``anew`` within a window, where less is looked at."""
        self._random = RandomState()
        self._batch = BatchSnapshot(batch, by_value=self._writes_batch or self.weights.is_learning)
        self.buffers.take(anew=anew)
        self.weights.take(anew=anew)
        self._attributes.take(anew=anew)

    def learn(self) -> None:
        """Note that an attempt went through: what changes in one shows."""
        self._writes_batch = self._writes_batch or self._batch.changes_unseen()
        self.buffers.learn()
        self.weights.learn()
        self.is_learning = self.weights.is_learning or self._writes_batch or self.buffers.is_learning

    def has_all_parts(self) -> bool:
        """Return whether the module has no parts that came since this was made."""
        return set(map(id, self._module.modules())) <= set(map(id, self._parts))

    def draws_numbers(self) -> bool:
        """Return whether random numbers were drawn since."""
        return not self._random.is_current() or self._attributes.draws_numbers()

    @property
    def left(self) -> list[str]:
        """Names of attributes that a failed attempt changed and that were not put back, as they are plain Python."""
        return self._attributes.left

    def restore(self) -> str | None:
        """Restore everything; name what cannot be."""
        self._random.restore()
        self._batch.restore()
        self.buffers.restore()
        self.weights.restore()
        self._attributes.restore(self.buffers.put_back)
        lost = self._batch.lost() or self.weights.lost() or self.buffers.lost() or self._attributes.lost()
        return lost or self._late()

    def _late(self) -> str | None:
        """Name a part that came since this was made and may have changed."""
        known = set(map(id, self._parts))
        late = ((name, part) for name, part in self._module.named_modules() if id(part) not in known)
        lost = (name for name, part in late if isinstance(part, Metric) or part._buffers)
        return next((f"what a part of the module holds that came within an epoch ({name})" for name in lost), None)
