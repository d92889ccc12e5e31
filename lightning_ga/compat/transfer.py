"""Move batches from the host to the step, and intercept that and the steps of evaluation.

Lightning's ``loops/training_epoch_loop.py``, ``trainer/call.py`` (``_call_strategy_hook``, by which the loops call both
on the strategy) and ``core/module.py``.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from lightning_ga.compat import closures, patching


@dataclass(frozen=True, slots=True)
class BatchTransfer:
    """Moves the batches of one loader from the host to the step (``loops/training_epoch_loop.py:320``)."""

    trainer: Any
    loader: int = 0  # among those of its stage

    @property
    def has_hooks(self) -> bool:
        """True if the user's own hooks change a batch during the transfer or after it."""
        return hooks_move_batches(self.trainer)

    @property
    def split_batch(self) -> Any:
        """The module's own ``split_batch``; ``None`` if it has none."""
        return getattr(self.trainer.lightning_module, "split_batch", None)

    def on_host(self, batch: Any) -> Any:
        """Run the part that precedes the transfer."""
        batch = self.trainer.precision_plugin.convert_input(batch)
        return self.trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=self.loader)

    def moved(self, batch: Any) -> Any:
        """Run the rest: the transfer, and the hook that follows it on the device."""
        call = patching.sibling(self.trainer, "trainer.call")
        return call._call_strategy_hook(self.trainer, "batch_to_device", batch, dataloader_idx=self.loader)

    def to_device(self, batch: Any) -> Any:
        """Run both."""
        return self.moved(self.on_host(batch))


def hooks_move_batches(trainer: Any) -> bool:
    """Return whether the module or the datamodule overrides the transfer of batches or the hook after it."""
    owners = trainer.lightning_module, trainer.datamodule
    return closures.has_hook(owners, "transfer_batch_to_device", "on_after_batch_transfer")


def hooks_see_batches(trainer: Any) -> bool:
    """Return whether the module or the datamodule overrides any hook that a batch passes before the step."""
    owners = trainer.lightning_module, trainer.datamodule
    return closures.has_hook(owners, "on_before_batch_transfer") or hooks_move_batches(trainer)


@contextmanager
def intercepted_evaluation(trainer: Any, around: Callable[..., Any], move: Callable[..., Any]) -> Iterator[None]:
    """Return a context in which steps of evaluation go through ``around``, and transfers of batches through ``move``.

    They are called as ``around(name, step, *arguments)`` and ``move(to_device, batch, dataloader_idx)``.
    """
    strategy = trainer.strategy
    to_device = type(strategy).batch_to_device

    def batch_to_device(batch: Any, device: Any = None, dataloader_idx: int = 0) -> Any:
        moved = partial(to_device, strategy, device=device, dataloader_idx=dataloader_idx)
        return move(moved, batch, dataloader_idx)

    with ExitStack() as held:
        held.enter_context(patching.shadowed(strategy, "batch_to_device", batch_to_device))
        for name in ("validation_step", "test_step", "predict_step"):
            step = partial(getattr(type(strategy), name), strategy)
            held.enter_context(patching.shadowed(strategy, name, partial(around, name, step)))
        yield
