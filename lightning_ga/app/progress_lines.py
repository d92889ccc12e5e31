"""What a run shows while it trains: Lightning's bar on a terminal, else a line a minute; one line an epoch anywhere."""

import logging
import math
import re
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from functools import partial
from textwrap import fill
from typing import Any
from unittest.mock import patch

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm

from lightning_ga import optimizer_steps
from lightning_ga.app.metric import after_epoch_end
from lightning_ga.app.mistakes import on_the_line
from lightning_ga.app.plan_report import find_accumulate, scheduled
from lightning_ga.app.run_files import OF_VALIDATION
from lightning_ga.app.terminal import columns, log, number

INFORMATION = ("lightning", "pytorch_lightning", "lightning_utilities")  # loggers
NOISE = (  # warnings about choices that this application makes on purpose
    r".*does not have many workers.*",
    r".*is smaller than the logging interval.*",
    r".*exists and is not empty.*",  # the output folder: Hydra has written its own files
    r".*could not find the monitored key.*",  # metric.py says it
    r".*callbacks used to create the checkpoint.*",  # a dry run has none of them
    r".*Validating sparse tensor invariants.*",
    r".*The dirpath has changed from.*",  # every run has a folder of its own
    r".*isinstance\(treespec, LeafSpec\).*",  # Lightning 2.6.6 on torch 2.15
)
LINE_EVERY = 60.0  # seconds between two lines in an epoch


