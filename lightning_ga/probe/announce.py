"""Tell on the terminal what the probe is doing, in place of the progress bar, which is not there yet."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class ProbeLine:
    """One line that is written over and over.

    Args:
        visible: Whether anything is written at all.
    """

    def __init__(self, visible: bool) -> None:
        self._visible = visible
        self._steps = 0

    def step(self, micro_batch_size: int) -> None:
        """Tell that a trial step of so many samples begins."""
        self._steps += 1
        self._write(f"Looking for the largest micro-batch: step {self._steps}, {micro_batch_size} samples …")

    def timing(self, micro_batch_size: int) -> None:
        """Tell that passes of so many samples are timed."""
        self._write(f"Looking for the fastest micro-batch: {micro_batch_size} samples …")

    def wipe(self) -> None:
        """Leave the line empty."""
        self._write("")

    def _write(self, text: str) -> None:
        if self._visible:
            print(f"\r{text:<79}", end="\r" if not text else "", file=sys.stderr, flush=True)


@contextmanager
def announcing(trainer: Any) -> Iterator[ProbeLine]:
    """Yield a Trainer's line and wipe it at the end: on rank 0, in a terminal, where a progress bar is wanted."""
    bar = trainer.progress_bar_callback
    wanted = bar is not None and not getattr(bar, "is_disabled", False)
    line = ProbeLine(bool(wanted and trainer.is_global_zero and sys.stderr.isatty()))
    try:
        yield line
    finally:
        line.wipe()
