"""Sums of bits tell of changes that no version tells of."""

import pytest
import torch

from lightning_ga.snapshot.checksums import checksums

TENSORS = {
    "a scalar": torch.tensor(2.0),
    "an odd length": torch.randn(7),
    "two bytes each": torch.randn(7).to(torch.bfloat16),
    "one byte each": torch.ones(5, dtype=torch.bool),
    "complex": torch.randn(3, dtype=torch.complex64),
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "transposed": torch.randn(4, 3).t(),
    "with holes": torch.randn(6, 6)[:, :3],
    "between words": torch.randn(9)[1:8],
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_change_of_one_element_shows(name: str) -> None:
    tensor = TENSORS[name].clone() if name not in ("transposed", "with holes", "between words") else TENSORS[name]
    before, again = checksums([tensor]), checksums([tensor])
    assert before == again
    last = tensor.data[(-1,) * tensor.dim()]
    version = tensor._version
    last.copy_(torch.zeros_like(last))
    assert tensor._version == version
    assert checksums([tensor]) != before


def test_what_cannot_be_read_has_no_sum() -> None:
    """Nor do tensors of no elements differ."""
    found = checksums([torch.ones(3, device="meta"), torch.eye(3).to_sparse(), torch.ones(1).expand(4), torch.ones(0)])
    assert found == [None, None, None, 0]
