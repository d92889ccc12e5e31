"""Tell on the terminal what the probe is doing, in place of the progress bar, which is not there yet."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def announcing(trainer: Any) -> Iterator[Callable[[str], None]]:
    """Yield what writes a line over the last one: on rank 0, in a terminal, where a progress bar is wanted."""
    bar = trainer.progress_bar_callback
    wanted = bar is not None and not getattr(bar, "is_disabled", False)
    visible = wanted and trainer.is_global_zero and sys.stderr.isatty()

    def write(text: str) -> None:
        if visible:
            print(f"\r{text:<79}", end="" if text else "\r", file=sys.stderr, flush=True)

    try:
        yield write
    finally:
        write("")
