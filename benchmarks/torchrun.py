"""Programs of the benchmarks on the ranks that ``torchrun`` starts."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch


def run_on_ranks(ranks: int, module: str, *arguments: object, env: Mapping[str, str] | None = None) -> Any:
    """Run ``python -m module *arguments FILE`` on some ranks, and return what the first has written to that file."""
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "found.json"
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        job = [sys.executable, *torchrun, "-m", module, *map(str, arguments), str(written)]
        done = subprocess.run(job, capture_output=True, text=True, check=False, env={**os.environ, **(env or {})})
        if done.returncode:
            raise RuntimeError(f"{module} on {ranks} ranks: {done.stdout[-1000:]}{done.stderr[-3000:]}")
        return json.loads(written.read_text())


def write_as_first_rank(find: Callable[[], Any], written: Path) -> NoReturn:
    """Find something out on this rank; the first writes it down. The process ends with that."""
    found = find()
    if torch.distributed.get_rank() == 0:
        written.write_text(json.dumps(found))
    torch.distributed.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
