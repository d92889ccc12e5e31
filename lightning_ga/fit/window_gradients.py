"""The gradients of a window: what each micro-batch weighs, and what is done to them before the step."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from lightning_ga.compat import agreement, loops
from lightning_ga.plan.config import Normalize
from lightning_ga.plan.weights import KnownWindow, LateWindow, count_items
from lightning_ga.plan.windows import Chunk
from lightning_ga.snapshot.gradients import sparse_parameters


class WindowGradients:
    """Weighs backward passes so that a window's gradient is that of its samples in one pass.

    Args:
        trainer: The Trainer.
        normalize: What micro-batches are weighted by: ``"samples"``, a callable that counts the items
            of a batch, or ``None`` for Lightning's division by the nominal factor.
    """

    def __init__(self, trainer: Any, normalize: Normalize) -> None:
        self._trainer = trainer
        self._normalize = normalize
        self._weights: KnownWindow | LateWindow | None = None
        self.weight = 1.0
        self._zeroing: list[Any] = []
        self._kept: dict[str, Any] | None = None
        self._sparse: list[torch.nn.Parameter] | None = None

    def begin_epoch(self, micro_batch: int, *, known: bool) -> None:
        """Begin an epoch of micro-batches of at most so many samples, ``known`` in advance or not."""
        self._sparse = None  # looked for once an epoch, when there are gradients to be seen
        world_size, sum_over_ranks = self._trainer.world_size, partial(agreement.sum_over_ranks, self._trainer)
        if self._normalize is None:
            return
        if self._normalize == "samples":
            late = partial(LateWindow, sum_over_ranks=sum_over_ranks, reference=micro_batch)
            self._weights = KnownWindow(world_size) if known else late(world_size)
        elif self._weights is None:
            self._weights = LateWindow(world_size, sum_over_ranks=sum_over_ranks)

    @property
    def counts_samples(self) -> bool:
        """Whether the samples of each micro-batch have to be known."""
        return self._weights is not None

    def weigh(self, batch: Any, chunk: Chunk, *, sharded_ranks: int, samples: int) -> None:
        """Before each micro-batch of so many samples: find its weight."""
        if self._weights is None:
            return
        factor = self._trainer.accumulate_grad_batches
        self.weight = self._weights.weigh(
            (count_items(self._normalize, batch) if callable(self._normalize) else samples) if chunk.count else 0,
            planned=chunk.count,
            window=chunk.window_samples * sharded_ranks,
            factor=factor,
            first=loops.micro_batch_index(self._trainer) % factor == 0,
        )

    def share_of(self, part: Any, batch: Any, *, samples: int, whole: int) -> float:
        """What a part of a batch weighs in it: its samples, or what ``normalize`` counts."""
        if not callable(self._normalize):
            return samples / whole
        total = count_items(self._normalize, batch)
        return count_items(self._normalize, part) / total if total else 0.0

    @contextmanager
    def weighing_a_part(self, share: float) -> Iterator[None]:
        """Within, the next backward pass is that of a part of the micro-batch."""
        weight, self.weight = self.weight, self.weight * share
        if self._weights is not None:
            self._weights.take_part(share)
        try:
            yield
        finally:
            self.weight = weight

    @contextmanager
    def counted_before(self) -> Iterator[None]:
        """Within, passes are evaluated again: what the window holds has been counted."""
        kept = None if self._weights is None else dict(vars(self._weights))
        try:
            yield
        finally:
            if self._weights is not None and kept is not None:
                vars(self._weights).update(kept)

    def keep(self) -> None:
        """Remember where the weights of the window are."""
        self._kept = None if self._weights is None else dict(vars(self._weights))

    def put_back(self) -> None:
        """After a failed attempt: the weights as they were kept, and no hook left on a parameter."""
        if self._weights is not None and self._kept is not None:
            vars(self._weights).update(self._kept)
        self._stop_zeroing()

    def apply_weight(self, loss: torch.Tensor) -> None:
        """Before each backward pass: let it weigh as much, and keep a weightless one out altogether."""
        weight = self.weight
        if self._weights is not None:
            self._weights.trained()
        if weight != 1.0:
            loss.register_hook(lambda gradient: gradient * weight)  # type: ignore[no-untyped-call]
        if weight == 0.0:
            # A mean over nothing is NaN, and 0 × NaN too: gradients are made zero as they come, before ranks reduce.
            parameters = (p for p in self._trainer.lightning_module.parameters() if p.requires_grad)
            self._zeroing = [parameter.register_hook(torch.zeros_like) for parameter in parameters]

    def settle(self) -> None:
        """After each backward pass: keep sparse gradients from growing with the factor."""
        self._stop_zeroing()
        if self._sparse is None:
            self._sparse = sparse_parameters(self._trainer.lightning_module)
        for parameter in self._sparse:
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.coalesce()

    def _stop_zeroing(self) -> None:
        for hook in self._zeroing:
            hook.remove()
        self._zeroing = []

    def close_window(self, optimizer: torch.optim.Optimizer) -> None:
        """Before the optimizer step, after unscaling and before clipping: bring the window to its mean."""
        scale = self.window_scale()
        if scale != 1.0:
            scale_gradients(optimizer, scale)

    def window_scale(self) -> float:
        """What the sum of the window's weighted micro-batches is to be multiplied by; ranks ask together."""
        return 1.0 if self._weights is None else self._weights.close(self._trainer.accumulate_grad_batches)


@torch.no_grad()
def scale_gradients(optimizer: torch.optim.Optimizer, scale: float) -> None:
    """Scale all gradients in place; sparse ones stay sparse and coalesced."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                (parameter.grad._values() if parameter.grad.is_sparse else parameter.grad).mul_(scale)
