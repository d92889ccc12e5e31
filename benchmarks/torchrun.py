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
    """Run ``python -m module *arguments FILE`` on some ranks, and return what the first has written to that file.

    Args:
        ranks: How many.
        module: The module.
        *arguments: Its arguments.
        env: Environment variables besides those of this process.

    Raises:
        RuntimeError: If a rank fails; with the end of what it printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "found.json"
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        job = [sys.executable, *torchrun, "-m", module, *map(str, arguments), str(written)]
        done = subprocess.run(job, capture_output=True, text=True, check=False, env={**os.environ, **(env or {})})
        if done.returncode:
            raise RuntimeError(f"{module} on {ranks} ranks: {done.stdout[-1000:]}{done.stderr[-3000:]}")
        return json.loads(written.read_text())


def write_as_first_rank(find: Callable[[], Any], written: Path) -> NoReturn:
    """Find something out on this rank; the first writes it down. The process ends with that.

    The interpreter does not: a thread of gloo that lets go of a tensor meanwhile would abort it (torch 2.15 under
    Python 3.11).
    """
    found = find()
    if torch.distributed.get_rank() == 0:
        written.write_text(json.dumps(found))
    torch.distributed.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
