from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from lightning_ga.probe.planned.estimate import LikeCuda


def saved(step: Any, *, like_cuda: bool = True) -> list[torch.Tensor]:
    """What a step keeps for its backward pass."""
    kept: list[torch.Tensor] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t)
    with LikeCuda() if like_cuda else nullcontext(), hooks:
        step()
    return kept


def test_dropout_keeps_a_mask_of_bytes():
    x = torch.randn(64, requires_grad=True)
    calls = [lambda: F.dropout(x, 0.5), lambda: nn.Dropout(0.1)(x), lambda: torch.dropout(x, 0.5, train=True)]
    for call in calls:
        assert [t.dtype for t in saved(call)] == [torch.bool]
        assert [t.dtype for t in saved(call, like_cuda=False)] == [torch.float32]


def test_dropout_out_of_use_changes_nothing():
    x = torch.randn(64)
    with LikeCuda():
        assert F.dropout(x, 0.5, training=False) is x
        assert torch.equal(F.dropout(x, 0.0), x)
        assert not F.dropout(x, 1.0).any()


def test_attention_with_dropout_keeps_no_matrix_of_tokens_by_tokens():
    """CUDA's kernels draw it again."""
    q = torch.randn(1, 1, 50, 8, requires_grad=True)
    for call in (
        lambda: F.scaled_dot_product_attention(q, q, q, dropout_p=0.1),
        lambda: F.scaled_dot_product_attention(q, q, q, None, 0.1),
    ):
        assert max(t.numel() for t in saved(call)) < 50 * 50
        assert max(t.numel() for t in saved(call, like_cuda=False)) == 50 * 50


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.layer_norm(x, [16]),
        lambda x: F.group_norm(x, 2),
        lambda x: F.softmax(x, dim=1),
        lambda x: x.log_softmax(1),
        lambda x: torch.sum(x, 1),
        lambda x: x.exp(),
        lambda x: F.mse_loss(x, x),
        lambda x: F.cross_entropy(x, torch.zeros(4, dtype=torch.int64)),
        lambda x: torch.pow(x, 2),
    ],
)
def test_under_autocast_what_cuda_computes_in_32_bits_comes_out_in_32(function: Any):
    x = torch.randn(4, 16).bfloat16()
    with LikeCuda():
        assert function(x).dtype is torch.bfloat16
        with torch.autocast("cpu", torch.bfloat16):
            assert function(x).dtype is torch.float32


def test_products_stay_in_half_precision():
    x = torch.randn(4, 16)
    with LikeCuda(), torch.autocast("cpu", torch.bfloat16):
        assert F.linear(x, torch.randn(3, 16)).dtype is torch.bfloat16
        assert F.softmax(x.bfloat16(), dim=1, dtype=torch.float64).dtype is torch.float64
        assert x.double().exp().dtype is torch.float64
