"""Hold back what a step logs until the batch is done.

Lightning's ``core/module.py`` (``log``) and ``trainer/connectors/logger_connector/result.py``.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from lightning_ga.compat import patching


@contextmanager
def logs_held_back(trainer: Any, note: Callable[..., None]) -> Iterator[Callable[..., None]]:
    """Return a context in which ``log`` calls ``note``; it yields the function that logs one value.

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
    """Log one value; on failure restore the sums of that name (``logger_connector/result.py:234``)."""
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
