"""Copy tensors, metrics and containers; see by versions or sums of bits what has changed; edit gradients in place."""

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy as shallow_copy
from copy import deepcopy
from io import IOBase
from operator import is_
from types import MappingProxyType
from typing import Any
from weakref import ProxyType

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torchmetrics import Metric

from lightning_ga.batch.pytree import contents_of, is_constant, open_container, rebuild, tensors_in
from lightning_ga.memory.oom import attempt, is_out_of_memory
from lightning_ga.snapshot.random_numbers import GENERATORS, generator_state, restore_generator

CONTAINERS = (dict, list, set, deque)
_SHARED = (Tensor, torch.nn.Module, *GENERATORS)  # what a copy of a batch has in common with it
_PLAIN = (type(None), bool, int, float, str, bytes, ProxyType)  # what holds nothing
SMALL = 2**20  # bytes of a tensor that is copied at the start of every window
_WIDTH = 1021  # of the rows in which bits are summed; a prime, so that samples that change places change the sum
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of an element


def versions(tensors: Iterable[Tensor]) -> list[int]:
    """Return how often each tensor was written to; those of inference mode do not know."""
    with torch._C.DisableTorchFunction():  # lazy parameters refuse most
        return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def is_writable(tensor: Tensor) -> bool:
    """Return whether values can be copied back into it: it is dense, stored as it reads, without overlap."""
    dense = tensor.layout is torch.strided and not tensor.is_nested
    return dense and not tensor.is_conj() and not tensor.is_neg() and 0 not in tensor.stride()


class Copies:
    """Copies of writable tensors, made in one call for each type and device."""

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        self._kinds: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
        with torch.inference_mode(False):  # copies made in evaluation are written to in training
            for tensor in tensors:
                originals, copies = self._kinds.setdefault((tensor.dtype, tensor.device), ([], []))
                originals.append(tensor)
                copies.append(torch.empty_like(tensor))

    def tensors(self) -> Iterator[Tensor]:
        """Yield the copies."""
        for _, copies in self._kinds.values():
            yield from copies

    @torch.no_grad()
    def take(self) -> None:
        """Copy the values."""
        for originals, copies in self._kinds.values():
            torch._foreach_copy_(copies, originals)

    @torch.no_grad()
    def restore(self) -> None:
        """Write the values back."""
        for originals, copies in self._kinds.values():
            torch._foreach_copy_(originals, copies)


@torch.no_grad()
def sums_of_bits(tensors: Iterable[Tensor]) -> list[Tensor | None]:
    """Return a sum of each tensor's bits, on its device; ``None`` for memory that cannot be read that way.

    Fused kernels, and code that writes to ``tensor.data``, raise no version; the sums show such a change, too. They
    also show values that change places, unless by a multiple of ``_WIDTH`` places.
    """
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        return list(map(_sum_of_bits, tensors))


def checksums(tensors: Iterable[Tensor]) -> list[int | None]:
    """Return ``sums_of_bits`` as numbers, which waits for the device."""
    return [None if value is None else int(value) for value in sums_of_bits(tensors)]


def _sum_of_bits(tensor: Tensor) -> Tensor | None:
    """Return the sum of the bits as integers; integer i weighs as much as its place modulo a prime.

    Large tensors are read eight bytes at a time, which takes an eighth of the time.
    """
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__ or tensor.is_meta or not is_writable(tensor):
        return None
    if tensor.numel() == 0 or tensor.untyped_storage().nbytes() == 0:  # sharded ones may be freed
        return None
    values = tensor.detach()
    if values.is_complex():
        values = torch.view_as_real(values)
    values = values.reshape(-1)
    each = 8 // values.element_size()
    is_packed = values.nbytes >= SMALL and values.numel() % each == 0 and values.storage_offset() % each == 0
    bits = values.view(torch.int64 if is_packed else _INTEGERS[values.element_size()])
    width = min(bits.numel(), _WIDTH)
    rest = bits.numel() % width  # rows overlap by the rest, so that there is no shorter one
    columns = bits.unfold(0, width + rest, width).sum(0, dtype=torch.int64)
    places = torch.arange(1, width + rest + 1, device=bits.device)
    if is_packed:  # upper bits by themselves: weights would push them out
        upper = (columns >> 32) * (places + len(places))
        return (upper + (columns & 0xFFFFFFFF) * places).sum()
    return (columns * places).sum()


