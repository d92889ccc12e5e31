"""What a run shows while it trains: a bar on a terminal, one line an epoch anywhere else."""

import logging
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm

from lightning_ga.app.plan_report import current_plan
from lightning_ga.app.terminal import keep_in_log

INFORMATION = (  # Lightning's loggers; which one it uses depends on the order of imports
    "lightning.fabric.utilities.rank_zero",
    "lightning.pytorch.utilities.rank_zero",
    "pytorch_lightning.utilities.rank_zero",
    "lightning.pytorch.trainer.connectors.signal_connector",
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
    """Lightning's bar with the epoch's mean loss and accuracy, effective batch size and factor, in 80 columns.

    Args:
        refresh_rate: Micro-batches between two updates.
    """

    BAR_FORMAT = "{desc} |{bar:5}| {n_fmt}/{total_fmt} {remaining}{postfix}"

    def __init__(self, refresh_rate: int = 5) -> None:
        super().__init__(refresh_rate=refresh_rate)

    def init_validation_tqdm(self) -> Tqdm:
        """Validation has no bar: it is a small part of an epoch."""
        return Tqdm(disable=True)

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """The values beside the bar."""
        return beside_bar(trainer, pl_module, super().get_metrics(trainer, pl_module))


class RichTrainingBar(RichProgressBar):
    """Lightning's bar in colour, with the same values."""

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """The values beside the bar."""
        return beside_bar(trainer, pl_module, super().get_metrics(trainer, pl_module))


class EpochLines(Callback):
    """One line an epoch, in the log of what was printed and, where there is no bar, on the screen.

    Args:
        shown: Whether it is printed too.
    """

    def __init__(self, *, shown: bool = True) -> None:
        self.shown = shown
        self._started = 0.0

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the time."""
        self._started = time.perf_counter()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Tell the epoch, its validation included."""
        if not trainer.is_global_zero:
            return
        means = {f"train/{name}": value for name, value in epoch_means(pl_module).items()}
        line = epoch_line(
            trainer.current_epoch + 1,
            trainer.max_epochs,
            {name: float(value) for name, value in {**trainer.callback_metrics, **means}.items()},
            time.perf_counter() - self._started,
        )
        if self.shown:
            print(line, flush=True)
        else:
            keep_in_log(line)


def make_progress(kind: str) -> list[Callback]:
    """What shows the progress of a training.

    Args:
        kind: ``bar``, ``rich``, ``plain``, ``none``, or ``auto`` for a bar on a terminal and plain lines elsewhere.
    """
    if kind == "auto":
        kind = "bar" if sys.stdout.isatty() else "plain"
    bars = {"bar": TrainingBar, "rich": RichTrainingBar}
    return [*([bars[kind]()] if kind in bars else []), EpochLines(shown=kind == "plain")]


def epoch_line(epoch: int, epochs: int | None, metrics: Mapping[str, float], seconds: float) -> str:
    """One epoch in words.

    Args:
        epoch: Its number, from 1.
        epochs: How many there will be, if that is known.
        metrics: Values by their names.
        seconds: What it took.

    Examples:
        >>> epoch_line(1, 4, {"val/loss": 0.41234, "train/loss": 0.5, "train/acc": 0.75}, 3.21)
        'Epoch 1/4: train loss 0.5000, acc 0.7500; val loss 0.4123; 3.2 s'
    """
    stages: dict[str, list[str]] = {"train": [], "val": []}
    for name, value in metrics.items():
        stage, _, measure = name.rpartition("/")
        stages.setdefault(stage, []).append(f"{measure} {value:.4f}")
    told = [f"{stage} {', '.join(values)}".strip() for stage, values in stages.items() if values]
    of = f"/{epochs}" if epochs is not None and epochs > 0 else ""
    return f"Epoch {epoch}{of}: {'; '.join([*told, f'{seconds:.1f} s'])}"


def beside_bar(trainer: Trainer, module: LightningModule, shown: Mapping[str, Any]) -> dict[str, Any]:
    """The values beside a bar: what the model logs for it, means of the epoch, and the plan."""
    metrics: dict[str, Any] = {name.removeprefix("train/"): value for name, value in shown.items() if name != "v_num"}
    metrics |= {name: f"{float(value):.3f}" for name, value in epoch_means(module).items()}
    plan = current_plan(trainer)
    if plan is not None:
        metrics["effective"] = str(plan.effective_batch_size)
    metrics["factor"] = str(trainer.accumulate_grad_batches)
    return metrics


def epoch_means(module: LightningModule) -> Mapping[str, Any]:
    """Means over the epoch so far, of a model that keeps them."""
    means = getattr(module, "epoch_means", None)
    return means() if callable(means) else {}


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
