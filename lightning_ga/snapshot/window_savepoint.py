"""Keep what a window of training may change besides gradients, and put it back if the window begins again.

A savepoint is taken once a window (in evaluation: once a batch), so it may cost some ten microseconds. It keeps four
kinds of state and no other:

- buffers up to 1 MiB;
- states of torchmetrics, and what the loop has logged;
- of the LightningModule's own attributes: copies of small dictionaries, sets, queues and tensors; lengths of
  lists, so that entries that were added are removed, but none that were removed come back;
- how often weights and larger buffers were written to: they are not copied, and ``restore`` names one that has changed.
"""

from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain
from types import NoneType
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_ga.snapshot.copies import (
    SMALL,
    Copies,
    by_id,
    copied_state,
    copies_of,
    has_same_entries,
    is_metric,
    is_writable,
    metric_state,
    put_back,
    refill,
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
        self._tables = [part._buffers for part in module.modules() if part._buffers]
        self._metrics = list(filter(is_metric, module.modules()))
        self._look()
        self._attributes: _Attributes | None = None  # none before anything is taken

    def _look(self) -> None:
        """Find the buffers: steps may put other tensors in their places."""
        self._buffers = list(map(dict, self._tables))
        copied: dict[int, Tensor] = {}
        self._watched: dict[str, Tensor] = {}
        for name, buffer in self._module.named_buffers():
            if is_writable(buffer) and buffer.nbytes <= SMALL:
                copied[id(buffer)] = buffer
            else:
                self._watched[name] = buffer
        self._copies = Copies(copied.values())
        self._watched.update(self._module.named_parameters())

    def take(self) -> None:
        """Remember everything, as a window begins."""
        if not all(map(has_same_entries, self._tables, self._buffers)):
            self._look()
        self._copies.take()
        self._versions = versions(self._watched.values())
        results = self._results()
        self._logged = results, dict(results)
        self._states = list(zip(results.values(), map(metric_state, results.values())))  # their tensors are replaced
        logged = (vars(result).get("value") for result in results.values())
        metrics = by_id(filter(is_metric, chain(self._metrics, logged))).values()
        self._states += zip(metrics, map(copied_state, metrics, map(metric_state, metrics)))
        self._attributes = _Attributes(self._module)

    def tensors(self) -> Iterator[Tensor]:
        """Yield the copies of buffers and attributes."""
        yield from self._copies.tensors()
        if self._attributes is not None:
            yield from self._attributes.copies()

    def restore(self) -> str | None:
        """Put everything back; return the name of a weight or large buffer that has changed and cannot be restored.

        It may be called several times after one ``take``.
        """
        if self._attributes is None:
            return None
        for table, buffers in zip(self._tables, self._buffers):
            table.update(buffers)
        self._copies.restore()
        for metric, state in self._states:
            vars(metric).update(copied_state(metric, state))  # copies again: updates change states in place
        refill(*self._logged)
        self._attributes.restore()
        for name, before, now in zip(self._watched, self._versions, versions(self._watched.values())):
            if before != now:
                return name
        return None


class _Attributes:
    """A module's own attributes in which steps collect values; numbers are left, as they may count attempts."""

    def __init__(self, module: LightningModule) -> None:
        self._own = vars(module)
        self._hook = self._own["_current_fx_name"]
        self._before = dict(self._own)
        self._lengths: list[tuple[list[Any], int]] = []
        self._contents: list[Any] = []  # containers and tensors that are copied whole
        for name in self._own.keys() - LIGHTNINGS_OWN:
            self._keep(self._own[name], depth=0)
        self._copies = copies_of(self._contents)

    def _keep(self, value: Any, depth: int) -> None:
        if isinstance(value, list):
            self._lengths.append((value, len(value)))
        elif isinstance(value, Tensor):
            # Outside of inference mode, in which Lightning evaluates, no step can change a tensor of it, nor can we.
            is_fixed = value.is_inference() and not torch.is_inference_mode_enabled()
            if is_writable(value) and value.nbytes <= SMALL and not is_fixed:
                self._contents.append(value)
        elif isinstance(value, _CONTAINERS) and len(value) <= _MAX_ENTRIES:
            if not isinstance(value, tuple):
                self._contents.append(value)
            if depth == 0:  # lists in a dictionary, the tensors of an LSTM's state
                for inner in value.values() if isinstance(value, dict) else value:
                    self._keep(inner, depth=1)

    def copies(self) -> Iterator[Tensor]:
        """Yield the copies of tensors."""
        for _, kept in self._copies:
            if isinstance(kept, Tensor):
                yield kept

    def restore(self) -> None:
        """Put them back, and the name of the running hook, which an error leaves behind."""
        own = self._own
        own["_current_fx_name"] = self._hook
        for name in (own.keys() | self._before.keys()) - LIGHTNINGS_OWN:
            if name in self._before:
                if isinstance(own.get(name), _COLLECTING) or isinstance(self._before[name], _COLLECTING):
                    own[name] = self._before[name]
            elif isinstance(own[name], _COLLECTING):
                del own[name]
        for listed, length in self._lengths:
            del listed[length:]
        put_back(self._copies)
