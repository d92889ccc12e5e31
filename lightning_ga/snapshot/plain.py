"""Plain attributes of modules, and of the objects that they hold: looked at, never put back.

A savepoint does not know them all. So after an out-of-memory error they are looked at before and after the window runs
again: what that changed, the failed attempt may have changed as well, and the warning names it.
"""

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.nn import Module, Parameter
from torch.utils.data import DataLoader, Dataset
from torchmetrics import Metric

from lightning_ga.snapshot.contents import contained, reachable
from lightning_ga.snapshot.copies import checksums, differ
from lightning_ga.snapshot.random_numbers import GENERATORS

LIGHTNINGS_OWN = {*vars(LightningModule()), "_hparams", "forward"}  # what Lightning keeps of itself in a module
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (dict, list, tuple, set, deque)
_GROWING = (dict, list, set, deque)
_OPAQUE = (type, ModuleType, FunctionType, MethodType, BuiltinFunctionType, Dataset, DataLoader, *GENERATORS)
_FOREIGN = ("lightning.", "pytorch_lightning.", "lightning_ga.", "torch.optim", "torch._dynamo")
_LONGEST = 1000  # longer containers hold data: they are not searched
_MOST = 10_000  # objects that are looked at


class PlainState:
    """What plain attributes hold now, by their paths.

    Args:
        module: The LightningModule.
        tensors: Tensors besides, with their names.
        put_back: Paths of values that are put back.
    """

    def __init__(self, module: Module, tensors: Iterable[tuple[str, Tensor]], put_back: Collection[str]) -> None:
        self._module, self._tensors, self._put_back = module, [*tensors], put_back
        self._values = self._read()

    def changed(self) -> tuple[str, ...]:
        """Return the names of what has changed since, and is not put back; lists of numbers never are."""
        pairs = [(path, self._values.get(path), now) for path, now in self._read().items()]
        changed = {(path, now[1]) for path, before, now in pairs if before and _has_changed(before[0], now[0])}
        return tuple(sorted(path for path, is_of_numbers in changed if is_of_numbers or path not in self._put_back))

    def _read(self) -> dict[str, tuple[Any, bool]]:
        """Return what to compare values by, ``None`` if that cannot be done, and whether they are lists of numbers."""
        found = [*self._tensors, *_reachable(self._module)]
        tensors = [value for _, value in found if isinstance(value, Tensor)]
        sums = dict(zip(map(id, tensors), checksums(tensors)))
        numbers = {path for path, value in found if isinstance(value, list) and value and isinstance(value[-1], _PLAIN)}
        return {path: (sums.get(id(value), _summary(value)), path in numbers) for path, value in found}


def shared_containers(module: Module, data: object) -> frozenset[str]:
    """Return the paths of containers that a module holds and its data, too: a replay buffer that steps fill."""
    seen = set[int]()
    held = {id(value) for part in reachable(data) for value in contained(vars(part), seen, longest=_LONGEST)}
    return frozenset(path for path, value in _reachable(module) if isinstance(value, _GROWING) and id(value) in held)


def summaries(module: Module, paths: Collection[str]) -> dict[str, int]:
    """Return what shows that containers at some paths have changed: their lengths, or the last entry of a full one."""
    found = [(path, value) for path, value in _reachable(module) if path in paths] if paths else []
    full = {path for path, each in found if each and len(each) == getattr(each, "maxlen", -1)}
    return {path: hash(_contents(each[-1])) if path in full else len(each) for path, each in found}


def _contents(entry: Any) -> Any:
    """Return something to compare an entry by: another object in its place may have its ``id``."""
    if isinstance(entry, Tensor):
        return tuple(checksums([entry]))
    if isinstance(entry, (dict, list, tuple)):
        return tuple(map(_contents, entry.values() if isinstance(entry, dict) else entry))
    return _summary(entry)


def hidden_modules(module: Module) -> Iterator[tuple[str, Module]]:
    """Yield networks that plain attributes hold, but not as submodules, with their paths."""
    registered = set(map(id, module.modules()))
    networks = ((path, part) for path, part in _reachable(module) if isinstance(part, Module))
    return ((path, part) for path, part in networks if id(part) not in registered)


