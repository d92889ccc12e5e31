"""Join gradients to the messages that ranks exchange, and put the averages in their place."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

FIRST_BUCKET = 2**20  # bytes: sent early, as in DistributedDataParallel


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients that are sent together.

    Attributes:
        parameters: Their parameters, of one type and device.
        last: The one whose gradient is expected last.
    """

    parameters: tuple[Parameter, ...]
    last: Parameter

    def joined(self, scale: float) -> Tensor:
        """Return all gradients in one new tensor, times ``scale``; behind them, which of them there are.

        Thus a rank that lacks one learns whether another has it, and no other rank has to ask.
        """
        first, there = self.parameters[0], [parameter.grad is not None for parameter in self.parameters]
        marks = first.new_ones(len(there)) if all(there) else first.new_tensor(there)
        return torch.cat([*map(_flat, self.parameters), marks]).mul_(scale)

    def spread(self, averaged: Tensor) -> None:
        """Replace gradients by averages; one that no rank has stays missing."""
        parts = torch.split(averaged, [*(parameter.numel() for parameter in self.parameters), len(self.parameters)])
        pairs = [(parameter, part.view(parameter.shape)) for parameter, part in zip(self.parameters, parts)]
        dense = [(p.grad, part) for p, part in pairs if p.grad is not None and not p.grad.is_sparse]
        if dense:
            torch._foreach_copy_([gradient for gradient, _ in dense], [part for _, part in dense])
        if len(dense) < len(pairs):
            _place_missing(pairs, parts[-1].tolist())


@dataclass(frozen=True, slots=True)
class SparseBucket:
    """A gradient that is sparse on every rank.

    Attributes:
        parameters: Its parameter.
    """

    parameters: tuple[Parameter]

    @property
    def last(self) -> Parameter:
        """The parameter."""
        return self.parameters[0]

    def joined(self, scale: float) -> Tensor:
        """Return the gradient times ``scale``, as a new tensor without duplicates; without rows if it is missing."""
        gradient = self.last.grad
        if gradient is None:
            parameter = self.last
            nowhere = torch.empty(1, 0, dtype=torch.int64, device=parameter.device)
            nothing = parameter.new_empty(0, *parameter.shape[1:])
            gradient = torch.sparse_coo_tensor(nowhere, nothing, parameter.shape, check_invariants=False)
        gradient = gradient if gradient.is_sparse else gradient.to_sparse(1)
        return (gradient.coalesce() * scale).coalesce()

    def spread(self, averaged: Tensor) -> None:
        """Replace the gradient by the average; one without rows is none, and a dense one (of tied weights) stays so."""
        averaged, gradient = averaged.coalesce(), self.last.grad
        if gradient is not None and not gradient.is_sparse:
            gradient.copy_(averaged.to_dense())
        else:
            self.last.grad = averaged if averaged._nnz() else None


AnyBucket = Bucket | SparseBucket


def make_buckets(
    parameters: Sequence[Parameter], sparse: Iterable[Tensor], *, most: int, arrival: Mapping[int, int]
) -> list[AnyBucket]:
    """Join parameters to buckets, the last parameter first; the same on all ranks but for ``last``.

    Args:
        parameters: Those to be averaged.
        sparse: Those whose gradients are sparse: each goes alone.
        most: Bytes of a bucket; a larger gradient goes alone.
        arrival: Place of each gradient in a backward pass, by the ``id`` of its parameter.
    """
    alone = set(map(id, sparse))
    groups = _grouped([p for p in reversed(parameters) if id(p) not in alone], most)
    dense = [Bucket(tuple(group), max(group, key=lambda p: arrival.get(id(p), -1))) for group in groups]
    return [*dense, *(SparseBucket((parameter,)) for parameter in parameters if id(parameter) in alone)]


def _grouped(parameters: Iterable[Parameter], most: int) -> list[list[Parameter]]:
    """Neighbours of one type and device, in groups of at most so many bytes."""
    full: list[list[Parameter]] = []
    filling: dict[tuple[torch.dtype, torch.device], list[Parameter]] = {}
    sizes: dict[tuple[torch.dtype, torch.device], int] = {}
    for parameter in parameters:
        kind, size = (parameter.dtype, parameter.device), parameter.numel() * parameter.element_size()
        if size > most:
            full.append([parameter])
            continue
        if filling.get(kind) and sizes[kind] + size > (most if full else min(FIRST_BUCKET, most)):
            full.append(filling.pop(kind))
            sizes[kind] = 0
        filling.setdefault(kind, []).append(parameter)
        sizes[kind] = sizes.get(kind, 0) + size
    return [*full, *filling.values()]


def _flat(parameter: Parameter) -> Tensor:
    gradient = parameter.grad
    if gradient is None:
        return parameter.new_zeros(parameter.numel())
    return (gradient.to_dense() if gradient.is_sparse else gradient).flatten().to(parameter.dtype)


def _place_missing(pairs: Collection[tuple[Parameter, Tensor]], marks: Iterable[float]) -> None:
    """Give parameters a gradient that another rank has."""
    for (parameter, part), mark in zip(pairs, marks):
        if mark and (parameter.grad is None or parameter.grad.is_sparse):
            parameter.grad = torch.empty_like(parameter).copy_(part)
