"""A training to probe: its steps, what is alive when they begin, and how it is put back after them."""

from collections.abc import Callable, Iterable, Iterator
from copy import copy
from itertools import chain
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_ga.memory.attribution import state_of

_MOST = 1 << 62


class ProbedTraining:
    """A training to probe, given by functions as ``find_micro_batch`` takes them, and by optimizers that are seen.

    A first step of Adam makes its state, and takes less memory before that than every later one.
    So what a step made is borrowed before the training is put back, and lent to the next trial.
    """

    def __init__(
        self,
        step: Callable[[int], object],
        *,
        resident: Callable[[], Iterable[Tensor | None]] | None = None,
        reset: Callable[[], object] | None = None,
        agree: Callable[[bool], bool] | None = None,  # whether something is so on every rank
        on_step: Callable[[int], object] | None = None,  # told the size of each step before it runs
        warm_up: Callable[[], object] | None = None,
    ) -> None:
        self.step, self.agree, self.on_step, self.warm_up = step, agree or bool, on_step or int, warm_up
        self.resident = resident or (lambda: chain(*self.owned().values()))
        self._reset = reset
        self._stepping: WeakSet[Optimizer] = WeakSet()
        self._warm: list[tuple[Optimizer, dict[Any, Any]]] = []

    def note(self, optimizer: Optimizer) -> None:
        """Remember an optimizer that steps."""
        self._stepping.add(optimizer)

    def lend(self) -> None:
        """Give optimizers the state that they lost. Nothing is kept: what a step replaces must die."""
        for optimizer, states in self._warm:
            for key, state in states.items():
                if key not in optimizer.state:
                    optimizer.state[key] = state
        self._warm = []

    def put_back(self, graded: list[tuple[Tensor, bool]] | None = None) -> None:
        """Put back the state before the step, but for what the optimizers made, which is kept for the next.

        After a failed step that nothing resets, the parameters have gradients if they had some before (``graded``).
        """
        self._warm = [(o, {key: copy(state) for key, state in o.state.items()}) for o in self._stepping]
        if self._reset is not None:
            self._reset()
            return
        for parameter, had_gradient in graded or ():
            if not had_gradient:
                parameter.grad = None
            elif parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def owned(self) -> dict[str, list[Tensor]]:
        """Return the parameters, gradients and state of the optimizers, by what they are."""
        return state_of(self._parameters(), self._stepping)

    def graded(self) -> list[tuple[Tensor, bool]]:
        """Tell which parameters have a gradient."""
        return [(parameter, parameter.grad is not None) for parameter in self._parameters()]

    def smallest(self, value: int) -> int:
        """Return the smallest value over ranks, from answers of ``agree`` alone: all ranks ask the same questions.

        Examples:
            >>> ProbedTraining(print).smallest(300)
            300
        """
        bound = 1
        while self.agree(value >= bound):
            bound *= 2
        low, high = bound // 2, bound - 1
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.agree(value >= middle) else (low, middle - 1)
        return low

    def largest(self, value: int) -> int:
        """Return the largest value over ranks, in the same way.

        Examples:
            >>> ProbedTraining(print).largest(300)
            300
        """
        return _MOST - self.smallest(_MOST - value)

    def _parameters(self) -> Iterator[Tensor]:
        for optimizer in self._stepping:
            for group in optimizer.param_groups:
                yield from group["params"]