def by_id(things: Iterable[Any]) -> dict[int, Any]:
    """Return things, each once, by their ids."""
    return {id(thing): thing for thing in things}


def everything_in(
    values: Iterable[Any],
    opened: Callable[[Any], Iterable[Any]],
    *,
    longest: float = math.inf,
    most: float = math.inf,
) -> Iterator[Any]:
    """Yield values and what they contain at any depth, but for numbers and text: each once, the nearest first.

    ``opened`` returns what an object holds that is no container. Containers of more than ``longest`` entries are data,
    which is not looked into. The walk ends after ``most`` values.
    """
    found: dict[int, Any] = {}  # alive, so that nothing else has their ids
    waiting = deque(values)
    while waiting and len(found) < most:
        value = waiting.popleft()
        if type(value) in _PLAIN or id(value) in found:
            continue
        found[id(value)] = value
        yield value
        if not isinstance(value, (*CONTAINERS, tuple)):
            waiting += opened(value)
        elif len(value) <= longest:
            waiting += value.values() if isinstance(value, dict) else value


def copies_of(things: Iterable[Any]) -> list[tuple[Any, Any]]:
    """Return things, each with its copy: a tensor's values, the state of a generator, the place in a file.

    Of a container it is a shallow copy.
    """
    originals = list(things)
    return list(zip(originals, map(_copy_of, originals)))


def _copy_of(thing: Any) -> Any:
    if type(thing) in (dict, OrderedDict, list):  # by far the most: networks have thousands of tables
        return thing.copy()
    if isinstance(thing, (*CONTAINERS, np.ndarray)):
        return shallow_copy(thing)
    if isinstance(thing, Tensor):
        with torch._C.DisableTorchFunctionSubclass():  # a copy needs nothing of a class of the user's own
            return thing.detach().clone()
    return thing.tell() if isinstance(thing, IOBase) else generator_state(thing)


@torch.no_grad()
def put_back(copies: Iterable[tuple[Any, Any]]) -> None:
    """Put copies back; versions of tensors stay, because others may have saved these for a backward pass."""
    for thing, kept in copies:
        if isinstance(thing, CONTAINERS):
            refill(thing, kept)
        elif isinstance(thing, Tensor):
            with torch._C.DisableTorchFunctionSubclass():
                thing.data.copy_(kept)
        elif isinstance(thing, np.ndarray):
            thing[...] = kept
        elif isinstance(thing, IOBase):
            thing.seek(kept)
        else:
            restore_generator(thing, kept)


def has_same_entries(container: Any, content: Any) -> bool:
    """Return whether a container has the entries that were copied from it, in their order, by identity."""
    if isinstance(container, set) or not (container or content):
        return bool(container == content)
    if isinstance(container, dict):
        return [*container] == [*content] and all(map(is_, container.values(), content.values()))
    return len(container) == len(content) and all(map(is_, container, content))


def refill(container: Any, content: Any) -> None:
    """Put content back into the dictionary, list, set or queue that it was copied from."""
    if has_same_entries(container, content):  # others may read it
        return
    if isinstance(container, dict):
        # Others must not see it empty, so it is cleared only if keys differ: ``update`` would keep their positions.
        if [*container] != [*content]:
            container.clear()
        kind = OrderedDict if isinstance(container, OrderedDict) else dict  # a Counter's own update would add
        kind.update(container, content)
        return
    container.clear()
    if isinstance(container, set):
        container.update(content)
    else:
        container.extend(content)


# What torchmetrics 1.9 keeps of a metric besides its states (``metric.py``, ``reset`` and ``forward``), and Lightning
# 2.6.6 of a logged value (``logger_connector/result.py``).
_COUNTERS = (
    *("_update_count", "_forward_cache", "_computed", "_cache", "compute_with_cache"),
    *("_is_synced", "_to_sync", "_should_unsync", "has_reset"),
)


