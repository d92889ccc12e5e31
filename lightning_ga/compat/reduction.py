"""Average the gradients of a window over ranks, by hand and once.

``DistributedDataParallel`` averages during the last backward pass. A rank that has to repeat that
pass, in halves, would then issue more collectives than the others and hang them all. So every
pass runs without collectives, and each rank averages when its window is complete.
"""

from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from lightning_ga.compat.gradient_dtype import dtype_of_sum, narrow, widen

_BUCKET = 25 * 2**20  # bytes joined to one message, as in DistributedDataParallel


@torch.no_grad()
def average_gradients(parameters: Iterable[Parameter], group: Any = None, *, summed: bool = False) -> None:
    """Replace every rank's gradients by their mean over ranks; a missing gradient counts as zero.

    A parameter without a gradient on every rank stays without one.

    Args:
        parameters: The same on every rank, in the same order.
        group: The process group; ``None`` is the default one.
        summed: Whether they are sums over several micro-batches, those of half-precision parameters in float32.
    """
    wanted = [parameter for parameter in parameters if parameter.requires_grad]
    world_size = dist.get_world_size(group)
    if world_size == 1 or not wanted:
        return
    # Of one type on all ranks, some of which may have run their micro-batch in pieces, or none.
    (widen if summed else narrow)(wanted)
    dtypes = dtype_of_sum if summed else attrgetter("dtype")
    kinds = torch.tensor([_kind(parameter) for parameter in wanted], dtype=torch.uint8, device=wanted[0].device)
    dist.all_reduce(kinds, dist.ReduceOp.MAX, group=group)
    having = [(parameter, kind) for parameter, kind in zip(wanted, kinds.tolist()) if kind]
    for parameter, kind in having:
        if kind == _SPARSE:
            _average_sparse(parameter, world_size, group, dtypes(parameter))
        elif parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter, dtype=dtypes(parameter))
    for bucket in _buckets([parameter for parameter, kind in having if kind == _DENSE]):
        if len(bucket) == 1 and bucket[0].is_contiguous():  # nothing to join, so nothing to copy
            dist.all_reduce(bucket[0].mul_(1 / world_size), group=group)
            continue
        flat = torch.cat([gradient.flatten() for gradient in bucket])
        dist.all_reduce(flat.mul_(1 / world_size), group=group)
        parts = torch.split(flat, [gradient.numel() for gradient in bucket])
        torch._foreach_copy_(bucket, [part.view(gradient.shape) for part, gradient in zip(parts, bucket)])


_NONE, _DENSE, _SPARSE = 0, 1, 2


def _kind(parameter: Parameter) -> int:
    gradient = parameter.grad
    return _NONE if gradient is None else _SPARSE if gradient.is_sparse else _DENSE


def _buckets(parameters: list[Parameter]) -> Iterator[list[Tensor]]:
    """Yield gradients of one type and device, up to 25 MiB together; larger ones alone."""
    bucket: list[Tensor] = []
    size = 0
    for parameter in parameters:
        gradient = parameter.grad
        assert gradient is not None
        more = gradient.numel() * gradient.element_size()
        alike = not bucket or (gradient.dtype, gradient.device) == (bucket[0].dtype, bucket[0].device)
        if bucket and (size + more > _BUCKET or not alike):
            yield bucket
            bucket, size = [], 0
        bucket.append(gradient)
        size += more
    if bucket:
        yield bucket


def _average_sparse(parameter: Parameter, world_size: int, group: Any, dtype: torch.dtype) -> None:
    """Average a sparse gradient: the rows of all ranks, added up."""
    gradient = parameter.grad
    if gradient is None:
        empty = torch.empty(1, 0, dtype=torch.int64, device=parameter.device)
        gradient = torch.sparse_coo_tensor(
            empty, parameter.new_empty(0, *parameter.shape[1:], dtype=dtype), parameter.shape
        )
    gradient = gradient.coalesce() if gradient.is_sparse else gradient.to_sparse(1).coalesce()
    gradient = gradient / world_size
    dist.all_reduce(gradient, group=group)
    parameter.grad = gradient.coalesce()
