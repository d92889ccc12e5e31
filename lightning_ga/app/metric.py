"""The optimized metric: which one it is, in which direction it is better, and which callbacks watch it.

Tested in tests/app/test_own_package.py.
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torchmetrics import Metric

from lightning_ga.app.other_tools import by_nearest
from lightning_ga.app.settings import BETTER, direction_of
from lightning_ga.app.terminal import log, warn
from lightning_ga.checkpoints import AtomicCheckpointIO, read_safely
from lightning_ga.errors import UserError

PLACEHOLDER = "optimized_metric"  # what callbacks of a configuration monitor in place of a metric's name
OF_TRAINING = "train"  # beginning of metrics that are known after an epoch only
OF_LOADER = "/dataloader_idx_"  # what Lightning adds to the names of metrics of several loaders
WORST = {"max": -torch.inf, "min": torch.inf}


class OptimizedMetric(Callback):
    """Finds the metric that decides which checkpoint is the best, and sets it in the callbacks that watch it.

    Without a name it is ``val/loss``, or the first that validation logs; without a direction, that of the logged object
    of torchmetrics, else of the name. A monitor that validation does not log costs a warning, and is watched later on.
    """

    def __init__(self, name: str | None = None, direction: str | None = None) -> None:
        self.name = name
        self.direction = direction
        self._of_objects: dict[str, str] = {}
        self._logged: set[str] = set()  # names, by validation
        self._values: dict[str, float] = {}  # of the latest validation: a checkpoint keeps them
        self._paused: dict[ModelCheckpoint, tuple[str, int]] = {}  # without their metric: monitor and save_top_k
        self._reported: set[str] = set()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look at what validation logs; Lightning's sanity check of several loaders shows nothing of it."""
        if trainer.state.fn != "fit" or (trainer.sanity_checking and len(trainer.num_sanity_val_batches) > 1):
            return
        record = pl_module.log

        def look(name: str, value: Any, *arguments: Any, **settings: Any) -> None:
            self._logged.add(name)
            if isinstance(value, Metric) and value.higher_is_better is not None:
                self._of_objects[name] = "max" if value.higher_is_better else "min"
            record(name, value, *arguments, **settings)

        vars(pl_module)["log"] = look

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Choose the metric after the first validation that logs one, by default that of Lightning's sanity check."""
        if vars(pl_module).pop("log", None) is None:
            return
        logged = [name for name in trainer.callback_metrics if name.partition(OF_LOADER)[0] in self._logged]
        if self.name is None and logged:
            self.name = "val/loss" if "val/loss" in logged else logged[0]
        self._values = {name: float(trainer.callback_metrics[name]) for name in logged}
        self._choose(trainer, logged, "validation")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Choose a metric of training: the only kind if there is no validation."""
        if self.name is not None and (self.name.startswith(OF_TRAINING) or not any(trainer.num_val_batches)):
            after_epoch_end(pl_module, lambda: self._choose(trainer, [*trainer.callback_metrics], "training"))

    def _choose(self, trainer: Trainer, logged: Sequence[str], source: str) -> None:
        """Find the direction, let callbacks watch, pause those whose metric is not logged, and tell the user."""
        self._resume(trainer)
        if self.name is not None and self.direction is None:
            self.direction = self._of_objects.get(self.name.partition(OF_LOADER)[0], direction_of(self.name))
        self._set_watchers(trainer)
        names = self._watched(trainer, source)
        missing = names - trainer.callback_metrics.keys()
        listed = ", ".join(logged) or "nothing"
        if not trainer.sanity_checking:
            self._pause(trainer, missing)
        elif not logged:  # the first validation shows what there is
            return
        elif self.name in missing:  # refused here, because nothing is lost yet
            nearest = by_nearest(str(self.name), logged, "optimized_metric={}", cutoff=0.0)
            raise UserError(
                f"optimized_metric={self.name} is not logged by validation, which logs {listed}: write {nearest}, or "
                "trainer.num_sanity_val_steps=0 if it begins in a later epoch."
            )
        if trainer.is_global_zero:
            if self.name in names - missing - self._reported:
                log.info(f"Optimized metric: {self.name} ({BETTER[str(self.direction)]})")
            for name in sorted(missing - self._reported):
                warn(f"{name} is not logged by {source}, which logs {listed}: so far no checkpoint is the best by it.")
        self._reported |= names & {self.name, *missing}

    def _watched(self, trainer: Trainer, source: str) -> set[str]:
        """The metrics that are watched and known by now: after an epoch all of them if there is no validation."""
        names = {self.name, *(monitor for monitor, _ in self._paused.values())}
        names |= {callback.monitor for callback in watchers(trainer)}
        known = set(filter(None, names))
        if any(trainer.num_val_batches):
            return {name for name in known if name.startswith(OF_TRAINING) == (source == "training")}
        return known

    def _pause(self, trainer: Trainer, missing: Collection[str]) -> None:
        """Let callbacks whose metric is missing do without it; a checkpoint of the last epoch is still saved."""
        for callback in watchers(trainer):
            if isinstance(callback, EarlyStopping):
                callback.strict = False  # a metric of training may come after validation
            elif callback.monitor in missing and callback not in self._paused:
                self._paused[callback] = (callback.monitor, callback.save_top_k)
                callback.save_top_k = 0
                if callback.save_last:
                    callback.monitor = None
                    callback.save_top_k = 1

    def _resume(self, trainer: Trainer) -> None:
        """Let paused callbacks watch their metric again once it is logged."""
        for callback, (monitor, kept) in [*self._paused.items()]:
            name = self.name if monitor == PLACEHOLDER else monitor
            if name in trainer.callback_metrics:
                callback.monitor = monitor
                callback.save_top_k = kept
                del self._paused[callback]

    def _set_watchers(self, trainer: Trainer) -> None:
        """Let callbacks watch the metric, as if they had been made with its name and direction."""
        if not self.name or not self.direction:
            return
        worst = torch.tensor(WORST[self.direction])
        for callback in watchers(trainer):
            if callback.monitor != PLACEHOLDER:
                continue
            callback.monitor = self.name
            callback.mode = self.direction
            if isinstance(callback, EarlyStopping):
                callback.min_delta = (1 if self.direction == "max" else -1) * abs(callback.min_delta)
                callback.best_score = worst
            else:
                callback.kth_value = worst

    def state_dict(self) -> dict[str, Any]:
        """Return what was found, for a resumed run, and the values that belong to a checkpoint."""
        return {"name": self.name, "direction": self.direction, "values": self._values}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Restore the metric of before; callbacks find their own state by its name and direction.

        Lightning would forget the best checkpoint of a run that continues in another folder.
        """
        saved = checkpoint.get("callbacks", {}).get(self.state_key, {})
        self.name = self.name or saved.get("name")
        if saved.get("name") == self.name:
            self.direction = self.direction or saved.get("direction")
        self._set_watchers(trainer)
        for callback in watchers(trainer):
            if isinstance(callback, ModelCheckpoint) and trainer.state.fn == "fit":  # not into the folder of a test
                bring_best(trainer, callback, checkpoint["callbacks"].get(callback.state_key) or {})


