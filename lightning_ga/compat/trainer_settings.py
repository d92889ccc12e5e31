"""Set the trainer's accumulation factor and the order of its callbacks."""

from typing import Any


def leave_factor(trainer: Any, recipe: int) -> None:
    """Store the user's factor on the trainer, beside the one that a fit leaves there."""
    trainer.__dict__["_recipe_factor"] = (trainer.accumulate_grad_batches, recipe)


def take_factor_back(trainer: Any) -> None:
    """Restore the user's factor on the trainer, unless it was set anew meanwhile."""
    left, recipe = trainer.__dict__.pop("_recipe_factor", (None, None))
    if trainer.accumulate_grad_batches == left:
        trainer.accumulate_grad_batches = recipe


def run_first(trainer: Any, callback: Any) -> int:
    """Move a callback before all others, which then see its gradients; return its position before, for ``run_at``.

    Lightning moves its tuners likewise.
    """
    place: int = trainer.callbacks.index(callback)
    run_at(trainer, callback, 0)
    return place


def run_at(trainer: Any, callback: Any, place: int) -> None:
    """Move a callback to a position among the others, if the trainer still has it."""
    if callback in trainer.callbacks:
        others = [other for other in trainer.callbacks if other is not callback]
        trainer.callbacks = [*others[:place], callback, *others[place:]]
