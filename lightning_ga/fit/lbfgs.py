"""Optimizers that evaluate their closure several times a step, such as LBFGS: the whole window each time.

Lightning's closure holds the last micro-batch only, so that a second evaluation would add its gradient
to those of the first. Here the first evaluation uses what was accumulated, and each further one runs
every micro-batch of the window again; its value is the loss of the whole window.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from lightning_ga.compat import closures, loops
from lightning_ga.fit.window_gradients import WindowGradients
from lightning_ga.plan.window_weights import WindowWeights

MakeClosure = Callable[[Any, torch.optim.Optimizer, int], Any]


def evaluates_again(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step of the optimizer calls its closure more than once."""
    return isinstance(optimizer, torch.optim.LBFGS)


@dataclass(frozen=True, slots=True)
class _Part:
    """One micro-batch of the window: what its step gets, and what it weighs."""

    kwargs: Any
    batch_idx: int
    weights: WindowWeights


class LbfgsWindow:
    """Keeps the micro-batches of a window and gives the loop closures that run them again."""

    def __init__(self, trainer: Any, gradients: WindowGradients) -> None:
        self._trainer = trainer
        self._gradients = gradients
        self._parts: list[_Part] = []
        self._losses: list[float] = []  # of the parts, as Lightning divided them

    def closure(self, make: MakeClosure, kwargs: Any, optimizer: torch.optim.Optimizer, batch_idx: int) -> Any:
        """Return the closure of a micro-batch; that of the last stands for the window."""
        if batch_idx % self._trainer.accumulate_grad_batches == 0:
            self._parts, self._losses = [], []
        self._parts.append(_Part(kwargs, batch_idx, self._gradients.weights))
        closure = _NotingClosure(self, make(kwargs, optimizer, batch_idx))
        if loops.window_is_over(self._trainer):
            return _WindowClosure(self, closure, lambda part: make(part.kwargs, optimizer, part.batch_idx))
        return closure

    def note(self, loss: torch.Tensor | None) -> None:
        """Keep the loss of the next micro-batch."""
        self._losses.append(0.0 if loss is None else float(loss))

    def run_again(self, make: Callable[[_Part], Any]) -> Any:
        """Run every micro-batch anew, the first one zeroing the gradients; return the last result."""
        self._losses, counted = [], self._gradients.weights
        for part in self._parts[:-1]:
            with closures.accumulating(self._trainer):
                self._run_part(make, part)
        result = self._run_part(make, self._parts[-1])
        self._gradients.put_back(counted)  # what the window holds has been counted before
        return result

    def loss(self) -> torch.Tensor:
        """Return the loss of the whole window."""
        scale = self._gradients.window_scale()
        total = scale * sum(part.weights.weight * loss for part, loss in zip(self._parts, self._losses))
        return torch.tensor(total, dtype=torch.float64)

    def _run_part(self, make: Callable[[_Part], Any], part: _Part) -> Any:
        self._gradients.put_back(part.weights)
        self._trainer._logger_connector.on_batch_start(part.kwargs["batch"])  # whose size means are weighed by
        return _NotingClosure(self, make(part)).closure()


class _NotingClosure:
    """A closure that notes its loss."""

    def __init__(self, window: LbfgsWindow, closure: Any) -> None:
        self._window, self._closure = window, closure

    def closure(self, *arguments: Any) -> Any:
        """Run the micro-batch."""
        result = self._closure.closure(*arguments)
        self._window.note(result.loss)
        return result


class _WindowClosure:
    """The closure of a window's last micro-batch."""

    def __init__(self, window: LbfgsWindow, first: _NotingClosure, make: Callable[[_Part], Any]) -> None:
        self._window, self._first, self._make = window, first, make
        self._evaluated = False

    def closure(self, *arguments: Any) -> closures.ClosureOutput:
        """Run the micro-batch, or the whole window again; the loss is that of the window."""
        again, self._evaluated = self._evaluated, True
        result = self._window.run_again(self._make) if again else self._first.closure(*arguments)
        return closures.ClosureOutput(self._window.loss(), result.asdict())
