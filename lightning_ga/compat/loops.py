"""Read and set what the Trainer and its fit loop count: epochs, batches, the factor, the position after a restart.

Lightning's ``loops/fit_loop.py``, ``loops/training_epoch_loop.py``, ``loops/progress.py`` and, for checkpoints,
``trainer/connectors/checkpoint_connector.py``. The loop of a run that cuts batches counts micro-batches. Its
checkpoints count batches of the recipe, so that a run without the callback goes on at the same place; the run's own
counts lie in the callback's state, for a resume with it.
"""

import copy
import warnings
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any


def training_epoch(trainer: Any) -> int:
    """Return the epoch that the loop sets on samplers (``loops/fit_loop.py:445``)."""
    return int(trainer.fit_loop.epoch_progress.current.processed)


def batches_processed(trainer: Any) -> int:
    """Return the number of batches that the loop has trained on in its epoch."""
    return int(trainer.fit_loop.epoch_loop.batch_progress.current.processed)


def micro_batch_index(trainer: Any) -> int:
    """Return the index in the epoch of the micro-batch that is being trained on."""
    return int(trainer.fit_loop.epoch_loop.batch_progress.current.ready) - 1


def begins_window(trainer: Any) -> bool:
    """Return whether the micro-batch that is being trained on is the first since the optimizer's step."""
    return bool(micro_batch_index(trainer) % trainer.accumulate_grad_batches == 0)


def window_is_over(trainer: Any) -> bool:
    """Return whether the optimizer steps on the micro-batch that is trained on (``training_epoch_loop.py:447``)."""
    loop, progress = trainer.fit_loop, trainer.fit_loop.epoch_loop.batch_progress
    ready = progress.current.ready
    if ready % trainer.accumulate_grad_batches and ready != loop.max_batches and not progress.is_last_batch:
        return False
    return not loop._should_accumulate()


@contextmanager
def at_earlier_batch(trainer: Any, back: int) -> Iterator[None]:
    """Return a context in which the loop counts so many batches less: one of before is run again."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    counts = [(vars(each), dict(vars(each))) for each in (progress.current, progress.total)]
    is_last, progress.is_last_batch = progress.is_last_batch, False
    for now, before in counts:
        now.update({name: number - back for name, number in before.items()})
    try:
        yield
    finally:
        progress.is_last_batch = is_last
        for now, before in counts:
            now.update(before)


def skips_backward(trainer: Any) -> bool:
    """Return whether batches run forward alone, as in the last pass of ``StochasticWeightAveraging`` for BatchNorm."""
    return bool(trainer.fit_loop.epoch_loop.automatic_optimization._skip_backward)


def restarts_in_epoch(trainer: Any) -> bool:
    """Return whether the loops were restored from a checkpoint and go on with its counters."""
    return bool(trainer.fit_loop.epoch_loop.restarting)


def batches_done(trainer: Any) -> tuple[int, int]:
    """Return the batches that a restored loop has trained on: in its epoch (none if that is over), and before it."""
    progress, epochs = trainer.fit_loop.epoch_loop.batch_progress, trainer.fit_loop.epoch_progress.current
    done = int(progress.current.processed) if epochs.started > epochs.processed else 0
    return done, int(progress.total.processed) - done


def move_to_micro_batch(trainer: Any, done: int, *, same_epoch: bool) -> None:
    """Let a restored loop go on after ``done`` micro-batches of this run; in the ``same_epoch`` totals change, too."""
    loop = trainer.fit_loop.epoch_loop
    progress = loop.batch_progress
    pending = loop.restarted_on_train_batch_end  # which 2.5 reads off the counts
    moved = done - progress.current.ready if same_epoch else 0
    progress.is_last_batch = same_epoch and progress.is_last_batch
    for name in ("ready", "started", "processed", "completed"):
        setattr(progress.current, name, done - int(pending and name == "completed"))
        setattr(progress.total, name, getattr(progress.total, name) + moved)


def begin_next_epoch(trainer: Any) -> None:
    """Let a restored loop begin its next epoch as any other, if the epoch of the checkpoint was over.

    Otherwise it acts as if it were in the middle of that epoch (``fit_loop.py:398``, ``:447``): no hook announces its
    start, and a checkpoint written in it would look like one between epochs.
    """
    loop = trainer.fit_loop
    progress = loop.epoch_progress.current
    if progress.ready != progress.processed:
        return
    if progress.completed < progress.processed:  # with max_steps, a checkpoint written in on_train_epoch_end
        loop.epoch_progress.increment_completed()
    if hasattr(loop, "reset_restart_stage"):  # 2.5.0 has no stages
        loop.reset_restart_stage()


def reopen_epoch(trainer: Any) -> None:
    """Let a restored loop go on in an epoch that ``max_steps`` ended early, as stock Lightning does.

    A checkpoint of ``on_train_epoch_end`` counts that epoch as processed (``fit_loop.py``: ``on_run_start``).
    """
    loop = trainer.fit_loop
    progress, batches = loop.epoch_progress, loop.epoch_loop.batch_progress
    if progress.current.completed < progress.current.processed and not batches.is_last_batch:
        progress.current.processed -= 1
        progress.total.processed -= 1


def align_logger_steps(trainer: Any) -> None:
    """Give loggers the right number of optimizer steps after a restart: checkpoints are written before it rises.

    The loop adds one, on its reset (``training_epoch_loop.py:190``) or by ending the micro-batch once more (:277).
    """
    loop = trainer.fit_loop.epoch_loop
    on_reset = loop.restarted_on_train_batch_end or not loop.restarted_on_last
    rises = on_reset or loop._should_check_val_fx(trainer.fit_loop._data_fetcher)
    loop._batches_that_stepped = loop.global_step - int(rises)


_REPEATS = "You're resuming from a checkpoint that ended before the epoch ended"  # ``training_epoch_loop.py:215``


def expect_positions_to_be_kept() -> None:
    """Silence Lightning's warning that a resume in mid-epoch repeats samples: here it does not."""
    warnings.filterwarnings("ignore", message=_REPEATS)


