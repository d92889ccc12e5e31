"""Sums of bits tell of changes that no version tells of."""

import pytest
import torch

from lightning_ga.snapshot.checksums import checksums, differ
from lightning_ga.testing import out_of_memory_at

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


def test_no_dispatch_mode_sees_sums() -> None:
    """Operations of a step are counted as if there were none."""
    tensor = torch.ones(3)
    with out_of_memory_at(1) as counter:
        assert checksums([tensor]) != [None]
    assert counter.operations == 0


def test_where_memory_runs_out_there_are_no_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is said to have changed then."""

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    tensor = torch.ones(3)
    before = checksums([tensor])
    monkeypatch.setattr(torch, "stack", fail)
    now = checksums([tensor])
    assert now == [None]
    assert not differ(before[0], now[0])
    assert differ(1, 2)
