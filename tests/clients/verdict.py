"""Whether what a run did, and what it said of itself, are true."""

from dataclasses import dataclass

from clients.program import Program
from clients.trial import Trace

SAME = "with the same result"


@dataclass(frozen=True, slots=True)
class Row:
    """One program in one mode."""

    client: str
    name: str
    mode: str
    factor: int | None = None
    gradient: float | None = None
    weights: float | None = None
    cause: str | None = None
    sentence: str = ""
    verdict: str = ""
    told: tuple[str, ...] = ()
    error: str = ""
    setting: str = ""
    survived: int = 0


def judge(program: Program, row: Row, whole: Trace, trace: Trace) -> str:
    """Say in a few words what to think of a row; begins with WRONG where it is wrong."""
    if trace.error is not None:
        return _of_an_end(row, trace)
    if len(trace.gradients) != len(whole.gradients):
        return f"WRONG: {len(trace.gradients)} steps"
    if row.mode == "out of memory" and not row.survived:
        return "WRONG: no error"
    if row.mode in ("budget", "step") and row.factor == 1:
        return "WRONG: not cut"
    return _of_numbers(program, row)


def _of_an_end(row: Row, trace: Trace) -> str:
    if trace.refused:
        return "refused"
    if row.mode == "out of memory" and "memory" in row.error.lower():
        return "refused"
    return "WRONG: died"


def _of_numbers(program: Program, row: Row) -> str:
    cut = row.mode != "alone"
    warned = any(warning.startswith("ExactnessWarning") for warning in row.told)
    if row.cause not in (*program.causes, "unmeasured"):
        return "WRONG: cause"
    error = max(row.gradient or 0.0, row.weights or 0.0)
    if row.mode == "out of memory" and row.cause == "random":
        error = row.gradient or 0.0  # later micro-batches are smaller, and collated with other random numbers
    if not cut and not program.settings and error > 0:
        return "WRONG: bits"
    if error <= program.tolerance:
        return "WRONG: alarm" if cut and row.cause == "exact" and warned else "right"
    if not cut or row.cause == "exact" or any(SAME in warning for warning in row.told):
        return "WRONG: off"
    if row.cause == "unmeasured" and not warned:
        return "WRONG: off"
    return "told" if row.told or row.cause == "random" else "WRONG: silent"
