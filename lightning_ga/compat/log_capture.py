"""Hold back what a step logs until the batch is done.

Lightning's ``core/module.py`` (``log``) and ``trainer/connectors/logger_connector/result.py``.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from lightning_ga.compat import patching


class HeldBackLogs:
    """A context in which ``log`` calls ``note``; entered, it gives the function that logs one value.

    ``LightningModule.log`` ends in ``results.log(fx, name, value, **settings)`` (``core/module.py:380``).

    Args:
        trainer: The Trainer.
        stage: What the batch is for, as in ``loops.stage``.
        note: Called instead.
    """

    def __init__(self, trainer: Any, stage: str, note: Callable[..., None]) -> None:
        # ``trainer._results`` asks for the stage several times.
        self._results = trainer.fit_loop.epoch_loop._results if stage == "training" else trainer._results
        self._note = note

    def __enter__(self) -> Callable[..., None]:
        if self._results is None:
            return _log_nothing
        patching.shadow(self._results, "log", self._note)
        return partial(_log_or_nothing, self._results)

    def __exit__(self, *_: object) -> None:
        if self._results is not None:
            patching.unshadow(self._results, "log")


def _log_nothing(*_: Any, **__: Any) -> None:
    """Take no values, where the Trainer takes none."""


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
