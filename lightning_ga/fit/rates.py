"""Scale learning rates with the effective batch while the optimizer updates weights, and log both.

Tested in tests/integration/test_schedules.py.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch.optim import Optimizer

from lightning_ga.compat.logger_rows import log_step
from lightning_ga.compat.patching import shadowed
from lightning_ga.errors import UserError
from lightning_ga.fit.parts import FitParts
from lightning_ga.fit.training_data import TrainingData
from lightning_ga.plan.config import ScaleLr, rate_ratio


class WindowRates:
    """Scales learning rates with the effective batch.

    The optimizer and ``on_before_optimizer_step`` see the scaled rates, everything else those that schedulers and the
    module set. With ``"none"`` rates are logged if windows vary.
    """

    def __init__(self, parts: FitParts, data: TrainingData, scale_lr: ScaleLr) -> None:
        self._parts = parts
        self._data = data
        self._scale_lr = scale_lr
        # Of each parameter group, the rate that was set, and the scaled one; none but in an update.
        self._rates: list[tuple[Any, Any]] = []

    def installed(self) -> AbstractContextManager[None]:
        """Return a context in which the optimizer sees scaled rates; refuse optimizers without rates."""
        if self._scale_lr == "none" and not self._parts.request.varies:
            return nullcontext()
        optimizer = self._parts.trainer.optimizers[0]
        has_rates = all(group.get("lr") is not None for group in optimizer.param_groups)
        if self._scale_lr != "none" and not has_rates:
            kind = type(optimizer).__name__
            raise UserError(f"scale_lr={self._scale_lr!r} scales 'lr', and {kind} has none: leave it out.")
        strategy = self._parts.trainer.strategy
        stock = partial(type(strategy).optimizer_step, strategy)
        return shadowed(strategy, "optimizer_step", partial(self._step, stock))

    def _step(
        self, stock: Callable[..., Any], optimizer: Optimizer, closure: Callable[[], Any], *given: Any, **named: Any
    ) -> Any:
        """Let the optimizer step with scaled rates; its closure, the window's last pass, runs without them."""
        if self._parts.place.skips_backward:
            return stock(optimizer, closure, *given, **named)
        batch = self._effective_batch()
        ratio = rate_ratio(self._scale_lr, batch, self._data.windows.planner.recipe.effective)

        def unscaled() -> Any:
            self._give_back(optimizer)
            result = closure()
            self._scale(optimizer, ratio)
            return result

        self._scale(optimizer, ratio)  # LBFGS reads them before it evaluates the closure
        try:
            result = stock(optimizer, unscaled, *given, **named)
            self._log(optimizer, batch)
        finally:
            self._give_back(optimizer)
        return result

    def _effective_batch(self) -> int:
        """Return the samples of a full window; a window ends with its epoch."""
        planner = self._data.windows.planner
        plan = planner.plan
        assert plan is not None, "windows begin once they are planned"
        of_epoch = planner.samples_of_epoch(self._parts.place.epoch)
        return plan.effective_batch_size if of_epoch is None else min(plan.effective_batch_size, of_epoch)

    def _scale(self, optimizer: Optimizer, ratio: float) -> None:
        if self._scale_lr == "none":
            return
        for group in optimizer.param_groups:
            scaled = group["lr"] * ratio
            self._rates.append((group["lr"], scaled))
            group["lr"] = scaled

    def _give_back(self, optimizer: Optimizer) -> None:
        for group, (before, scaled) in zip(optimizer.param_groups, self._rates):
            if group["lr"] is scaled:  # else a hook has set another one
                group["lr"] = before
        self._rates = []

    def _log(self, optimizer: Optimizer, batch: int) -> None:
        row: dict[str, Any] = {
            "effective_batch_size": batch,
            "accumulate_grad_batches": int(self._parts.trainer.accumulate_grad_batches),
        }
        for number, group in enumerate(optimizer.param_groups):
            name = f"learning_rate/{number}" if number else "learning_rate"
            row[name] = group.get("lr")
        log_step(self._parts.trainer, row)
