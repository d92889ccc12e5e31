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

MakeClosure = Callable[[Any, torch.optim.Optimizer, int], Any]


def evaluates_again(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step of the optimizer calls its closure more than once."""
    return isinstance(optimizer, torch.optim.LBFGS)


@dataclass(slots=True)
class _Part:
    """One micro-batch of the window: what its step gets, its weight, and the loss Lightning divided."""

    kwargs: Any
    batch_idx: int
    weight: float
    loss: float = 0.0


class LbfgsWindow:
    """Keeps the micro-batches of a window and gives the loop closures that run them again.

    Args:
        trainer: The Trainer.
        gradients: The weights of the window.
    """

    def __init__(self, trainer: Any, gradients: WindowGradients) -> None:
        self._trainer = trainer
        self._gradients = gradients
        self._parts: list[_Part] = []

    def closure(self, make: MakeClosure, kwargs: Any, optimizer: torch.optim.Optimizer, batch_idx: int) -> Any:
        """The closure of a micro-batch; that of the last stands for the window."""
        if batch_idx % self._trainer.accumulate_grad_batches == 0:
            self._parts = []
        self._parts.append(_Part(kwargs, batch_idx, self._gradients.weight))
        closure = make(kwargs, optimizer, batch_idx)
        if loops.window_is_over(self._trainer):
            return _WindowClosure(self, closure, lambda part: make(part.kwargs, optimizer, part.batch_idx))
        return _Noting(closure, self._parts[-1])

    def run_again(self, make: Callable[[_Part], Any]) -> Any:
        """Every micro-batch anew, the first one zeroing the gradients; returns the last closure."""
        with self._gradients.counted_before():
            for part in self._parts[:-1]:
                self._gradients.weight = part.weight
                self._trainer._logger_connector.on_batch_start(part.kwargs["batch"])  # whose size means are weighed by
                with closures.accumulating(self._trainer):
                    part.loss = _value(make(part)())
            self._gradients.weight = self._parts[-1].weight
            self._trainer._logger_connector.on_batch_start(self._parts[-1].kwargs["batch"])
            closure = make(self._parts[-1])
            self.note_last(closure())
        return closure

    def note_last(self, loss: torch.Tensor | None) -> None:
        """Keep the loss of the last micro-batch."""
        self._parts[-1].loss = _value(loss)

    def loss(self) -> torch.Tensor:
        """Loss of the whole window."""
        scale = self._gradients.window_scale()
        total = scale * sum(part.weight * part.loss for part in self._parts)
        return torch.tensor(total, dtype=torch.float64)


class _Noting:
    """A closure that notes its loss."""

    def __init__(self, closure: Any, part: _Part) -> None:
        self._closure, self._part = closure, part
        self.consume_result = closure.consume_result

    def __call__(self, *arguments: Any) -> torch.Tensor | None:
        loss: torch.Tensor | None = self._closure(*arguments)
        self._part.loss = _value(loss)
        return loss


class _WindowClosure:
    """The closure of a window's last micro-batch."""

    def __init__(self, window: LbfgsWindow, closure: Any, make: Callable[[_Part], Any]) -> None:
        self._window, self._closure, self._make = window, closure, make
        self._evaluated = False

    def __call__(self, *arguments: Any) -> torch.Tensor:
        if self._evaluated:
            self._closure = self._window.run_again(self._make)
        else:
            self._evaluated = True
            self._window.note_last(self._closure(*arguments))
        return self._window.loss()

    def consume_result(self) -> Any:
        """What the loop reports of the last micro-batch."""
        return self._closure.consume_result()


def _value(loss: torch.Tensor | None) -> float:
    return 0.0 if loss is None else float(loss)
