"""After an out-of-memory error in training or evaluation: undo the failed passes.

Tested in tests/fit/test_evaluation.py and tests/integration/test_survive.py.
"""

from collections.abc import Callable
from typing import Any

from lightning_ga.fit import messages
from lightning_ga.memory.oom import retry_once


def undo_passes(
    trainer: Any,
    stage: str,
    failure: Exception,
    *,
    leave_ranks: Callable[[], str | None],
    undo: Callable[[], str | None],
) -> None:
    """Undo what failed passes have done.

    ``leave_ranks`` is called once, before ``undo``. It returns why other ranks wait for this one, and ``undo`` what
    cannot be put back; ``None`` if all is well.

    Raises:
        UserError: If the samples cannot run again with the same result.
    """
    others = leave_ranks()
    if others is not None:
        raise messages.out_of_memory(trainer, stage, messages.OTHERS_WAIT, others) from failure
    moved = retry_once(undo)
    if moved is not None:
        raise messages.out_of_memory(trainer, stage, messages.CHANGED, moved) from failure
