"""What a step logs, held back until the batch is done.

Read in lightning 2.6.6 and 2.5.0; ``tests/compat`` fails when a name or an order that is relied on here changes.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from lightning_ga.compat import patching


@contextmanager
def logs_held_back(trainer: Any, note: Callable[..., None]) -> Iterator[Callable[..., None]]:
    """Within, ``log`` calls ``note`` instead of the results of the running loop; yields what would have been called.

    ``LightningModule.log`` ends in ``results.log(fx, name, value, **settings)`` (``core/module.py:380``).
    """
    results = trainer._results
    if results is None:
        yield lambda *_, **__: None
        return
    patching.shadow(results, "log", note)
    try:
        yield partial(_log_or_nothing, results)
    finally:
        patching.unshadow(results, "log")


def _log_or_nothing(results: Any, fx: str, name: str, *arguments: Any, **settings: Any) -> None:
    """Log one value; if that fails half-way, put the sums of that name back (``logger_connector/result.py:234``)."""
    key = f"{fx}.{name}"
    before = {known: dict(vars(metric)) for known, metric in results.items() if known.startswith(key)}
    try:
        type(results).log(results, fx, name, *arguments, **settings)
    except Exception:
        for known in [known for known in results if known.startswith(key)]:
            if known in before:
                vars(results[known]).update(before[known])
            else:
                del results[known]
        raise
