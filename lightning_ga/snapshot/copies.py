"""Copy tensors, metrics and containers; see by versions or sums of bits what has changed; edit gradients in place."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from copy import copy as shallow_copy
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torchmetrics import Metric

from lightning_ga.batch.pytree import contents_of, is_constant, open_container, rebuild, tensors_in
from lightning_ga.memory.oom import attempt, is_out_of_memory

SMALL = 2**20  # bytes of a tensor that is copied at the start of every window
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of an element


def versions(tensors: Iterable[Tensor]) -> tuple[int, ...]:
    """Return how often each tensor was written to; those of inference mode do not know."""
    with torch._C.DisableTorchFunction():  # lazy parameters refuse most
        found = [*tensors]
        try:
            return tuple([tensor._version for tensor in found])  # the usual case, in a third less time
        except RuntimeError:
            return tuple(0 if tensor.is_inference() else tensor._version for tensor in found)


def is_writable(tensor: Tensor) -> bool:
    """Return whether values can be copied back into it: it is dense, stored as it reads, without overlap."""
    dense = tensor.layout is torch.strided and not tensor.is_nested
    return dense and not tensor.is_conj() and not tensor.is_neg() and 0 not in tensor.stride()


class JoinedCopies:
    """Copies of writable tensors, made in few calls: numbers and vectors of a kind are joined."""

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        kinds: dict[Any, list[Tensor]] = {}
        for tensor in tensors:
            kinds.setdefault((min(tensor.dim(), 2), tensor.dtype, tensor.device), []).append(tensor)
        with torch.inference_mode(False):  # copies made in evaluation are written to in training
            self._apart = [(of, [*map(torch.empty_like, of)]) for (axes, *_), of in kinds.items() if axes == 2]
            joined = [(torch.cat if axes else torch.stack, of) for (axes, *_), of in kinds.items() if axes < 2]
            self._joined = [(join, of, join([each.detach() for each in of])) for join, of in joined]

    def tensors(self) -> Iterator[Tensor]:
        """Yield the copies."""
        yield from (copy for _, copies in self._apart for copy in copies)
        yield from (copy for *_, copy in self._joined)

    def take(self) -> None:
        """Copy the values."""
        if not self._joined and not self._apart:
            return
        with torch.no_grad():
            for join, tensors, copy in self._joined:
                join(tensors, out=copy)
            for tensors, copies in self._apart:
                torch._foreach_copy_(copies, tensors)

    @torch.no_grad()
    def restore(self) -> None:
        """Write the values back."""
        for _, tensors, copy in self._joined:
            parts = torch.split_with_sizes(copy, [tensor.numel() for tensor in tensors])
            torch._foreach_copy_(tensors, [part.view_as(tensor) for part, tensor in zip(parts, tensors)])
        for tensors, copies in self._apart:
            torch._foreach_copy_(tensors, copies)


@torch.no_grad()
def checksums(tensors: Sequence[Tensor]) -> list[int | None]:
    """Return the sum of each tensor's bits as integers; ``None`` for one whose memory cannot be read that way.

    Fused kernels, and code that writes to ``tensor.data``, raise no version; the sums show such a change, too.
    """
    sums: list[int | None] = [None] * len(tensors)
    by_device: dict[torch.device, list[tuple[int, Tensor]]] = {}
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        for number, tensor in enumerate(tensors):
            is_plain = type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__ and not tensor.is_meta
            if is_plain and is_writable(tensor):
                values = tensor.detach()
                if values.is_complex():
                    values = torch.view_as_real(values)
                bits = values.contiguous().view(_INTEGERS[values.element_size()]).sum(dtype=torch.int64)
                by_device.setdefault(bits.device, []).append((number, bits))
        for found in by_device.values():  # one transfer for each device
            for (number, _), value in zip(found, torch.stack([bits for _, bits in found]).tolist()):
                sums[number] = value
    return sums


def refill(container: Any, content: Any) -> None:
    """Put content back into the dictionary, list, set or queue that it was copied from."""
    if isinstance(container, dict):
        for name in container.keys() - content.keys():
            del container[name]
        kind = OrderedDict if isinstance(container, OrderedDict) else dict  # a Counter's own update would add
        kind.update(container, content)  # never empty, as others may read it
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


def metric_state(metric: Metric, *, copied: bool = True) -> dict[str, Any]:
    """Return what an update of a metric may change; logged values are replaced and need no copies."""
    own = vars(metric)
    states = {name: own[name] for name in metric._defaults}
    counters = {name: own[name] for name in _COUNTERS if name in own}
    if copied:
        states = {name: _copy(state) for name, state in states.items()}
    return {**states, **counters}


def set_metric_state(metric: Metric, state: dict[str, Any]) -> None:
    """Give a metric copies of what ``metric_state`` returned: updates change states in place."""
    vars(metric).update({**state, **{name: _copy(state[name]) for name in metric._defaults}})


def _copy(state: Any) -> Any:
    return list(state) if isinstance(state, list) else state.clone()


def sparse_parameters(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return weights of embeddings that ask for sparse gradients, and every parameter that has one now."""
    asked = [getattr(part, "weight", None) for part in module.modules() if getattr(part, "sparse", False)]
    having = [parameter for parameter in module.parameters() if parameter.grad is not None and parameter.grad.is_sparse]
    return list({id(p): p for p in (*asked, *having) if isinstance(p, torch.nn.Parameter)}.values())


