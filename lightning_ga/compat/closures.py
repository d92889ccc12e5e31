"""Intercept the closures of automatic optimization, and the optimizer's step.

Lightning's ``loops/optimization/automatic.py``, ``plugins/precision/precision.py`` and ``loops/utilities.py``.
"""

import dis
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from lightning_ga.compat import patching


@contextmanager
def intercepted_closures(trainer: Any, wrap: Callable[..., Callable[..., Any]]) -> Iterator[None]:
    """Return a context in which the loop runs what ``wrap(whole, make, kwargs, optimizer, batch_idx)`` returns.

    ``whole`` is Lightning's own closure (``automatic.py:163``), and ``make`` makes others of the last three. The result
    has the ``loss`` for the optimizer, and the output as ``asdict()``.
    """
    loop = trainer.fit_loop.epoch_loop.automatic_optimization
    make = partial(type(loop)._make_closure, loop)

    def make_ours(*given: Any) -> Any:
        """Return Lightning's own closure, which reports an ``optimizer_step`` that never calls it, but runs ours."""
        whole = make(*given)
        vars(whole)["closure"] = wrap(whole, make, *given)
        return whole

    with patching.shadowed(loop, "_make_closure", make_ours):
        yield


def run_closure(closure: Any) -> Any:
    """Run the forward pass, the zeroing of gradients and the backward pass of Lightning's own closure."""
    return type(closure).closure(closure)


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
    """Return a context in which more pieces of the batch follow: the loop says that it goes on to accumulate.

    In place of ``on_after_backward``, ``withheld`` is called with the loss (``plugins/precision/precision.py``).
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


def undo_half_made_scale(trainer: Any) -> None:
    """Let a gradient scaler begin anew if memory ran out between the two tensors that it makes for its first loss."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    if isinstance(scaler, torch.amp.GradScaler) and scaler._growth_tracker is None:
        scaler._scale = None


BETWEEN_BATCHES = (
    *("on_train_batch_start", "on_train_batch_end"),
    *("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"),
)


def has_hook(owners: Iterable[Any], *names: str) -> bool:
    """Return whether one of these, modules or callbacks, has a hook of its own by one of these names."""
    hooks = (getattr(owner, name, None) for owner in owners for name in names)
    stock = ("lightning.", "pytorch_lightning.", "lightning_ga.callback", "lightning_ga.app.")
    return any(hook is not None and not getattr(hook, "__module__", "").startswith(stock) for hook in hooks)


_COUNTS_WINDOWS = {"global_step", "accumulate_grad_batches"}


def reads_batch(hook: Any, *, of_module: bool) -> bool:
    """Return whether the code of a hook reads what belongs to a batch, and nothing that counts windows.

    Outputs, batch and number come after trainer and module in a callback (``callbacks/callback.py``). An object that is
    called in place of a function may read anything.
    """
    function = inspect.unwrap(getattr(hook, "__func__", hook))  # of ``rank_zero_only``, say
    code = getattr(function, "__code__", None)
    if code is None or _COUNTS_WINDOWS.intersection(code.co_names):
        return code is None
    others = inspect.ismethod(hook) + (0 if of_module else 2)  # its owner, and trainer and module
    parameters = enumerate(inspect.signature(function).parameters.values())
    given = {
        each.name
        for place, each in parameters
        if place >= others or each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    }
    read = [each.argval for each in dis.get_instructions(code) if each.opname.startswith("LOAD")]
    return bool(given.intersection(name for each in read for name in (each if isinstance(each, tuple) else (each,))))


def zeroes_by_itself(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer has a ``zero_grad`` of its own."""
    return getattr(optimizer.zero_grad, "__func__", None) is not torch.optim.Optimizer.zero_grad


def evaluates_again(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a step of the optimizer calls its closure more than once."""
    return isinstance(optimizer, torch.optim.LBFGS)


def zero_gradients(trainer: Any, optimizer: Any, number: int) -> None:
    """Zero gradients as the loop does for a batch of this number, without the hooks around it."""
    trainer.fit_loop.epoch_loop.automatic_optimization._optimizer_zero_grad(number, optimizer)
