"""The trainer's own factor and callbacks.

Read in lightning 2.6.6 and 2.5.0; ``tests/compat`` fails when a name or an order that is relied on here changes.
"""

from typing import Any


def leave_factor(trainer: Any, recipe: int) -> None:
    """Remember beside the factor that a fit leaves in the trainer which one the user wrote."""
    trainer.__dict__["_recipe_factor"] = (trainer.accumulate_grad_batches, recipe)


def take_factor_back(trainer: Any) -> None:
    """Let the trainer have the user's factor again, unless it was set anew meanwhile."""
    left, recipe = trainer.__dict__.pop("_recipe_factor", (None, None))
    if trainer.accumulate_grad_batches == left:
        trainer.accumulate_grad_batches = recipe


def run_first(trainer: Any, callback: Any) -> int:
    """Move a callback before all others, as Lightning does with its tuners, so that they see its gradients.

    Returns:
        Its place before, for ``run_at``.
    """
    place: int = trainer.callbacks.index(callback)
    run_at(trainer, callback, 0)
    return place


def run_at(trainer: Any, callback: Any, place: int) -> None:
    """Move a callback, if the trainer still has it, to a place among the others."""
    if callback in trainer.callbacks:
        others = [other for other in trainer.callbacks if other is not callback]
        trainer.callbacks = [*others[:place], callback, *others[place:]]
