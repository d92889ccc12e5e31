"""Processes of the benchmarks: forks of this one, and functions that run on ranks."""

import json
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from benchmarks.trainers import quiet


def forked(function: Callable[[], object], output: Path, *, hangs_after: float = 600) -> tuple[int | None, float]:
    """Return a fork's exit code, ``None`` if it hung, and its processor seconds; its output goes to a file."""
    child = multiprocessing.get_context("fork").Process(target=_lead, args=(function, output))
    before = resource.getrusage(resource.RUSAGE_CHILDREN)[:2]  # user and system
    child.start()
    child.join(hangs_after)
    code = child.exitcode
    assert child.pid
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.join()
    return code, sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) - sum(before)


def _lead(function: Callable[[], object], output: Path) -> None:
    os.setsid()
    with output.open("w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    function()


def apart(function: Callable[..., Any], *arguments: Any, ranks: int, env: Mapping[str, str] | None = None) -> Any:
    """Call a function of a benchmark on ranks that ``torchrun`` starts, and return the first rank's result.

    Arguments and result travel as JSON.
    """
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        name = function.__globals__["__spec__"].name
        call = ["benchmarks.processes", name, function.__name__, json.dumps(arguments), str(result)]
        environment = {**os.environ, **(env or {})}
        ended = subprocess.run([*torchrun, *call], capture_output=True, text=True, check=False, env=environment)
        if not result.exists():
            raise RuntimeError(f"{call}: exit code {ended.returncode}. {ended.stdout[-1000:]}{ended.stderr[-3000:]}")
        return json.loads(result.read_text())


if __name__ == "__main__":
    module, function, arguments, written = sys.argv[1:]
    quiet()
    result = getattr(import_module(module), function)(*json.loads(arguments))
    if torch.distributed.get_rank() == 0:
        Path(written).write_text(json.dumps(result))
    torch.distributed.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # else a thread of autograd that releases its last task meanwhile aborts the process
