"""An optimizer's step that is run again after memory ran out in it, if what it had done can be undone."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

from torch.utils._python_dispatch import _get_current_dispatch_mode

from lightning_ga.fit.messages import OomEvent, of_rank, optimizer_step_failed
from lightning_ga.memory.device import describe_memory
from lightning_ga.memory.oom import attempt, is_out_of_memory
from lightning_ga.snapshot.update import UpdateSnapshot, is_own, without_hooks


class OptimizerRetry:
    """Takes the place of ``optimizer.step``, wherever it is called from.

    Args:
        trainer: The Trainer.
        report: Told of every error that was survived.
        prepare: Called when backward, hooks and clipping are done.
    """

    def __init__(self, trainer: Any, report: Callable[[OomEvent], None], *, prepare: Callable[[], None]) -> None:
        self._trainer = trainer
        self._report = report
        self._prepare = prepare
        self._before = UpdateSnapshot(trainer.optimizers[0])
        self._is_update = False  # whether backward, hooks and clipping are done
        self._tells: bool | None = None  # whether versions tell what a step changes; known once one went through

    def __call__(
        self, step: Callable[..., Any], closure: Callable[[], Any] | None = None, *given: Any, **settings: Any
    ) -> Any:
        """Run ``step``; once more without its closure if memory runs out after that, and nothing has changed."""
        losses: list[Any] = []
        if self._is_update:
            self._before.begin()

        def once() -> Any:
            losses.append(closure() if closure is not None else None)
            return losses[-1]

        try:
            ran = attempt(
                partial(step, *(() if closure is None else (once,)), *given, **settings),
                lambda error: self._is_update and is_out_of_memory(error),
            )
            if ran.failure is None:
                self._learn()
                return ran.result
            update = partial(step, *(() if closure is None else (None,)), *given, **settings)
            # Hooks have run before the closure; without one, what they changed is seen.
            with nullcontext() if closure is None else without_hooks(self._trainer.optimizers[0]):
                self._run_again(update, ran.failure)
            return losses[0] if losses else None
        finally:
            self.forget()

    def forget(self) -> None:
        """Let go of gradients where a window is over: a step that a gradient scaler skips is never called."""
        self._is_update = False
        self._before.forget()

    def _run_again(self, update: Callable[[], Any], failure: Exception) -> None:
        """Undo what a failed update began, and run it once more."""
        memory = describe_memory(self._trainer.strategy.root_device)
        if not self._can_tell() or self._before.have_changed():
            raise of_rank(optimizer_step_failed(memory), self._trainer.world_size) from failure
        self._before.restore()
        try:
            update()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise of_rank(optimizer_step_failed(memory, again=True), self._trainer.world_size) from error
        self._report(OomEvent("the optimizer's step", self._trainer.global_step, 0, 0, memory))

    def gradients_are_ready(self) -> None:
        """Backward, hooks and clipping are done: all that is left is the update."""
        self._prepare()
        self._before.take(short=self._tells is True)
        self._is_update = True

    def _can_tell(self) -> bool:
        """Whether versions can be relied on; in a first step, those of PyTorch's own optimizers.

        Not so where a dispatch mode sees the step: operations on lists of tensors raise no versions then.
        Nor where it is fused and counts no steps.
        """
        optimizer = self._trainer.optimizers[0]
        if _get_current_dispatch_mode() is not None and any(map(_is_by_lists, optimizer.param_groups)):
            return False
        if self._tells is not None:
            return self._tells
        return is_own(optimizer) and self._before.counts_fused_steps()

    def _learn(self) -> None:
        """Weights that a step changes without raising a version (by ``.data``) cannot be watched."""
        if self._tells is None and self._is_update:
            self._tells = self._before.all_have_changed()


def _is_by_lists(group: dict[str, Any]) -> bool:
    """Whether a group's weights are updated by operations on lists: what PyTorch's optimizers choose off the CPU."""
    chosen = group.get("foreach", False)  # optimizers without that choice go weight by weight
    default = chosen is None and any(weight.device.type != "cpu" for weight in group["params"])
    return bool(chosen or group.get("fused") or default)
