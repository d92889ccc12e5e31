"""Measure whether micro-batches give the gradient of the whole batch: one experiment, before training and within it.

A batch of the user's own data runs through the code that trains: as a whole, and in two parts, one right after the
other. If the gradients differ, or a pass changes what it should not, more runs name the cause: with BatchNorm that
normalizes each part by itself, or by its running statistics; the second part alone; the whole with other random
numbers. The gradients give the verdict. It cannot show effects that come between measurements, rare samples, what
callbacks do, and state outside of the module.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning_ga.batch.layout import LayoutError
from lightning_ga.compat import ranks
from lightning_ga.fit.exactness.judgement import Judgement, NotFiniteError, is_survivable, judge_chunks
from lightning_ga.fit.exactness.passes import Passes, passes_of, rounding
from lightning_ga.loading.trial_batches import CutBatch, Move
from lightning_ga.memory.oom import attempt, is_out_of_memory
from lightning_ga.plan.accumulation import whole_multiples
from lightning_ga.plan.exactness_verdicts import Exactness
from lightning_ga.snapshot.random_numbers import reseed
from lightning_ga.snapshot.trial_isolation import refuse_lazy

if TYPE_CHECKING:
    from lightning_ga.chunks import ChunkedModules

Halves = Callable[[int, Move, int], CutBatch | None]
SAMPLES = 7  # in parts of four and three: BatchNorm refuses one sample, and unequal parts show wrong weights
_MORE = 4  # times as many samples if the gradient is zero: a loss over pairs may find no pair among a few
_SMALL = 2**28  # bytes of parameters: a smaller model is measured without autocast, and above its limit
_SHARDED = "each rank holds a part of the model, and cannot run a step by itself"


def measure(
    trainer: Any,
    halves: Halves,
    move: Move,
    normalize: Any,
    *,
    available: int,
    limit: int,
    at_first: int = SAMPLES,
    in_step: bool = False,
    chunked: "ChunkedModules | None" = None,
    begins: bool = True,
    multiple: int = 1,
) -> tuple[Exactness, int]:
    """Measure on some of the ``available`` samples, in passes of at most ``limit``, and leave no trace.

    Return the verdict, and the number of samples of the last trial. The first has ``at_first`` samples; if their
    gradient is zero, more follow, and fewer once memory runs out. A small model may begin with a few more than
    ``limit``.
    ``halves(count, move, seed)`` makes a batch and its parts, multiples of ``multiple`` if so many fit; ``move`` moves
    a batch to the device, with its hooks. If ``normalize`` is no function, samples are counted.

    If training ``begins``, the module's start hooks run first. If the step cuts batches (``in_step``), the parts are
    pieces of one batch. A ``UserError`` of the step is raised; other errors make the verdict ``"unmeasured"`` or
    ``"uncuttable"``.
    """
    refuse_lazy(trainer.lightning_module.parameters())
    if ranks.is_sharded(trainer):
        return unmeasured(trainer, _SHARDED), 0
    plain = sum(p.numel() * p.element_size() for p in trainer.lightning_module.parameters()) <= _SMALL
    tried = partial(
        _tried, trainer, halves, move, normalize, plain=plain, begins=begins, in_step=in_step, chunked=chunked
    )
    most = whole_multiples(min(limit, available), multiple)
    most_at_first = available if plain else most  # a small model may begin above its limit
    # Three multiples make unequal parts, of two and of one.
    size = whole_multiples(min(max(at_first, 3 * multiple), most_at_first), multiple)
    if size < 2:
        return unmeasured(trainer, "a micro-batch of one sample has no parts"), size
    found = tried(size)
    while found is not None and not found.has_gradient and size < most:
        size = min(_MORE * size, most)
        found = tried(size)
    while found is None and size >= 4:  # memory has run out
        size = whole_multiples(size // 2, multiple)
        found = tried(size)
    if found is None:
        found = unmeasured(trainer, f"memory ran out in the measurement, on {size} samples")
    return found, size


def _make_batch(passes: Passes, halves: Halves, move: Move, size: int, seed: int) -> CutBatch | None:
    """Make and move a batch, with random numbers of this seed."""

    def moved(batch: Any) -> Any:
        reseed(seed)
        return move(batch)

    passes.begin(seed)
    return halves(size, moved, seed)


def unmeasured(trainer: Any, reason: str) -> Exactness:
    """Return the verdict that nothing was measured, and why."""
    return Exactness(None, rounding(trainer), "unmeasured", reason=reason)


def _tried(
    trainer: Any,
    halves: Halves,
    move: Move,
    normalize: Any,
    size: int,
    *,
    plain: bool,
    begins: bool,
    in_step: bool,
    chunked: "ChunkedModules | None",
) -> Exactness | None:
    """Run a batch of this size and its parts, and judge the gradients; ``None`` if memory ran out."""
    tolerance = rounding(trainer, plain=plain)

    def judged() -> Exactness:
        with passes_of(trainer, plain=plain, begins=begins, in_step=in_step) as passes:
            make = partial(_make_batch, passes, halves, move, size)
            batch = make(0)
            if batch is None:
                return unmeasured(trainer, "the training data have no two samples that stay in one batch")
            if chunked is not None:
                return judge_chunks(passes, chunked, batch, tolerance)
            return Judgement(passes, batch, lambda: make(1) or batch, normalize, tolerance).verdict()

    outcome = attempt(judged, is_survivable)
    error = outcome.failure
    if error is None or is_out_of_memory(error):
        found: Exactness | None = outcome.result
        return found
    if isinstance(error, LayoutError):
        return Exactness(None, tolerance, "uncuttable", reason=str(error))
    reason = str(error)
    if not isinstance(error, NotFiniteError):
        reason = f"a step on some samples ended in {type(error).__name__}: {reason.rstrip('.')}"
    return Exactness(None, tolerance, "unmeasured", reason=reason)
