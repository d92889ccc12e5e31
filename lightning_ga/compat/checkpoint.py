"""Convert the fit loop's part of a checkpoint to the units that stock Lightning expects, and back.

Lightning's ``trainer/connectors/checkpoint_connector.py`` and ``loops/fit_loop.py`` (``on_save_checkpoint``,
``on_load_checkpoint``). The loop of a run that cuts batches counts micro-batches; its checkpoints count batches of the
recipe, so that a run without the callback goes on at the same place. The run's own counts lie in the callback's state,
for a resume with it.
"""

import copy
from collections.abc import MutableMapping, Sequence
from typing import Any

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
