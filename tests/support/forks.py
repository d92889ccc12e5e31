"""Processes that begin with all that is imported: forks of a server, as importing takes longer than most tests.

A test that needs a process of its own (gloo ranks, a kill, a limit that the kernel sets) gets a fork of a server that
has imported torch, Lightning and the package, and has trained nothing. Each pytest worker starts one server, when the
first test asks for a fork; it ends with the worker.

Nobody watches the clock: CPU time is the sign of life. Whatever works uses some, however slow the machine is; ranks
that wait for each other use none.
"""

import faulthandler
import gc
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any
from unittest import mock

import psutil

SUPPORT = Path(__file__).parent
PATHS = (SUPPORT, SUPPORT.parent / "differential", SUPPORT.parents[1])
PRELOADED = ("forks", "random_training", "address_space")
AT_WORK = 3.0  # seconds of CPU time that show that a process goes on; a rank that waits uses 0.3 in two minutes
PATIENCE = 120  # seconds in which less than that is used by something that hangs
LAST_RESORT = 600  # seconds


@dataclass(frozen=True)
class Ended:
    """How a process came to its end."""

    code: int
    output: str


def forked(
    function: Callable[..., int | None], *arguments: Any, environment: Mapping[str, str] | None = None, folder: Path
) -> Ended:
    """Call a function in a process of its own, and wait until it and all that it has started have ended."""
    output = folder / "output.txt"
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
    process = server().Process(target=begin, args=(function, arguments, variables, folder, output))
    process.start()
    try:
        wait(process, output)
    finally:
        end(process.pid)
        process.join()
    code = process.exitcode
    process.close()
    return Ended(code, output.read_text(errors="replace"))


@cache
def server() -> ForkServerContext:
    """The start of forks; the server itself has one thread, and modules of the tests on its path."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    paths = os.pathsep.join([*map(str, PATHS), *filter(None, [os.environ.get("PYTHONPATH")])])
    with mock.patch.dict(os.environ, {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}):
        forkserver.ensure_running()
    return context


def begin(
    function: Callable[..., int | None], arguments: Any, variables: dict[str, str], folder: Path, output: Path
) -> None:
    """The life of a fork: a session of its own, in which a signal makes every process say where it is."""
    gc.freeze()
    os.setsid()
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    faulthandler.register(signal.SIGUSR1, file=2)
    sys.exit(function(*arguments))


def wait(process: Any, output: Path) -> None:
    """Wait for a process and all of its session, as long as they use CPU time."""
    started = at = time.monotonic()
    used = 0.0
    while not ended(process, 5):
        alive, now = session(process.pid), time.monotonic()
        total = sum(cpu_seconds(each) for each in alive)
        if abs(total - used) >= AT_WORK:
            used, at = total, now
        if now - at > PATIENCE or now - started > LAST_RESORT:
            raise AssertionError(f"{len(alive)} processes hang: {where(alive, output)}")


def ended(process: Any, seconds: float) -> bool:
    """Whether a process and all of its session end within some seconds, or twice as many."""
    process.join(seconds)
    until = time.monotonic() + seconds
    while not process.is_alive():
        if not session(process.pid):
            return True
        if time.monotonic() > until:
            break
        time.sleep(0.05)
    return False


def session(leader: int) -> list[psutil.Process]:
    """Processes of a session that are not dead, and their children in sessions of their own."""
    try:
        os.killpg(leader, 0)
    except ProcessLookupError:
        return []
    alive: dict[psutil.Process, None] = {}
    for process in psutil.process_iter():
        with suppress(OSError, psutil.Error):
            if os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                alive |= dict.fromkeys([process, *process.children(recursive=True)])
    return list(alive)


def cpu_seconds(process: psutil.Process) -> float:
    with suppress(psutil.Error):
        times = process.cpu_times()
        return times.user + times.system
    return 0.0


def where(alive: list[psutil.Process], output: Path) -> str:
    """The end of an output to which every process has written where it is, one after the other."""

    def told() -> int:
        return output.read_text(errors="replace").count("most recent call first")

    for each in alive:
        before, until = told(), time.monotonic() + 30  # a busy machine takes its time
        send(each, signal.SIGUSR1)
        while told() == before and each.is_running() and time.monotonic() < until:
            time.sleep(0.3)
        time.sleep(0.3)
    return output.read_text(errors="replace")[-8000:]


def end(leader: int) -> None:
    """End what is left of a session."""
    for each in session(leader):
        send(each, signal.SIGKILL)


def send(process: psutil.Process, number: int) -> None:
    with suppress(psutil.Error):
        process.send_signal(number)


def in_ranks(ranks: int, function: Callable[..., int | None], *arguments: Any) -> int:
    """Call a function on several ranks, each a fork of this process, with the variables of an elastic agent."""
    port = free_port()
    children = [fork(as_rank, rank, ranks, port, function, *arguments) for rank in range(ranks)]
    return max((exit_code(child) for child in children), key=abs)


def in_turn(function: Callable[..., int | None], lives: Sequence[tuple[tuple[Any, ...], int]]) -> None:
    """Call a function with several arguments, one after the other, each in a fork of this process."""
    for arguments, expected in lives:
        code = exit_code(fork(function, *arguments))
        assert code == expected, f"{function.__name__}{arguments} ended with {code} instead of {expected}."


def as_rank(rank: int, ranks: int, port: int, function: Callable[..., int | None], *arguments: Any) -> int | None:
    """Call a function on one of several ranks."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "GROUP_RANK": "0"}
    os.environ |= {"LOCAL_WORLD_SIZE": str(ranks), "TORCHELASTIC_RUN_ID": "test"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return function(*arguments)


def fork(function: Callable[..., int | None], *arguments: Any) -> int:
    """Call a function in a fork of this process; the number of the new process."""
    child = os.fork()
    if child:
        return child
    code: int | None = 1
    try:
        code = function(*arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code or 0)


def exit_code(child: int) -> int:
    """How a fork of this process ends; a signal that ends it is negative."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def free_port() -> int:
    """A port of this host that nobody listens to."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
