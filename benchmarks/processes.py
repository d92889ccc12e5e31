"""Processes of the benchmarks: forks of this one, and functions that run in new processes."""

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
    """Exit code of a fork, ``None`` if it hung, and its processor seconds; output goes to a file, its group ends."""
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


def apart(function: Callable[..., Any], *arguments: Any, ranks: int = 0, env: Mapping[str, str] | None = None) -> Any:
    """Call a function of a benchmark in a new process, or on ranks that ``torchrun`` starts: what the first returns.

    The process is started as this one was, on a simulated device too. What goes in and comes out is told by JSON.
    """
    module = function.__globals__["__spec__"].name
    start = sys.orig_argv[: sys.orig_argv.index(module)] if module in sys.orig_argv else [sys.executable, "-m"]
    torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"] if ranks else []
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "result.json"
        call = ["benchmarks.processes", module, function.__name__, json.dumps(arguments), str(written)]
        environment = {**os.environ, **(env or {})}
        done = subprocess.run([*start, *torchrun, *call], capture_output=True, text=True, check=False, env=environment)
        if not written.exists():
            raise RuntimeError(f"{call}: exit code {done.returncode}. {done.stdout[-1000:]}{done.stderr[-3000:]}")
        return json.loads(written.read_text())


if __name__ == "__main__":
    module, function, arguments, written = sys.argv[1:]
    quiet()
    result = getattr(import_module(module), function)(*json.loads(arguments))
    ranks = torch.distributed.is_initialized()
    if not ranks or torch.distributed.get_rank() == 0:
        Path(written).write_text(json.dumps(result))
    if ranks:
        torch.distributed.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # else a thread of autograd that lets go of its last task meanwhile aborts the process
