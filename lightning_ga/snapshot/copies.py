"""Copy tensors, see whether they are written to, and write the copies back.

Fused kernels and whatever writes to ``tensor.data`` raise no version (``_version``): then the sum of a tensor's bits
shows a change, without a copy. To read all values takes too long to be done in every window: the exactness check and
the first micro-batches do it.
"""

from array import array
from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

_VERSION = attrgetter("_version")
SMALL = 2**20  # bytes of a tensor that is copied where every window begins


def versions(tensors: Iterable[Tensor | None]) -> "array[int]":
    """Return how often each tensor was written to; -1 for none. Unlike a list, the garbage collector passes it over."""
    tensors = [*tensors]
    try:
        return array("q", [*map(_VERSION, tensors)])  # twice as fast
    except AttributeError:  # one is none
        return array("q", [-1 if tensor is None else tensor._version for tensor in tensors])


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
        with _disable_current_modes():
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
    strides = values.stride()
    flat = values.permute(sorted(range(values.dim()), key=strides.__getitem__, reverse=True)).reshape(-1)
    size = flat.element_size()
    if flat.storage_offset() * size % WORD:
        flat = flat.clone()
    words = flat.numel() * size // WORD * (WORD // size)
    rest = flat[words:].view(torch.uint8).sum(dtype=torch.int64)
    return flat[:words].view(torch.int64).sum() + rest
