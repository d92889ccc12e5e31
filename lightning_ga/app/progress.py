"""What a run shows while it trains: the plan first, then a bar with the effective batch and the factor."""

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm
from rich.console import Console

from lightning_ga.app.plots import plot_probe
from lightning_ga.app.report import plan_table, save_plan
from lightning_ga.fit.exactness import Exactness
from lightning_ga.plan.accumulation import AccumulationPlan
from lightning_ga.plan.records import ProbeResult
from lightning_ga.probe.planned.device import current_device

LOG_UPDATES = 5  # of a bar that is written to a file: per epoch
INFORMATION = (  # Lightning's loggers; which one it uses depends on the order of imports
    "lightning.fabric.utilities.rank_zero",
    "lightning.pytorch.utilities.rank_zero",
    "pytorch_lightning.utilities.rank_zero",
)
NOISE = (  # warnings about choices that this application makes on purpose
    r".*does not have many workers.*",
    r".*is smaller than the logging interval.*",
    r".*exists and is not empty.*",  # the output folder: Hydra has written its own files
    r".*AMP with fp16 is not supported on CPU.*",  # an error of ours says it
    r".*The dirpath has changed from.*",  # every run has a folder of its own
    r".*isinstance\(treespec, LeafSpec\).*",  # Lightning 2.6.6 on torch 2.15
)


class TrainingBar(TQDMProgressBar):
    """Lightning's bar with loss, accuracy, effective batch size and factor, in 80 columns.

    Written to a file it is updated a few times an epoch, so that a log stays readable.

    Args:
        refresh_rate: Micro-batches between two updates on a terminal.
    """

    BAR_FORMAT = "{desc} |{bar:5}| {n_fmt}/{total_fmt} {remaining}{postfix}"

    def __init__(self, refresh_rate: int = 5) -> None:
        super().__init__(refresh_rate=refresh_rate)

    @property
    def refresh_rate(self) -> int:
        """Micro-batches between two updates."""
        rate: int = super().refresh_rate
        if sys.stdout.isatty() or not self._trainer:
            return rate
        batches = self.total_train_batches
        return max(rate, int(batches) // LOG_UPDATES) if batches != float("inf") else rate

    def init_validation_tqdm(self) -> Tqdm:
        """Validation has no bar: it is a small part of an epoch."""
        return Tqdm(disable=True)

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """The values beside the bar."""
        shown = super().get_metrics(trainer, pl_module)
        shown.pop("v_num", None)
        metrics: dict[str, Any] = {name.removeprefix("train/"): value for name, value in shown.items()}
        plan = current_plan(trainer)
        if plan is not None:
            metrics["effective"] = str(plan.effective_batch_size)
        metrics["factor"] = str(trainer.accumulate_grad_batches)
        return metrics


class PlanReport(Callback):
    """Prints the plan and saves it as JSON and as a picture once training is set up, before the first step.

    Args:
        folder: Where ``plan.json`` and ``probe.png`` go.
        dry_run: End the fit right there, without a single training step.

    Attributes:
        started: Whether there was anything to train.
    """

    def __init__(self, folder: Path, *, dry_run: bool = False) -> None:
        self.folder = folder
        self.dry_run = dry_run
        self.started = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """AutoAccumulate, which comes first among the callbacks, has its plan by now."""
        self.started = True
        if trainer.is_global_zero:
            records = current_plan(trainer), current_probe(trainer), current_exactness(trainer), current_device()
            save_plan(self.folder / "plan.json", *records)
            if records[1] is not None:
                plot_probe(self.folder / "probe.png", records[1])
            Console(width=80).print(plan_table(*records, setting=describe_setting(trainer, pl_module)))
        if self.dry_run:
            trainer.fit_loop.epoch_loop.max_steps = trainer.global_step


def describe_setting(trainer: Trainer, module: LightningModule) -> str:
    """Model, parameters, precision and device, unless it is another one, in one line."""
    name = module.hparams.get("name", type(module).__name__)
    millions = sum(parameter.numel() for parameter in module.parameters()) / 1e6
    device = f"{trainer.world_size} × {module.device.type}" if trainer.world_size > 1 else module.device.type
    place = "" if current_device() is not None else f", on {device}"
    return f"{name}, {millions:.1f} M parameters, {trainer.precision}{place}"


def find_accumulate(trainer: Trainer) -> Any:
    """The callback that plans, known by what it offers: ``plan`` and ``probe``."""
    plans = [callback for callback in _callbacks(trainer) if hasattr(callback, "plan") and hasattr(callback, "probe")]
    return plans[0] if plans else None


def current_plan(trainer: Trainer) -> AccumulationPlan | None:
    """The plan of the epoch, or the recipe as it is where nothing plans."""
    plan: AccumulationPlan | None = getattr(find_accumulate(trainer), "plan", None)
    return plan or recipe_plan(trainer)


def current_probe(trainer: Trainer) -> ProbeResult | None:
    """What the probe found, if one ran."""
    probe: ProbeResult | None = getattr(find_accumulate(trainer), "probe", None)
    return probe


def survived_errors(trainer: Trainer) -> int:
    """Out-of-memory errors that cost a retry each, not the run."""
    return getattr(find_accumulate(trainer), "oom_events", 0)


def current_exactness(trainer: Trainer) -> Exactness | None:
    """What the exactness check measured, if it ran."""
    exactness: Exactness | None = getattr(find_accumulate(trainer), "exactness", None)
    return exactness


def recipe_plan(trainer: Trainer) -> AccumulationPlan | None:
    """The loader's batch size × accumulated batches × ranks; nothing if the loader has no batch size."""
    batch = getattr(trainer.train_dataloader, "batch_size", None)
    if not isinstance(batch, int):
        return None
    factor, ranks = trainer.accumulate_grad_batches, trainer.world_size
    return AccumulationPlan(batch * factor * ranks, ranks, batch, factor, ((batch,) * factor,) * ranks)


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Keep Lightning's information and the warnings in ``NOISE`` off the screen."""
    logs = [logging.getLogger(name) for name in INFORMATION]
    levels = [log.level for log in logs]
    for log in logs:
        log.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            for message in NOISE:
                warnings.filterwarnings("ignore", message)
            yield
    finally:
        for log, level in zip(logs, levels):
            log.setLevel(level)


def _callbacks(trainer: Trainer) -> list[Callback]:
    return trainer.callbacks  # type: ignore[attr-defined, no-any-return]
