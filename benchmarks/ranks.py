"""One case on the ranks that ``torchrun`` starts: how both Lightning and Accelerate document it."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.cases import CASES, Case
from benchmarks.measure import Measured, measure, quiet


def measure_on_ranks(case: Case, draws: int) -> Measured:
    """Run this file on as many ranks as the case asks for.

    Raises:
        RuntimeError: If a rank fails; with the end of what it printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "measured.json"
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={case.ranks}"]
        job = ["-m", "benchmarks.ranks", case.name, str(draws), str(written)]
        done = subprocess.run([sys.executable, *torchrun, *job], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{case.name}: {done.stdout[-1000:]}{done.stderr[-3000:]}")
        return Measured(**json.loads(written.read_text()))


def main(name: str, draws: str, written: str) -> None:
    """Measure on this rank; the first writes down what came out."""
    quiet()
    case = next(case for case in CASES if case.name == name)
    measured = measure(case, int(draws))
    if torch.distributed.get_rank() == 0:
        Path(written).write_text(json.dumps({"errors": measured.errors, "reasons": measured.reasons}))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
