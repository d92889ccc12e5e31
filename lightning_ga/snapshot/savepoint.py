"""Keep what a window of training may change besides gradients, and put it back if the window begins again.

A savepoint is taken once a window (in evaluation: once a batch), so it may cost some ten microseconds. It keeps four
kinds of state and no other:

- buffers up to 1 MiB;
- states of torchmetrics, and what the loop has logged;
- of the LightningModule's own attributes: lengths of lists, copies of small dictionaries, sets, queues and tensors;
- how often weights and larger buffers were written to: they are not copied, and ``restore`` names one that has changed.
"""

import copy
from collections import deque
from collections.abc import Callable, Iterator
from operator import is_
from types import NoneType
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric

from lightning_ga.snapshot.copies import (
    SMALL,
    Copies,
    is_writable,
    metric_state,
    refill,
    set_metric_state,
    versions,
)

LIGHTNINGS_OWN = {*vars(LightningModule()), "_hparams", "forward"}  # attributes that Lightning keeps in a module
_CONTAINERS = (tuple, dict, set, deque)
_COLLECTING = (Tensor, list, *_CONTAINERS, NoneType)  # kinds of attributes in which steps collect values
_MAX_ENTRIES = 64  # entries of a container that is copied


class Savepoint:
    """The state of a module at the start of a window.

    Args:
        module: The LightningModule. Submodules that are added later are not seen.
        results: Returns what the running loop has logged, by name; asked for each time.
    """

    def __init__(self, module: LightningModule, results: Callable[[], dict[str, Any]]) -> None:
        self._module = module
        self._results = results
        self._places = [(part._buffers, name) for part in module.modules() for name in part._buffers]
        self._metrics = [part for part in module.modules() if isinstance(part, Metric)]
        self._look()
        self._is_taken = False

    def _look(self) -> None:
        """Find the buffers: steps may put other tensors in their places."""
        self._buffers = [table[name] for table, name in self._places]
        found = {id(buffer): buffer for buffer in self._buffers if buffer is not None}
        copied = {key: buffer for key, buffer in found.items() if is_writable(buffer) and buffer.nbytes <= SMALL}
        self._copies = Copies(copied.values())
        large = {name: buffer for name, buffer in self._module.named_buffers() if id(buffer) not in copied}
        self._watched = {**large, **dict(self._module.named_parameters())}

    def take(self) -> None:
        """Remember everything, as a window begins."""
        if not all(map(is_, (table.get(name) for table, name in self._places), self._buffers)):
            self._look()
        self._copies.take()
        self._versions = versions(self._watched.values())
        results = self._results()
        self._logged = results, dict(results)
        logged = (vars(result).get("value") for result in results.values())
        metrics = {id(metric): metric for metric in (*self._metrics, *logged) if isinstance(metric, Metric)}
        self._states = [(metric, metric_state(metric)) for metric in metrics.values()]
        self._states += [(result, metric_state(result, copied=False)) for result in results.values()]
        self._attributes = _Attributes(self._module)
        self._is_taken = True

    def tensors(self) -> Iterator[Tensor]:
        """Yield the copies of buffers and attributes."""
        yield from self._copies.tensors()
        if self._is_taken:
            yield from self._attributes.copies()

    def restore(self) -> str | None:
        """Put everything back; return the name of a weight or large buffer that has changed and cannot be restored.

        It may be called several times after one ``take``.
        """
        if not self._is_taken:
            return None
        for (table, name), buffer in zip(self._places, self._buffers):
            table[name] = buffer
        self._copies.restore()
        for metric, state in self._states:
            set_metric_state(metric, state)
        refill(*self._logged)
        self._attributes.restore()
        pairs = zip(self._watched, self._versions, versions(self._watched.values()))
        return next((name for name, before, now in pairs if before != now), None)


class _Attributes:
    """A module's own attributes in which steps collect values; numbers are left, as they may count attempts."""

    def __init__(self, module: LightningModule) -> None:
        self._own = vars(module)
        self._hook = self._own["_current_fx_name"]
        self._before = {name: value for name, value in self._own.items() if name not in LIGHTNINGS_OWN}
        self._lengths: list[tuple[list[Any], int]] = []
        self._contents: list[tuple[Any, Any]] = []
        self._tensors: list[tuple[Tensor, Tensor]] = []
        for value in self._before.values():
            self._keep(value, depth=0)

    def _keep(self, value: Any, depth: int) -> None:
        if isinstance(value, list):
            self._lengths.append((value, len(value)))
        elif isinstance(value, Tensor):
            # Outside of inference mode, in which Lightning evaluates, no step can change a tensor of it, nor can we.
            is_fixed = value.is_inference() and not torch.is_inference_mode_enabled()
            if is_writable(value) and value.nbytes <= SMALL and not is_fixed:
                with torch._C.DisableTorchFunctionSubclass():  # a copy needs nothing of a class of the user's own
                    self._tensors.append((value, value.detach().clone()))
        elif isinstance(value, _CONTAINERS) and len(value) <= _MAX_ENTRIES:
            if not isinstance(value, tuple):
                self._contents.append((value, copy.copy(value)))
            if depth == 0:  # lists in a dictionary, the tensors of an LSTM's state
                for inner in value.values() if isinstance(value, dict) else value:
                    self._keep(inner, depth=1)

    def copies(self) -> Iterator[Tensor]:
        """Yield the copies of tensors."""
        return (value for _, value in self._tensors)

    @torch.no_grad()
    def restore(self) -> None:
        """Put them back, and the name of the running hook, which an error leaves behind."""
        self._own["_current_fx_name"] = self._hook
        for name in [name for name, value in self._own.items() if isinstance(value, _COLLECTING)]:
            if name in self._before:
                self._own[name] = self._before[name]
            elif name not in LIGHTNINGS_OWN:
                del self._own[name]
        self._own.update({name: value for name, value in self._before.items() if isinstance(value, _COLLECTING)})
        for listed, length in self._lengths:
            del listed[length:]
        for container, content in self._contents:
            refill(container, content)
        with torch._C.DisableTorchFunctionSubclass():
            for tensor, value in self._tensors:
                tensor.copy_(value)
