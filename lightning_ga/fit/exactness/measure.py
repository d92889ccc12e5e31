"""Measure whether micro-batches give the gradient of the whole batch: one experiment, before training and within it.

A batch of the user's own data runs through the code that trains: as a whole; in two parts, one right after the
other; and, if the gradients differ, as a whole again with other random numbers. The gradients give the verdict. It
cannot show effects that come between measurements, rare samples, what callbacks do, and state outside of the module.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning_ga.batch.layout import LayoutError
from lightning_ga.compat import ranks
from lightning_ga.compat.patching import replaced
from lightning_ga.errors import UserError
from lightning_ga.fit.exactness.differences import Differences, Gradient, compare, distance, norm
from lightning_ga.fit.exactness.passes import Passes, batch_norm_layers, fixed_statistics, passes_of, rounding
from lightning_ga.loading.trial_batches import CutBatch, Move, TrialBatches
from lightning_ga.memory.oom import attempt, is_out_of_memory
from lightning_ga.plan.accumulation import whole_multiples
from lightning_ga.plan.exactness import Cause, Exactness
from lightning_ga.plan.window_weights import count_items
from lightning_ga.snapshot.isolation import refuse_lazy
from lightning_ga.snapshot.random_numbers import reseed

if TYPE_CHECKING:
    from lightning_ga.chunks import ChunkedModules

SAMPLES = 7  # in parts of four and three: BatchNorm refuses one sample, and unequal parts show wrong weights
_MORE = 4  # times as many samples if the gradient is zero: a loss over pairs may find no pair among a few
_SMALL = 2**28  # bytes of parameters: a smaller model is measured without autocast, and above its limit
_ALWAYS_ALLOWED = 20  # measurements of any training
_SHARE = 2e-3  # of training's passes, for all later measurements
_COST = 4  # passes of a measurement, approximately
_NOISE = 3.0  # by how much a difference has to exceed that of other random numbers
_NO_GRADIENT = "its gradient is zero"
_SHARDED = "each rank holds a part of the model, and cannot run a step by itself"
_UNSEEDED = "two passes over one batch differ though they draw the same random numbers, so nothing can be measured"
_RANDOM = (
    "the step, or what makes its batch, draws random numbers: two passes over one batch differ by {:.1g} of its "
    "gradient, so that no smaller error can be seen; each micro-batch draws its own"
)
PER_CHUNK = (
    "BatchNorm layers in the submodules of whole= normalize by the statistics of each chunk, not of the whole batch; "
    "GroupNorm (lightning_ga.models.to_group_norm) makes it exact"
)
RANDOM_CHUNKS = (
    "the submodules of whole= draw random numbers, and chunks draw others than the whole: whether they treat samples "
    "by themselves was not measured"
)
ELSEWHERE = "something outside of the module (or reads batch_idx)"


class Moments:
    """The moments of training at which its exactness is measured again: after 1, 2, 4, 8, … optimizer steps."""

    def __init__(self) -> None:
        self._next = 1
        self._made = 0

    def is_due(self, steps: int, passes: int) -> bool:
        """Return whether a measurement is due after so many steps and passes.

        Beyond the first twenty, measurements take at most 0.2 % of training's passes.
        """
        is_affordable = self._made < _ALWAYS_ALLOWED or (self._made + 1) * _COST <= _SHARE * passes
        return steps >= self._next and is_affordable

    def note(self, steps: int) -> None:
        """Note a measurement after so many steps.

        Examples:
            >>> moments = Moments()
            >>> for steps in range(20):
            ...     if moments.is_due(steps, passes=steps):
            ...         moments.note(steps)
            ...         print(steps)
            1
            2
            4
            8
            16
        """
        self._made += 1
        while self._next <= steps:
            self._next *= 2


def measure(trainer: Any, batch: CutBatch, *, normalize: Any, begins: bool, in_step: bool = False) -> Exactness:
    """Measure on a batch that is on the device, and leave no trace.

    If ``normalize`` is no function, samples are counted. If training ``begins``, the module's start hooks run first.
    If the step cuts batches (``in_step``), the parts are pieces of one batch. A ``UserError`` of the step is
    raised; other errors make the verdict ``"unmeasured"`` or ``"uncuttable"``.
    """
    if ranks.is_sharded(trainer):
        return _unmeasured(trainer, _SHARDED)
    for plain in dict.fromkeys((_is_small(trainer), False)):  # autocast takes less memory
        found = _tried(trainer, lambda *_: batch, normalize, plain=plain, begins=begins, in_step=in_step)
        if found is not None:
            return found
    return _unmeasured(trainer, f"memory ran out in the measurement, on {sum(batch.sizes)} samples")


def measure_at_start(
    trainer: Any,
    batches: TrialBatches,
    move: Move,
    normalize: Any,
    *,
    limit: int,
    in_step: bool = False,
    chunked: "ChunkedModules | None" = None,
    begins: bool = True,
    multiple: int = 1,
) -> Exactness:
    """Measure on a few samples of the training data, in passes of at most ``limit`` samples.

    If training ``begins``, the module's start hooks run first. Parts are multiples of ``multiple`` if so many fit.

    A small model may run a few samples more than that. ``move`` moves a batch to the device, with its hooks.
    """
    refuse_lazy(trainer.lightning_module.parameters())
    if ranks.is_sharded(trainer):
        return _unmeasured(trainer, _SHARDED)
    plain = _is_small(trainer)
    most = min(limit, batches.most)
    size = whole_multiples(min(max(SAMPLES, 3 * multiple), batches.most if plain else most), multiple)
    verdict = _unmeasured(trainer, "a micro-batch of one sample has no parts")
    while size >= 2:
        make = partial(_make_batch, batches, move, size, multiple)
        found = _tried(trainer, make, normalize, plain=plain, begins=begins, in_step=in_step, chunked=chunked)
        verdict = found or _unmeasured(trainer, f"memory ran out in the measurement, on {size} samples")
        if found is None:
            size = most = whole_multiples(size // 2, multiple)
        elif not found.has_gradient and size < most:
            size = whole_multiples(min(_MORE * size, most), multiple)
        else:
            break
    return verdict


def _make_batch(
    batches: TrialBatches, move: Move, size: int, multiple: int, passes: Passes, seed: int
) -> CutBatch | None:
    """Make and move a batch, with random numbers of this seed."""

    def moved(batch: Any) -> Any:
        reseed(seed)
        return move(batch)

    passes.begin(seed)
    return batches.batch_in_two_parts(size, moved, seed, multiple)


def _is_small(trainer: Any) -> bool:
    return bool(sum(p.numel() * p.element_size() for p in trainer.lightning_module.parameters()) <= _SMALL)


def _is_survivable(error: Exception) -> bool:
    """Return whether training may continue after an error of the measurement: it is not a user's mistake."""
    return isinstance(error, LayoutError) or not isinstance(error, UserError)