def coalesce_gradients(parameters: Iterable[Tensor]) -> None:
    """Keep one entry a row in sparse gradients: backward passes append theirs."""
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()


@torch.no_grad()
def scale_gradients(optimizer: torch.optim.Optimizer, scale: float) -> None:
    """Scale all gradients in place; sparse ones stay sparse and coalesced."""
    kinds = dict[type, list[Tensor]]()  # one call cannot take plain tensors and DTensors
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is not None:
                values = gradient
                if gradient.is_sparse:
                    values = gradient._values()
                kinds.setdefault(type(values), []).append(values)
    for found in kinds.values():
        torch._foreach_mul_(found, scale)


def with_own_containers(batch: Any, inside: tuple[int, ...] = ()) -> Any:
    """Copy the containers of a batch but not its tensors, because a step may pop labels from the batch."""
    if id(batch) in inside:  # an object may contain itself
        return batch
    children = open_container(batch)
    inside = (*inside, id(batch))
    if children is not None:
        return rebuild(batch, [with_own_containers(child, inside) for _, child in children])
    if not hasattr(batch, "__dict__") or isinstance(batch, Tensor) or is_constant(batch):
        return batch
    clone = shallow_copy(batch)
    own = contents_of(clone).items()  # ``copy.copy`` may have copied inner mappings, too
    containers = ((name, value) for name, value in own if isinstance(value, (dict, list)))
    vars(clone).update({name: with_own_containers(value, inside) for name, value in containers})
    return clone


def copied(sample: Any) -> Any:
    """Return a deep copy; of a tensor that is a view, only what it shows and not its whole storage.

    Nested tensors are cloned: autograd fails on deep copies of them (PyTorch 2.15).
    """
    return deepcopy(sample, {id(tensor): tensor.clone() for tensor in tensors_in(sample) if _is_cloned(tensor)})


def copied_if_possible(batch: Any) -> Any:
    """Return a copy of a batch, because steps may remove labels from it; the batch itself if it cannot be copied."""
    outcome = attempt(copied, lambda error: not is_out_of_memory(error), batch)
    return outcome.result if outcome.failure is None else batch


def _is_cloned(tensor: Tensor) -> bool:
    """Return whether a tensor is copied by an operation, which meters of memory see, as they do not see deep copies."""
    if tensor.is_nested or type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
        return tensor.is_nested
    is_plain = not tensor.requires_grad and not vars(tensor)
    return is_plain or tensor._is_view() or tensor.untyped_storage().nbytes() > tensor.nbytes