def is_metric(value: Any) -> bool:
    """Return whether a value is a metric, without the search through all kinds of metrics that ``isinstance`` makes."""
    return Metric in type(value).__mro__


def metric_state(metric: Metric) -> dict[str, Any]:
    """Return what an update of a metric may change."""
    own = vars(metric)
    return {name: own[name] for name in (*metric._defaults, *_COUNTERS) if name in own}


def copied_state(metric: Metric, state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of a metric with copies of what updates change in place."""
    return {**state, **{name: _copy_of(state[name]) for name in metric._defaults}}


def sparse_parameters(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return weights of embeddings that ask for sparse gradients, and every parameter that has one now."""
    found: dict[int, torch.nn.Parameter] = {}
    for part in module.modules():
        asks = getattr(part, "sparse", False)
        for name, parameter in part._parameters.items():
            if parameter is not None and ((asks and name == "weight") or _is_sparse(parameter.grad)):
                found[id(parameter)] = parameter
    return list(found.values())


def _is_sparse(gradient: Tensor | None) -> bool:
    return gradient is not None and gradient.is_sparse


def coalesce_gradients(parameters: Iterable[Tensor]) -> None:
    """Keep one entry a row in sparse gradients: backward passes append theirs."""
    for parameter in parameters:
        if parameter.grad is not None and _is_sparse(parameter.grad):
            parameter.grad = parameter.grad.coalesce()


@torch.no_grad()
def scale_gradients(optimizer: torch.optim.Optimizer, scale: float) -> None:
    """Scale all gradients in place; sparse ones stay sparse and coalesced."""
    kinds = dict[type, list[Tensor]]()  # one call cannot take plain tensors and DTensors
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                values = parameter.grad._values() if parameter.grad.is_sparse else parameter.grad
                kinds.setdefault(type(values), []).append(values)
    for found in kinds.values():
        torch._foreach_mul_(found, scale)


def with_own_containers(
    batch: Any, instead: Mapping[int, Any] = MappingProxyType({}), inside: tuple[int, ...] = ()
) -> Any:
    """Copy the containers of a batch but not its tensors, because a step may pop labels from the batch.

    ``instead`` has what comes in the place of a value, by the value's id.
    """
    if id(batch) in instead or id(batch) in inside:  # an object may contain itself
        return instead.get(id(batch), batch)
    inside = (*inside, id(batch))
    children = open_container(batch)
    if children is not None:
        return rebuild(batch, [with_own_containers(child, instead, inside) for _, child in children])
    if not hasattr(batch, "__dict__") or isinstance(batch, _SHARED) or is_constant(batch):
        return batch
    clone = shallow_copy(batch)
    if clone is not batch:  # a function is its own copy
        for name, value in contents_of(clone).items():  # ``copy.copy`` may have copied inner mappings, too
            vars(clone)[name] = with_own_containers(value, instead, inside)
    return clone


def copied(sample: Any) -> Any:
    """Return a deep copy; of a tensor that is a view, only what it shows and not its whole storage.

    Nested tensors are cloned: autograd fails on deep copies of them (PyTorch 2.15).
    """
    clones = {id(tensor): tensor.clone() for tensor in tensors_in(sample) if _is_cloned(tensor)}
    return deepcopy(sample, clones)


def copied_if_possible(batch: Any) -> Any:
    """Return a copy of a batch, because steps may remove labels from it; the batch itself if it cannot be copied."""
    outcome = attempt(copied, lambda error: not is_out_of_memory(error), batch)
    return outcome.result if outcome.failure is None else batch


def _is_cloned(tensor: Tensor) -> bool:
    """Return whether a tensor is copied by an operation, which meters of memory see, as they do not see deep copies."""
    if tensor.is_nested:
        return True
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
        return False
    is_plain = not tensor.requires_grad and not vars(tensor)
    return is_plain or tensor._is_view() or tensor.untyped_storage().nbytes() > tensor.nbytes
