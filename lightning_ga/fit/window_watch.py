"""See what changes the model between the micro-batches of a window, which should all meet the same one.

The exactness check calls no callbacks and steps no schedules. A callback that lets a teacher follow its student
after every batch does so factor times a step now, and so does a hook that steps a schedule of the learning rate:
the first micro-batches of training show it.
"""

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase
from torchmetrics import Metric

from lightning_ga.compat import agreement, loops
from lightning_ga.snapshot.checksums import checksums, differ

LOOKS = 8  # micro-batches before which the model is looked at


class WindowWatch:
    """Compares the model before a micro-batch with what it was before the one before, within a window."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._looks = 0 if agreement.is_sharded(trainer) else LOOKS
        self._before: dict[str, float | None] = {}
        self._tables: Collection[str] = ()

    def pass_by(self, tables: Collection[str]) -> None:
        """Do not look at these: tables that are filled when they are first needed."""
        self._tables = tables

    @property
    def is_looking(self) -> bool:
        """Whether the model is still looked at."""
        return self._looks > 0

    def changed(self) -> tuple[str, ...]:
        """Return the names of what has changed, before a micro-batch."""
        factor = self._trainer.accumulate_grad_batches
        if not self._looks or factor == 1:
            return ()
        self._looks -= 1
        module = self._trainer.lightning_module
        named = dict([*kept_buffers(module), *module.named_parameters()])
        before, self._before = self._before, {**dict(zip(named, checksums(named.values()))), **self._learning_rates()}
        if loops.micro_batch_index(self._trainer) % factor == 0:
            return ()
        now = ((name, value) for name, value in self._before.items() if name not in self._tables)
        return tuple(name for name, value in now if differ(before.get(name), value))

    def _learning_rates(self) -> dict[str, float]:
        groups = [group for optimizer in self._trainer.optimizers for group in optimizer.param_groups]
        rates = {f"the learning rate of group {number}": group.get("lr") for number, group in enumerate(groups)}
        return {name: float(rate) for name, rate in rates.items() if rate is not None}


def kept_buffers(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Buffers that a step should leave alone, with their names: all but those of normalization and metrics."""
    parts = (part for part in module.modules() if isinstance(part, (_NormBase, Metric)))
    own = {id(buffer) for part in parts for buffer in part.buffers(recurse=False)}
    yield from ((name, buffer) for name, buffer in module.named_buffers() if id(buffer) not in own)
