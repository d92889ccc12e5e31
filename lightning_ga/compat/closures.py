"""The closures of automatic optimization, and the optimizer's step.

Read in lightning 2.6.6 and 2.5.0; ``tests/compat`` fails when a name or an order that is relied on here changes.
"""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import wraps
from itertools import chain
from types import MethodType
from typing import Any

import torch

from lightning_ga.compat import patching


def intercept_closures(trainer: Any, wrap: Callable[..., Any]) -> None:
    """Let the loop take its closures from ``wrap(make, kwargs, optimizer, batch_idx)`` (``automatic.py:163``)."""
    loop = trainer.fit_loop.epoch_loop.automatic_optimization
    make = type(loop)._make_closure

    def make_ours(*given: Any) -> Any:
        """A closure of Lightning's own class, which says so if an ``optimizer_step`` forgets to call it."""
        ours, closure = wrap(lambda *again: make(loop, *again), *given), make(loop, *given)
        patching.shadow(closure, "closure", lambda *arguments, **_: _Ran(ours(*arguments), ours.consume_result()))
        return closure

    patching.shadow(loop, "_make_closure", make_ours)


@dataclass(frozen=True, slots=True)
class _Ran:
    """What a closure hands to the loop: what the optimizer is told, and what came of the micro-batch."""

    loss: Any
    result: Any

    def asdict(self) -> dict[str, Any]:
        """As the results of the loop's own closures."""
        return dict(self.result.asdict())


def release_closures(trainer: Any) -> None:
    """Undo ``intercept_closures``."""
    patching.unshadow(trainer.fit_loop.epoch_loop.automatic_optimization, "_make_closure")


def accumulating(trainer: Any) -> AbstractContextManager[None]:
    """Within, backward passes do not reduce gradients over ranks."""
    block = getattr(trainer.strategy, "block_backward_sync", None)
    return nullcontext() if block is None else block()


def takes_an_iterator(module: Any, step: str = "training_step") -> bool:
    """Whether a step fetches batches itself (``loops/utilities.py``, ``_select_data_fetcher``)."""
    return "dataloader_iter" in inspect.signature(getattr(module, step)).parameters


def zero_no_gradients(closure: Any) -> None:
    """Let a closure of the loop leave gradients as they are: an earlier part of its batch has zeroed them."""
    closure._zero_grad_fn = None


def zeroes_gradients(closure: Any) -> bool:
    """Whether a closure of the loop zeroes gradients before its backward pass."""
    return closure._zero_grad_fn is not None


def intercept_optimizer_step(trainer: Any, around: Callable[..., Any], ready: Callable[[], None]) -> Callable[[], None]:
    """Let the optimizer's step go through ``around(step, *arguments)``, whoever calls it; returns what undoes that.

    ``ready`` is called between clipping and the update (``plugins/precision/precision.py``, ``_after_closure``).
    """
    optimizer, plugin = trainer.optimizers[0], trainer.precision_plugin
    after_closure, earlier = type(plugin)._after_closure, vars(optimizer).get("step")
    step, active = optimizer.step, True

    def after(*arguments: Any) -> None:
        after_closure(plugin, *arguments)
        ready()

    @wraps(step)
    def through(_: Any, *arguments: Any, **settings: Any) -> Any:
        return around(step, *arguments, **settings) if active else step(*arguments, **settings)

    def release() -> None:
        nonlocal active
        active = False
        patching.unshadow(plugin, "_after_closure")
        if vars(optimizer).get("step") is not method:  # a schedule has wrapped it since
            return
        if earlier is None:
            patching.unshadow(optimizer, "step")
        else:
            patching.shadow(optimizer, "step", earlier)

    # A method, as schedules of the learning rate wrap it by its ``__func__`` (``torch/optim/lr_scheduler.py``).
    method = MethodType(through, optimizer)
    patching.shadow(optimizer, "step", method)
    patching.shadow(plugin, "_after_closure", after)
    return release


class TrainedTensors:
    """The module's parameters, and tensors that only an optimizer knows; the module is walked through once.

    Args:
        trainer: The Trainer.
    """

    def __init__(self, trainer: Any) -> None:
        self._optimizers = trainer.optimizers
        self._tables = [part._parameters for part in trainer.lightning_module.modules()]

    def now(self) -> list[torch.Tensor]:
        """Return those that there are now, each once; of parts that were added since, none."""
        groups = [group["params"] for optimizer in self._optimizers for group in optimizer.param_groups]
        known = chain(chain.from_iterable(map(dict.values, self._tables)), chain.from_iterable(groups))
        return list({id(tensor): tensor for tensor in known if tensor is not None}.values())
