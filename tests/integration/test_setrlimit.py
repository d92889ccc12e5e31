"""Memory that really runs out: the kernel refuses the CPU's allocator."""

import json
from pathlib import Path

import pytest
from address_space import main
from forks import forked


@pytest.mark.skipif(not Path("/proc/self/statm").is_file(), reason="needs Linux to count and limit the address space")
def test_a_batch_of_512_survives_a_small_address_space(tmp_path: Path) -> None:
    """Without a retry the run ends; with one it trains on in parts, to the same weights."""
    done = forked(main, 50 * 2**20, tmp_path / "result.json", folder=tmp_path)
    assert done.code == 0, done.output[-4000:]
    result = json.loads((tmp_path / "result.json").read_text())
    whole, limited = result["whole"], result["limited"]
    assert "DefaultCPUAllocator" in result["error"]
    assert (whole["events"], whole["planned"], whole["sizes"]) == (0, 512, [[512] * 2, [512] * 2])
    first, second = limited["sizes"]
    assert limited["events"] >= 1
    assert first[0] == 512
    assert limited["planned"] == min(first) < 512
    assert limited["planned"] == second[0] == max(second)
    assert limited["weights"] == pytest.approx(whole["weights"], rel=1e-4, abs=1e-6)
