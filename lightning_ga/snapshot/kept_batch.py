"""Keep a batch so that it can run again after an error, and see whether a step has changed its tensors in place.

Tensors count how often they were written to. Those of inference mode, in which Lightning evaluates, do not: the small
ones are copied and can be put back, and of the others a fingerprint is taken, which does not wait for the device.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from lightning_ga.batch.pytree import tensors_in
from lightning_ga.snapshot.copies import SMALL, JoinedCopies, is_writable, versions, with_own_containers
from lightning_ga.snapshot.savepoint import Savepoint

_SUMS = 1021  # of a fingerprint; a prime, so that samples that change places change sums
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}  # by their bytes


class KeptBatch:
    """A batch as the loader made it: containers of its own, because steps change them, and the same tensors.

    Up to 1 MiB of tensors without versions is copied. What a step does to NumPy arrays is not seen.
    """

    def __init__(self, batch: Any) -> None:
        self.batch = with_own_containers(batch)
        self._tensors = [*tensors_in(batch)]
        self._versions = versions(self._tensors)
        self._copies: JoinedCopies | None = None
        self._large: list[Tensor] = []
        self._fingerprints: list[Tensor] = []
        with torch._C.DisableTorchFunction():  # a class of the user's own may refuse anything
            unversioned = [tensor for tensor in self._tensors if tensor.is_inference()]
            if unversioned:
                self._keep(unversioned)

    def _keep(self, tensors: Sequence[Tensor]) -> None:
        """Copy the smallest tensors, as long as there is room for them, and take fingerprints of the others."""
        found = {id(tensor): tensor for tensor in tensors}
        parts = [part for tensor in found.values() for part in _memory_of(tensor)]
        parts.sort(key=lambda part: part.nbytes)
        copied = list[Tensor]()
        free = SMALL
        for part in parts:
            free -= part.nbytes
            if free >= 0:
                copied.append(part)
            else:
                self._large.append(part)
        self._copies = JoinedCopies(copied)
        self._copies.take()
        self._fingerprints = _fingerprints(self._large)

    def restore(self) -> None:
        """Put back the tensors of which copies are kept."""
        if self._copies is not None:
            with torch.inference_mode(), torch._C.DisableTorchFunction():  # elsewhere they cannot be written to
                self._copies.restore()

    def changed(self) -> bool:
        """Return whether a tensor of which no copy is kept was written to; large ones wait for the device."""
        if versions(self._tensors) != self._versions:
            return True
        pairs = zip(self._fingerprints, _fingerprints(self._large), strict=True)
        return any(not torch.equal(before, now) for before, now in pairs)


def undo(savepoint: Savepoint, batches: Sequence[KeptBatch]) -> str | None:
    """Put back what passes over these batches have changed; return in words what cannot be put back."""
    moved = savepoint.restore()
    if moved is not None:
        return f"{moved}, of which no copy is kept"
    for kept in batches:
        kept.restore()
        if kept.changed():
            return "a tensor of its batch in place, and the batch cannot be read again"
    return None


def _memory_of(tensor: Tensor) -> Iterator[Tensor]:
    """Yield dense tensors that share the memory of the values of a tensor of any layout."""
    if hasattr(tensor, "__tensor_flatten__"):  # a class that wraps others, such as jagged tensors
        for name in tensor.__tensor_flatten__()[0]:
            yield from _memory_of(getattr(tensor, name))
    elif tensor.is_nested:
        yield from tensor.unbind()
    elif tensor.layout is torch.sparse_coo:
        yield tensor._values()
    elif tensor.layout is not torch.strided:
        yield tensor.values()
    elif tensor.numel():
        for axis in reversed(range(tensor.dim())):
            if tensor.stride(axis) == 0:  # the same memory again and again
                tensor = tensor.select(axis, 0)
        if is_writable(tensor) and not tensor.is_meta and not tensor.is_quantized:
            yield tensor


@torch.no_grad()
def _fingerprints(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return sums of the bits of each tensor, which stay on its device: word i counts in sum i modulo a prime.

    So a change of places shows, too. Each costs one kernel, and a copy if the tensor has gaps.
    """
    found = []
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        for tensor in tensors:
            values = tensor
            if tensor.is_complex():
                values = torch.view_as_real(tensor)
            axes = sorted(range(values.dim()), key=values.stride, reverse=True)  # as they lie in memory
            flat = values.permute(axes).reshape(-1)
            words = flat.view(_widest_words(flat))
            rest = words.numel() % _SUMS
            if words.numel() < _SUMS:
                found.append(words.to(torch.int64, copy=True))
            else:  # rows overlap by the rest, so that there is no shorter one
                found.append(words.unfold(0, _SUMS + rest, _SUMS).sum(0, dtype=torch.int64))
    return found


def _widest_words(flat: Tensor) -> torch.dtype:
    """Return the type of the largest integers that fill a tensor's memory."""
    offset = flat.storage_offset() * flat.element_size()
    return next(dtype for size, dtype in _WORDS.items() if flat.nbytes % size == 0 and offset % size == 0)
