"""Warn of what acts batch by batch where the loader cuts: there, batches of the loop are micro-batches."""

from collections import Counter
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_ga.compat import closures, intervals, loops
from lightning_ga.snapshot.contents import contained
from lightning_ga.snapshot.copies import versions

_LOOKS = 8  # micro-batches before which the callbacks are looked at


class ByBatch:
    """Looks for callbacks that average the weights, and for schedules and callbacks that follow the last batch."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._looks = _LOOKS
        self._before: dict[str, tuple[list[torch.Tensor], Any]] = {}  # by the callback's name
        self._has_warned_of_monitors = False

    def look(self) -> None:
        """Compare the tensors of callbacks with those before the last micro-batch, if that was of the same window."""
        if not self._looks or self._trainer.accumulate_grad_batches == 1:
            return
        self._looks -= 1
        before, self._before = self._before, {}
        for callback in self._trainer.callbacks:
            name, tensors = type(callback).__name__, _tensors_of(callback)
            self._before[name] = tensors, versions(tensors)
            if loops.begins_window(self._trainer) or name not in before:
                continue
            known, former = before[name]
            pairs = zip(known, versions(known), former)
            if self._are_weights([tensor for tensor, now, was in pairs if now != was]):
                self._looks = 0
                rank_zero_warn(
                    f"{name} changes its copy of the weights after each micro-batch: where the loader cuts, these are "
                    "the batches that hooks such as on_train_batch_end see. Let it act if trainer.global_step has "
                    'changed, or use micro_batching="step".'
                )

    def check_monitors(self) -> None:
        """Warn, as an epoch ends, of what decides by a value of the last batch."""
        if self._has_warned_of_monitors or self._trainer.accumulate_grad_batches == 1:
            return
        # This hook may log the mean over the epoch by the same name.
        if closures.has_hook([self._trainer.lightning_module], "on_train_epoch_end"):
            return
        for who, value in intervals.followed_by_step(self._trainer):
            self._has_warned_of_monitors = True
            rank_zero_warn(
                f"{who} follows {value!r}, which training_step logs by step: where the loader cuts, that is the value "
                'of a micro-batch. Log it with on_epoch=True, or use micro_batching="step".'
            )

    def _are_weights(self, tensors: list[torch.Tensor]) -> bool:
        """Return whether there is one of the shape of each trained parameter."""
        trained = Counter(p.shape for p in self._trainer.lightning_module.parameters() if p.requires_grad)
        return bool(trained) and trained <= Counter(tensor.shape for tensor in tensors)


def _tensors_of(callback: Any) -> list[torch.Tensor]:
    """Return the tensors that a callback keeps in its attributes, in containers and in modules of its own."""
    held = [value for value in vars(callback).values() if not isinstance(value, torch.nn.Module)]
    modules = [value for value in vars(callback).values() if isinstance(value, torch.nn.Module)]
    tensors = [each for each in contained(held, set(), longest=1000) if isinstance(each, torch.Tensor)]
    tensors += [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    return [tensor for tensor in tensors if not tensor.is_inference()]  # outputs of validation have no versions
