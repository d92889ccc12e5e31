"""Copies of tensors and sums of their bits."""

import pytest
import torch

from lightning_ga.snapshot.copies import SMALL, Copies, checksums


def test_copies_made_in_evaluation_are_written_to_in_training() -> None:
    """A sanity check comes first: what is made in inference mode could not be written to outside of it."""
    tensors = [torch.zeros(()), torch.zeros(3), torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64)]
    with torch.inference_mode():
        copies = Copies(tensors)
        copies.take()
    for tensor in tensors:
        tensor += 1
    copies.take()
    for tensor in tensors:
        tensor += 1
    copies.restore()
    assert all(bool((tensor == 1).all()) for tensor in tensors)
    assert sum(copy.numel() for copy in copies.tensors()) == 12


@pytest.mark.parametrize(
    "tensor",
    [
        *(torch.arange(7).to(dtype) for dtype in (torch.float64, torch.bfloat16, torch.int8, torch.bool)),
        torch.arange(7.0)[1:],
        torch.arange(6.0).view(2, 3).T,
        torch.complex(torch.arange(3.0), torch.arange(3.0)),
        *(
            torch.zeros(SMALL, dtype=dtype) for dtype in (torch.float64, torch.float32, torch.int8)
        ),  # eight bytes at once
        torch.zeros(SMALL)[1:],
    ],
    ids=lambda tensor: f"{tensor.dtype}, {tensor.numel()} {tensor.stride()}",
)
def test_a_sum_of_bits_shows_a_change_that_raises_no_version(tensor: torch.Tensor) -> None:
    """Of any type, at any place in memory."""
    before, version = checksums([tensor]), tensor._version
    assert checksums([tensor]) == before
    last = tensor.data[-1]
    last.copy_(~last if tensor.dtype is torch.bool else last + 1)
    assert tensor._version == version
    assert before[0] is not None
    assert checksums([tensor]) != before


@pytest.mark.parametrize("first", [0, 1, 511, 100_001])
@pytest.mark.parametrize("apart", [1, 2, 256, 512, 65_536])
def test_a_sum_of_bits_shows_values_that_change_places(first: int, apart: int) -> None:
    """Of a large tensor, too, whose upper bits must not be pushed out by weights that are powers of two."""
    tensor = torch.zeros(SMALL)
    tensor[first] = 1.0
    before = checksums([tensor])
    tensor[first], tensor[first + apart] = 0.0, 1.0
    assert checksums([tensor]) != before
