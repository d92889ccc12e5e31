"""A line on the terminal that says what the probe is doing: it takes the place of the bar, which is not there yet."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class ProbeLine:
    """One line that is written over and over, and wiped out at the end.

    Args:
        visible: Whether anything is written at all.
    """

    def __init__(self, visible: bool) -> None:
        self._visible = visible
        self._steps = 0

    def step(self, micro_batch_size: int) -> None:
        """A trial step of so many samples begins."""
        self._steps += 1
        self._write(f"Looking for the largest micro-batch: step {self._steps}, {micro_batch_size} samples …")

    def timing(self, micro_batch_size: int) -> None:
        """Passes of so many samples are timed."""
        self._write(f"Looking for the fastest micro-batch: {micro_batch_size} samples …")

    def wipe(self) -> None:
        """Leave the line empty."""
        self._write("")

    def _write(self, text: str) -> None:
        if self._visible:
            print(f"\r{text:<79}", end="\r" if not text else "", file=sys.stderr, flush=True)


@contextmanager
def probe_line(trainer: Any) -> Iterator[ProbeLine]:
    """The line of a probe in a Trainer: on rank 0, in a terminal, where a progress bar is wanted."""
    bar = trainer.progress_bar_callback
    wanted = bar is not None and not getattr(bar, "is_disabled", False)
    line = ProbeLine(bool(wanted and trainer.is_global_zero and sys.stderr.isatty()))
    try:
        yield line
    finally:
        line.wipe()
