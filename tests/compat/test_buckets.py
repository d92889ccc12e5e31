"""Gradients are joined to messages of a bounded size; ranks that exchange them are in ``integration/``."""

from collections.abc import Iterable

import pytest
import torch
from torch import nn

from lightning_ga.compat.gradient_dtype import has_grad_dtype
from lightning_ga.compat.reduction import FIRST_BUCKET, Bucket, SparseBucket, make_buckets

MOST = 25 * 2**20


def parameters(*sizes: int, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """Parameters of so many bytes, on no device."""
    return [nn.Parameter(torch.empty(size // dtype.itemsize, device="meta", dtype=dtype)) for size in sizes]


def bytes_of(buckets: Iterable[Bucket | SparseBucket]) -> list[list[int]]:
    return [[p.numel() * p.element_size() for p in bucket.parameters] for bucket in buckets]


def made(given: list[nn.Parameter], most: int = MOST, sparse: Iterable[nn.Parameter] = ()) -> list[list[int]]:
    return bytes_of(make_buckets(given, sparse, most=most, arrival={}))


def gradients(bucket: Bucket | SparseBucket) -> list[torch.Tensor | None]:
    return [parameter.grad for parameter in bucket.parameters]


def placed(bucket: Bucket | SparseBucket, more: int = 0) -> Bucket:
    """A bucket with room for its message, and for so many bytes more, in which something lies."""
    assert isinstance(bucket, Bucket)
    bucket.place(torch.full((bucket.size + more,), 255, dtype=torch.uint8))
    return bucket


def test_the_last_gradients_go_first_in_a_small_message() -> None:
    half = FIRST_BUCKET // 2
    assert made(parameters(8, half, half, half, 16)) == [[16, half, half], [half, 8]]
    assert made(parameters(half, 8, 4 * FIRST_BUCKET, 16)) == [[16, 4 * FIRST_BUCKET], [8, half]]


def test_messages_hold_25_mib_at_most() -> None:
    quarter = MOST // 4
    given = parameters(quarter, 3 * MOST, quarter, quarter, quarter, quarter)
    assert made(given) == [[quarter], [3 * MOST], [quarter] * 4]


def test_types_and_sparse_gradients_are_not_mixed() -> None:
    half, table = parameters(16, 16, dtype=torch.bfloat16), parameters(32)
    given = [*parameters(8), half[0], *table, *parameters(8), half[1]]
    assert made(given, sparse=table) == [[16, 16], [8, 8], [32]]


def test_sparse_gradients_stay_sparse() -> None:
    """A copy is sent; one without rows on all ranks is none; a dense one of tied weights stays dense."""
    table = nn.Parameter(torch.randn(4, 3))
    bucket = SparseBucket(table, table.dtype)
    bucket.join([None], 0.5)
    bucket.spread([None])
    assert table.grad is None
    table.grad = torch.sparse_coo_tensor([[1, 1]], torch.ones(2, 3), (4, 3), check_invariants=True)
    assert bucket.join([table.grad], 0.5)._nnz() == 1
    assert table.grad._nnz() == 2
    bucket.spread(gradients(bucket))
    assert table.grad.is_coalesced()
    assert table.grad.to_dense()[1].tolist() == [1.0] * 3
    table.grad = torch.ones(4, 3)
    bucket.join([table.grad], 0.5)
    bucket.spread([table.grad])
    assert table.grad.tolist() == [[0.5] * 3] * 4


@pytest.mark.skipif(not has_grad_dtype(), reason="gradients have the types of their parameters before torch 2.10")
def test_sums_of_half_precision_parameters_are_sent_in_single_precision() -> None:
    """Of one type on all ranks, whatever each has."""
    wide, narrow = (nn.Parameter(torch.randn(3).bfloat16()) for _ in range(2))
    wide.grad_dtype = narrow.grad_dtype = None
    wide.grad, narrow.grad = torch.full((3,), 1 / 3), torch.ones(3).bfloat16()
    bucket = placed(*make_buckets([wide, narrow], (), most=MOST, arrival={}, summed=True))
    assert bucket.join(gradients(bucket), 0.5).dtype == torch.float32
    bucket.spread(gradients(bucket))
    assert wide.grad.tolist() == torch.full((3,), 1 / 6).tolist()
    assert narrow.grad.dtype == torch.float32
    assert narrow.grad.tolist() == [0.5] * 3
    bucket = placed(*make_buckets([wide, narrow], (), most=MOST, arrival={}))
    bucket.join(gradients(bucket), 1.0)
    bucket.spread(gradients(bucket))
    assert {wide.grad.dtype, narrow.grad.dtype} == {torch.bfloat16}
