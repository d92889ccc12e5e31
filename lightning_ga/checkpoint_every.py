"""Save checkpoints every few windows, written by a thread while training goes on."""

import io
import re
import shutil
import signal
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from lightning_ga.checkpoints import PART, RECORD, AtomicCheckpointIO, write_whole
from lightning_ga.compat import patching, ranks
from lightning_ga.compat.patching import Callback
from lightning_ga.errors import UserError

KEPT = 2  # checkpoints of CheckpointEvery
AHEAD = ".ahead"  # suffix of a checkpoint of a later step than the one that is written: training went back
INTERVAL = re.compile(r"(\d+)(s|min|)")
UNITS = {"": 1, "s": 1, "min": 60}  # windows without a unit, else seconds


class CheckpointEvery(Callback):
    """Save a checkpoint every so many windows, or seconds, without stopping training for long; the last two are kept.

    At the end of a window the state is copied to the host. A thread then writes it to ``step-N.ckpt.part``, flushes and
    renames it, so that a process that is killed leaves no half-written ``step-N.ckpt``. Sharded strategies write all of
    it before training goes on, into a folder that is renamed in the same way. The next copy waits until the one before
    is written.

    After SIGTERM on any rank (a spot instance's notice, a machine that joins) all ranks save at the end of the window
    and end together. Lightning's own handler exchanges a value between ranks at any moment, and then they hang.

    Data that are cut in the step cannot continue within an epoch, so they are saved at its end, if one is due; SIGTERM
    within an epoch saves nothing.

    If training goes back to an earlier step in this folder, checkpoints of later steps become ``step-N.ckpt.ahead``.

    A run that resumes one of its checkpoints must have the same number of samples and the same effective batch.

    Args:
        dirpath: The folder, which all hosts share; none other writes ``step-N.ckpt`` there.
        every: A number of windows (optimizer steps), or a time such as ``"30s"`` or ``"5min"``.

    Raises:
        UserError: If ``every`` is neither, or ``dirpath`` is a URL; or as training starts from a checkpoint of other
            data or another batch, or from different checkpoints on different ranks.
    """

    def __init__(self, dirpath: str | Path, every: int | str = 20) -> None:
        match = INTERVAL.fullmatch(str(every))
        if match is None or int(match[1]) < 1:
            raise UserError(f"{every=} is neither a number of windows nor a time: write 20, '30s' or '5min'.")
        self._every = int(match[1]) * UNITS[match[2]]
        self._is_time = match[2] != ""
        if "://" in str(dirpath):
            raise UserError(f"{dirpath=} must be a folder that all hosts mount: copy files from there to a bucket.")
        self._folder = Path(dirpath).expanduser()
        self._writer = BackgroundWriter()
        self._facts: dict[str, Any] = {}

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Come last, so that the other callbacks are saved as they are after the window; forget the fit before."""
        trainer.callbacks = [*(other for other in trainer.callbacks if other is not self), self]
        self._restored: dict[str, Any] = {}  # facts of the run in a checkpoint

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Compare the run with its checkpoint, and count from here."""
        self._facts = facts_of(trainer)
        for name, before in self._restored.items():
            now = self._facts.get(name, before)
            if now != before:
                raise UserError(f"The checkpoint is of a training with {before:,} {name}, and this one has {now:,}.")
        steps = ranks.of_all_ranks(trainer, trainer.global_step)
        if len({*steps}) > 1:
            raise UserError(f"Ranks resume from steps {steps}: all hosts must share the folder of the checkpoints.")
        self._step: int = trainer.global_step  # of the latest window that is done
        self._note_saved()
        self._ends = False  # whether SIGTERM has come
        self._all_end = False  # whether it has come on any rank
        with suppress(ValueError):  # not the main thread
            signal.signal(signal.SIGTERM, self._note_end)  # until Lightning puts the handlers back, after the fit

    def _note_saved(self) -> None:
        self._saved_at = time.monotonic()
        self._saved_step = self._step
        self._is_due = False

    def _note_end(self, *_: Any) -> None:
        self._ends = True

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Save if a window is done and one is due; never in mid-window, where buffers are ahead of the weights."""
        if trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        if self._is_time:
            is_due = any_rank(trainer, time.monotonic() - self._saved_at >= self._every)
        else:
            is_due = self._step // self._every > self._saved_step // self._every
        self._all_end = any_rank(trainer, self._ends)
        self._is_due = self._is_due or is_due or self._all_end
        if self._is_due and not any(fit.data.windows.in_step for fit in fits_of(trainer)):
            self.save(trainer)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """End, once the window before is logged; all ranks do."""
        if self._all_end:
            raise patching.sibling(trainer, "utilities.exceptions").SIGTERMException

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Save what could not be saved within the epoch."""
        if self._is_due:
            self.save(trainer)

    def save(self, trainer: Any) -> None:
        """Copy the state of the training, and let it be written; all ranks call this."""
        part = self._folder / f"step-{self._step}.ckpt{PART}"
        with patching.replaced(trainer.strategy, checkpoint_io=self._writer), ranks.uncounted_collectives():
            trainer.save_checkpoint(part, weights_only=False)
        if trainer.is_global_zero and part.is_dir():  # of shards, which are written
            remove(whole_name(part))  # of a training that has gone back: no folder replaces another
            keep_latest(part.replace(whole_name(part)))
        self._note_saved()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Wait until the last checkpoint is written."""
        self._writer.wait()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Wait until the last checkpoint is written; the error that ends the run is the one to show."""
        with suppress(Exception):
            self._writer.wait()

    def state_dict(self) -> dict[str, Any]:
        """Return what must not change from start to start."""
        return self._facts

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Note what the checkpoint's training had."""
        self._restored = state_dict