def _is_of_parts(error: Exception) -> bool:
    """Return whether an error says something of the parts of a batch."""
    return _is_survivable(error) and not is_out_of_memory(error)


def _unmeasured(trainer: Any, reason: str) -> Exactness:
    return Exactness(None, rounding(trainer), "unmeasured", reason=reason)


def _tried(
    trainer: Any,
    make: Callable[[Passes, int], CutBatch | None],
    normalize: Any,
    *,
    plain: bool,
    chunked: "ChunkedModules | None" = None,
    **place: bool,
) -> Exactness | None:
    """Run what ``make(passes, seed)`` returns and its parts, and judge the gradients; ``None`` if memory ran out."""
    tolerance = rounding(trainer, plain=plain)

    def judged() -> Exactness:
        with passes_of(trainer, plain=plain, **place) as passes:
            batch = make(passes, 0)
            if batch is None:
                return _unmeasured(trainer, "the training data have no two samples that stay in one batch")
            if chunked is not None:
                return _judge_chunks(passes, chunked, batch, tolerance)
            verdict = _Judgement(passes, batch, lambda: make(passes, 1) or batch, normalize, tolerance).verdict()
        return replace(verdict, micro_steps=passes.count)

    outcome = attempt(judged, _is_survivable)
    error = outcome.failure
    if error is None or is_out_of_memory(error):
        verdict: Exactness | None = outcome.result
        return verdict
    if isinstance(error, LayoutError):
        return Exactness(None, tolerance, "uncuttable", reason=str(error))
    reason = f"a step on some samples ended in {type(error).__name__}: {str(error).rstrip('.')}"
    return Exactness(None, tolerance, "unmeasured", reason=reason)


