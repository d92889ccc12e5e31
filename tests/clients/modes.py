"""Each program alone, with a budget, cut in the step, and with memory that runs out; and what to think of it."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from clients.program import OOM_STEP, Program, Trace, run
from lightning_ga import AutoAccumulate
from lightning_ga.plan.accumulation import AccumulationPlan

OOM_PLACE = 0.6  # of the operations of a step's forward and backward pass
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


def try_modes(program: Program) -> list[Row]:
    """Every mode of a program, beside its training in one pass."""
    whole = run(program, program.batch)
    if whole.error is not None:
        raise whole.error
    counted = run(program, program.batch, fails_at=0).operations
    alone = _accumulate(program)
    rows = [_row(program, "alone", alone, whole, run(program, program.batch, [alone]))]
    small = {**_budget(program, alone), "effective_batch_size": program.batch}
    modes = [
        ("budget", program.batch // 4, small, None),
        ("step", program.batch, {"micro_batching": "step", "micro_batch_size": part(program.batch)}, None),
        ("out of memory", program.batch, {}, int(OOM_PLACE * counted)),
    ]
    for mode, batch, settings, fails_at in modes:
        if mode == "step" and callable(program.settings.get("size_of")):  # are refused together
            continue
        callback = _accumulate(program, **settings)
        trace = run(program, batch, [callback], fails_at=fails_at)
        row = _row(program, mode, callback, whole, trace)
        rows.append(replace(row, setting=", ".join(f"{name}={value!r}" for name, value in settings.items())))
    return rows


def part(batch: int) -> int:
    """A micro-batch that does not divide the batch.

    Examples:
        >>> part(8), part(16)
        (3, 6)
    """
    return max(1, 3 * batch // 8)


def _accumulate(program: Program, **settings: Any) -> AutoAccumulate:
    return AutoAccumulate(**{**program.settings, **settings})


def _budget(program: Program, alone: AutoAccumulate) -> dict[str, Any]:
    """A budget that about a third of the batch fits in, as a probe predicts it or finds its peak; else that size."""
    size = part(program.batch)
    curve = dict(alone.probe.curve) if alone.probe is not None else {}
    if size in curve and curve[size] < max(curve.values()) and "whole" not in program.settings:
        return {"memory_budget": curve[size]}
    capped = _accumulate(program, effective_batch_size=program.batch, max_micro_batch_size=size, cache=False)
    run(program, program.batch // 4, [capped])
    if capped.probe is not None and alone.probe is not None and capped.probe.peak_bytes < alone.probe.peak_bytes:
        return {"memory_budget": capped.probe.peak_bytes}
    return {"micro_batch_size": size}


def _row(program: Program, mode: str, callback: AutoAccumulate, whole: Trace, trace: Trace) -> Row:
    step = OOM_STEP if mode == "out of memory" else 0
    exactness = callback.exactness
    row = Row(
        program.client,
        program.name,
        mode,
        passes_of(callback.plan) if callback.plan and trace.started else None,
        gradient_error(whole, trace, step),
        weight_error(whole, trace),
        exactness.cause if exactness else None,
        str(exactness or ""),
        told=trace.told,
        error=f"{type(trace.error).__name__}: {trace.error}" if trace.error else "",
        survived=callback.oom_events,
    )
    return replace(row, verdict=judge(program, row, whole, trace))


def passes_of(plan: AccumulationPlan) -> int:
    """The micro-batches of a window, or the chunks of submodules that run over one."""
    return plan.factor if plan.chunk_size is None else -(-plan.micro_batch_size // plan.chunk_size)


def gradient_error(whole: Trace, trace: Trace, step: int) -> float | None:
    """Relative error of the gradient of one step; ``None`` if there was no such step."""
    if len(trace.gradients) <= step:
        return None
    expected = whole.gradients[step]
    return float((trace.gradients[step] - expected).norm() / expected.norm())


def weight_error(whole: Trace, trace: Trace) -> float | None:
    """Relative error of all weights at the end; ``None`` if training did not end well."""
    if trace.error is not None or trace.weights.keys() != whole.weights.keys():
        return None
    difference = torch.stack([(trace.weights[name] - whole.weights[name]).norm() for name in whole.weights]).norm()
    return float(difference / torch.stack([values.norm() for values in whole.weights.values()]).norm())


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
