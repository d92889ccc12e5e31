"""Processes of the benchmarks: forks of this one, programs that print JSON, and ranks that ``torchrun`` starts."""

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import torch


def forked(
    function: Callable[[], object], output: Path, *, hangs_after: float = 600
) -> tuple[int | None, resource.struct_rusage | None]:
    """Exit code of a fork of this process, ``None`` if it hung, and what it used; it leads a group of its own.

    Its output goes to a file. Whatever is left of its group is killed.
    """
    sys.stdout.flush()
    child = os.fork()
    if not child:
        _be_child(function, output)
    ended, used, start = None, None, time.monotonic()
    while ended is None and time.monotonic() - start < hangs_after:
        done, status, used = os.wait4(child, os.WNOHANG)
        ended = os.waitstatus_to_exitcode(status) if done else None
        time.sleep(0.01)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if ended is None:
        os.waitpid(child, 0)
    return ended, used


def _be_child(function: Callable[[], object], output: Path) -> NoReturn:
    os.setsid()
    with output.open("w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    code = 1
    try:
        function()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def printed_by(module: str, *arguments: object) -> Any:
    """What ``python -m module *arguments`` printed as JSON."""
    return json.loads(_output_of([sys.executable, "-m", module, *map(str, arguments)]))


def run_on_ranks(ranks: int, module: str, *arguments: object, env: Mapping[str, str] | None = None) -> Any:
    """Run ``python -m module *arguments FILE`` on some ranks, and return what the first has written to that file."""
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "found.json"
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        _output_of([sys.executable, *torchrun, "-m", module, *map(str, arguments), str(written)], env)
        return json.loads(written.read_text())


def _output_of(command: Sequence[str], env: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **(env or {})})
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(command)}: exit code {done.returncode}. {done.stdout[-1000:]}{done.stderr[-3000:]}"
        )
    return done.stdout


def write_as_first_rank(find: Callable[[], Any], written: Path) -> NoReturn:
    """Find something out on this rank; the first writes it down. The process ends with that."""
    found = find()
    if torch.distributed.get_rank() == 0:
        written.write_text(json.dumps(found))
    torch.distributed.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
