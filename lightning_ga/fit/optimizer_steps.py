"""Count the optimizer steps of a training whose effective batch may change.

Tested in tests/integration/test_recipe_inputs.py.
"""

from math import inf
from typing import Any

from lightning_ga.errors import UserError


def optimizer_steps(trainer: Any) -> int | float:
    """Count the optimizer steps of a whole training, with or without ``AutoAccumulate``, in ``configure_optimizers``.

    ``trainer.estimated_stepping_batches`` is wrong there if the effective batch changes, because it divides by the
    current factor. The count is infinite if nothing limits it: no number of steps, and no epochs of a known length.

    Raises:
        UserError: If no fit is running; or if ``effective_batch_size=`` counts the samples of batches, and the loader
            does not say before training has read one how many these are: ready-made batches, several loaders.
    """
    if getattr(trainer, "lightning_module", None) is None:
        raise UserError(
            "optimizer_steps(trainer) counts the steps of a fit that is running: call it in configure_optimizers, as "
            "lightning_ga.optimizer_steps(self.trainer)."
        )
    estimate: int | float = trainer.estimated_stepping_batches  # sets the training data up if need be
    for callback in trainer.callbacks:
        # That of ``AutoAccumulate``: another callback may have an ``optimizer_steps`` that counts something else.
        count = getattr(getattr(callback, "_fit", None), "optimizer_steps", None)
        if callable(count):
            steps = count()
            if steps is not None:
                return int(steps)
    return inf if estimate == -1 else estimate
