"""Run a batch and its parts, compare their gradients, and name the cause of what differs.

Tested in tests/fit/exactness/test_measure.py.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any

from lightning_ga.batch.layout import LayoutError
from lightning_ga.errors import UserError
from lightning_ga.fit.exactness.differences import Differences, Gradient, compare, distance, norm
from lightning_ga.fit.exactness.passes import Passes, batch_norm_layers, fixed_statistics, statistics_of_parts
from lightning_ga.loading.trial_batches import CutBatch
from lightning_ga.memory.oom import attempt, is_out_of_memory
from lightning_ga.plan.exactness_verdicts import Cause, Exactness
from lightning_ga.plan.item_counters import count_items

if TYPE_CHECKING:
    from lightning_ga.chunks import ChunkedModules

_NOISE = 3.0  # by how much a difference has to exceed that of other random numbers
_ITS_GRADIENT = "its gradient"
_BY_STATISTICS = "its gradient by running statistics"
_NO_GRADIENT = "its gradient is zero"
_UNSEEDED = "two passes over one batch differ though they draw the same random numbers, so nothing can be measured"
_RANDOM = (
    "the step, or what makes its batch, draws random numbers: two passes over one batch differ by {:.1g} of its "
    "gradient, so that no smaller error can be seen; each micro-batch draws its own"
)
NOTHING_TO_AVERAGE = (
    "a part of a batch has a gradient that is infinite or NaN, and the whole batch has not: the part has nothing to "
    "average, such as no target, and 0 ÷ 0 is NaN, or one sample, which has no variance; give normalize= a function "
    "that counts what the loss is a mean over, such as lightning_ga.counters.TargetTokens(): parts in which it counts "
    "nothing weigh nothing; or let the loss treat samples by themselves"
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


def is_survivable(error: Exception) -> bool:
    """Return whether training may continue after an error of the measurement: it is not a user's mistake."""
    return isinstance(error, LayoutError) or not isinstance(error, UserError)


def _is_of_parts(error: Exception) -> bool:
    """Return whether an error of the parts of a batch says something of them."""
    return is_survivable(error) and not is_out_of_memory(error)


class NotFiniteError(Exception):
    """A gradient that is infinite or NaN: nothing can be compared with it."""


def _finite(gradient: Gradient, name: str) -> Gradient:
    """Return the gradient of this name; raise ``NotFiniteError`` if its norm is infinite or NaN."""
    size = norm(gradient)
    if not size < math.inf:
        raise NotFiniteError(f"the norm of {name} is {size}")
    return gradient


def _as_trained(gradient: Gradient, count: float) -> Gradient:
    """Return the gradient of a part of so many items, with zeros for NaN of a mean over nothing.

    Training zeroes any gradient of weight 0. Here only NaN and infinity are zeroed, as a finite gradient shows which
    weight is right.
    """
    if count == 0:
        return [tensor.nan_to_num(0.0, 0.0, 0.0) for tensor in gradient]
    return gradient


