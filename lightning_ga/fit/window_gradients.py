"""The gradients of a window: what each micro-batch weighs, and what is done to them before the step."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_ga.compat import gradient_dtype, ranks
from lightning_ga.errors import ExactnessWarning
from lightning_ga.plan.config import Normalize
from lightning_ga.plan.weights import KnownWindow, LateWindow, WindowWeights, count_items
from lightning_ga.plan.windows import Chunk
from lightning_ga.snapshot.copies import ZeroedAdditions, coalesce_gradients, sparse_parameters


class WindowGradients:
    """Weighs backward passes so that a window's gradient is that of its samples in one pass.

    Micro-batches are weighted by their samples (``normalize="samples"``), by what a callable counts in them, or, with
    ``None``, by Lightning's division by the nominal factor.
    """

    def __init__(self, trainer: Any, normalize: Normalize) -> None:
        self._trainer = trainer
        self._counts: Callable[[Any], Any] | None = normalize if callable(normalize) else None
        self._by_samples = normalize == "samples"
        self.weights = WindowWeights()  # of the window, as far as it has come
        self.counts_samples = False  # whether the samples of each micro-batch have to be known
        self._zeroing: ZeroedAdditions | None = None
        self._sparse: list[torch.nn.Parameter] | None = None
        self._half: list[torch.Tensor] = []  # parameters whose gradients are summed in float32
        self._is_rounded = False  # whether torch cannot do that, and the user does not know it
        self._trains = self._skips = False  # whether steps of the window have returned a loss, and whether None
        self._has_skipped = False  # whether a step of the last micro-batch has returned None

    @contextmanager
    def summed_in_float32(self) -> Iterator[None]:
        """Sum the gradients of half-precision parameters in float32 as a context, and round them before each step."""
        module, optimizers = self._trainer.lightning_module, self._trainer.optimizers
        half = gradient_dtype.half_parameters(module) if ranks.gradients_are_ours(self._trainer) else []
        self._is_rounded = bool(half) and not gradient_dtype.has_grad_dtype()
        self._half = [] if self._is_rounded else half
        gradient_dtype.begin(self._half)
        handles = [gradient_dtype.narrow_before_steps(each, self._half) for each in optimizers if self._half]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            gradient_dtype.end(self._half)
            self._half = []

    def begin_epoch(self, micro_batch: int, *, known: bool) -> None:
        """Begin an epoch, with the most samples of a micro-batch; those of windows are ``known`` in advance, or not."""
        self._sparse = None  # looked for once an epoch, when there are gradients to be seen
        world_size, sum_over_ranks = self._trainer.world_size, partial(ranks.sum_over_ranks, self._trainer)
        if self._by_samples and known:
            self.weights = KnownWindow(world_size)
        elif self._by_samples:
            self.weights = LateWindow(world_size, sum_over_ranks=sum_over_ranks, reference=micro_batch, fixed=True)
        elif self._counts is not None and not isinstance(self.weights, LateWindow):
            self.weights = LateWindow(world_size, sum_over_ranks=sum_over_ranks)
        self.counts_samples = self._by_samples or self._counts is not None

    def weigh(self, batch: Any, chunk: Chunk, index: int, *, sharded_ranks: int, samples: int) -> None:
        """Weigh the next micro-batch, the ``index``-th of its epoch, of which ``chunk`` was planned."""
        factor = self._trainer.accumulate_grad_batches
        self._skips |= bool(index % factor and self.weights.pending)
        self._has_skipped = False
        count = samples if self._counts is None else count_items(self._counts, batch)
        self.weights = self.weights.weigh(
            count if chunk.count else 0,
            planned=chunk.count,
            window=chunk.window_samples * sharded_ranks,
            factor=factor,
            first=index % factor == 0,
        )

    def share_of(self, part: Any, batch: Any, *, samples: int, whole: int) -> float:
        """Return what a part of a batch weighs in it: its samples of the ``whole``, or what ``normalize`` counts."""
        if self._counts is None:
            return samples / whole
        total = count_items(self._counts, batch)
        return count_items(self._counts, part) / total if total else 0.0

    def weigh_a_part(self, share: float) -> None:
        """Let the next backward pass be that of a part of the micro-batch."""
        self.weights = self.weights.part(share)

    def weigh_all(self) -> None:
        """Let the next backward pass be that of a whole micro-batch."""
        self.weights = self.weights.whole()

    def put_back(self, weights: WindowWeights) -> None:
        """Go on with weights as they were, with no hook left on a parameter."""
        self.weights = weights
        self._stop_zeroing()

    def apply_weight(self, loss: torch.Tensor) -> None:
        """Let the backward pass that begins weigh as much, and keep a weightless one out altogether."""
        weight, self._trains = self.weights.weight * self.weights.share, True
        self.weights = self.weights.trained()
        if weight != 1.0:
            loss.register_hook(lambda gradient: gradient * weight)  # type: ignore[no-untyped-call]
        if weight == 0.0:
            # A mean over nothing is NaN, and 0 × NaN too: gradients are made zero as they come, before ranks reduce.
            self._zeroing = ZeroedAdditions(self._trainer.lightning_module.parameters())

    def settle(self) -> None:
        """Keep sparse gradients from growing with the factor, after a backward pass."""
        self._stop_zeroing()
        if self._sparse is None:
            self._sparse = sparse_parameters(self._trainer.lightning_module)
        coalesce_gradients(self._sparse)
        is_sum = self._trainer.accumulate_grad_batches > 1 or self.weights.share != 1.0
        if is_sum and self._half:
            gradient_dtype.widen(self._half)
        if is_sum and self._is_rounded:
            self._is_rounded = False
            rank_zero_warn(gradient_dtype.SUMS_ARE_ROUNDED, category=ExactnessWarning)

    def skip(self) -> None:
        """Note that a step has returned ``None``."""
        self._skips = self._has_skipped = True

    @property
    def has_skipped(self) -> bool:
        """Whether a step of the last micro-batch has returned ``None``."""
        return self._has_skipped or bool(self.weights.pending)

    def close_window(self, optimizer: torch.optim.Optimizer) -> bool:
        """Bring the window to its mean: before the optimizer step, after unscaling and before clipping.

        Return whether steps have returned ``None`` for some of it, and not for all.
        """
        scale = self.window_scale()
        if scale != 1.0:
            scale_gradients(optimizer, scale)
        left_out = self._trains and (self._skips or bool(self.weights.pending))
        self._trains = self._skips = False
        return left_out

    def leave_out(self, optimizer: torch.optim.Optimizer) -> None:
        """Leave a window out: the optimizer meets no gradient, as after a pass that returns ``None``."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def window_scale(self) -> float:
        """Return what the window's weighted sum is to be multiplied by; ranks ask together."""
        scale, self.weights = self.weights.close(self._trainer.accumulate_grad_batches)
        return scale

    def _stop_zeroing(self) -> None:
        if self._zeroing is not None:
            self._zeroing.remove()
        self._zeroing = None


@torch.no_grad()
def scale_gradients(optimizer: torch.optim.Optimizer, scale: float) -> None:
    """Scale all gradients in place; sparse ones stay sparse and coalesced."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                (parameter.grad._values() if parameter.grad.is_sparse else parameter.grad).mul_(scale)
