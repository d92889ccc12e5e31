"""The optimized metric: that validation logs it, and the values that belong to the best checkpoint.

Callbacks of a configuration watch it by ``${optimized:metric}`` and ``${optimized:direction}``, see ``settings.py``.
Tested in tests/app/test_own_package.py.
"""

from difflib import get_close_matches
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_ga.app.terminal import log
from lightning_ga.errors import UserError

OF_TRAINING = "train"  # beginning of metrics that validation does not log


class OptimizedMetric(Callback):
    """Refuses a metric that validation does not log, and keeps the values of the latest validation in checkpoints."""

    def __init__(self, name: str | None, direction: str | None) -> None:
        self.name = name
        self.direction = direction
        self.values: dict[str, float] = {}

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say what decides which checkpoint is the best."""
        if trainer.is_global_zero and self.name is not None:
            better = {"max": "larger", "min": "smaller"}[str(self.direction)]
            log.info(f"Optimized metric: {self.name} ({better} is better)")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep what validation logs; in Lightning's sanity check, refuse a metric that is not among it."""
        self.values = {}
        for name, value in trainer.callback_metrics.items():
            if not name.startswith(OF_TRAINING):
                self.values[name] = float(value)
        is_missing = bool(self.values) and self.name not in self.values
        if trainer.sanity_checking and is_missing and self._is_needed(trainer):
            (nearest,) = get_close_matches(str(self.name), self.values, n=1, cutoff=0.0)
            raise UserError(
                f"optimized_metric={self.name} is not logged by validation, which logs {', '.join(self.values)}: write "
                f"optimized_metric={nearest}, or null to keep the latest checkpoint."
            )

    def _is_needed(self, trainer: Trainer) -> bool:
        """Whether a callback watches the metric, and validation has to log it."""
        if self.name is None or self.name.startswith(OF_TRAINING):
            return False
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        return any(getattr(callback, "monitor", None) == self.name for callback in callbacks)

    def state_dict(self) -> dict[str, Any]:
        """Return what belongs to a checkpoint."""
        return {"name": self.name, "values": self.values}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Keep the best checkpoint of a run that continues in another folder, where Lightning forgets its score."""
        for callback in trainer.checkpoint_callbacks:
            state = checkpoint["callbacks"].get(callback.state_key, {})
            if Path(state.get("best_model_path", "")).is_file():
                state["dirpath"] = callback.dirpath  # type: ignore[attr-defined]
