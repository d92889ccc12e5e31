"""The optimizers of a training step whose code is not known: what they hold, and how it stays while steps are tried."""

from collections.abc import Iterator
from copy import copy
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_ga.memory.origin_meter import state_of


class SteppingOptimizers:
    """Optimizers that were seen to step: their parameters, gradients and warmed state.

    A first step of Adam makes its state, and takes less memory before that than every later one.
    So what a step made is borrowed before the training is put back, and lent to the next trial.
    """

    def __init__(self) -> None:
        self._seen: WeakSet[Optimizer] = WeakSet()
        self._warm: list[tuple[Optimizer, dict[Any, Any]]] = []

    def note(self, optimizer: Optimizer) -> None:
        """Remember an optimizer that steps."""
        self._seen.add(optimizer)

    def borrow(self) -> None:
        """Keep the state that a step made, in case that what comes next drops it."""
        self._warm = [(o, {key: copy(state) for key, state in o.state.items()}) for o in self._seen]

    def lend(self) -> None:
        """Give optimizers the state that they lost. Nothing is kept: what a step replaces must die."""
        for optimizer, states in self._warm:
            for key, state in states.items():
                if key not in optimizer.state:
                    optimizer.state[key] = state
        self._warm = []

    def owned(self) -> dict[str, list[Tensor]]:
        """Parameters, gradients and state by what they are."""
        return state_of(self._parameters(), self._seen)

    def graded(self) -> list[tuple[Tensor, bool]]:
        """Tell which parameters have a gradient."""
        return [(parameter, parameter.grad is not None) for parameter in self._parameters()]

    def regrade(self, graded: list[tuple[Tensor, bool]]) -> None:
        """After a failed step: no gradient where there was none, and some gradient where there was one."""
        for parameter, had in graded:
            if not had:
                parameter.grad = None
            elif parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def _parameters(self) -> Iterator[Tensor]:
        for optimizer in self._seen:
            for group in optimizer.param_groups:
                yield from group["params"]
