"""Join gradients to the messages that ranks exchange, and put the averages in their place."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from operator import attrgetter, is_, not_
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_ga.snapshot.copies import versions

FIRST_BUCKET = 2**20  # bytes that are sent as soon as there are as many, as in DistributedDataParallel
LARGE = 2**14  # entries of a gradient that take longer to be read once more than a call takes


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


@dataclass(frozen=True, slots=True, eq=False)
class Message:
    """A tensor that is sent, and its parts, which lie in it."""

    whole: Tensor
    gradients: tuple[Tensor, ...]  # shaped as their parameters
    marks: Tensor  # which gradients there are

    @property
    def in_one_pass(self) -> bool:
        """Whether gradients are scaled one by one as they are copied, not all together afterwards."""
        return self.whole.device.type == "cpu" and len(self.whole) >= LARGE * len(self.gradients)


@dataclass(frozen=True, slots=True, eq=False)
class Bucket:
    """Gradients that are sent together."""

    parameters: tuple[Parameter, ...]  # on one device
    last: Parameter  # the one whose gradient is expected last
    dtype: torch.dtype  # what gradients are sent as, and are afterwards

    @property
    def length(self) -> int:
        """Entries of the tensor that is sent."""
        return sum(parameter.numel() for parameter in self.parameters) + len(self.parameters)

    @property
    def size(self) -> int:
        """Bytes of the tensor that is sent."""
        return self.length * self.dtype.itemsize

    def message(self, room: Tensor | None = None) -> Message:
        """Return a message for the gradients, in so many bytes of ``room`` if there is one."""
        if room is None:
            room = torch.empty(self.size, dtype=torch.uint8, device=self.last.device)
        whole = room[: self.size].view(self.dtype)
        *parts, marks = torch.split(
            whole, [*(parameter.numel() for parameter in self.parameters), len(self.parameters)]
        )
        # In the order of memory of the parameters, which ``DistributedDataParallel`` has seen to be that of all ranks.
        strides = [torch.empty_like(parameter, device="meta").stride() for parameter in self.parameters]
        laid_out = [part.as_strided(p.shape, order) for part, p, order in zip(parts, self.parameters, strides)]
        return Message(whole, tuple(laid_out), marks)

    def join(self, gradients: Sequence[Tensor | None], scale: float, message: Message) -> None:
        """Write all gradients to a message, times ``scale``, and which of them there are.

        Thus a rank that lacks one learns whether another has it, and no other rank has to ask.
        """
        alike = self._alike(gradients)
        message.marks.fill_(1)
        others = [] if all(alike) else self._join_others(gradients, alike, message)
        kept: list[Any] = [*compress(gradients, alike)]
        parts = [*compress(message.gradients, alike)]
        if message.in_one_pass:
            for gradient, part in zip(kept, parts):
                torch.mul(gradient, scale, out=part)
            torch._foreach_mul_([*others, message.marks], scale)
        else:
            _copy(kept, parts)
            message.whole.mul_(scale)

    def spread(self, gradients: Sequence[Tensor | None], averaged: Message) -> None:
        """Replace gradients by averages; one that no rank has stays missing."""
        alike = self._alike(gradients)
        if not all(alike):
            self._replace(map(not_, alike), averaged)
        kept: list[Any] = [*compress(gradients, alike)]
        _copy([*compress(averaged.gradients, alike)], kept)

    def _alike(self, gradients: Iterable[Tensor | None]) -> list[bool]:
        """Tell which gradients are there, of the type that is sent and not sparse."""
        return [g is not None and g.dtype == self.dtype and not g.is_sparse for g in gradients]

    @staticmethod
    def _join_others(gradients: Sequence[Tensor | None], alike: Sequence[bool], message: Message) -> list[Tensor]:
        """Write what is not there, or not alike, and which gradients there are; return where gradients were written."""
        others = [*compress(message.gradients, map(not_, alike))]
        for part, gradient in zip(others, compress(gradients, map(not_, alike))):
            if gradient is None:
                part.zero_()
            else:
                part.copy_(gradient.to_dense() if gradient.is_sparse else gradient)
        message.marks.copy_(torch.tensor([gradient is not None for gradient in gradients]))
        return others

    def _replace(self, those: Iterable[bool], averaged: Message) -> None:
        """Give parameters a gradient that another rank has, or one of another type; none if memory runs out."""
        there = zip(those, averaged.marks.tolist(), self.parameters, averaged.gradients)
        lacking = [(p, part) for is_lacking, mark, p, part in there if is_lacking and mark]
        for parameter, gradient in [(p, torch.empty_like(p, dtype=self.dtype).copy_(part)) for p, part in lacking]:
            parameter.grad = gradient


@dataclass(frozen=True, slots=True, eq=False)
class SparseBucket:
    """A gradient that is sparse on every rank."""

    parameters: tuple[Parameter]
    dtype: torch.dtype

    @property
    def last(self) -> Parameter:
        """The parameter."""
        return self.parameters[0]

    def joined(self, gradient: Tensor | None, scale: float) -> Tensor:
        """Return the gradient times ``scale``, as a new tensor without duplicates; without rows if it is missing."""
        if gradient is None:
            parameter = self.last
            nowhere = torch.empty(1, 0, dtype=torch.int64, device=parameter.device)
            nothing = parameter.new_empty(0, *parameter.shape[1:])
            gradient = torch.sparse_coo_tensor(nowhere, nothing, parameter.shape, check_invariants=False)
        gradient = gradient if gradient.is_sparse else gradient.to_sparse(1)
        return (gradient.to(self.dtype).coalesce() * scale).coalesce()

    def spread(self, gradients: Sequence[Tensor | None], averaged: Tensor) -> None:
        """Replace the gradient by the average; one without rows is none, and a dense one (of tied weights) stays so."""
        averaged, (gradient,) = averaged.coalesce(), gradients
        if gradient is not None and not gradient.is_sparse:
            self.last.grad = averaged.to_dense()
        else:
            self.last.grad = averaged if averaged._nnz() else None


AnyBucket = Bucket | SparseBucket


def make_buckets(
    parameters: Sequence[Parameter],
    sparse: Iterable[Tensor],
    *,
    most: int,
    arrival: Mapping[int, int],
    dtype: Callable[[Parameter], torch.dtype] = attrgetter("dtype"),
) -> list[AnyBucket]:
    """Join parameters to buckets, the last parameter first; the same on all ranks but for ``last``.

    Args:
        parameters: Those to be averaged.
        sparse: Those whose gradients are sparse: each goes alone.
        most: Bytes of a bucket; a larger gradient goes alone.
        arrival: Place of each gradient in a backward pass, by the ``id`` of its parameter.
        dtype: Says what the gradient of a parameter is sent as.
    """
    alone = set(map(id, sparse))
    together = [parameter for parameter in reversed(parameters) if id(parameter) not in alone]
    dense = [
        Bucket(tuple(group), max(group, key=lambda p: arrival.get(id(p), -1)), dtype(group[0]))
        for group in _grouped(together, most, dtype)
    ]
    return [*dense, *(SparseBucket((p,), dtype(p)) for p in parameters if id(p) in alone)]


def _copy(sources: list[Tensor], targets: list[Tensor]) -> None:
    """Copy tensors in one call."""
    if targets:
        torch._foreach_copy_(targets, sources)


def _grouped(
    parameters: Iterable[Parameter], most: int, dtype: Callable[[Parameter], torch.dtype]
) -> list[list[Parameter]]:
    """Neighbours of one type and device, in groups of at most so many bytes."""
    full: list[list[Parameter]] = []
    filling: dict[tuple[torch.dtype, torch.device], list[Parameter]] = {}
    sizes: dict[tuple[torch.dtype, torch.device], int] = {}
    for parameter in parameters:
        kind = dtype(parameter), parameter.device
        size = parameter.numel() * kind[0].itemsize
        if size > most:
            full.append([parameter])
            continue
        if filling.get(kind) and sizes[kind] + size > most:
            full.append(filling.pop(kind))
            sizes[kind] = 0
        filling.setdefault(kind, []).append(parameter)
        sizes[kind] = sizes.get(kind, 0) + size
        if not full and sizes[kind] >= FIRST_BUCKET:
            full.append(filling.pop(kind))
            sizes[kind] = 0
    return [*full, *filling.values()]
