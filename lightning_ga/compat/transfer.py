"""The way of batches from the host to the step.

Read in lightning 2.6.6 and 2.5.0; ``tests/compat`` fails when a name or an order that is relied on here changes.
"""

from dataclasses import dataclass
from typing import Any

from lightning_ga.compat import patching


def to_device(trainer: Any, batch: Any) -> Any:
    """A batch as ``training_step`` gets it (``loops/training_epoch_loop.py:320``)."""
    return transferred(trainer, before_transfer(trainer, batch))


def before_transfer(trainer: Any, batch: Any, *, loader: int = 0) -> Any:
    """What ``to_device`` does on the host."""
    batch = trainer.precision_plugin.convert_input(batch)
    return trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=loader)


def transferred(trainer: Any, batch: Any, *, loader: int = 0) -> Any:
    """The rest of it: the transfer, and what comes after it on the device."""
    return patching.sibling(trainer, "trainer.call")._call_strategy_hook(
        trainer, "batch_to_device", batch, dataloader_idx=loader
    )


@dataclass(frozen=True, slots=True)
class BatchTransfer:
    """The way of a loader's batches from the host to the step.

    Attributes:
        trainer: The Trainer.
        loader: The loader's number among those of its stage.
    """

    trainer: Any
    loader: int = 0

    @property
    def has_hooks(self) -> bool:
        """Whether something of the user's own is done to a batch while it is moved or afterwards."""
        return hooks_move_batches(self.trainer)

    @property
    def split_batch(self) -> Any:
        """The module's own way to cut a batch; ``None`` if it has none."""
        return getattr(self.trainer.lightning_module, "split_batch", None)

    def on_host(self, batch: Any) -> Any:
        """Do what is done before the batch is moved."""
        return before_transfer(self.trainer, batch, loader=self.loader)

    def to_device(self, batch: Any) -> Any:
        """Do that, and move the batch."""
        return transferred(self.trainer, self.on_host(batch), loader=self.loader)


def hooks_move_batches(trainer: Any) -> bool:
    """Whether the module or the datamodule has a part of its own in the way of batches to the device."""
    owners = [owner for owner in (trainer.lightning_module, trainer.datamodule) if owner is not None]
    hooks = [
        getattr(owner, hook) for owner in owners for hook in ("transfer_batch_to_device", "on_after_batch_transfer")
    ]
    return not all(hook.__module__.startswith(("lightning.", "pytorch_lightning.")) for hook in hooks)


def hooks_see_batches(trainer: Any) -> bool:
    """Whether the module or the datamodule has a part of its own in what is done to a batch before the step."""
    owners = [owner for owner in (trainer.lightning_module, trainer.datamodule) if owner is not None]
    before = [owner.on_before_batch_transfer for owner in owners]
    own = not all(hook.__module__.startswith(("lightning.", "pytorch_lightning.")) for hook in before)
    return own or hooks_move_batches(trainer)