class BackgroundWriter(AtomicCheckpointIO):
    """Copies a checkpoint to the host, and writes it in a thread under its name without ``.part``.

    Lightning's ``AsyncCheckpointIO`` (2.6.6) copies tensors on their own device, which may be full, and its errors come
    after the file before has been removed.
    """

    def __init__(self) -> None:
        super().__init__()
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._writing: Future[None] | None = None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Copy the checkpoint, and write it in the thread once the one before is written."""
        self.wait()
        copy = io.BytesIO()
        torch.save(self._loadable(checkpoint), copy)
        self._writing = self._thread.submit(self._write, copy, whole_name(Path(path)))

    def _write(self, copy: io.BytesIO, path: Path) -> None:
        write_whole(path, lambda file: file.write(copy.getbuffer()))
        keep_latest(path)

    def wait(self) -> None:
        """Wait for the checkpoint that is being written, and raise its error."""
        writing = self._writing
        self._writing = None
        if writing is not None:
            writing.result()

    def __reduce__(self) -> Any:
        """Return how other processes and copies make theirs: with a thread of its own."""
        return type(self), ()


def whole_name(part: Path) -> Path:
    """Return the name that a checkpoint gets once it is whole."""
    return part.with_name(part.name.removesuffix(PART))


def keep_latest(written: Path) -> None:
    """Remove what is older than the last two checkpoints, and what killed processes have half written.

    Checkpoints of later steps than the one that is just written are of a training before: they are put aside.
    """
    folder = written.parent
    whole = sorted(folder.glob("step-[0-9]*.ckpt"), key=lambda path: int(path.stem.removeprefix("step-")))
    number = whole.index(written) + 1
    for path in [*whole[:number][:-KEPT], *folder.glob(f"step-*.ckpt{PART}")]:
        remove(path)
    for path in whole[number:]:
        aside = path.with_name(path.name + AHEAD)
        remove(aside)
        path.replace(aside)


def remove(path: Path) -> None:
    """Remove a file or a folder, if there is one."""
    if path.is_dir():
        (path / RECORD).unlink(missing_ok=True)  # a folder that is removed by half is not whole
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def any_rank(trainer: Any, decision: bool) -> bool:
    """Return whether any rank says so."""
    with ranks.uncounted_collectives():
        return bool(trainer.strategy.reduce_boolean_decision(decision, all=False))


def fits_of(trainer: Any) -> list[Any]:
    """Return the fits of AutoAccumulate."""
    found = [getattr(each, "_fit", None) for each in trainer.callbacks if hasattr(each, "optimizer_steps")]
    return [fit for fit in found if fit is not None and fit.plan is not None]


def facts_of(trainer: Any) -> dict[str, Any]:
    """Return the samples of the dataset, and of an optimizer step if AutoAccumulate keeps that number."""
    facts = {}
    with suppress(AttributeError, TypeError, NotImplementedError):  # a dataset without a length, several loaders
        facts["samples"] = len(trainer.train_dataloader.dataset)
    for fit in fits_of(trainer):
        if not fit.parts.request.varies:
            facts["samples per optimizer step"] = fit.plan.effective_batch_size
    return facts
