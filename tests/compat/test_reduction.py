"""Gradients are joined to messages of a bounded size; ranks that exchange them are in ``integration/``."""

import torch

from lightning_ga.compat.reduction import _BUCKET, _buckets


def with_gradients(*sizes: int, dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    """Parameters with gradients of so many bytes, on no device."""
    parameters = [torch.nn.Parameter(torch.empty(size // dtype.itemsize, device="meta", dtype=dtype)) for size in sizes]
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    return parameters


def bytes_of(buckets: list[list[torch.Tensor]]) -> list[list[int]]:
    return [[gradient.numel() * gradient.element_size() for gradient in bucket] for bucket in buckets]


def test_messages_hold_25_mib_at_most() -> None:
    """A larger gradient goes alone: it is exchanged where it is, without a copy."""
    quarter = _BUCKET // 4
    parameters = with_gradients(quarter, quarter, quarter, quarter, quarter, 3 * _BUCKET, quarter)
    assert bytes_of(list(_buckets(parameters))) == [[quarter] * 4, [quarter], [3 * _BUCKET], [quarter]]


def test_types_are_not_mixed() -> None:
    """Each message is of one type."""
    parameters = with_gradients(8, 8) + with_gradients(8, dtype=torch.bfloat16) + with_gradients(8)
    assert bytes_of(list(_buckets(parameters))) == [[8, 8], [8], [8]]
