"""What a run prints and keeps: one logger, its handler for the screen, and the end by Ctrl-C or SIGTERM."""

import logging
import math
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_only

from lightning_ga.app.mistakes import chain, link_of
from lightning_ga.errors import RankError, printable

log = logging.getLogger("lightning_ga.app")
SIGNALS = {"KeyboardInterrupt": signal.SIGINT, "SIGTERMException": signal.SIGTERM, "Interrupted": signal.SIGTERM}


class Console(logging.Handler):
    """Prints records: warnings and errors on standard error, without the traceback that the log keeps."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print one; if nobody can read it (a closed pipe, a full disk), the run continues."""
        stream: Any = sys.stderr if record.levelno >= logging.WARNING else sys.stdout
        encoding = getattr(stream, "encoding", None) or "utf-8"
        text = record.getMessage().rstrip("\n").encode(encoding, "replace").decode(encoding)
        try:
            print(text, file=stream, flush=True)
        except OSError:
            silence(stream)


def silence(stream: Any) -> None:
    """Discard what a stream still buffers and all that is written to it later, because it is closed."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def columns() -> int:
    """How many columns a table may have: those of the terminal within reason, 80 without one."""
    return max(60, min(shutil.get_terminal_size((80, 24)).columns, 200))


def number(value: float) -> str:
    """A measured number with four digits behind the point, small and huge ones by their power of ten.

    Examples:
        >>> number(0.75), number(0.00015), number(1e20)
        ('0.7500', '1.5e-4', '1e20')
    """
    if not math.isfinite(value):
        return "not finite"
    if value == 0 or 1e-3 <= abs(value) < 1e9:
        return f"{value:.4f}"
    digits, _, power = f"{value:.3e}".partition("e")
    return f"{digits.rstrip('0').rstrip('.')}e{int(power)}"


def warn(sentence: str) -> None:
    """Log a warning."""
    log.warning("Warning: %s", printable(sentence))


def is_first_rank(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is the only one, or the first of those that were started together."""
    names = ["RANK"] if "RANK" in environment else ["SLURM_PROCID", "NODE_RANK", "LOCAL_RANK"]
    return {environment.get(name, "0") for name in names} == {"0"}


def report_error(sentence: str, error: BaseException | None = None, *, trace: bool = False) -> None:
    """Print a mistake on the first rank, and an error of one rank alone on that rank; the log keeps the ``trace``."""
    rank = getattr(rank_zero_only, "rank", int(not is_first_rank()))  # Lightning sets it when it is imported
    if rank and (error is None or link_of(RankError, error) is None):
        return
    where = f" on rank {rank}" if rank else ""
    text = f"Error{where}: {printable(sentence)}"
    if any(isinstance(handler, Console) for handler in logging.getLogger().handlers):
        log.error("%s", text, exc_info=error if trace else None)
    else:
        print(text, file=sys.stderr)


class Interrupted(BaseException):
    """A signal that ended the run; its text is printed."""

    def __init__(self, signum: signal.Signals, outcome: str = "this run had trained and saved nothing.") -> None:
        name = "Ctrl-C" if signum == signal.SIGINT else signum.name
        super().__init__(f"Stopped by {name}: {outcome}")
        self.code = 128 + signum  # as shells count: 130 for Ctrl-C, 143 for SIGTERM


@contextmanager
def interruptions_reported(outcome: Callable[[], str]) -> Iterator[None]:
    """A context that turns the end by a signal into an ``Interrupted`` that says what the run has saved."""
    try:
        yield
    except BaseException as end:  # Lightning makes SystemExit of signals, and torch.save an error of its own
        for link in chain(end):
            if type(link).__name__ in SIGNALS:
                raise Interrupted(SIGNALS[type(link).__name__], outcome()) from end
        raise
