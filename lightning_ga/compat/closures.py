"""Intercept the closures of automatic optimization.

Lightning's ``loops/optimization/automatic.py``, ``plugins/precision/precision.py`` and ``loops/utilities.py``.

Tested in tests/integration/test_lbfgs.py.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any
from weakref import ref

import torch
from lightning.pytorch import LightningModule

from lightning_ga.compat import patching
from lightning_ga.compat.loop_counters import LoopReader


@contextmanager
def intercepted_closures(trainer: Any, wrap: Callable[..., Callable[..., Any]], place: LoopReader) -> Iterator[None]:
    """Return a context in which the loop runs what ``wrap(closure, make, kwargs, optimizer, position)`` returns.

    The ``closure`` is a weak reference to Lightning's own; ``make(kwargs, optimizer, position)`` makes another
    (``automatic.py:172``). Lightning zeroes gradients if the ``place`` is that of a window's first pass.
    """
    loop = trainer.fit_loop.epoch_loop.automatic_optimization
    make = partial(type(loop)._make_closure, loop)

    def make_ours(kwargs: Any, optimizer: Any, _: int) -> Any:
        """Return Lightning's own closure, so that Lightning notices if it is never called; calling it runs ours.

        Lightning zeroes if the factor divides the batch's index. Windows may begin elsewhere, so it gets the index in
        the window; the hook that zeroes gets the batch's.
        """
        given = (kwargs, optimizer, place.index_in_window)
        lightning_closure = make(*given)
        vars(lightning_closure)["closure"] = wrap(ref(lightning_closure), make, *given)
        return lightning_closure

    def zero(_: int, optimizer: Any) -> None:
        type(loop)._optimizer_zero_grad(loop, trainer.fit_loop.batch_idx, optimizer)

    with patching.shadowed(loop, "_make_closure", make_ours), patching.shadowed(loop, "_optimizer_zero_grad", zero):
        yield


def zero_gradients(trainer: Any, batch_idx: int) -> bool:
    """Let a module's own hook zero the gradients, if it has one; return whether it leaves any."""
    module = trainer.lightning_module
    if type(module).optimizer_zero_grad is LightningModule.optimizer_zero_grad:
        return False
    for optimizer in trainer.optimizers:
        module.optimizer_zero_grad(trainer.current_epoch, batch_idx, optimizer)
        for group in optimizer.param_groups:
            if any(each.grad is not None and bool(each.grad.norm() != 0) for each in group["params"]):
                return True
    return False


def run_closure(closure: Any, *, zeroes: bool = True) -> Any:
    """Run forward pass, zeroing of gradients and backward pass of Lightning's own closure.

    It may be given by a weak reference, because a strong one would keep the closure, and with it a batch, alive. Unless
    it ``zeroes``, it zeroes no gradients from here on.
    """
    if isinstance(closure, ref):
        closure = closure()
    if not zeroes:
        closure._zero_grad_fn = None
    return type(closure).closure(closure)  # its own ``closure`` may be replaced by ours, which calls this function


def before_the_last(trainer: Any) -> AbstractContextManager[None]:
    """Return a context for all pieces of a batch but the last: ``on_after_backward`` is not called."""
    return patching.shadowed(trainer.precision_plugin, "post_backward", lambda loss, _: loss.detach())


def evaluates_again(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a step of the optimizer evaluates its closure more than once, as LBFGS and SAM do."""
    return isinstance(optimizer, torch.optim.LBFGS) or hasattr(optimizer, "second_step")


def takes_an_iterator(module: Any) -> bool:
    """Return whether the step fetches batches itself (``loops/utilities.py``, ``_select_data_fetcher``)."""
    return "dataloader_iter" in inspect.signature(module.training_step).parameters
