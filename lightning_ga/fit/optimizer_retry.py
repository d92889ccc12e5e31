"""An optimizer's step that is run again after memory ran out in it, if what it had done can be undone."""

import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import _get_current_dispatch_mode

from lightning_ga.fit.messages import OomEvent, of_rank, optimizer_step_failed
from lightning_ga.memory.device import describe_memory
from lightning_ga.memory.oom import is_out_of_memory, release


class OptimizerRetry:
    """Takes the place of ``optimizer.step``, wherever it is called from.

    Args:
        trainer: The Trainer.
        report: Told of every error that was survived.
    """

    def __init__(self, trainer: Any, report: Callable[[OomEvent], None]) -> None:
        self._trainer = trainer
        self._report = report
        self._before: OptimizerMarks | None = None
        self._tells: bool | None = None  # whether versions tell what a step changes; known once one went through

    def __call__(
        self, step: Callable[..., Any], closure: Callable[[], Any] | None = None, *given: Any, **settings: Any
    ) -> Any:
        """Run ``step``; once more without its closure if memory runs out after that, and nothing has changed."""
        losses: list[Any] = []

        def once() -> Any:
            losses.append(closure() if closure is not None else None)
            return losses[-1]

        try:
            try:
                result = step(*(() if closure is None else (once,)), *given, **settings)
            except Exception as error:
                if self._before is None or not is_out_of_memory(error):
                    raise
                failure = error
            else:
                self._learn()
                return result
            self._run_again(lambda: step(*(() if closure is None else (None,)), *given, **settings), failure)
            return losses[0] if losses else None
        finally:
            self._before = None

    def _run_again(self, update: Callable[[], Any], failure: Exception) -> None:
        """Free what the failed update pins, undo what it began, and run it once more."""
        release(failure)
        memory = describe_memory(self._trainer.strategy.root_device)
        if self._before is None or not self._can_tell() or self._before.have_changed():
            raise of_rank(optimizer_step_failed(memory), self._trainer.world_size) from failure
        self._before.put_back()
        try:
            update()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise of_rank(optimizer_step_failed(memory, again=True), self._trainer.world_size) from error
        self._report(OomEvent("the optimizer's step", self._trainer.global_step, 0, 0, memory))

    def gradients_are_ready(self) -> None:
        """Backward, hooks and clipping are done: all that is left is the update."""
        self._before = OptimizerMarks(self._trainer.optimizers[0])

    def _can_tell(self) -> bool:
        """Whether versions can be relied on; in a first step, those of PyTorch's own optimizers.

        Not so of fused ones, nor where a dispatch mode sees the step: operations on lists of tensors on the CPU, where
        steps are counted, raise no versions then.
        """
        optimizer = self._trainer.optimizers[0]
        if _get_current_dispatch_mode() is not None and any(map(_is_by_lists, optimizer.param_groups)):
            return False
        if self._tells is not None:
            return self._tells
        fused = any(group.get("fused") for group in optimizer.param_groups)
        return type(optimizer).__module__.startswith("torch.optim.") and not fused

    def _learn(self) -> None:
        """Weights that a step changes without raising their versions (by ``.data``) cannot be watched."""
        if self._tells is None and self._before is not None:
            self._tells = self._before.weights_have_changed()


class OptimizerMarks:
    """An optimizer's tensors by their versions, and its numbers: nothing is copied or kept alive.

    Args:
        optimizer: The optimizer, with gradients.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        graded = [weight for weight in weights if weight.grad is not None]
        self._weights = [_Mark(weight) for weight in graded]
        owners = [*optimizer.param_groups, *(state for state in optimizer.state.values() if isinstance(state, dict))]
        apart = {id(weight) for weight in weights}
        states = [tensor for owner in owners for tensor in _tensors(owner) if id(tensor) not in apart]
        self._others = [_Mark(tensor) for tensor in (*states, *(weight.grad for weight in graded))]
        self._gradients = [(weight, weakref.ref(weight.grad)) for weight in graded]
        self._owners = [(owner, set(owner), {k: v for k, v in owner.items() if _is_number(v)}) for owner in owners]

    def have_changed(self) -> bool:
        """Whether a weight, its gradient, or a tensor of the state is another now."""
        moved = any(gradient() is not weight.grad for weight, gradient in self._gradients)
        return moved or any(mark.has_changed() for mark in (*self._weights, *self._others))

    def weights_have_changed(self) -> bool | None:
        """Whether all weights with a gradient are others now; ``None`` where none has one."""
        return all(mark.has_changed() for mark in self._weights) if self._weights else None

    def put_back(self) -> None:
        """Remove what the failed step had begun to make, and set numbers back."""
        known = {id(owner) for owner, _, _ in self._owners}
        states = self._optimizer.state
        for key in [key for key, state in states.items() if id(state) not in known or not state]:
            del states[key]
        for owner, names, numbers in self._owners:
            for name in owner.keys() - names:
                del owner[name]
            owner.update(numbers)


class _Mark:
    """A tensor's identity and version."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._version = weakref.ref(tensor), tensor._version

    def has_changed(self) -> bool:
        tensor = self._tensor()
        return tensor is None or tensor._version != self._version


def _is_by_lists(group: dict[str, Any]) -> bool:
    """Whether a group's weights are updated by operations on lists: what PyTorch's optimizers choose off the CPU."""
    chosen = group.get("foreach", False)  # optimizers without that choice go weight by weight
    return bool(chosen) or (chosen is None and any(weight.device.type != "cpu" for weight in group["params"]))


def _tensors(state: Any) -> Iterator[Tensor]:
    """The tensors of a state, in whatever it keeps them."""
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, (dict, list, tuple)):
        for part in state.values() if isinstance(state, dict) else state:
            yield from _tensors(part)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float))
