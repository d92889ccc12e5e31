"""Join gradients to the messages that ranks exchange, and put the averages in their place."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import compress
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_ga.compat.gradient_dtype import dtype_of_sum

FIRST_BUCKET = 2**20  # bytes that are sent as soon as there are as many, as in DistributedDataParallel


class Bucket:
    """Dense gradients of one device that are sent together; ``last`` is the parameter whose gradient should come last.

    Gradients are sent as ``dtype``, and have that type afterwards. The message holds them, and which of them there are:
    thus a rank that lacks one learns whether another has it, and no other rank has to ask.
    """

    def __init__(self, parameters: tuple[Parameter, ...], last: Parameter, dtype: torch.dtype) -> None:
        self.parameters, self.last, self.dtype = parameters, last, dtype
        self.size = (sum(p.numel() for p in parameters) + len(parameters)) * dtype.itemsize  # bytes of the message

    def place(self, room: Tensor) -> None:
        """Let the message lie at the beginning of ``room``, which is a tensor of bytes."""
        self._message = room[: self.size].view(self.dtype)
        sizes = [parameter.numel() for parameter in self.parameters]
        *parts, self._present = torch.split(self._message, [*sizes, len(sizes)])
        # In the order of memory of the parameters, which ``DistributedDataParallel`` has seen to be that of all ranks.
        strides = [torch.empty_like(parameter, device="meta").stride() for parameter in self.parameters]
        self._parts = [part.as_strided(p.shape, order) for part, p, order in zip(parts, self.parameters, strides)]

    def join(self, gradients: Sequence[Tensor | None], scale: float) -> Tensor:
        """Write gradients to the message, times ``scale``, and return it."""
        there = [gradient is not None for gradient in gradients]
        if all(there):
            self._present.fill_(1)
        else:
            self._present.copy_(torch.tensor(there))
            torch._foreach_zero_([part for part, is_there in zip(self._parts, there) if not is_there])
        found = [gradient for gradient in gradients if gradient is not None]
        _copy([g.to_dense() if g.is_sparse else g for g in found], [*compress(self._parts, there)])
        return self._message.mul_(scale)

    def spread(self, gradients: Sequence[Tensor | None]) -> None:
        """Replace gradients by the averages, which are in the message; one that no rank has stays missing."""
        # Those that are there, of the type that is sent and not sparse, are overwritten.
        alike = [g is not None and g.dtype == self.dtype and not g.is_sparse for g in gradients]
        if not all(alike):
            there = zip(self.parameters, self._parts, self._present.tolist(), alike)
            lacking = [(p, part) for p, part, is_present, is_alike in there if is_present and not is_alike]
            # All are made before the first is given: if memory runs out, no parameter has a new one.
            for parameter, gradient in [(p, torch.empty_like(p, dtype=self.dtype).copy_(part)) for p, part in lacking]:
                parameter.grad = gradient
        _copy([*compress(self._parts, alike)], [*compress(gradients, alike)])


class SparseBucket:
    """A gradient that is sparse on every rank."""

    def __init__(self, parameter: Parameter, dtype: torch.dtype) -> None:
        self.parameters, self.last, self.dtype = (parameter,), parameter, dtype
        self._message = torch.empty(0)

    def join(self, gradients: Sequence[Tensor | None], scale: float) -> Tensor:
        """Return the gradient times ``scale``, as a new tensor without duplicates; without rows if it is missing."""
        (gradient,) = gradients
        if gradient is None:
            nowhere = torch.empty(1, 0, dtype=torch.int64, device=self.last.device)
            nothing = self.last.new_empty(0, *self.last.shape[1:])
            gradient = torch.sparse_coo_tensor(nowhere, nothing, self.last.shape, check_invariants=False)
        gradient = gradient if gradient.is_sparse else gradient.to_sparse(1)
        self._message = (gradient.to(self.dtype).coalesce() * scale).coalesce()
        return self._message

    def spread(self, gradients: Sequence[Tensor | None]) -> None:
        """Replace the gradient by the average; one without rows is none, and a dense one (of tied weights) stays so."""
        averaged, (gradient,) = self._message.coalesce(), gradients
        if gradient is not None and not gradient.is_sparse:
            self.last.grad = averaged.to_dense()
        else:
            self.last.grad = averaged if averaged._nnz() else None
        self._message = torch.empty(0)


AnyBucket = Bucket | SparseBucket


def make_buckets(
    parameters: Sequence[Parameter],
    sparse: Iterable[Tensor],
    *,
    most: int,
    arrival: Mapping[int, int],
    summed: bool = False,
) -> list[AnyBucket]:
    """Join parameters to buckets of at most so many bytes, the last parameter first; a larger gradient goes alone.

    Buckets are the same on all ranks but for ``last``, which follows from ``arrival``: the place of each gradient in a
    backward pass, by the ``id`` of its parameter. If gradients are ``summed``, half-precision ones are sent in float32.
    Those of ``sparse`` parameters go alone.
    """
    dtype: Callable[[Parameter], torch.dtype] = dtype_of_sum if summed else attrgetter("dtype")
    alone = set(map(id, sparse))
    together = [parameter for parameter in reversed(parameters) if id(parameter) not in alone]
    dense = [
        Bucket(tuple(group), max(group, key=lambda p: arrival.get(id(p), -1)), dtype(group[0]))
        for group in _grouped(together, most, dtype)
    ]
    return [*dense, *(SparseBucket(parameter, dtype(parameter)) for parameter in parameters if id(parameter) in alone)]


def _copy(sources: list[Any], targets: list[Any]) -> None:
    if targets:
        torch._foreach_copy_(targets, sources)


def _grouped(
    parameters: Iterable[Parameter], most: int, dtype: Callable[[Parameter], torch.dtype]
) -> list[list[Parameter]]:
    """Neighbours of one type and device, in groups of at most so many bytes."""
    full: list[list[Parameter]] = []
    filling: dict[tuple[torch.dtype, torch.device], list[Parameter]] = {}
    sizes: Counter[tuple[torch.dtype, torch.device]] = Counter()
    for parameter in parameters:
        kind = dtype(parameter), parameter.device
        size = parameter.numel() * kind[0].itemsize
        if size > most:
            full.append([parameter])
            continue
        if sizes[kind] + size > most:
            full.append(filling.pop(kind))
            del sizes[kind]
        filling.setdefault(kind, []).append(parameter)
        sizes[kind] += size
        if not full and sizes[kind] >= FIRST_BUCKET:
            full.append(filling.pop(kind))
            del sizes[kind]
    return [*full, *filling.values()]
