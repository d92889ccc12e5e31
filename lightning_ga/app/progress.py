"""What a run shows while it trains: a bar on a terminal, one line an epoch anywhere else."""

import logging
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from textwrap import wrap
from types import SimpleNamespace
from typing import Any

import psutil
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar, TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm

from lightning_ga.app.plan_report import current_plan
from lightning_ga.app.run_files import write_json
from lightning_ga.app.terminal import columns, keep_in_log
from lightning_ga.app.values import direction
from lightning_ga.plan.weights import tensors_in

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
    r".*could not find the monitored key.*",  # told after training
    r".*callbacks used to create the checkpoint.*",  # a dry run has none of them
    r".*Validating sparse tensor invariants.*",
    r".*The dirpath has changed from.*",  # every run has a folder of its own
    r".*isinstance\(treespec, LeafSpec\).*",  # Lightning 2.6.6 on torch 2.15
)


class PlanBar(ProgressBar):
    """Beside a bar: what the model logs for it, means of the epoch, effective batch size and factor."""

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """The values beside the bar."""
        logged = super().get_metrics(trainer, pl_module)
        metrics: dict[str, Any] = {name.removeprefix("train/"): logged[name] for name in logged if name != "v_num"}
        metrics |= {name: f"{float(value):.3f}" for name, value in epoch_means(pl_module).items()}
        plan = current_plan(trainer)
        if plan is not None:
            metrics["effective"] = str(plan.effective_batch_size)
        return {**metrics, "factor": str(trainer.accumulate_grad_batches)}


class TrainingBar(PlanBar, TQDMProgressBar):
    """Lightning's bar in 80 columns; epochs count from 1."""

    BAR_FORMAT = "{desc} |{bar:5}| {n_fmt}/{total_fmt} {remaining}{postfix}"

    def on_train_epoch_start(self, trainer: Trainer, *arguments: Any) -> None:
        """Begin the bar of the next epoch: what shows its number reads nothing else of the Trainer."""
        counted: Any = SimpleNamespace(current_epoch=trainer.current_epoch + 1)
        super().on_train_epoch_start(counted, *arguments)

    def init_validation_tqdm(self) -> Tqdm:
        """Validation has no bar: it is a small part of an epoch."""
        return Tqdm(disable=True)


class RichTrainingBar(PlanBar, RichProgressBar):
    """Lightning's bar in colour; epochs count from 1."""

    def _get_train_description(self, current_epoch: int) -> str:
        of = f"/{self.trainer.max_epochs}" if (self.trainer.max_epochs or 0) > 0 else ""
        return f"Epoch {current_epoch + 1}{of}".ljust(len(self.validation_description))


