"""What a run shows while it trains: Lightning's bar on a terminal, and one line an epoch anywhere."""

import logging
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from textwrap import wrap

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm

from lightning_ga.app.errors import on_the_line
from lightning_ga.app.plan_report import find_accumulate
from lightning_ga.app.terminal import columns, log
from lightning_ga.compat import patching  # noqa: F401  # imports both namespaces, which sets their loggers' levels
from lightning_ga.plan.schedule import PiecewiseSchedule

INFORMATION = ("lightning", "pytorch_lightning", "lightning_utilities")  # loggers
NOISE = (  # warnings about choices that this application makes on purpose
    r".*does not have many workers.*",
    r".*is smaller than the logging interval.*",
    r".*exists and is not empty.*",  # the output folder: Hydra has written its own files
    r".*could not find the monitored key.*",  # app/metric.py says it
    r".*callbacks used to create the checkpoint.*",  # a dry run has none of them
    r".*Validating sparse tensor invariants.*",
    r".*The dirpath has changed from.*",  # every run has a folder of its own
    r".*isinstance\(treespec, LeafSpec\).*",  # Lightning 2.6.6 on torch 2.15
)


class EpochLine(Callback):
    """Prints one line for every epoch, with its validation, and does not break a progress bar."""

    def __init__(self, schedule: PiecewiseSchedule | None = None) -> None:
        self._validated, self._started, self._schedule = False, 0.0, schedule

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the time."""
        self._started, self._validated = time.perf_counter(), False

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note that the values of validation are of this epoch."""
        self._validated = True

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the epoch; all ranks ask a model for its ``epoch_means``, which it logs only after this."""
        means = getattr(pl_module, "epoch_means", None)
        of_epoch = means() if callable(means) else {}
        if not trainer.is_global_zero:
            return
        found = {**trainer.callback_metrics, **of_epoch}
        metrics = {name: float(found[name]) for name in found if self._validated or not name.startswith("val")}
        seconds = time.perf_counter() - self._started
        line = epoch_line(trainer.current_epoch + 1, trainer.max_epochs, metrics, seconds)
        line += batch_of(trainer, self._schedule)
        with Tqdm.external_write_mode(file=sys.stdout):
            log.info("\n".join(wrap(line, columns(), subsequent_indent="  ")))


def epoch_line(epoch: int, epochs: int | None, metrics: Mapping[str, float], seconds: float) -> str:
    """One epoch in words: ``Epoch 1/4: train loss 0.5000, acc 0.7500; val loss 0.4123; 3.2 s``."""
    stages: dict[str, list[str]] = {"train": [], "val": []}
    for name, value in metrics.items():
        stage, _, measure = name.rpartition("/")
        if measure != "top5":  # a line has 80 columns
            stages.setdefault(stage, []).append(f"{measure} {value:.4f}")
    parts = [f"{stage} {', '.join(values)}".strip() for stage, values in stages.items() if values]
    of = f"/{epochs}" if epochs is not None and epochs > 0 else ""
    return f"Epoch {epoch}{of}: {'; '.join([*parts, f'{seconds:.1f} s'])}"


def batch_of(trainer: Trainer, schedule: PiecewiseSchedule | None) -> str:
    """The batch of the epoch's last optimizer step, if a schedule changes it."""
    plan = getattr(find_accumulate(trainer), "plan", None)
    if schedule is None or plan is None or len(schedule.counts) < 2 or schedule.unit == "samples":
        return ""
    by_step = schedule.at(trainer.global_step - 1, 0) if schedule.by_window else None
    is_factor = schedule.name.startswith("accumulate")
    return f"; batch {plan.effective_batch_size if by_step is None or is_factor else by_step:,}"


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Keep Lightning's information and the warnings in ``NOISE`` off the screen, and others to their sentence."""
    levels = {name: logging.getLogger(name).level for name in INFORMATION}
    for name in INFORMATION:
        logging.getLogger(name).setLevel(logging.WARNING)
    form, warnings.formatwarning = warnings.formatwarning, lambda message, *_: f"Warning: {on_the_line(str(message))}"
    logging.captureWarnings(True)
    try:
        with warnings.catch_warnings():
            for message in NOISE:
                warnings.filterwarnings("ignore", message)
            yield
    finally:
        logging.captureWarnings(False)
        warnings.formatwarning = form
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
