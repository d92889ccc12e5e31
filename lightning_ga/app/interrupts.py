"""Ctrl-C and SIGTERM: the exit codes of the shell, and one sentence on what was saved and how to go on."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning_ga.app.errors import chain


class Interrupted(BaseException):
    """A signal that ended the run; its text is told to the user."""

    def __init__(self, signum: signal.Signals, outcome: str = "nothing had been trained or saved.") -> None:
        name = "Ctrl-C" if signum == signal.SIGINT else signum.name
        super().__init__(f"Stopped by {name}: {outcome}")
        self.signum = signum

    @property
    def code(self) -> int:
        """128 + the number of the signal, as shells count: 130 for Ctrl-C, 143 for SIGTERM."""
        return 128 + self.signum


@contextmanager
def sigterm_ends() -> Iterator[None]:
    """A context in which SIGTERM ends the process at once, with a sentence: there is nothing to save yet.

    An exception would not do: code that imports optional packages catches all that is raised there.
    """

    def end(*_: Any) -> None:
        interrupted = Interrupted(signal.SIGTERM)
        print(f"Error: {interrupted}", file=sys.stderr, flush=True)
        os._exit(interrupted.code)

    with sigterm_handled(end):
        yield


@contextmanager
def interruptions_told(outcome: Callable[[], str]) -> Iterator[None]:
    """A context that turns the end by a signal into an ``Interrupted`` that says what became of the run.

    Lightning turns Ctrl-C into ``SystemExit(1)`` and SIGTERM, once a batch is done, into one without a code.
    """

    def interrupt(*_: Any) -> None:
        raise Interrupted(signal.SIGTERM)

    try:
        with sigterm_handled(interrupt):
            yield
    except (KeyboardInterrupt, Interrupted, SystemExit) as end:
        signum = signal_behind(end)
        if signum is None:
            raise
        raise Interrupted(signum, outcome()) from end


@contextmanager
def sigterm_handled(handler: Callable[..., None]) -> Iterator[None]:
    """A context in which SIGTERM calls a function; threads other than the first cannot handle signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def signal_behind(end: BaseException) -> signal.Signals | None:
    """Which signal an exception comes from, if one."""
    for link in chain(end):
        if isinstance(link, Interrupted):
            return link.signum
        if isinstance(link, KeyboardInterrupt):
            return signal.SIGINT
        if type(link).__name__ == "SIGTERMException":
            return signal.SIGTERM
    return None
