"""Intercept the steps of evaluation loops, and the transfer of their batches.

Lightning's ``trainer/call.py`` (``_call_strategy_hook``), by which the loops call both on the strategy.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from lightning_ga.compat import patching

STEPS = ("validation_step", "test_step", "predict_step")


def intercept_evaluation(trainer: Any, around: Callable[..., Any], move: Callable[..., Any]) -> None:
    """Let steps of evaluation loops go through ``around``, and the transfer of their batches through ``move``.

    Args:
        trainer: The Trainer.
        around: Called as ``around(name, step, *arguments)`` for a step.
        move: Called as ``move(to_device, batch, dataloader_idx)`` for a batch.
    """
    strategy = trainer.strategy
    for name in STEPS:
        patching.shadow(strategy, name, partial(around, name, partial(getattr(type(strategy), name), strategy)))
    to_device = type(strategy).batch_to_device

    def batch_to_device(batch: Any, device: Any = None, dataloader_idx: int = 0) -> Any:
        moved = partial(to_device, strategy, device=device, dataloader_idx=dataloader_idx)
        return move(moved, batch, dataloader_idx)

    patching.shadow(strategy, "batch_to_device", batch_to_device)


def release_evaluation(trainer: Any) -> None:
    """Undo ``intercept_evaluation``."""
    for name in (*STEPS, "batch_to_device"):
        patching.unshadow(trainer.strategy, name)
