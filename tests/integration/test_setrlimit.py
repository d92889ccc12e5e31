"""Memory that really runs out: the kernel refuses the CPU's allocator."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.skipif(not Path("/proc/self/statm").is_file(), reason="needs Linux to count and limit the address space")
def test_a_batch_of_512_survives_a_small_address_space() -> None:
    """Without a retry the run ends; with one it trains on in parts, to the same weights."""
    done = subprocess.run(
        [sys.executable, str(HERE / "address_space.py"), str(100 * 2**20)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout.splitlines()[-1])
    whole, limited = result["whole"], result["limited"]
    assert "DefaultCPUAllocator" in result["error"]
    assert (whole["events"], whole["planned"], set(whole["sizes"])) == (0, 512, {512})
    assert limited["events"] >= 1
    assert limited["sizes"][0] == 512
    assert limited["planned"] < 512
    assert max(limited["sizes"][-8:]) == limited["planned"]
    assert limited["weights"] == pytest.approx(whole["weights"], rel=1e-4, abs=1e-6)
