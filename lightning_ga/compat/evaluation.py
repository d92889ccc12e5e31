"""Intercept the steps of evaluation loops, and the transfer of their batches.

Lightning's ``trainer/call.py`` (``_call_strategy_hook``), by which the loops call both on the strategy.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from lightning_ga.compat import patching

STEPS = ("validation_step", "test_step", "predict_step")


@contextmanager
def intercepted_evaluation(trainer: Any, around: Callable[..., Any], move: Callable[..., Any]) -> Iterator[None]:
    """Return a context in which steps of evaluation go through ``around``, and transfers of batches through ``move``.

    Args:
        trainer: The Trainer.
        around: Called as ``around(name, step, *arguments)`` for a step.
        move: Called as ``move(to_device, batch, dataloader_idx)`` for a batch.
    """
    strategy = trainer.strategy
    to_device = type(strategy).batch_to_device

    def batch_to_device(batch: Any, device: Any = None, dataloader_idx: int = 0) -> Any:
        moved = partial(to_device, strategy, device=device, dataloader_idx=dataloader_idx)
        return move(moved, batch, dataloader_idx)

    with ExitStack() as held:
        held.enter_context(patching.shadowed(strategy, "batch_to_device", batch_to_device))
        for name in STEPS:
            step = partial(getattr(type(strategy), name), strategy)
            held.enter_context(patching.shadowed(strategy, name, partial(around, name, step)))
        yield
