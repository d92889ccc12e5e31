"""What a process owes its terminal: signs that it can show, a log of what was printed, and an end by Ctrl-C or SIGTERM.

Both signals end with the exit codes of the shell, and with one sentence on what was saved and how to go on.
"""

import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any, TextIO

from lightning_ga.app.errors import FULL, chain
from lightning_ga.errors import printable

MOVES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")  # colours and movements of a terminal's cursor
SIGNALS = {"KeyboardInterrupt": signal.SIGINT, "SIGTERMException": signal.SIGTERM, "Interrupted": signal.SIGTERM}
_open: list["Tee"] = []  # logs of what is printed


def printable_everywhere(*streams: Any) -> None:
    """Have signs that a terminal's encoding lacks shown as question marks, where printing them would fail.

    Streams that the process was started without, as by ``>&-``, lead nowhere: a file would get their number.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115 (as long as the process)
    for stream in streams or (sys.stdout, sys.stderr):
        with suppress(AttributeError, ValueError, OSError):
            stream.reconfigure(errors="replace")


def silence(stream: Any) -> None:
    """Let what a stream still holds, and all that it is given, go nowhere: it can be written to no more."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def columns() -> int:
    """How many columns a table may have: those of the terminal within reason, 80 where there is none."""
    return max(60, min(shutil.get_terminal_size((80, 24)).columns, 200))


class Tee:
    """A stream that writes what is printed to a log as well, without what only moves a terminal's cursor.

    If nobody can read it any more (a closed pipe, a full disk), the run goes on, and so does its log.
    """

    def __init__(self, stream: TextIO, log: TextIO) -> None:
        self._stream, self._log = stream, log

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Print and keep."""
        if "\r" not in text:
            self.keep(MOVES.sub("", text))
        self._show(self._stream.write, text)
        return len(text)

    def keep(self, text: str) -> None:
        """Write to the log alone."""
        with suppress(OSError, ValueError):  # a full disk is told by what must be written
            self._log.write(text)

    def flush(self) -> None:
        """Both."""
        self._show(self._stream.flush)
        with suppress(OSError, ValueError):
            self._log.flush()

    def _show(self, show: Callable[..., object], *text: str) -> None:
        try:
            show(*text)
        except OSError as error:
            silence(self._stream)
            warn(f"What is printed cannot be shown ({error.strerror}): the run goes on, and keeps it in its log.")


@contextmanager
def printed_to(path: Path) -> Iterator[None]:
    """A context that keeps all that is printed in a file, added to its end."""
    with (
        path.open("a", encoding="utf-8", errors="replace") as log,
        redirect_stdout(Tee(sys.stdout, log)) as tee,
        redirect_stderr(Tee(sys.stderr, log)),
    ):
        _open.append(tee)
        try:
            yield
        finally:
            _open.remove(tee)


def keep_in_log(line: str, show: Callable[[str], object] | None = None) -> None:
    """Write a line to the log of what is printed, and ``show`` it; on the screen alone if no log is open."""
    if show is not None:
        show(line)
    shown = show is not None and isinstance(sys.stdout, Tee)  # not within a display of rich, which moves the cursor
    if _open and not shown:
        _open[-1].keep(f"{line}\n")


def warn(sentence: str | None) -> None:
    """Print a warning beside the output; nothing where there is none."""
    if sentence:
        print(f"Warning: {printable(sentence)}", file=sys.stderr)


class Interrupted(BaseException):
    """A signal that ended the run; its text is told to the user."""

    def __init__(self, signum: signal.Signals, outcome: str = "this run had trained and saved nothing.") -> None:
        super().__init__(f"Stopped by {'Ctrl-C' if signum == signal.SIGINT else signum.name}: {outcome}")
        self.code = 128 + signum  # as shells count: 130 for Ctrl-C, 143 for SIGTERM


@contextmanager
def interruptions_told(outcome: Callable[[], str]) -> Iterator[None]:
    """A context that turns the end by a signal into an ``Interrupted`` that says what became of the run.

    An error of a full disk is given that as a note. Lightning turns Ctrl-C into ``SystemExit(1)`` and SIGTERM in a fit,
    once a batch is done, into one without a code; at other times SIGTERM ends the process.
    """
    try:
        yield
    except BaseException as end:  # torch.save, if it is interrupted, raises an error of its own
        links = [*chain(end)]
        behind = [SIGNALS[type(link).__name__] for link in links if type(link).__name__ in SIGNALS]
        if behind:
            raise Interrupted(behind[0], outcome()) from end
        if any(isinstance(link, OSError) and link.errno in FULL for link in links):
            end.add_note(outcome())
        raise
