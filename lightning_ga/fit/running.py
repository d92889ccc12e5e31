"""Run a batch of a window: whole if it fits, otherwise in pieces; if memory runs out, the window again."""

from typing import Any

from lightning_ga.compat.log_capture import LogTap, current_hook, return_to_hook
from lightning_ga.fit.engine import Engine
from lightning_ga.fit.log_buffer import LogBuffer
from lightning_ga.fit.parts import BatchResult, Part, Window, written_versions
from lightning_ga.fit.piecewise import PiecewiseRun


def run_window(engine: Engine, window: Window, *, begins: bool = True, all_parts: bool = False) -> BatchResult:
    """Run the last batch of a window; if memory runs out, all of the window again, in smaller pieces.

    ``begins`` if the window begins with this batch; ``all_parts`` if all batches are to run, though none has failed,
    because an optimizer evaluates its closure again.
    """
    stage, part, failure = window.stage, window.parts[-1], engine.not_moved
    tap = engine.tap(stage)
    tap.begin()
    takes = (begins or all_parts) and engine.policy.retries
    if takes:
        window.savepoint.forget()
    pieces = engine.pieces(stage, part) if engine.limits else 1
    if pieces == 1 and part.move is None and not all_parts:
        hook = current_hook(engine.trainer)
        held = LogBuffer() if engine.distributed else None
        part.written = written_versions(part.batch)
        outcome = engine.catch(stage, _run_whole, window, part, tap, held, takes)
        if outcome.failure is None:
            engine.finish(stage)
            if held is not None:
                held.replay(tap.log, engine.retry_once)
            return BatchResult((outcome.result,))
        failure = outcome.failure
        return_to_hook(engine.trainer, hook)
    result = PiecewiseRun(engine, window, tap, failure=failure, pieces=pieces, takes=takes, all_parts=all_parts).run()
    engine.finish(stage)
    return result


def _run_whole(window: Window, part: Part, tap: LogTap, held: LogBuffer | None, takes: bool) -> Any:
    if takes:
        window.savepoint.take()
    if held is None:
        return window.run_pass(part, part.batch, None, 1.0)
    # What ranks exchange in logs comes after all passes, as it does on a rank that runs pieces.
    with tap.held(held.note):
        result = window.run_pass(part, part.batch, None, 1.0)
    held.keep(1.0)
    return result
