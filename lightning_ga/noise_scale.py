"""Log the gradient noise scale beside training: how large a batch still saves steps.

Tested in tests/integration/test_noise_scale.py.
"""

from collections import deque
from itertools import chain
from math import isfinite
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_ga.callback import AutoAccumulate
from lightning_ga.compat import ranks
from lightning_ga.compat.logger_rows import log_step
from lightning_ga.compat.patching import Callback
from lightning_ga.errors import UserError
from lightning_ga.plan.critical_batch import NoiseScaleEstimate, noise_scale, window_moments

NORMS = (torch.nn.LayerNorm, torch.nn.GroupNorm, torch.nn.RMSNorm)


class NoiseScale(Callback):
    """Log the gradient noise scale, in samples: well below it, a batch twice as large needs half the steps.

    It is estimated from the gradients of normalisation layers (Gray et al., arXiv 2411.00999), of micro-batches and of
    their mean, so windows need several micro-batches, on all ranks. Loggers get ``noise_scale``, in samples, and its
    standard error ``noise_scale_error``, once both are known; the error ignores that the scale changes in training.
    Put it in the callbacks beside ``AutoAccumulate``.

    Args:
        windows: Number of the latest windows that are averaged.

    Raises:
        UserError: At the start of training, under BatchNorm or sharding, with a fused optimizer and a GradScaler,
            without normalisation layers, or if no window has several micro-batches.
    """

    def __init__(self, windows: int = 64) -> None:
        self._moments: deque[tuple[float, float]] = deque(maxlen=windows)
        self._passes: list[tuple[int, float, torch.Tensor]] = []  # samples, count of ``normalize=``, squared norm
        self._scale = 0.0  # of the gradients in the backward pass that runs; none outside of training's passes
        self._handles: list[Any] = []

    @property
    def estimate(self) -> NoiseScaleEstimate | None:
        """The noise scale and its standard error; ``None`` while the mean gradient is lost in the noise."""
        return noise_scale(self._moments)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Refuse what cannot be measured, and watch the gradients of normalisation layers."""
        fit: Any = next((each._fit for each in trainer.callbacks if isinstance(each, AutoAccumulate)), None)
        layers = [layer for layer in pl_module.modules() if isinstance(layer, NORMS)]
        own = chain.from_iterable(layer.parameters(recurse=False) for layer in layers)
        self._norms = [each for each in own if each.requires_grad]
        problem = self._problem(trainer, pl_module, fit)
        if problem is not None:
            raise UserError(f"NoiseScale cannot measure here: {problem}.")
        self._gradients: Any = fit.parts.gradients
        self._handles = [each.register_hook(self._add) for each in self._norms]  # type: ignore[no-untyped-call]

    def _problem(self, trainer: Any, module: Any, fit: Any) -> str | None:
        if fit is None:
            return "AutoAccumulate is not among the callbacks"
        if any(isinstance(layer, _BatchNorm) for layer in module.modules()):
            return "BatchNorm makes the samples of a micro-batch depend on each other"
        if ranks.is_sharded(trainer):
            return "the strategy shards gradients"
        groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
        if getattr(trainer.precision_plugin, "scaler", None) and any(group.get("fused") for group in groups):
            return "a fused optimizer gets gradients that the GradScaler has scaled: set fused=False"
        if not self._norms:
            return "the model has no LayerNorm, GroupNorm or RMSNorm that is trained"
        is_one = fit.plan is not None and fit.plan.factor * fit.plan.world_size < 2
        if is_one and not fit.parts.request.by_window:
            return "a window is one micro-batch: set micro_batch_size=…"
        return None

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: torch.Tensor) -> None:
        """Note the weight of a micro-batch, by which its gradient is multiplied."""
        weights = self._gradients.weights
        weight = weights.weight
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None:
            weight *= scaler.get_scale()
        self._scale = trainer.accumulate_grad_batches / weight if weight else 0.0
        samples = self._gradients.counted.pass_samples
        self._passes.append((samples, weights.count, torch.zeros((), device=loss.device)))

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        """Ignore gradients until the next pass of training."""
        self._scale = 0.0

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Estimate from the window's passes and mean gradient; leave out windows that ran again or overflowed."""
        known = [(samples, float(norm)) for samples, count, norm in self._passes if count]
        ran_once = self._gradients.weights.reached == sum(count for _, count, _ in self._passes)
        self._passes = []
        whole = sum(float(each.grad.float().square().sum()) for each in self._norms if each.grad is not None)
        of_ranks = [*chain.from_iterable(ranks.of_all_ranks(trainer, known))]
        if len(of_ranks) > 1 and ran_once:
            moments = window_moments(of_ranks, whole)
            if all(map(isfinite, moments)):
                self._moments.append(moments)
        estimate = self.estimate
        if estimate is not None:
            log_step(trainer, {"noise_scale": estimate.value, "noise_scale_error": estimate.error})

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Remove the hooks."""
        self.on_train_end(trainer, pl_module)

    def _add(self, gradient: torch.Tensor) -> None:
        if self._scale:
            self._passes[-1][-1].add_(gradient.detach().float().mul(self._scale).square().sum())
