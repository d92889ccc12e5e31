"""Optimizers that evaluate their closure several times a step, such as LBFGS: the whole window each time.

Lightning's closure holds the last micro-batch only, so that a second evaluation would add its gradient
to those of the first. Here the first evaluation uses what was accumulated, and each further one runs
every micro-batch of the window again; its value is the loss of the whole window.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import torch

from lightning_ga.compat import closures, loops
from lightning_ga.fit.window_gradients import WindowGradients
from lightning_ga.plan.window_weights import WindowWeights

Closure = Callable[..., Any]
"""Runs a micro-batch and returns its result; whatever it is given is the optimizer's."""
Wrap = Callable[..., Closure]
"""Makes closures of Lightning's; see ``closures.intercepted_closures``."""


def evaluates_again(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step of the optimizer calls its closure more than once."""
    return isinstance(optimizer, torch.optim.LBFGS)


@dataclass(frozen=True, slots=True)
class _Part:
    """One micro-batch of the window."""

    run: Closure
    batch: Any
    weights: WindowWeights  # what it weighs


class LbfgsWindow:
    """Keeps the micro-batches of a window and gives the loop closures that run them again.

    Args:
        trainer: The Trainer.
        gradients: The weights of the window.
        wrap: Makes the closures of single micro-batches; ``None`` for Lightning's own.
    """

    def __init__(self, trainer: Any, gradients: WindowGradients, wrap: Wrap | None) -> None:
        self._trainer, self._gradients = trainer, gradients
        self._wrap: Wrap = wrap or (lambda whole, *_: whole.closure)
        self._parts: list[_Part] = []
        self._losses: list[float] = []  # of the parts, as Lightning divided them

    def closure(
        self, whole: Any, make: Callable[..., Any], kwargs: Any, optimizer: torch.optim.Optimizer, batch_idx: int
    ) -> Closure:
        """Return the closure of a micro-batch; that of the last stands for the window."""
        if batch_idx % self._trainer.accumulate_grad_batches == 0:
            self._parts, self._losses = [], []
        part = _Part(self._wrap(whole, make, kwargs, optimizer, batch_idx), kwargs["batch"], self._gradients.weights)
        self._parts.append(part)
        run = partial(self._noting, part.run)
        if not loops.window_is_over(self._trainer):
            return run
        evaluations = count()

        def evaluate(*_: Any) -> closures.ClosureOutput:
            """Run the micro-batch, or the whole window again; the loss is that of the window."""
            result = self._run_again() if next(evaluations) else run()
            return closures.ClosureOutput(self._loss(), result.asdict())

        return evaluate

    def _noting(self, run: Closure, *_: Any) -> Any:
        """Run a micro-batch and keep its loss."""
        result = run()
        self._losses.append(0.0 if result.loss is None else float(result.loss))
        return result

    def _run_again(self) -> Any:
        """Run every micro-batch anew, the first one zeroing the gradients; return the last result."""
        self._losses, counted = [], self._gradients.weights
        for part in self._parts[:-1]:
            with closures.accumulating(self._trainer) or nullcontext():
                self._run_part(part)
        result = self._run_part(self._parts[-1])
        self._gradients.put_back(counted)  # what the window holds has been counted before
        return result

    def _run_part(self, part: _Part) -> Any:
        self._gradients.put_back(part.weights)
        self._trainer._logger_connector.on_batch_start(part.batch)  # whose size means are weighed by
        return self._noting(part.run)

    def _loss(self) -> torch.Tensor:
        """Return the loss of the whole window."""
        scale = self._gradients.window_scale()
        total = scale * sum(part.weights.weight * loss for part, loss in zip(self._parts, self._losses))
        return torch.tensor(total, dtype=torch.float64)
