"""Leave out micro-batches that hold no samples and only fill their window up."""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_ga.compat import closures
from lightning_ga.fit.lbfgs import Closure, Wrap


def without_empty(wrap: Wrap | None, is_empty: Callable[[int], bool]) -> Wrap:
    """Let closures run as ``wrap`` says, but for micro-batches that hold no samples: these are not run at all.

    They only fill windows up to the accumulation factor, are never a window's first, and bring a sample that has been
    trained on: to run them would log it, count it in metrics and move statistics again. Their loss is that of the last
    that ran.

    Args:
        wrap: Makes the closures; ``None`` for Lightning's own.
        is_empty: Says so of a micro-batch, by its number.
    """
    last = torch.zeros(())  # with a loss, or a gradient scaler would skip the step

    def closure(whole: Any, make: Callable[..., Any], kwargs: Any, optimizer: Optimizer, batch_idx: int) -> Closure:
        if is_empty(batch_idx):
            return lambda *_: closures.ClosureOutput(last, {"loss": last})
        run = whole.closure if wrap is None else wrap(whole, make, kwargs, optimizer, batch_idx)

        def noting(*arguments: Any) -> Any:
            nonlocal last
            result = run(*arguments)
            last = last if result.loss is None else result.loss.detach()
            return result

        return noting

    return closure