def after_epoch_end(module: LightningModule, call: Callable[[], None]) -> None:
    """Call a function after the module's next ``on_train_epoch_end``, before which its values are those of before.

    Lightning 2.6 calls the hook of the module before those of early stopping and checkpoints, but after all others.
    """
    of_module = module.on_train_epoch_end

    def both() -> None:
        vars(module).pop("on_train_epoch_end", None)
        of_module()
        call()

    vars(module)["on_train_epoch_end"] = both


def watchers(trainer: Trainer) -> list[Any]:
    """The callbacks that watch a metric."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return [one for one in callbacks if isinstance(one, ModelCheckpoint | EarlyStopping) and one.monitor is not None]


def bring_best(trainer: Trainer, callback: ModelCheckpoint, state: dict[str, Any]) -> None:
    """Copy the best checkpoint of a run that continues in another folder, where Lightning forgets it and its score."""
    name = Path(state.get("best_model_path") or "").name
    score = state.get("best_model_score")
    folder = callback.dirpath
    if folder is None or not name or state["dirpath"] == folder:
        return
    changes: dict[str, Any] = {}
    with suppress(UserError, LookupError):  # there is none, or one of a later epoch
        content: Any = {}
        if trainer.is_global_zero:
            content = read_safely(Path(str(trainer.ckpt_path)).with_name(name))
        if content["callbacks"][callback.state_key]["best_model_score"] == score:
            new = str(Path(folder, name))
            AtomicCheckpointIO().save_checkpoint(content, new)
            changes = {
                "dirpath": folder,
                "best_model_path": new,
                "kth_best_model_path": new,
                "last_model_path": "",
                "best_k_models": {new: score},
                "kth_value": score,
            }
    state.update(trainer.strategy.broadcast(changes))
