"""Hold back what a step logs until the batch is done.

Lightning's ``core/module.py`` (``log``) and ``trainer/connectors/logger_connector/result.py``.
"""

from collections.abc import Callable
from typing import Any

from lightning_ga.compat import patching


def hold_back(trainer: Any, stage: str, note: Callable[..., None]) -> Any:
    """Let ``log`` call ``note`` instead; return where values go, ``None`` where the Trainer takes none.

    ``LightningModule.log`` ends in ``results.log(fx, name, value, **settings)`` (``core/module.py:380``).

    Args:
        trainer: The Trainer.
        stage: What the batch is for, as in ``loops.stage``.
        note: Called instead.
    """
    # ``trainer._results`` asks for the stage several times.
    results = trainer.fit_loop.epoch_loop._results if stage == "training" else trainer._results
    if results is not None:
        patching.shadow(results, "log", note)
    return results


def let_go(results: Any) -> None:
    """Undo ``hold_back``."""
    if results is not None:
        patching.unshadow(results, "log")


def current_hook(trainer: Any) -> str | None:
    """Return the hook in which ``log`` believes to be called."""
    name: str | None = trainer.lightning_module._current_fx_name
    return name


def return_to_hook(trainer: Any, name: str | None) -> None:
    """Let ``log`` know that hooks within one have failed (``trainer/call.py:180`` does so only where they return)."""
    trainer.lightning_module._current_fx_name = name


def log(results: Any, fx: str, name: str, *arguments: Any, **settings: Any) -> None:
    """Log one value; on failure restore the sums of that name (``logger_connector/result.py:234``)."""
    if results is None:
        return
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
