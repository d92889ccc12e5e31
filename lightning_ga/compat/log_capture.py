"""Tap what steps log: through at once if a batch runs whole, held and merged if it runs in pieces.

Lightning's ``core/module.py`` (``log``) and ``trainer/connectors/logger_connector/result.py``.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from lightning_ga.compat import patching

Note = Callable[..., None]


class LogTap:
    """Takes the place of ``results.log`` (``core/module.py:380``), where all logging ends.

    What an attempt has logged before it failed stays and is not logged again, as its value is that of the whole batch.
    """

    def __init__(self, results: Any) -> None:
        self.results = results
        self.logged: list[tuple[str, str]] = []  # by the current batch
        self.note: Note | None = None  # takes entries instead; ``None`` if they go through
        self.log: Note = _nothing
        if results is not None:
            self.log = partial(_log, results, type(results).log)
            vars(results)["log"] = self

    def __call__(self, fx: str, name: str, *arguments: Any, **settings: Any) -> None:
        """Log a value."""
        if self.note is None:
            self.log(fx, name, *arguments, **settings)
            self.logged.append((fx, name))
        elif (fx, name) not in self.logged:
            self.note(fx, name, *arguments, **settings)

    def begin(self) -> None:
        """Begin a batch: what it logs goes through."""
        self.logged, self.note = [], None

    def held(self, note: Note) -> AbstractContextManager[None]:
        """Return a context in which values go to ``note`` instead."""
        return patching.replaced(self, note=note)

    def of_batch(self, batch: Any) -> AbstractContextManager[None]:
        """Return a context in which values are those of another batch, by whose size means are weighted."""
        return patching.replaced(self.results, batch=batch, batch_size=None)

    def release(self) -> None:
        """Restore Lightning's own."""
        if self.results is not None:
            vars(self.results).pop("log", None)


def _nothing(*_: Any, **__: Any) -> None:
    """Log nothing."""


def results_of(trainer: Any, stage: str) -> Any:
    """Return where values that are logged in a stage go; ``None`` if the Trainer takes none."""
    return trainer.fit_loop.epoch_loop._results if stage == "training" else trainer._results


def current_hook(module: Any) -> str | None:
    """Return the hook in which ``log`` believes to be called."""
    name: str | None = module._current_fx_name
    return name


def return_to_hook(module: Any, name: str | None) -> None:
    """Let ``log`` know that hooks within one have failed (``trainer/call.py:180`` does so only if they return)."""
    module._current_fx_name = name


def _log(results: Any, log: Note, fx: str, name: str, *arguments: Any, **settings: Any) -> None:
    """Log one value; on failure restore the sums of that name (``logger_connector/result.py:234``)."""
    key = f"{fx}.{name}"
    before = [(metric, dict(vars(metric))) for known in (key, f"{key}.0") if (metric := results.get(known))]
    try:
        log(results, fx, name, *arguments, **settings)
    except Exception:
        for metric, values in before:
            vars(metric).update(values)
        for known in [known for known in results if known.startswith(key)] if not before else ():
            del results[known]
        raise