class _Judgement:
    """Runs a batch and its parts, and names the cause of what differs."""

    def __init__(
        self, passes: Passes, batch: CutBatch, remake: Callable[[], CutBatch], normalize: Any, tolerance: float
    ) -> None:
        self._passes = passes
        self._batch = batch
        self._remake = remake
        self._tolerance = tolerance
        self._counts = [float(size) for size in batch.sizes]
        if callable(normalize):
            self._counts = [float(count_items(normalize, part)) for part in batch.parts]
        self._repeated = tolerance  # two passes that differ by less are the same
        if passes.is_on_host and tolerance <= 1e-4:
            self._repeated = tolerance / 100

    def verdict(self) -> Exactness:
        """Return the verdict."""
        passes = self._passes
        layers = batch_norm_layers(self._passes.module)
        if not (min(self._counts) >= 0 and 0 < sum(self._counts) < math.inf):
            return self._verdict("unmeasured", reason=f"normalize counts {self._counts} in the parts of a batch")
        (whole,) = passes.run(self._batch.whole, watched=True)
        changed = passes.changed
        size = norm(whole)
        if not size:
            return self._verdict("unmeasured", reason=_NO_GRADIENT, has_gradient=False)
        if not size < math.inf:
            return self._verdict("unmeasured", reason=f"the norm of its gradient is {size}")
        run = attempt(passes.run, _is_of_parts, *self._batch.parts)
        if run.failure and layers and min(self._batch.sizes) < 2:  # they may refuse one sample
            return self._verdict("batch_norm", layers=layers)
        found = None
        second = None
        if not run.failure:
            first, second = run.result
            found = self._compare(whole, first, second)
        of_state = replace(self._verdict("exact", found), tensors=changed)
        if found is not None and found.error <= self._tolerance and not changed:
            return of_state
        depends = self._depends_on_first(second)
        if depends is None:
            return self._verdict("random", reason=_UNSEEDED)
        if depends:
            return replace(of_state, cause="stateful", tensors=changed or (ELSEWHERE,), layers=layers)
        assert found is not None, "without gradients, the verdict is stateful"
        if found.error <= self._tolerance:
            return of_state
        return replace(self._named(whole, found, layers), tensors=changed)

    def _depends_on_first(self, second: Gradient | None) -> bool | None:
        """Return whether the second part has another gradient after the first; ``None`` if two runs of it alone differ.

        If the second failed after the first, and each runs alone, the second depends on what the first has left.
        """
        one, other = self._batch.parts
        if second is None:
            self._passes.run(one)
            self._passes.run(other)
            return True
        (alone,) = self._passes.run(other)
        if not distance(alone, second) > self._repeated:  # false for NaN, too
            return False
        (again,) = self._passes.run(other)
        return None if distance(alone, again) > self._repeated else True

    def _named(self, whole: Gradient, found: Differences, layers: tuple[str, ...]) -> Exactness:
        """Name the cause of a difference that is not due to state."""
        (other,) = self._passes.run(self._remake().whole, seed=1)
        noise = distance(whole, other)
        level = self._tolerance
        if noise > self._tolerance:
            level = _NOISE * noise
            if found.error <= level:
                reason = "" if layers else _RANDOM.format(noise)
                return self._verdict("batch_norm" if layers else "random", layers=layers, reason=reason)
        if layers:
            with fixed_statistics():
                (fixed,) = self._passes.run(self._batch.whole)
                of_loss = self._compare(fixed, *self._passes.run(*self._batch.parts))
            if of_loss.error <= level:
                return self._verdict("batch_norm", found, layers=layers)
            found = replace(of_loss, error=found.error)
        return self._verdict(found.cause(level), found, layers=layers)

    def _compare(self, whole: Gradient, first: Gradient, second: Gradient) -> Differences:
        return compare(whole, first, second, weight=self._counts[0] / sum(self._counts), enough=self._tolerance)

    def _verdict(self, cause: Cause, found: Differences | None = None, **more: Any) -> Exactness:
        return Exactness(None if found is None else found.error, self._tolerance, cause, **more)


def _judge_chunks(passes: Passes, chunked: "ChunkedModules", batch: CutBatch, tolerance: float) -> Exactness:
    """Compare a pass whose submodules of ``whole=`` run in two chunks with a pass in which they run whole."""
    samples = sum(batch.sizes)

    def gradient(size: int | None) -> Gradient:
        with replaced(chunked.size, samples=size, window=samples):
            return passes.run(batch.whole)[0]

    def refused(reason: str) -> UserError:
        return UserError(f"whole={chunked.names!r}: {reason}")

    whole = gradient(None)
    in_two = (samples + 1) // 2
    for name, chunks in chunked.forwards.items():
        if not chunks.is_called:
            raise refused(f"training_step does not call {name} itself: name submodules that are called.")
    if not 0 < norm(whole) < math.inf:
        return replace(_unmeasured(passes.trainer, _NO_GRADIENT), has_gradient=False)
    with replaced(chunked.size, samples=None, window=samples):  # another length shows which arguments have no samples
        passes.run(batch.parts[1])
    error = distance(whole, gradient(in_two))
    if error <= tolerance:
        return Exactness(error, tolerance, "exact", micro_steps=passes.count)
    if any(chunks.draws for chunks in chunked.forwards.values()):
        return Exactness(None, tolerance, "random", reason=RANDOM_CHUNKS, micro_steps=passes.count)
    with fixed_statistics():
        if distance(gradient(None), gradient(in_two)) > tolerance:
            raise refused(
                f"run in chunks, {', '.join(chunked.names)} made a gradient that is off by {error:.1g} of it, so what "
                "it computes of a sample depends on the others: name submodules that treat samples by themselves."
            )
    layers: list[str] = []
    for chunks in chunked.forwards.values():
        layers += batch_norm_layers(chunks.module)
    return Exactness(error, tolerance, "batch_norm", tuple(layers), PER_CHUNK, passes.count)
