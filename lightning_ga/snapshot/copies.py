"""Copy tensors, see whether they are written to, and write the copies back."""

from array import array
from collections.abc import Iterable, Iterator
from operator import attrgetter

import torch
from torch import Tensor

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
    """Copies of small tensors that can be written to, made in few calls: vectors of a kind are joined."""

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        kinds: dict[object, list[Tensor]] = {}
        for tensor in tensors:
            kinds.setdefault((tensor.dtype, tensor.device, min(tensor.dim(), 2)), []).append(tensor)
        with torch.inference_mode(False):  # copies made in evaluation are written to in training
            self._groups = [_Joined(group) if group[0].dim() < 2 else _Apart(group) for group in kinds.values()]

    def tensors(self) -> Iterator[Tensor]:
        """Yield the copies."""
        for group in self._groups:
            yield from group.copies

    def take(self) -> None:
        """Copy the values."""
        if self._groups:
            with torch.no_grad():
                for group in self._groups:
                    group.take()

    @torch.no_grad()
    def restore(self) -> None:
        """Write the values back."""
        for group in self._groups:
            group.restore()


class _Joined:
    """Numbers or vectors of one kind."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors = tensors
        self._join = torch.cat if tensors[0].dim() else torch.stack
        self.copies = [self._join([tensor.detach() for tensor in tensors])]

    def take(self) -> None:
        self._join(self._tensors, out=self.copies[0])

    def restore(self) -> None:
        sizes = [tensor.numel() for tensor in self._tensors]
        parts = torch.split_with_sizes(self.copies[0], sizes)
        torch._foreach_copy_(self._tensors, [part.view_as(tensor) for part, tensor in zip(parts, self._tensors)])


class _Apart:
    """Other tensors of one kind."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors = tensors
        self.copies = [torch.empty_like(tensor) for tensor in tensors]

    def take(self) -> None:
        torch._foreach_copy_(self.copies, self._tensors)

    def restore(self) -> None:
        torch._foreach_copy_(self._tensors, self.copies)