def hidden_tensors(owner: Any) -> dict[str, Tensor]:
    """Return what plain attributes of a module or a callback hold besides its parts: tensors, and those of networks.

    Only dense tensors of no class of their own: others may have no shape, or no differences.
    """
    parts = [*owner.modules()] if isinstance(owner, Module) else []
    own = [each for part in parts for each in (part, *part._parameters.values(), *part._buffers.values())]
    known, found = set(map(id, own)), dict[str, Tensor]()
    for path, value in _reachable(owner):
        if id(value) not in known and isinstance(value, (Tensor, Module)):
            found |= {path: value} if isinstance(value, Tensor) else state_of(value, path)
    return {path: tensor for path, tensor in found.items() if _is_dense(tensor)}


def _is_dense(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, Parameter) and tensor.layout is torch.strided and not tensor.is_nested


def state_of(network: Module, path: str = "") -> dict[str, Tensor]:
    """Return weights and buffers of a network, with their names."""
    return {**dict(network.named_parameters(path)), **dict(network.named_buffers(path))}


def hidden_copies(module: Module) -> dict[str, Tensor]:
    """Return weights of hidden networks, and other hidden tensors if they are a copy or an average of all weights."""
    trained = [weight for weight in module.parameters() if weight.requires_grad]
    shapes = {weight.shape for weight in trained}
    found = {path: tensor for path, tensor in hidden_tensors(module).items() if tensor.shape in shapes}
    if found and copies_of([*found.values()], trained):
        return found
    return {path: tensor for path, tensor in found.items() if isinstance(tensor, Parameter)}


@torch.no_grad()
def copies_of(tensors: Sequence[Tensor], weights: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Return pairs of a tensor and the weight that it copies or averages; none unless there is one for each weight.

    Together they are nearer to the weights than zeros are, unlike gradients.
    """
    alike: dict[Any, deque[Tensor]] = {}
    for tensor in filter(_is_dense, tensors):
        alike.setdefault(_kind(tensor), deque()).append(tensor)
    places = [alike.get(_kind(weight)) for weight in weights]
    pairs = [(place.popleft(), weight) for place, weight in zip(places, weights) if place]
    if len(pairs) < len(weights):
        return []
    apart = sum(float((tensor - weight).abs().square().sum()) for tensor, weight in pairs)
    return pairs if apart < sum(float(weight.abs().square().sum()) for weight in weights) / 4 else []


def _kind(tensor: Tensor) -> Any:
    """Return what two tensors have in common that can be averaged; masks of weights cannot."""
    return tensor.shape, tensor.device, tensor.is_floating_point(), tensor.is_complex()


def _reachable(owner: Any) -> Iterator[tuple[str, Any]]:
    """Yield what plain attributes refer to at any depth, with its path."""
    pending: deque[tuple[str, Any]] = deque(owner.named_modules() if isinstance(owner, Module) else [("", owner)])
    seen = set[int]()
    while pending and len(seen) < _MOST:
        path, value = pending.popleft()
        is_plain = isinstance(value, _PLAIN)
        if not is_plain and (isinstance(value, _OPAQUE) or _is_foreign(value, owner)):
            continue
        yield path, value
        if not is_plain and id(value) not in seen:
            seen.add(id(value))
            pending.extend((f"{path}.{name}".lstrip("."), child) for name, child in _children(value))


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (Tensor, np.ndarray, set, Metric)):
        return
    if isinstance(value, _CONTAINERS):
        if len(value) <= _LONGEST:
            pairs = value.items() if isinstance(value, dict) else enumerate(value)
            yield from ((str(name), child) for name, child in pairs)
        return
    tables = _TABLES | LIGHTNINGS_OWN if isinstance(value, LightningModule) else _TABLES
    apart: Collection[str] = tables if isinstance(value, Module) else ()
    yield from ((name, child) for name, child in getattr(value, "__dict__", {}).items() if name not in apart)


_TABLES = {name for name in vars(Module()) if name != "training"}


def _is_foreign(value: Any, owner: Any) -> bool:
    """Return whether an object belongs to the trainer, or is an optimizer: it changes outside of steps."""
    kind = type(value).__module__ + "."
    return value is not owner and kind.startswith(_FOREIGN) and not isinstance(value, Module)


def _summary(value: Any) -> Any:
    """Return something to compare a value by."""
    if isinstance(value, np.ndarray):
        return hash(value.tobytes()) if value.dtype != object else value.shape
    if isinstance(value, Metric):
        return value._update_count
    if isinstance(value, _CONTAINERS):
        return len(value)
    return value if isinstance(value, _PLAIN) else None


def _has_changed(before: Any, now: Any) -> bool:
    numbers = isinstance(before, int) and isinstance(now, int)
    return differ(before, now) if numbers else before is not None and now is not None and before != now
