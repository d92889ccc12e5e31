"""Jagged tensors that share their offsets can be computed with together, whole and in parts."""

from typing import Any

import pytest
import torch

from lightning_ga.batch.take import take

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
LENGTHS = (2, 4, 1, 3)


def jagged(**given: Any) -> torch.Tensor:
    rows = [torch.arange(3.0 * length).view(length, 3) for length in LENGTHS]
    return torch.nested.nested_tensor(rows, layout=torch.jagged, **given)


def test_parts_of_tensors_with_the_same_offsets_share_theirs() -> None:
    """Also of one that is transposed, and of one that a computation has made."""
    inputs = jagged()
    targets = torch.nested.nested_tensor_from_jagged(torch.ones(10, 3), offsets=inputs.offsets())
    for start, stop in ((0, 1), (1, 3), (3, 4), (0, 4)):
        parts = [take(each, 0, start, stop) for each in (inputs, targets, 2 * inputs)]
        difference = (parts[0] - parts[1] + parts[2]).unbind()
        wanted = [3 * rows - 1 for rows in inputs.unbind()[start:stop]]
        assert all(torch.equal(*pair) for pair in zip(difference, wanted, strict=True))
    turned = take(inputs.transpose(1, 2), 0, 1, 3)
    assert torch.equal(turned.transpose(1, 2).unbind()[0], inputs.unbind()[1])
    assert (turned.transpose(1, 2) - take(inputs, 0, 1, 3)).values().abs().sum() == 0


def test_parts_are_views_and_keep_gradients() -> None:
    values = torch.ones(10, 3, requires_grad=True)
    whole = torch.nested.nested_tensor_from_jagged(values, offsets=jagged().offsets())
    part = take(whole, 0, 1, 3)
    assert part.values().untyped_storage().data_ptr() == values.untyped_storage().data_ptr()
    part.values().sum().backward()
    assert values.grad is not None
    assert values.grad.sum(1).tolist() == [0, 0, 3, 3, 3, 3, 3, 0, 0, 0]


def test_jagged_tensors_with_gaps_are_copied() -> None:
    rows, lengths = torch.arange(32.0).view(4, 8), torch.tensor(LENGTHS)
    gaps = torch.nested.narrow(rows, 1, torch.arange(4), lengths, layout=torch.jagged)
    part = take(gaps, 0, 1, 3)
    assert [each.tolist() for each in part.unbind()] == [[9.0, 10.0, 11.0, 12.0], [18.0]]
