"""Keep a batch so that it can run again after an error, and see whether a step has changed its tensors in place.

Tensors count how often they were written to. Those of inference mode, in which Lightning evaluates, do not: the small
ones are copied and can be put back, and of the others a sum of bits is kept, which does not wait for the device. So is
one of tensors in memory that NumPy owns, which a loader may fill again and again.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from lightning_ga.batch.pytree import tensors_in
from lightning_ga.memory.live_tensors import plain_tensors
from lightning_ga.snapshot.copies import (
    SMALL,
    by_id,
    copies_of,
    is_writable,
    put_back,
    sums_of_bits,
    versions,
    with_own_containers,
)
from lightning_ga.snapshot.window_savepoint import Savepoint


class KeptBatch:
    """A batch as the loader made it: containers of its own, because steps change them, and the same tensors.

    Up to 1 MiB of tensors without versions is copied. What a step does to NumPy arrays is not seen.
    """

    def __init__(self, batch: Any) -> None:
        self.batch = with_own_containers(batch)
        self._tensors = [*tensors_in(batch)]
        self._versions = versions(self._tensors)
        with torch._C.DisableTorchFunction():  # a class of the user's own may refuse anything
            unversioned = by_id(filter(Tensor.is_inference, self._tensors)).values()
            parts = sorted(chain.from_iterable(map(_memory_of, unversioned)), key=attrgetter("nbytes"))
            # As many of the smallest as there is room for.
            small = bisect_right(list(accumulate(map(attrgetter("nbytes"), parts))), SMALL)
            self._copies = copies_of(parts[:small])
            foreign = by_id(filter(_is_of_foreign_memory, self._tensors)).values()
            self._summed = [*parts[small:], *foreign]
            self._sums = sums_of_bits(self._summed)  # read only after an error

    def restore(self) -> None:
        """Put back the tensors of which copies are kept."""
        with torch.inference_mode(), torch._C.DisableTorchFunction():  # elsewhere they cannot be written to
            put_back(self._copies)

    def changed(self) -> bool:
        """Return whether a tensor of which no copy is kept was written to."""
        if versions(self._tensors) != self._versions:
            return True
        for before, now in zip(self._sums, sums_of_bits(self._summed)):
            if before is not None and now is not None and not torch.equal(before, now):
                return True
        return False


def undo(savepoint: Savepoint, batches: Sequence[KeptBatch]) -> str | None:
    """Put back what passes over these batches have changed; return in words what cannot be put back."""
    moved = savepoint.restore()
    if moved is not None:
        return f"{moved}, of which no copy is kept"
    for kept in batches:
        kept.restore()
        if kept.changed():
            return "a tensor of its batch in place, or the loader had, and the batch cannot be read again"
    return None


def _is_of_foreign_memory(tensor: Tensor) -> bool:
    """Return whether a tensor lies in memory on the host that torch has not allocated, as in NumPy's."""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.is_nested or tensor.is_inference():
        return False
    # What is shared is a data worker's.
    return not tensor.untyped_storage().resizable() and not tensor.is_shared()  # type: ignore[no-untyped-call]


def _memory_of(tensor: Tensor) -> Iterator[Tensor]:
    """Yield dense tensors that share the memory of a tensor of any layout."""
    for plain in plain_tensors(tensor):
        for part in plain.unbind() if plain.is_nested else (plain,):
            for axis in reversed(range(part.dim())):
                if part.numel() and part.stride(axis) == 0:  # the same memory again and again
                    part = part.select(axis, 0)
            if part.numel() and is_writable(part) and not part.is_meta and not part.is_quantized:
                yield part
