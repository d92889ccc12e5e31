"""Let validation be due by the recipe's batches, at the ends of windows.

Lightning's ``loops/training_epoch_loop.py`` (``_should_check_val_fx``, 2.6.6).

Tested in tests/integration/test_recipe_inputs.py.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from math import inf
from typing import Any

from lightning_ga.compat import patching


def due_by_recipe(trainer: Any, span: Callable[[], Any]) -> AbstractContextManager[None]:
    """Return a context in which validation is due at the ends of windows, by batches of the recipe.

    Lightning asks whether ``val_check_batch`` divides the loop's own count (``:560``), so the former is replaced while
    it asks. ``span`` returns the ``WindowSpan`` of the window that runs or has just ended.
    """
    loop = trainer.fit_loop.epoch_loop
    stock = loop._should_check_val_fx

    def should_check(fetcher: Any) -> bool:
        every = trainer.val_check_batch
        over_epochs = trainer.check_val_every_n_epoch is None
        counted = (loop.total_batch_idx if over_epochs else loop.batch_idx) + 1
        if every in (None, inf) or not counted:  # by time, or as the epoch ends; or before the first batch
            return bool(stock(fetcher))
        is_due = not loop._should_accumulate() and span().validates(every, over_epochs=over_epochs)
        with patching.replaced(trainer, val_check_batch=counted if is_due else counted + 1):
            return bool(stock(fetcher))

    return patching.shadowed(loop, "_should_check_val_fx", should_check)
