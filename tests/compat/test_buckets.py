"""Gradients are joined to messages of a bounded size; ranks that exchange them are in ``integration/``."""

from collections.abc import Iterable

import pytest
import torch
from torch import nn

from lightning_ga.compat.buckets import FIRST_BUCKET, Bucket, SparseBucket, make_buckets
from lightning_ga.compat.gradient_dtype import has_grad_dtype

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
    """They are complete first, and the sooner something is sent the better, but no bias alone."""
    half = FIRST_BUCKET // 2
    assert made(parameters(8, half, half, half, 16)) == [[16, half, half], [half, 8]]
    assert made(parameters(half, 8, 4 * FIRST_BUCKET, 16)) == [[16, 4 * FIRST_BUCKET], [8, half]]


def test_messages_hold_25_mib_at_most() -> None:
    """A larger gradient goes alone."""
    quarter = MOST // 4
    given = parameters(quarter, 3 * MOST, quarter, quarter, quarter, quarter)
    assert made(given) == [[quarter], [3 * MOST], [quarter] * 4]


def test_types_and_sparse_gradients_are_not_mixed() -> None:
    """Neighbours in between do not cut a message short."""
    half, table = parameters(16, 16, dtype=torch.bfloat16), parameters(32)
    given = [*parameters(8), half[0], *table, *parameters(8), half[1]]
    assert made(given, sparse=table) == [[16, 16], [8, 8], [32]]


def awkward() -> tuple[list[nn.Parameter], list[torch.Tensor | None]]:
    """Parameters whose gradients lie in memory in all orders, are sparse or missing; and these gradients."""
    plain, cut, turned, wide, table, missing = (nn.Parameter(torch.randn(4, 6)) for _ in range(6))
    image = nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
    every_other = nn.Parameter(torch.randn(8, 3)[::2])
    empty, number = nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.tensor(2.0))
    sparse = torch.sparse_coo_tensor([[3, 1, 3]], torch.randn(3, 6), (4, 6), check_invariants=True)
    found = [torch.randn(4, 6), torch.randn(4, 12)[:, ::2], torch.randn(6, 4).T, torch.randn(6).expand(4, 6), sparse]
    more = [None, torch.randn(2, 3, 4, 5), torch.randn(4, 3), torch.zeros(0, 3), torch.tensor(3.0)]
    return [plain, cut, turned, wide, table, missing, image, every_other, empty, number], [*found, *more]


def test_gradients_of_all_kinds_are_averaged() -> None:
    """Those of two ranks that lack different ones."""
    weights, ours = awkward()
    theirs = [None if gradient is None else torch.randn(gradient.shape) for gradient in ours]
    theirs[0], theirs[5] = None, torch.randn(4, 6)
    bucket = placed(*make_buckets(weights, (), most=MOST, arrival={}))
    ours, theirs, weights = ours[::-1], theirs[::-1], weights[::-1]
    wanted = [sum(g.to_dense() / 3 for g in pair if g is not None) for pair in zip(ours, theirs)]
    message = bucket.join(theirs, 1 / 3).clone()
    bucket.join(ours, 1 / 3).add_(message)
    for weight, gradient in zip(weights, ours):
        # A pass adds to its gradients, so no two entries of one are one in memory.
        weight.grad = gradient.clone() if gradient is not None and 0 in gradient.stride() else gradient
    bucket.spread(gradients(bucket))
    for weight, mean in zip(weights, wanted):
        assert weight.grad is not None
        torch.testing.assert_close(weight.grad, mean)


def test_a_gradient_in_the_order_of_its_parameter_is_copied_as_it_lies() -> None:
    """As ``DistributedDataParallel`` does: no copy turns an image around."""
    image = nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
    bucket = placed(Bucket((image,), image, image.dtype))
    values = torch.arange(120.0).view(2, 4, 5, 3).permute(0, 3, 1, 2)
    assert bucket.join([values], 1.0)[:-1].tolist() == [*range(120)]


def test_a_gradient_that_another_rank_has_is_taken_over() -> None:
    """One that nobody has stays missing, and an unforeseen sparse one becomes dense."""
    here, elsewhere, nowhere, table = (nn.Parameter(torch.randn(2, 3)) for _ in range(4))
    bucket = placed(Bucket((here, elsewhere, nowhere, table), here, here.dtype))
    table.grad, elsewhere.grad = torch.ones(2, 3).to_sparse(), 4 * torch.ones(2, 3)
    theirs = bucket.join(gradients(bucket), 0.5).clone()
    here.grad, elsewhere.grad = torch.ones(2, 3), None
    bucket.join(gradients(bucket), 0.5).add_(theirs)
    bucket.spread(gradients(bucket))
    assert here.grad.tolist() == [[0.5] * 3] * 2
    assert elsewhere.grad is not None
    assert elsewhere.grad.tolist() == [[2.0] * 3] * 2
    assert nowhere.grad is None
    assert table.grad is not None
    assert table.grad.tolist() == [[1.0] * 3] * 2  # both copies hold it


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
