"""A training to probe: its steps, what is alive when they begin, and how it is put back after them, without a trace."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from copy import copy
from itertools import chain
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.optim import Optimizer

from lightning_ga.compat import dataloaders, patching, trial_steps
from lightning_ga.memory.holders import OriginMeter, state_of
from lightning_ga.memory.live_tensors import uncounted
from lightning_ga.memory.oom import retry_once
from lightning_ga.snapshot.contents import ObjectState
from lightning_ga.snapshot.random_numbers import RandomState
from lightning_ga.snapshot.savepoint import Savepoint
from lightning_ga.snapshot.state import OptimizerState, ReachedState, SavedGradients, SwappedState, TensorValues


@contextmanager
def isolated(
    trainer: Any, stand_ins: Mapping[int, Any] | None = None, *, begins: bool = True
) -> Iterator[Callable[[], None]]:
    """Let trial steps run as a context; the yielded function puts back all they changed, and so does the end.

    By the id of an object, ``stand_ins`` say what attributes of modules refer to in its place meanwhile. Once training
    has begun, trials take no optimizer step.
    """
    module = trainer.lightning_module
    modules = list(module.modules())
    modules += [other for other in trainer.strategy.model.modules() if all(other is not known for known in modules)]
    random_state = RandomState()
    attributes = trial_steps.remember_progress(trainer)
    with uncounted():
        own = (each for m in modules for each in (*m._parameters.values(), *m._buffers.values()) if each is not None)
        values = TensorValues(iter({id(tensor): tensor for tensor in own}.values()))
        plain = SwappedState(modules, [trainer, trainer.strategy, trainer.datamodule], stand_ins)
        optimizers = [OptimizerState(optimizer) for optimizer in trainer.optimizers if begins]
    gradients = SavedGradients(module.parameters())
    objects = ObjectState(trial_steps.owners(trainer))
    reached = ReachedState(module, [trainer, trainer.strategy, trainer.datamodule])

    kept: tuple[Any, ...] = (gradients, plain, values, *optimizers, objects, reached, attributes, random_state)

    def restore() -> None:
        for each in kept:
            retry_once(each.restore)

    def prepare() -> None:
        restore()
        with uncounted():
            plain.swap_in_copies()
            attributes.swap_in_copies()
            reached.swap_in_copies()
        trial_steps.enter_trial(trainer, begins=begins)

    tensors = [each for each in chain(module.parameters(), module.buffers()) if not each.is_inference()]
    with ExitStack() as stack:  # windows look at versions to see what was written to
        for tensor in tensors:  # one by one: torch 2.6 takes no more
            stack.enter_context(_unsafe_preserve_version_counter(tensor))
        try:
            prepare()
            yield prepare
        finally:
            restore()
            if begins:  # no window is under way
                trial_steps.forget_used(trainer)


@contextmanager
def hooks_apart(trainer: Any) -> Iterator[None]:
    """Let hooks of batches be called apart from training, as a context: what they change is put back."""
    profiler, trainer.profiler = trainer.profiler, patching.sibling(trainer, "profilers").PassThroughProfiler()
    try:
        with _kept_apart(trainer) if dataloaders.hooks_see_batches(trainer) else nullcontext():
            yield
    finally:
        trainer.profiler = profiler


@contextmanager
def _kept_apart(trainer: Any) -> Iterator[None]:
    module, random_state = trainer.lightning_module, RandomState()
    plain = SwappedState(list(module.modules()), [trainer, trainer.strategy, trainer.datamodule])
    tensors = Savepoint(module)
    tensors.take()
    plain.swap_in_copies()
    try:
        yield
    finally:
        for each in (plain, tensors, random_state):
            retry_once(each.restore)


_MOST = 1 << 62


class ProbedTraining:
    """A training whose optimizers are seen as they step; a subclass says what a step is.

    A first step of Adam makes its state, and takes less memory before that than every later one.
    So what a step made is borrowed before the training is put back, and lent to the next trial.
    """

    module: nn.Module | None = None  # its parts are named where memory is attributed

    def __init__(self) -> None:
        self._stepping: WeakSet[Optimizer] = WeakSet()
        self._warm: list[tuple[Optimizer, dict[Any, Any]]] = []

    def step(self, samples: int, meter: OriginMeter) -> object:
        """Run one whole training step on so many samples; the meter can be told which tensors are the batch."""
        raise NotImplementedError

    def first_sizes(self, high: int) -> Sequence[int]:
        """Return the sizes of which the first that runs is the first step: two samples, as BatchNorm refuses one."""
        return range(min(2, high), 0, -1)

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
        """Return whether something is so on every rank."""
        return bool(value)

    def announce(self, samples: int) -> None:
        """Note the size of the step that runs next."""

    def warm_up(self) -> bool:
        """Make the optimizer's state without a training step; return whether that was done."""
        return False

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
        if self.reset():
            return
        for parameter, had_gradient in graded or ():
            if not had_gradient:
                parameter.grad = None
            elif parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def graded(self) -> list[tuple[Tensor, bool]]:
        """Tell which parameters have a gradient."""
        return [(parameter, parameter.grad is not None) for parameter in self._parameters()]

    def smallest(self, value: int) -> int:
        """Return the smallest value over ranks, from answers of ``agree`` alone: all ranks ask the same questions."""
        bound = 1
        while self.agree(value >= bound):
            bound *= 2
        low, high = bound // 2, bound - 1
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.agree(value >= middle) else (low, middle - 1)
        return low

    def largest(self, value: int) -> int:
        """Return the largest value over ranks, in the same way."""
        return _MOST - self.smallest(_MOST - value)

    def _parameters(self) -> Iterator[Tensor]:
        for optimizer in self._stepping:
            for group in optimizer.param_groups:
                yield from group["params"]
