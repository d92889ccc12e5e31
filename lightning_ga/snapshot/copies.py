"""Copy tensors, see whether they are written to, and write the copies back; gradients as backward passes add to them.

Fused kernels and whatever writes to ``tensor.data`` raise no version (``_version``): then the sum of a tensor's bits
shows a change, without a copy. To read all values takes too long to be done in every window: the exactness check and
the first micro-batches do it.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils._python_dispatch import _disable_current_modes

_VERSION = attrgetter("_version")
SMALL = 2**20  # bytes of a tensor that is copied where every window begins


def versions(tensors: Iterable[Tensor | None]) -> tuple[int, ...]:
    """Return how often each tensor was written to; -1 for none."""
    tensors = [*tensors]
    try:
        return tuple(map(_VERSION, tensors))  # twice as fast
    except AttributeError:  # one is none
        return tuple(-1 if tensor is None else tensor._version for tensor in tensors)


def is_small(tensor: Tensor) -> bool:
    """Return whether a tensor may be copied where every window begins."""
    return tensor.numel() * tensor.element_size() <= SMALL


def is_expanded(tensor: Tensor) -> bool:
    """Return whether several of its elements are one in memory; sparse and nested tensors have no strides to tell."""
    return tensor.layout is torch.strided and not tensor.is_nested and 0 in tensor.stride()


def is_writable(tensor: Tensor) -> bool:
    """Return whether values can be copied back into it: it is dense, stored as it reads, no two elements are one."""
    dense = tensor.layout is torch.strided and not tensor.is_nested
    return dense and not tensor.is_conj() and not tensor.is_neg() and not is_expanded(tensor)


class SmallCopies:
    """Copies of small tensors that can be written to, made in few calls: numbers and vectors of a kind are joined."""

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


WORD = 8  # bytes that are added up as one integer


def checksums(tensors: Iterable[Tensor]) -> list[int | None]:
    """Return the sum of each tensor's bits, 64 at a time; ``None`` for one whose memory cannot be read that way.

    Dispatch modes (which count operations, say) do not see it. If memory runs out, and on devices that do not know
    these operations, there are no sums.
    """
    listed = list(tensors)
    by_device: dict[torch.device, list[Tensor]] = {}
    try:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            sums = [_checksum(tensor) for tensor in listed]
            for total in sums:
                if total is not None:
                    by_device.setdefault(total.device, []).append(total)
            # One transfer for each device.
            values = {device: iter(torch.stack(totals).tolist()) for device, totals in by_device.items()}
    except RuntimeError:
        return [None] * len(listed)
    return [None if total is None else next(values[total.device]) for total in sums]


def differ(before: float | None, now: float | None) -> bool:
    """Return whether two sums of a tensor show that it has changed."""
    return before is not None and now is not None and before != now


@torch.no_grad()
def _checksum(tensor: Tensor) -> Tensor | None:
    """Return the sum, where the tensor lies; 64-bit words are added as they are: to add others would copy them."""
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__ or tensor.is_meta or not is_writable(tensor):
        return None
    values = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    if not values.is_contiguous():
        strides = values.stride()
        values = values.permute(sorted(range(values.dim()), key=strides.__getitem__, reverse=True))
    flat = values.reshape(-1)
    size = flat.element_size()
    if flat.storage_offset() * size % WORD:
        flat = flat.clone()
    words = flat.numel() * size // WORD * (WORD // size)
    total = flat[:words].view(torch.int64).sum()
    return total if words == flat.numel() else total + flat[words:].view(torch.uint8).sum(dtype=torch.int64)


@dataclass(frozen=True, slots=True)
class Gradients:
    """The gradients of some parameters at one moment, and how often each had been written to."""

    tensors: list[Tensor | None]
    versions: Sequence[int]

    @classmethod
    def of(cls, parameters: Iterable[Tensor]) -> "Gradients":
        """Look at the gradients of parameters."""
        tensors = [parameter.grad for parameter in parameters]
        return cls(tensors, versions(tensors))

    def unchanged_since(self, before: "Gradients") -> bool:
        """Return whether none has been replaced or written to in between."""
        return self.versions == before.versions and all(map(is_, self.tensors, before.tensors))

    def changed_since(self, before: "Gradients") -> Iterator[bool]:
        """Yield for each whether it is there, and has been replaced or written to in between."""
        pairs = zip(self.tensors, before.tensors, self.versions, before.versions)
        return (now is not None and (now is not then or new != old) for now, then, new, old in pairs)


@contextmanager
def counted_additions(parameters: Iterable[Tensor]) -> Iterator[Counter[Tensor]]:
    """Return a context in which additions of backward passes to gradients are counted, in the order in which they come.

    A table of hooks that is left empty makes every later backward pass take the interpreter's lock (1 µs for each
    parameter in torch 2.15). The table of hooks before a gradient is added can be dropped, that of those after not.
    """
    counts: Counter[Tensor] = Counter()
    trained: list[Any] = [parameter for parameter in parameters if parameter.requires_grad]

    def count(parameter: Tensor, _: Tensor) -> None:
        counts[parameter] += 1

    handles = [parameter.register_hook(partial(count, parameter)) for parameter in trained]
    try:
        yield counts
    finally:
        for parameter, handle in zip(trained, handles):
            handle.remove()
            if not parameter._backward_hooks:
                parameter._backward_hooks = None


class ZeroedAdditions:
    """Lets backward passes add zeros to gradients, until it is removed.

    Hooks are on the nodes that add, not on the parameters: so they come after all hooks of the user's own, and
    ``autograd.grad`` does not call them.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        # Kept, as parameters do not keep them.
        self._nodes = [get_gradient_edge(parameter).node for parameter in parameters if parameter.requires_grad]
        self._handles: list[Any] = [node.register_prehook(_zeros) for node in self._nodes]

    def remove(self) -> None:
        """Let gradients be added as they come."""
        for handle in self._handles:
            handle.remove()
        self._nodes, self._handles = [], []


def _zeros(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    return tuple(None if gradient is None else torch.zeros_like(gradient) for gradient in gradients)


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