def expect_nothing_of_positions() -> None:
    """Undo ``expect_positions_to_be_kept``."""
    for entry in [entry for entry in warnings.filters if getattr(entry[1], "pattern", None) == _REPEATS]:
        warnings.filters.remove(entry)  # type: ignore[attr-defined]


def end_training(trainer: Any) -> None:
    """Let the fit end before its first training step, once it has started."""
    trainer.fit_loop.epoch_loop.max_steps = trainer.global_step


def all_epochs(trainer: Any) -> range | None:
    """Return every epoch of the training, those before a resume too; ``None`` if there is no end."""
    last = trainer.max_epochs
    return None if last is None or last < 0 else range(max(1, last))


def training_epochs(trainer: Any) -> range:
    """Return the epochs that training is known to run, from the current one on."""
    first, epochs = training_epoch(trainer), all_epochs(trainer)
    return range(first, first + 1 if epochs is None else max(first + 1, epochs.stop))


_STAGES = {"predict": "prediction", "test": "test", "validate": "validation", "sanity_check": "validation"}


def stage(trainer: Any) -> str:
    """Return what batches are for now: ``"training"``, ``"validation"``, ``"test"`` or ``"prediction"``."""
    running = trainer.state.stage
    return "training" if running is None else _STAGES.get(running.value, "training")


class WindowFactor(int):
    """A factor whose remainders count micro-batches from the start of the window on.

    Lightning, and callbacks, tell windows by ``batch_idx % trainer.accumulate_grad_batches``
    (``training_epoch_loop.py:440``, ``automatic.py:220``): that is right only if all before had the same factor.
    """

    start: int  # micro-batches of the epoch before the window

    def __rmod__(self, index: int) -> int:
        return (index - self.start) % int(self)

    def __reduce__(self) -> Any:
        return int, (int(self),)


def leave_factor(trainer: Any, recipe: int, samples: int) -> None:
    """Store the user's factor on the trainer, beside the one that a fit leaves there, and the samples seen by then."""
    trainer.__dict__["_recipe_factor"] = (trainer.accumulate_grad_batches, recipe)
    trainer.__dict__["_samples_seen"] = samples


def samples_before(trainer: Any) -> int:
    """Return the samples that fits of the trainer have seen before, whose counts the next one goes on with."""
    return int(trainer.__dict__.get("_samples_seen", 0)) if trainer.global_step else 0


def take_factor_back(trainer: Any) -> None:
    """Restore the user's factor on the trainer, unless it was set anew meanwhile."""
    left, recipe = trainer.__dict__.pop("_recipe_factor", (None, None))
    if trainer.accumulate_grad_batches == left:
        trainer.accumulate_grad_batches = recipe


def move_callback(trainer: Any, callback: Any, place: int) -> int | None:
    """Move a callback to a position among the others, as Lightning moves its tuners; return where it was.

    Nothing happens if the trainer does not have it any more.
    """
    if callback not in trainer.callbacks:
        return None
    before: int = trainer.callbacks.index(callback)
    others = [other for other in trainer.callbacks if other is not callback]
    trainer.callbacks = [*others[:place], callback, *others[place:]]
    return before


_COUNTS = "loop_batches"  # in the callback's entry
_LOADERS = "combined_loader"  # in the fit loop's


def count_recipe_batches(checkpoint: MutableMapping[str, Any], key: str, *, done: int, before: int) -> None:
    """Let a checkpoint count the recipe's batches: ``done`` in this epoch, and those ``before``.

    The loop's own counts of micro-batches go to the callback's entry, which has the ``key``.
    """
    progress = _fit_loop(checkpoint).get("epoch_loop.batch_progress")
    own = checkpoint.get("callbacks", {}).get(key)
    if progress is None or own is None:
        return
    current, total = progress["current"], progress["total"]
    if (current["processed"], total["processed"]) == (done, before + done):
        return
    own[_COUNTS] = copy.deepcopy(progress)
    pending = current["processed"] - current["completed"] if done else 0  # one, in ``on_train_batch_end``
    for counts, offset in ((current, 0), (total, before)):
        counts.update(dict.fromkeys(counts, offset + done))
        counts["completed"] -= pending


def count_micro_batches(checkpoint: MutableMapping[str, Any], key: str) -> None:
    """Restore the counts that ``count_recipe_batches`` replaced in a loaded checkpoint, before loops read them."""
    counts = checkpoint.get("callbacks", {}).get(key, {}).pop(_COUNTS, None)
    if counts is not None:
        _fit_loop(checkpoint)["epoch_loop.batch_progress"] = counts


def save_loaders(checkpoint: MutableMapping[str, Any], states: Sequence[Any]) -> None:
    """Store the states of the user's loaders where stock Lightning looks for them."""
    if states:
        _fit_loop(checkpoint).setdefault("state_dict", {})[_LOADERS] = list(states)


def take_loaders(checkpoint: MutableMapping[str, Any]) -> list[Any]:
    """Remove the states of loaders from a loaded checkpoint and return them: the loop does not see these loaders."""
    states: list[Any] = _fit_loop(checkpoint).get("state_dict", {}).pop(_LOADERS, [])
    return states


def _fit_loop(checkpoint: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    state: MutableMapping[str, Any] = checkpoint.get("loops", {}).get("fit_loop", {})
    return state
