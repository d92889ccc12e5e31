"""Ctrl-C and SIGTERM: the exit codes of the shell, and one sentence on what was saved and how to go on."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Interrupted(BaseException):
    """A signal that ended the run; its text is told to the user.

    Attributes:
        signum: The signal.
    """

    def __init__(self, signum: signal.Signals, outcome: str = "nothing had been trained or saved.") -> None:
        name = "Ctrl-C" if signum == signal.SIGINT else signum.name
        super().__init__(f"Stopped by {name}: {outcome}")
        self.signum = signum

    @property
    def code(self) -> int:
        """128 + the number of the signal, as shells count: 130 for Ctrl-C, 143 for SIGTERM."""
        return 128 + self.signum

    @classmethod
    def by_keyboard(cls) -> "Interrupted":
        """Ctrl-C before there was anything to tell."""
        return cls(signal.SIGINT)


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """A context in which SIGTERM raises ``Interrupted``, as Ctrl-C raises ``KeyboardInterrupt``."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals cannot be handled here
        return

    def interrupt(*_: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough: the way out must not be cut off
        raise Interrupted(signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def interruptions_told(outcome: Callable[[], str]) -> Iterator[None]:
    """A context that turns the end by a signal into an ``Interrupted`` that says what became of the run.

    Lightning turns Ctrl-C into ``SystemExit(1)`` and SIGTERM, once a batch is done, into one without a code.

    Args:
        outcome: Called after the end: what was saved, and how to go on.
    """
    try:
        yield
    except (KeyboardInterrupt, Interrupted, SystemExit) as end:
        signum = signal_behind(end)
        if signum is None:
            raise
        raise Interrupted(signum, outcome()) from end


def signal_behind(end: BaseException) -> signal.Signals | None:
    """Which signal an exception comes from, if one."""
    link: BaseException | None = end
    while link is not None:
        if isinstance(link, Interrupted):
            return link.signum
        if isinstance(link, KeyboardInterrupt):
            return signal.SIGINT
        if type(link).__name__ == "SIGTERMException":
            return signal.SIGTERM
        link = link.__context__
    return None
