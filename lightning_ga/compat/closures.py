"""Intercept the closures of automatic optimization, and the optimizer's step.

Lightning's ``loops/optimization/automatic.py``, ``plugins/precision/precision.py`` and ``loops/utilities.py``.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import is_
from typing import Any

import torch

from lightning_ga.compat import patching


@contextmanager
def intercepted_closures(trainer: Any, wrap: Callable[..., Callable[..., Any]]) -> Iterator[None]:
    """Return a context in which the loop's closures are those of ``wrap``.

    It is called as ``wrap(whole, make, kwargs, optimizer, batch_idx)``: ``whole`` is Lightning's own closure
    (``automatic.py:163``), and ``make`` makes others of the last three. What comes of it runs the
    micro-batch, and returns a result with the ``loss`` for the optimizer and the output as ``asdict()``.
    """
    loop = trainer.fit_loop.epoch_loop.automatic_optimization
    make = partial(type(loop)._make_closure, loop)

    def make_ours(*given: Any) -> Any:
        """Return a closure of Lightning's own class, which reports an ``optimizer_step`` that never calls it."""
        whole = make(*given)
        closure = object.__new__(type(whole))
        vars(closure).update(vars(whole), closure=wrap(whole, make, *given))
        return closure

    with patching.shadowed(loop, "_make_closure", make_ours):
        yield


@dataclass(frozen=True, slots=True)
class ClosureOutput:
    """The result of a closure: the loss that the optimizer gets, and the output of the micro-batch."""

    loss: Any
    output: dict[str, Any]

    def asdict(self) -> dict[str, Any]:
        """Return the output."""
        return self.output


def accumulating(trainer: Any) -> AbstractContextManager[None] | None:
    """Return a context in which backward passes do not reduce gradients over ranks; ``None`` if they never do."""
    block = getattr(trainer.strategy, "block_backward_sync", None)
    return None if block is None else block()


@contextmanager
def before_the_last(trainer: Any, withheld: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Return a context in which more pieces of the batch follow: its gradients are not complete after a backward pass.

    The loop says that it goes on to accumulate, as hooks of gradients may ask, and ``on_after_backward`` is not called.

    Args:
        trainer: The Trainer.
        withheld: Called instead, with the loss without its graph (``plugins/precision/precision.py``).
    """
    loop, plugin = trainer.fit_loop.epoch_loop, trainer.precision_plugin  # ``fit_loop._should_accumulate`` asks it

    def post_backward(loss: torch.Tensor, _: Any) -> torch.Tensor:
        loss = loss.detach()
        withheld(loss)
        return loss

    with (
        patching.shadowed(loop, "_should_accumulate", lambda: True),
        patching.shadowed(plugin, "post_backward", post_backward),
    ):
        yield


def call_after_backward(trainer: Any, loss: torch.Tensor) -> None:
    """Call the hooks ``on_after_backward``."""
    trainer.precision_plugin.post_backward(loss, trainer.lightning_module)


def takes_an_iterator(module: Any, step: str = "training_step") -> bool:
    """Return whether a step fetches batches itself (``loops/utilities.py``, ``_select_data_fetcher``)."""
    return "dataloader_iter" in inspect.signature(getattr(module, step)).parameters


def zero_no_gradients(closure: Any) -> None:
    """Stop a closure of the loop from zeroing gradients: an earlier micro-batch of its batch has done so."""
    closure._zero_grad_fn = None


def zeroes_gradients(closure: Any) -> bool:
    """Return whether a closure of the loop zeroes gradients before its backward pass."""
    return closure._zero_grad_fn is not None


def zeroes_as_stock(trainer: Any) -> bool:
    """Return whether zeroing leaves no gradient: each is an optimizer's, and no hook has a way of its own to do it."""
    module, optimizers = trainer.lightning_module, trainer.optimizers
    zeroed = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    if any(id(parameter) not in zeroed for parameter in module.parameters() if parameter.requires_grad):
        return False
    stock = patching.sibling(trainer, "core.module").LightningModule.optimizer_zero_grad
    by_torch = all(getattr(each.zero_grad, "__func__", None) is torch.optim.Optimizer.zero_grad for each in optimizers)
    return by_torch and getattr(module.optimizer_zero_grad, "__func__", None) is stock


def zero_through(closure: Any, around: Callable[[Callable[[], None]], None]) -> None:
    """Let a closure of the loop zero gradients by ``around(zero)``."""
    closure._zero_grad_fn = partial(around, closure._zero_grad_fn)


def undo_half_made_scale(trainer: Any) -> None:
    """Let a gradient scaler begin anew if memory ran out between the two tensors that it makes for its first loss.

    It refuses to go on with one of them (``_lazy_init_scale_growth_tracker`` in ``torch/amp/grad_scaler.py``).
    """
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    if isinstance(scaler, torch.amp.GradScaler) and scaler._growth_tracker is None:
        scaler._scale = None


@contextmanager
def after_backward(trainer: Any, finish: Callable[[], None]) -> Iterator[None]:
    """Return a context in which a call follows every backward pass, before the hooks ``on_after_backward``."""
    plugin = trainer.precision_plugin
    backward = plugin.backward

    def and_then(*arguments: Any, **settings: Any) -> None:
        backward(*arguments, **settings)
        finish()

    with patching.shadowed(plugin, "backward", and_then):
        yield


@contextmanager
def intercepted_optimizer_step(trainer: Any, around: Callable[..., Any], ready: Callable[[], None]) -> Iterator[None]:
    """Return a context in which every call of the optimizer's step goes through ``around(step, *arguments)``.

    Args:
        trainer: The Trainer.
        around: Called instead of the step, with the step and its arguments.
        ready: Called between clipping and the update (``plugins/precision/precision.py``, ``_after_closure``).
    """
    optimizer, plugin = trainer.optimizers[0], trainer.precision_plugin
    after_closure = type(plugin)._after_closure

    def after(*arguments: Any) -> None:
        after_closure(plugin, *arguments)
        ready()

    step = partial(around, optimizer.step)
    with patching.shadowed(optimizer, "step", step), patching.shadowed(plugin, "_after_closure", after):
        yield


class TrainedTensors:
    """The module's parameters, and tensors that only an optimizer holds; modules are listed once, at the start."""

    def __init__(self, trainer: Any) -> None:
        self._optimizers = trainer.optimizers
        self._tables = [part._parameters for part in trainer.lightning_module.modules()]
        self._found: list[torch.Tensor | None] = []
        self._tensors: list[torch.Tensor] = []

    def now(self) -> list[torch.Tensor]:
        """Return the tensors that exist now, each once; those of modules added since are not among them."""
        groups = [group["params"] for optimizer in self._optimizers for group in optimizer.param_groups]
        found = [*chain.from_iterable(map(dict.values, self._tables)), *chain.from_iterable(groups)]
        if len(found) != len(self._found) or not all(map(is_, found, self._found)):
            self._found = found
            self._tensors = list({id(tensor): tensor for tensor in found if tensor is not None}.values())
        return self._tensors