class EpochLog(Callback):
    """One line an epoch, in the log and, if it is ``shown``, on the screen; and its record in ``epochs.json``.

    The line says when the ``metric`` was the best so far.
    """

    def __init__(self, folder: Path, *, metric: str = "", shown: bool = True) -> None:
        self.folder, self.metric, self.shown = folder, metric, shown
        self._best: float | None = None
        self._validated = False
        self._records: list[dict[str, Any]] = []
        self._started = 0.0
        self._samples = 0

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the time."""
        self._started, self._samples, self._validated = time.perf_counter(), 0, False

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note that the values of validation are of this epoch."""
        self._validated = True

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count samples, which a batch has along the first axis of its first tensor."""
        first = next(tensors_in(batch), None)
        self._samples += (0 if first is None else first.shape[0]) * trainer.world_size

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Tell the epoch, its validation included."""
        means = {f"train/{name}": value for name, value in epoch_means(pl_module, over_ranks=True).items()}
        if not trainer.is_global_zero:
            return
        metrics = {name: float(value) for name, value in {**trainer.callback_metrics, **means}.items()}
        metrics = {name: value for name, value in metrics.items() if self._validated or not name.startswith("val/")}
        seconds = time.perf_counter() - self._started
        line = epoch_line(trainer.current_epoch + 1, trainer.max_epochs, metrics, seconds)
        line += "; best so far" if self._is_best(metrics.get(self.metric)) else ""
        line = "\n".join(wrap(line, columns(), subsequent_indent="  "))
        bar = trainer.progress_bar_callback
        show = bar.print if isinstance(bar, TQDMProgressBar) else partial(print, flush=True)
        keep_in_log(line, show if self.shown else None)
        on_gpu, device = pl_module.device.type == "cuda", pl_module.device  # on a CPU, what the process holds now
        used = torch.cuda.max_memory_allocated(device) if on_gpu else psutil.Process().memory_info().rss
        counts = {"epoch": trainer.current_epoch + 1, "steps": trainer.global_step, "seconds": round(seconds, 3)}
        self._records.append(
            {**counts, "samples": self._samples, "peak_bytes" if on_gpu else "process_bytes": used, **metrics}
        )
        write_json(self.folder / "epochs.json", self._records)

    def _is_best(self, value: float | None) -> bool:
        """Whether a value is better than all before it, of which there is one at least."""
        if value is None or math.isnan(value):
            return False
        sign = 1 if direction(self.metric) == "max" else -1
        before, better = self._best, self._best is None or sign * value > sign * self._best
        self._best = value if better else before
        return better and before is not None

    def state_dict(self) -> dict[str, Any]:
        """Keep the best value, for a run that goes on."""
        return {self.metric: self._best}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from the best value."""
        self._best = state_dict.get(self.metric)


def make_progress(kind: str, folder: Path, metric: str = "", *, has_bar: bool = False) -> list[Callback]:
    """What shows the progress of a training; ``auto`` is a bar on a terminal and plain lines elsewhere."""
    if kind == "auto":
        kind = "bar" if sys.stdout.isatty() else "plain"
    bars: dict[str, Callable[[], Callback]] = {"bar": partial(TrainingBar, refresh_rate=5), "rich": RichTrainingBar}
    made = [bars[kind]()] if kind in bars and not has_bar else []
    return [*made, EpochLog(folder, metric=metric, shown=kind != "none")]


def epoch_line(epoch: int, epochs: int | None, metrics: Mapping[str, float], seconds: float) -> str:
    """One epoch in words.

    Examples:
        >>> epoch_line(1, 4, {"val/loss": 0.41234, "train/loss": 0.5, "train/acc": 0.75}, 3.21)
        'Epoch 1/4: train loss 0.5000, acc 0.7500; val loss 0.4123; 3.2 s'
    """
    stages: dict[str, list[str]] = {"train": [], "val": []}
    for name, value in metrics.items():
        stage, _, measure = name.rpartition("/")
        if measure == "top5":  # a line has 80 columns
            continue
        stages.setdefault(stage, []).append(f"{measure} {value:.4f}")
    told = [f"{stage} {', '.join(values)}".strip() for stage, values in stages.items() if values]
    of = f"/{epochs}" if epochs is not None and epochs > 0 else ""
    return f"Epoch {epoch}{of}: {'; '.join([*told, f'{seconds:.1f} s'])}"


def epoch_means(module: LightningModule, *, over_ranks: bool = False) -> Mapping[str, Any]:
    """Means over the epoch so far, of a model that keeps them; all ranks ask for those over ranks."""
    means = getattr(module, "epoch_means", None)
    return means(over_ranks=over_ranks) if callable(means) else {}


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Keep Lightning's information and the warnings in ``NOISE`` off the screen, and others to their sentence."""
    logs = [logging.getLogger(name) for name in INFORMATION]
    levels = [log.level for log in logs]
    for log in logs:
        log.setLevel(logging.WARNING)
    form, warnings.formatwarning = warnings.formatwarning, lambda message, *_: f"Warning: {message}\n"
    try:
        with warnings.catch_warnings():
            for message in NOISE:
                warnings.filterwarnings("ignore", message)
            yield
    finally:
        warnings.formatwarning = form
        for log, level in zip(logs, levels):
            log.setLevel(level)
