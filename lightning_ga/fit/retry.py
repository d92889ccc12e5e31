"""After an out-of-memory error in training or evaluation: undo the failed passes.

Tested in tests/fit/test_evaluation.py and tests/integration/test_survive.py.
"""

from collections.abc import Callable
from typing import Any

from lightning_ga.fit import messages
from lightning_ga.memory.device import describe_memory
from lightning_ga.memory.oom import is_ambiguous_out_of_memory, retry_once


def go_back(
    trainer: Any,
    stage: str,
    failure: Exception,
    *,
    failed: int,
    fits: int | None,
    why_not_alone: Callable[[], str | None],
    undo: Callable[[], str | None],
    unit: str = "micro-batches",
) -> messages.OomEvent:
    """Undo what failed passes have done, and return the event.

    A pass of ``failed`` samples ran out of memory; now it may have as many as ``fits``, which is ``None`` if there is
    nothing left to try. ``why_not_alone`` returns why other ranks wait for this one, and
    ``undo`` what cannot be put back; ``None`` if all is well.

    Raises:
        UserError: If the samples cannot run again with the same result. Then nothing has fallen, and the run ends.
    """
    if fits is None:
        if is_ambiguous_out_of_memory(failure):  # it may mean something else
            raise failure
        one = messages.ONE_CHUNK if unit == "chunks" else messages.ONE_SAMPLE
        raise messages.out_of_memory(trainer, stage, one) from failure
    others = why_not_alone()
    if others is not None:
        raise messages.out_of_memory(trainer, stage, messages.OTHERS_WAIT, others) from failure
    moved = retry_once(undo)
    if moved is not None:
        raise messages.out_of_memory(trainer, stage, messages.CHANGED, moved) from failure
    memory = describe_memory(trainer.strategy.root_device)
    return messages.OomEvent(stage, int(trainer.global_step), failed, fits, memory, unit)
