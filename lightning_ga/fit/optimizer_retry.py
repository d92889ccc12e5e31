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
            release(failure)
            memory = describe_memory(self._trainer.strategy.root_device)
            if not self._can_tell() or self._before.have_changed():
                raise of_rank(optimizer_step_failed(memory), self._trainer.world_size) from failure
            self._before.put_back()
            step(*(() if closure is None else (None,)), *given, **settings)
            self._report(OomEvent("the optimizer's step", self._trainer.global_step, 0, 0, memory))
            return losses[0] if losses else None
        finally:
            self._before = None

    def gradients_are_ready(self) -> None:
        """Backward, hooks and clipping are done: all that is left is the update."""
        self._before = OptimizerMarks(self._trainer.optimizers[0])

    def _can_tell(self) -> bool:
        """Whether versions can be relied on; in a first step, those of PyTorch's own optimizers.

        Not so where a dispatch mode sees the step: operations on lists of tensors raise no versions then.
        Nor where it is fused and counts no steps.
        """
        if self._tells is not None or self._before is None:
            return bool(self._tells)
        optimizer = self._trainer.optimizers[0]
        by_lists = any(group.get("foreach") or group.get("fused") for group in optimizer.param_groups)
        hidden = by_lists and _get_current_dispatch_mode() is not None
        return _is_own(optimizer) and not hidden and self._before.counts_fused_steps()

    def _learn(self) -> None:
        """Weights that a step changes without raising a version (by ``.data``) cannot be watched."""
        if self._tells is None and self._before is not None:
            self._tells = self._before.all_have_changed()


class OptimizerMarks:
    """An optimizer's tensors by their versions, and its numbers: nothing is copied or kept alive.

    Fused kernels raise no version of what they write; PyTorch's own optimizers count the step of each
    weight, in a tensor, before such a kernel runs (``torch/optim/adam.py``, ``_fused_adam``).

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
        fused = [group for group in optimizer.param_groups if group.get("fused")] if _is_own(optimizer) else []
        self._fused = {id(weight): weight for group in fused for weight in group["params"] if weight.grad is not None}
        self._steps = {key: _Mark(step) for key, weight in self._fused.items() for step in self._steps_of(weight)}
        self._gradients = [(weight, weakref.ref(weight.grad)) for weight in graded]
        self._owners = [(owner, set(owner), {k: v for k, v in owner.items() if _is_number(v)}) for owner in owners]

    def have_changed(self) -> bool:
        """Whether a weight, its gradient, or a tensor of the state is another now."""
        moved = any(gradient() is not weight.grad for weight, gradient in self._gradients)
        marks = any(mark.has_changed() for mark in (*self._weights, *self._others))
        return moved or marks or any(map(self._has_stepped, self._fused.values()))

    def all_have_changed(self) -> bool | None:
        """Whether that can be seen of all weights with a gradient now; ``None`` where none has one."""
        pairs = zip(self._weights, self._gradients)
        seen = [mark.has_changed() or self._has_stepped(weight) for mark, (weight, _) in pairs]
        return all(seen) if seen else None

    def counts_fused_steps(self) -> bool:
        """Whether no weight is updated by a fused kernel, or some of these have their steps counted."""
        return not self._fused or any(self._steps_of(weight) for weight in self._fused.values())

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

    def _has_stepped(self, weight: Tensor) -> bool:
        """Whether a fused kernel may have updated a weight; a count that is made in this step begins at version 0."""
        if id(weight) not in self._fused:
            return False
        mark = self._steps.get(id(weight))
        return any(step._version > 0 for step in self._steps_of(weight)) if mark is None else mark.has_changed()

    def _steps_of(self, weight: Tensor) -> list[Tensor]:
        """The tensor that counts the steps of a weight, if there is one."""
        step = self._optimizer.state.get(weight, {}).get("step")
        return [step] if isinstance(step, Tensor) else []


def _is_own(optimizer: Optimizer) -> bool:
    return type(optimizer).__module__.startswith("torch.optim.")


class _Mark:
    """A tensor's identity and version."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._version = weakref.ref(tensor), tensor._version

    def has_changed(self) -> bool:
        tensor = self._tensor()
        return tensor is None or tensor._version != self._version


def _tensors(state: Any) -> Iterator[Tensor]:
    """The tensors of a state, in whatever it keeps them."""
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, (dict, list, tuple)):
        for part in state.values() if isinstance(state, dict) else state:
            yield from _tensors(part)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float))