class Judgement:
    """Runs a batch and its parts; ``remake`` makes the batch again with other random numbers."""

    def __init__(
        self, passes: Passes, batch: CutBatch, remake: Callable[[], CutBatch], normalize: Any, tolerance: float
    ) -> None:
        self._passes = passes
        self._batch = batch
        self._remake = remake
        self._tolerance = tolerance
        self._layers = batch_norm_layers(passes.module)
        self._counts = [float(size) for size in batch.sizes]
        if callable(normalize):
            self._counts = [float(count_items(normalize, part)) for part in batch.parts]

    def verdict(self) -> Exactness:
        """Return the verdict; raise ``NotFiniteError`` if the gradient of the whole is infinite or NaN.

        If that of a part is, and the part weighs more than 0, training would have it, too: it counts as a difference.
        """
        if not (min(self._counts) >= 0 and 0 < sum(self._counts) < math.inf):
            return self._exactness("unmeasured", reason=f"normalize counts {self._counts} in the parts of a batch")
        whole = _finite(self._passes.run_one(self._batch.whole, watched=True), _ITS_GRADIENT)
        if norm(whole) == 0:
            return self._exactness("unmeasured", reason=_NO_GRADIENT, has_gradient=False)
        parts = attempt(self._passes.run, _is_of_parts, *self._batch.parts)
        if parts.failure is None:
            return self._judge_gradients(whole, *map(_as_trained, parts.result, self._counts))
        if self._layers and min(self._batch.sizes) < 2:  # these layers may refuse one sample
            return self._exactness("batch_norm")
        # A part that fails alone, too, raises here. Otherwise the second one depends on what the first has left.
        for part in self._batch.parts:
            self._passes.run(part)
        return self._stateful(None)

    def _judge_gradients(self, whole: Gradient, first: Gradient, second: Gradient) -> Exactness:
        """Return the verdict on gradients of a whole batch and of its parts.

        The questions, in their order: are they the same? If not, is it BatchNorm alone? Or does the second part depend
        on random numbers or on what the first has left? Else ``_named`` looks at the loss.
        """
        # With BatchNorm the error alone is computed, however large it is: the cause comes from other comparisons.
        enough = math.inf if self._layers else self._tolerance
        found = self._differences(whole, first, second, enough=enough)
        is_exact = found.error <= self._tolerance
        if is_exact and not self._passes.changed:
            return self._exactness("exact", found)
        if self._layers and not self._passes.changed:
            # If noise or state made the difference, parts would add up in neither of these comparisons.
            by_parts = attempt(self._adds_up_by_parts, is_survivable, first, second)
            if by_parts.result or self._of_loss.error <= self._tolerance:
                return self._exactness("batch_norm", found)
        alone = self._run_second()
        if not self._are_same(alone, second):
            if not self._are_same(alone, self._run_second()):
                return self._exactness("random", reason=_UNSEEDED)
            return self._stateful(found)
        if is_exact:
            return self._exactness("exact", found)
        if not found.error < math.inf:
            return self._exactness("coupled", reason=NOTHING_TO_AVERAGE)
        return self._named(whole, found)

    def _run_second(self) -> Gradient:
        return _as_trained(self._passes.run_one(self._batch.parts[1]), self._counts[1])

    def _are_same(self, one: Gradient, other: Gradient) -> bool:
        """Return whether gradients of the same samples are equal, up to rounding; NaN counts as equal."""
        tolerance = self._tolerance
        if self._passes.is_on_host and tolerance <= 1e-4:  # nearly to the bit, unless in half precision
            tolerance /= 100
        return not distance(one, other) > tolerance

    def _named(self, whole: Gradient, found: Differences) -> Exactness:
        """Name the cause of a difference that is not due to state."""
        other = self._passes.run_one(self._remake().whole, seed=1)
        noise = distance(whole, _finite(other, "its gradient with other random numbers"))
        level = self._tolerance
        if noise > self._tolerance:
            level = _NOISE * noise
            # An error within the noise may be noise alone, so its number is left out. BatchNorm couples samples anyway.
            if found.error <= level and self._layers:
                return self._exactness("batch_norm")
            if found.error <= level:
                return self._exactness("random", reason=_RANDOM.format(noise))
        if self._layers:
            if self._of_loss.error <= level:
                return self._exactness("batch_norm", found)
            found = replace(self._of_loss, error=found.error)  # the cause is the loss's, the error that of training
        return self._exactness(found.cause(level), found)

    def _adds_up_by_parts(self, first: Gradient, second: Gradient) -> bool:
        """Return whether the parts give the gradient of a whole in which BatchNorm normalizes each part by itself.

        If so, nothing else couples samples. If not, a layer's rows may be in another order than the samples.
        """
        with statistics_of_parts(self._batch.sizes):
            whole = self._passes.run_one(self._batch.whole)
        return self._differences(whole, first, second, enough=math.inf).error <= self._tolerance

    @cached_property
    def _of_loss(self) -> Differences:
        """The differences if BatchNorm layers normalize by running statistics, so that they couple no samples."""
        with fixed_statistics():
            whole = _finite(self._passes.run_one(self._batch.whole), _BY_STATISTICS)
            parts = map(_as_trained, self._passes.run(*self._batch.parts), self._counts)
            return self._differences(whole, *parts, enough=self._tolerance)

    def _differences(self, whole: Gradient, first: Gradient, second: Gradient, *, enough: float) -> Differences:
        return compare(whole, first, second, weight=self._counts[0] / sum(self._counts), enough=enough)

    def _stateful(self, found: Differences | None) -> Exactness:
        return replace(self._exactness("stateful", found), tensors=self._passes.changed or (ELSEWHERE,))

    def _exactness(self, cause: Cause, found: Differences | None = None, **more: Any) -> Exactness:
        return Exactness(
            None if found is None else found.error,
            self._tolerance,
            cause,
            layers=() if cause in ("exact", "random", "unmeasured") else self._layers,
            tensors=self._passes.changed,
            **more,
        )


def judge_chunks(passes: Passes, chunked: "ChunkedModules", batch: CutBatch, tolerance: float) -> Exactness:
    """Compare a pass whose submodules of ``whole=`` run in two chunks with a pass in which they run whole.

    It raises ``NotFiniteError`` if some gradient is infinite or NaN.
    """
    samples = sum(batch.sizes)
    in_two = (samples + 1) // 2

    def gradient(size: int | None) -> Gradient:
        chunked.size.use(size, window=samples)
        return passes.run_one(batch.whole)

    whole = gradient(None)
    for name, chunks in chunked.forwards.items():
        if not chunks.is_called:
            raise UserError(
                f"whole={chunked.names!r}: training_step does not call {name} itself: name submodules that are called."
            )
    if norm(_finite(whole, _ITS_GRADIENT)) == 0:
        return Exactness(None, tolerance, "unmeasured", reason=_NO_GRADIENT, has_gradient=False)
    # A whole pass over fewer samples shows ``Chunks`` which arguments keep their length.
    passes.run(batch.parts[1])
    error = distance(whole, _finite(gradient(in_two), "its gradient in chunks"))
    if error <= tolerance:
        return Exactness(error, tolerance, "exact")
    if any(chunks.draws for chunks in chunked.forwards.values()):
        return Exactness(None, tolerance, "random", reason=RANDOM_CHUNKS)
    with fixed_statistics():
        of_whole = _finite(gradient(None), _BY_STATISTICS)
        of_chunks = _finite(gradient(in_two), _BY_STATISTICS)
        if distance(of_whole, of_chunks) > tolerance:
            raise UserError(
                f"whole={chunked.names!r}: run in chunks, {', '.join(chunked.names)} made a gradient that is off by "
                f"{error:.1g} of it, so what it computes of a sample depends on the others: name submodules that treat "
                "samples by themselves."
            )
    layers = chain.from_iterable(batch_norm_layers(chunks.module) for chunks in chunked.forwards.values())
    return Exactness(error, tolerance, "batch_norm", reason=PER_CHUNK, layers=tuple(layers))