class EpochLine(Callback):
    """Prints one line for every epoch, with its validation, and one a minute in between if there is no progress bar."""

    def __init__(self) -> None:
        self._fit_began = 0.0  # seconds of the clock
        self._epoch_began = 0.0
        self._line_at = math.inf
        self._validation_began = 0.0
        self._validation_seconds = 0.0  # of the epoch
        self._has_validated = False  # in the epoch
        self._first_step = 0  # optimizer steps, of this process
        self._last_step: int | None = None  # None: Lightning does not know the end
        self._done_before = 0  # samples, or optimizer steps, before the epoch

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note where training begins, as a resumed one has steps behind it, and where it ends, if that is known."""
        self._fit_began = time.perf_counter()
        self._line_at = self._fit_began
        self._first_step = trainer.global_step
        self.on_train_epoch_start(trainer, pl_module)  # Lightning leaves it out if training goes on in an epoch
        with suppress(MisconfigurationException):  # Lightning counts none with a schedule of its own
            steps = optimizer_steps(trainer)
            self._last_step = None if math.isinf(steps) else int(steps)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the time, and what was done before."""
        self._epoch_began = time.perf_counter()
        self._validation_seconds = 0.0
        self._has_validated = False
        self._done_before, _ = done(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Print how far training is, once a minute if there is no bar."""
        now = time.perf_counter()
        if now >= self._line_at + LINE_EVERY and trainer.progress_bar_callback is None and trainer.is_global_zero:
            self._line_at = now
            epoch = of(trainer.current_epoch + 1, trainer.max_epochs)
            step = of(trainer.global_step, self._last_step)
            self._print(f"Epoch {epoch}, step {step}, {self._rate(trainer)}{self._left(trainer, now)}")

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the time: samples a second are those of training."""
        self._validation_began = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note how long it took; its values are of this epoch from now on."""
        self._validation_seconds += time.perf_counter() - self._validation_began
        self._has_validated = True

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the epoch, with what the module logs at its end."""
        after_epoch_end(pl_module, partial(self._print_epoch, trainer))

    def _print_epoch(self, trainer: Trainer) -> None:
        known = {**trainer.callback_metrics}  # on all ranks: Lightning may exchange values here
        if not trainer.is_global_zero:
            return
        metrics = {
            name: float(value)
            for name, value in known.items()
            if self._has_validated or not re.match(OF_VALIDATION, name)  # values of the epoch before are still there
        }
        line = epoch_line(
            trainer.current_epoch + 1, trainer.max_epochs, metrics, time.perf_counter() - self._epoch_began
        )
        self._print(f"{line}, {self._rate(trainer)}{batch_of(trainer)}")

    def _left(self, trainer: Trainer, now: float) -> str:
        """The time until the last optimizer step, by those of this process: ``, 0:12:03 left``; empty if not known."""
        steps_here = trainer.global_step - self._first_step
        if self._last_step is None or not steps_here:
            return ""
        seconds = round((now - self._fit_began) / steps_here * (self._last_step - trainer.global_step))
        return f", {timedelta(seconds=seconds)} left"

    def _rate(self, trainer: Trainer) -> str:
        """What was done in a second of training in this epoch: ``1,234 samples/s``, or optimizer steps."""
        count, unit = done(trainer)
        seconds = time.perf_counter() - self._epoch_began - self._validation_seconds
        rate = (count - self._done_before) / max(seconds, 1e-9)
        return f"{rate:,.0f} {unit}/s" if rate >= 10 else f"{rate:,.2f} {unit}/s"

    def _print(self, line: str) -> None:
        """Print a line without breaking a progress bar; only a terminal has a width."""
        if sys.stdout.isatty():
            line = fill(line, columns(), subsequent_indent="  ")
        with Tqdm.external_write_mode(file=sys.stdout):
            log.info(line)


def done(trainer: Trainer) -> tuple[int, str]:
    """What training has done so far over all ranks: the samples, which AutoAccumulate counts, else optimizer steps."""
    accumulate = find_accumulate(trainer)
    if accumulate is not None:
        position = accumulate.state_dict().get("position")
        if position is not None:
            return position["samples_before"] + position["samples_done"], "samples"
    return trainer.global_step, "steps"


def of(count: int, total: int | None) -> str:
    """A count and its end, if it has one: ``3/10``."""
    if total is None or total <= 0:
        return f"{count:,}"
    return f"{count:,}/{total:,}"


def epoch_line(epoch: int, epochs: int | None, metrics: Mapping[str, float], seconds: float) -> str:
    """One epoch in words: ``Epoch 1/4: train loss 0.5000, acc 0.7500; val loss 0.4123; 3.2 s``."""
    stages: dict[str, list[str]] = {"train": [], "val": []}
    for name, value in metrics.items():
        stage, _, measure = name.rpartition("/")
        if measure != "top5":  # a line has 80 columns
            stages.setdefault(stage, []).append(f"{measure} {number(value)}")
    parts = [f"{stage} {', '.join(texts)}".lstrip() for stage, texts in stages.items() if texts]
    parts.append(f"{seconds:.1f} s")
    return f"Epoch {of(epoch, epochs)}: {'; '.join(parts)}"


def batch_of(trainer: Trainer) -> str:
    """The batch of the epoch's last optimizer step, if a schedule by epochs or steps changes it."""
    accumulate = find_accumulate(trainer)
    request = scheduled(accumulate)
    if request is None or request.is_by_samples:
        return ""
    batch = accumulate.plan.effective_batch_size
    if request.by_window and not request.is_factor:
        batch = request.schedule.at(trainer.global_step - 1, 0)
    return f"; batch {batch:,}"


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Keep Lightning's information and the warnings in ``NOISE`` off the screen, and others to their sentence."""
    with ExitStack() as stack:
        for name in INFORMATION:
            logger = logging.getLogger(name)
            stack.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.WARNING)
        stack.enter_context(patch.object(logging.getLogger("lightning"), "handlers", []))  # ours tell what it says
        stack.enter_context(patch.object(warnings, "formatwarning", as_sentence))
        stack.callback(logging.captureWarnings, False)
        logging.captureWarnings(True)
        stack.enter_context(warnings.catch_warnings())
        for message in NOISE:
            warnings.filterwarnings("ignore", message)
        yield


def as_sentence(message: Any, *_: Any) -> str:
    """A warning without its place in a file."""
    return f"Warning: {on_the_line(str(message))}"
