"""A training to probe: its steps, what is alive when they begin, and how it is put back after them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_ga.memory.step_recorder import StepRecorder, state_of

_BOUND = 1 << 62


class ProbedTraining:
    """A training whose optimizers are seen as they step; a subclass says what a step is.

    The first step of Adam needs less memory than every later one, because it makes the state. So the state that a step
    made is kept when the training is put back, and given to the next trial.
    """

    multiple = 1  # of which micro-batches are multiples, if so many fit

    def __init__(self) -> None:
        self.reached_all = True  # whether the last step has reached all parameters that were assumed to have a gradient
        self._stepping: WeakKeyDictionary[Optimizer, set[Any]] = WeakKeyDictionary()  # with keys of whole states
        self._warm: list[tuple[Optimizer, dict[Any, Any]]] = []

    def step(self, samples: int, meter: StepRecorder) -> object:
        """Run one whole training step on so many samples; ``meter.note_batch`` names the tensors of the batch."""
        raise NotImplementedError

    def first_pass(self, samples: int, meter: StepRecorder) -> object:
        """Run forward and backward of the first pass of a window, without the optimizer's step."""
        raise NotImplementedError

    def updates_in_proportion(self) -> bool:
        """Return whether the optimizers' steps are known to need memory in proportion to the gradients."""
        return False

    def see_gradients(self) -> None:
        """See which parameters have gradients in later steps, as far as the first step has not shown it."""

    def few(self, most: int) -> int:
        """Return a small size for a step, of at most so many samples: the multiple, but at least two.

        BatchNorm refuses one sample.
        """
        return min(max(2, self.multiple), most)

    def first_sizes(self, high: int, *, cautious: bool = False) -> Sequence[int]:
        """Return the sizes to try for the first step, in this order; at most two if one too many ends the process."""
        few = min(2, high) if cautious else self.few(high)
        return [few, *range(min(2, few - 1), 0, -1)]

    def useful(self, samples: int, limit: int) -> int:
        """Return the size to try above the limit so far, if a search proposes one of so many samples."""
        return samples

    def resident(self) -> Iterable[Tensor | None]:
        """Return the tensors that are alive when a step starts."""
        return chain(*self.owned().values())

    def owned(self) -> Mapping[str, Iterable[Tensor]]:
        """Return parameters, gradients and state of the optimizers, by what they are."""
        return state_of(self._parameters(), self._stepping)

    def reset(self) -> bool:
        """Put the training's state back; return whether that is done at all."""
        return False

    def agree(self, value: bool) -> bool:
        """Return whether ``value`` is true on every rank."""
        return bool(value)

    def error_of_all(self, failure: Exception | None) -> Exception:
        """Return the error to raise, on every rank, if a step has failed on one of them; this one's is ``failure``."""
        return failure or RuntimeError("a trial step failed on another rank")

    def warm_up(self) -> None:
        """Make the optimizer's state without a training step, if that can be done."""

    def forget(self) -> None:
        """Forget the state that optimizers made, and what else is known of a limit that does not hold any more."""
        self._warm = []

    def note(self, optimizer: Optimizer, *_: object) -> None:
        """Remember an optimizer, before and after it steps, and of which parameters it has a whole state."""
        self._stepping[optimizer] = set(optimizer.state)

    def lend(self) -> None:
        """Give optimizers the kept state. Keep no reference: what a step replaces must be freed."""
        for optimizer, states in self._warm:
            for key, state in states.items():
                if key not in optimizer.state:
                    optimizer.state[key] = state
        self._warm = []

    def put_back(self, graded: list[tuple[Tensor, bool]] | None = None) -> None:
        """Put back the state before the step; keep the state that optimizers made for the next step.

        After a failed step that nothing resets, the parameters have gradients if they had some before (``graded``).
        """
        self._warm = []
        for optimizer, whole in self._stepping.items():
            for key in optimizer.state.keys() - whole:  # memory may have run out while it was made
                del optimizer.state[key]
            states = {key: copy(state) for key, state in optimizer.state.items()}
            self._warm.append((optimizer, states))
        if self.reset():
            return
        for parameter, had_gradient in graded or ():
            if not had_gradient:
                parameter.grad = None
            elif parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def graded(self) -> list[tuple[Tensor, bool]]:
        """Return for each parameter whether it has a gradient."""
        return [(parameter, parameter.grad is not None) for parameter in self._parameters()]

    def smallest(self, value: int) -> int:
        """Return the smallest value over ranks, from answers of ``agree`` alone: all ranks ask the same questions."""
        beyond = 1
        while self.agree(value >= beyond):
            beyond *= 2
        smallest = beyond // 2  # all ranks have at least that, and some less than ``beyond``
        while smallest + 1 < beyond:
            middle = (smallest + beyond) // 2
            if self.agree(value >= middle):
                smallest = middle
            else:
                beyond = middle
        return smallest

    def largest(self, value: int) -> int:
        """Return the largest value over ranks, in the same way."""
        return _BOUND - self.smallest(_BOUND - value)

    def _parameters(self) -> Iterator[Tensor]:
        for optimizer in self._stepping:
            for group in optimizer.param_groups:
                yield from group["params"]
