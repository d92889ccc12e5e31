"""Memory that really runs out: the kernel refuses the CPU's allocator."""

from pathlib import Path

import pytest
import torch
from address_space import main
from forks import forked


@pytest.mark.skipif(not Path("/proc/self/statm").is_file(), reason="needs Linux to count and limit the address space")
def test_a_batch_of_512_survives_a_small_address_space(tmp_path: Path) -> None:
    """Without a retry the run ends; with one it trains on in parts, to the same weights."""
    done = forked(main, 72 * 2**20, tmp_path / "result.pt", folder=tmp_path)
    assert done.code == 0, done.output[-4000:]
    (whole, sizes, *counts), error, (weights, (first, second), events, planned) = torch.load(tmp_path / "result.pt")
    assert "DefaultCPUAllocator" in error
    assert (sizes, counts) == ([[512] * 2, [512] * 2], [0, 512])
    assert events >= 1
    assert first[0] == 512
    assert second[0] == max(second) == min(first) < 512  # the second epoch starts with what fitted in the first
    assert planned == min(second)  # and may shrink again: how fragmented the address space is, the kernel decides
    torch.testing.assert_close(weights, whole, rtol=1e-4, atol=1e-6)
