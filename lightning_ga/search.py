"""Find the largest micro-batch that fits in a memory budget, in as few training steps as possible.

``Search`` is pure: it says which size to try next and takes what came of it. Two traces of small
steps predict the peak at every size (see ``replay``), and one step at the predicted limit verifies
it. Where the prediction misses, or the streams do not align, measured peaks and halving close in on
the limit from both sides. The limit was always tried, or, where nothing may be tried, predicted.
"""

from dataclasses import dataclass
from math import isqrt

from lightning_ga.replay import Replay, Trace, extrapolate, largest_fitting


@dataclass(frozen=True, slots=True)
class Trial:
    """One training step tried at a micro-batch size.

    Attributes:
        micro_batch_size: Samples of the step.
        peak_bytes: Most bytes alive at once during the step.
        fits: Whether the step ran within the budget.
        seconds: Wall time of the step.
    """

    micro_batch_size: int
    peak_bytes: int
    fits: bool
    seconds: float


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What a probe found.

    Attributes:
        limit: Largest micro-batch that fits in the budget, or the largest that was asked for.
        budget_bytes: Memory that a step may take, in bytes.
        peak_bytes: Peak at the limit, in bytes.
        trials: Steps that were tried, in order.
        steps: Training steps run in all, warm-up included.
        seconds: Wall time of the whole probe.
        method: What found the limit, e.g. ``"replay"`` or ``"bracket"``.
    """

    limit: int
    budget_bytes: int
    peak_bytes: int
    trials: tuple[Trial, ...]
    steps: int
    seconds: float
    method: str


def trace_sizes(high: int, budget: int, *, alive: int = 0, growing: int = 0, warm_up: int = 2) -> tuple[int, ...]:
    """Sizes of the traces: small enough to fit for sure, yet apart where that costs nothing.

    They start at two samples, as BatchNorm refuses one. The warm-up bounds what a larger step
    takes: what is alive after it, plus what it allocated and released, in proportion.

    Args:
        high: Largest micro-batch that is of use.
        budget: Bytes that a step may take.
        alive: Bytes alive after the warm-up.
        growing: Peak bytes of what the warm-up both allocated and released.
        warm_up: Samples of the warm-up.

    Examples:
        >>> trace_sizes(100, budget=2000, alive=500, growing=100), trace_sizes(100, budget=800, alive=500, growing=100)
        ((4, 8), (2, 4))
    """
    if high <= 3:
        return (high,) if high < 3 else (2, 3)
    room = (budget - alive) * warm_up
    return next((pair for pair in ((4, 8), (2, 4)) if pair[1] <= high and growing * pair[1] <= room), (2, 3))


class Search:
    """Say which micro-batch size to try next, from what came of the earlier ones.

    The loop around it::

        search = Search(high=512, budget=2**30)
        while (size := search.propose()) > search.limit:
            search.record(*run(size))

    A proposal equal to ``limit`` means that nothing larger is worth a trial. With several ranks,
    each keeps a search of its own and all run the smallest proposal: it ends at the limit of all.

    Args:
        high: Largest micro-batch that is of use.
        budget: Bytes that a step may take.
        sizes: First sizes to trace, in rising order.
        rounding: Bytes that the allocator rounds up to: 1 on a CPU, 512 on CUDA.
        predict_only: Try nothing near the budget: the result is ``predicted`` then.

    Attributes:
        limit: Largest size that was tried and fits; 0 before one did.
        ceiling: Smallest size known not to fit, by trial; ``high + 1`` before one failed.
        method: ``"replay"`` if a verified prediction found the limit, ``"prediction"`` if one that
            was not verified did, ``"below"`` if it was approached with trials from below, else ``"bracket"``.
    """

    def __init__(
        self, *, high: int, budget: int, sizes: tuple[int, ...] = (4, 8), rounding: int = 1, predict_only: bool = False
    ) -> None:
        self.budget = budget
        self.rounding = rounding
        self.predict_only = predict_only
        self.limit = 0
        self.ceiling = high + 1
        self._high = high
        self._sizes = sizes
        self._fitting: list[tuple[Trial, Trace | None]] = []  # by size
        self._curve: _Curve | None = None
        self._verified = self._misled = False
        self._misses = 0

    def propose(self) -> int:
        """The next size to try, above ``limit`` and below ``ceiling``; ``limit`` itself at the end."""
        if self.limit + 1 >= self.ceiling:
            return self.limit
        for size in self._sizes:
            if self.limit < size < self.ceiling:
                return size
        if self.predict_only:
            return self._approach()
        guess = self._guess()
        if guess == self.limit and not self._is_proven():
            return self.limit + 1
        return guess

    def record(self, trial: Trial, trace: Trace | None = None) -> None:
        """Take the outcome of one step; ``trace`` if the step fits and was recorded."""
        size = trial.micro_batch_size
        if self._curve is not None:
            foreseen = self._curve.confirms(trial, trace) if trial.fits else self._curve(size) > self.budget
            self._verified |= foreseen and trial.fits
            self._misled |= not foreseen
        if not trial.fits:
            self.ceiling = min(self.ceiling, size)
            self._misses += 1
            return
        self.limit = max(self.limit, size)
        self._fitting = sorted([*self._fitting, (trial, trace)], key=lambda pair: pair[0].micro_batch_size)
        self._curve = _fit(self._fitting, self.rounding)

    @property
    def wants_trace(self) -> bool:
        """Whether the next step should be recorded; later ones need not be where recording disturbs."""
        return len(self._fitting) < len(self._sizes)

    @property
    def predicted(self) -> int:
        """The limit where nothing may be tried: predicted if the streams align, else the largest that was tried."""
        if self._curve is None or not self._curve.is_replay:
            return self.limit
        return max(self.limit, largest_fitting(self._curve, self.limit + 1, self.ceiling - 1, self.budget))

    def predict(self, samples: int) -> int | None:
        """Predicted peak in bytes at a micro-batch of ``samples``, ``None`` before two steps were measured."""
        return None if self._curve is None else self._curve(samples)

    @property
    def method(self) -> str:
        """What found the limit."""
        replayed = self._curve is not None and self._curve.is_replay
        if self.predict_only:
            return "prediction" if replayed else "below"
        return "replay" if replayed and self._is_proven() else "bracket"

    def _is_proven(self) -> bool:
        """Whether a replay's word counts as a trial: one confirmed it to the byte, and none ever contradicted it."""
        return self._verified and not self._misled and self._curve is not None and self._curve.is_replay

    def _guess(self) -> int:
        """Where the limit should be, from the predicted curve and from what contradicts it."""
        low, high = self.limit, self.ceiling - 1
        if self._curve is None:
            return _between(low, self.ceiling) if self._misses else min(2 * low, high)
        guess = largest_fitting(self._curve, low + 1, self._high, self.budget)
        if guess < self.ceiling:
            return guess
        # The curve said that the size that failed fits. An allocator may be fragmented: spare 2, 4, 8 % of the budget.
        if (self._curve.is_replay or len(self._curve.lines) > 1) and self._misses <= 3:
            spare = self.budget * 2**self._misses // 100
            guess = largest_fitting(self._curve, low + 1, high, self.budget - spare)
        return guess if low < guess < self.ceiling else _between(low, self.ceiling)

    def _approach(self) -> int:
        """From below without coming near the budget: needed only where the streams do not align."""
        last = self._fitting[-1][0] if self._fitting else None
        if last is None:
            return _between(0, self.ceiling)
        if self._curve is not None and self._curve.is_replay and (self._verified or not self._curve.is_quadratic):
            return self.limit
        # A doubling takes at most four times the memory of this step (attention or similarity matrices).
        if self._misses or 4 * last.peak_bytes > self.budget:
            return self.limit
        return min(2 * self.limit, self._high)


@dataclass(frozen=True, slots=True)
class _Curve:
    """Peak bytes by micro-batch size: a replay if there is one, plus the highest of some lines.

    With a replay, the one line is what the traces did not see. Without, there is a line for every
    phase of the step that the traces tell apart, or one through the measured peaks.
    """

    replay: Replay | None
    samples: tuple[int, int]
    lines: tuple[tuple[int, int], ...]  # bytes at these two sizes

    @property
    def is_replay(self) -> bool:
        return self.replay is not None

    @property
    def is_quadratic(self) -> bool:
        return self.replay is not None and self.replay.is_quadratic

    def __call__(self, samples: int) -> int:
        low, high = self.samples
        rest = max(end + max(0, end - start) * (samples - high) // (high - low) for start, end in self.lines)
        return max(rest, 0) + (0 if self.replay is None else self.replay(samples))

    def confirms(self, trial: Trial, trace: Trace | None) -> bool:
        """Whether a further trial has the predicted peak to the byte."""
        aligned = self.replay is None or trace is None or self.replay.confirms(trace)
        return aligned and self(trial.micro_batch_size) == trial.peak_bytes


def _fit(fitting: list[tuple[Trial, Trace | None]], rounding: int) -> _Curve | None:
    """The curve through the two largest steps; by replay, then by phase, if the two largest traces allow."""
    traced = [(trial, trace) for trial, trace in fitting if trace is not None][-2:]
    if len(traced) == 2:
        (_, first), (_, second) = traced
        unseen = [trial.peak_bytes - trace.peak(rounding) for trial, trace in traced]
        sizes = (first.samples, second.samples)
        replay = extrapolate(first, second, rounding=rounding)
        if replay is not None:
            return _Curve(replay, sizes, ((unseen[0], unseen[1]),))
        if len(first.marks) == len(second.marks):
            phases = zip(first.phase_peaks(rounding), second.phase_peaks(rounding))
            return _Curve(None, sizes, tuple((start + unseen[0], end + unseen[1]) for start, end in phases))
    if len(fitting) < 2:
        return None
    small, large = fitting[-2][0], fitting[-1][0]
    return _Curve(None, (small.micro_batch_size, large.micro_batch_size), ((small.peak_bytes, large.peak_bytes),))


def _between(low: int, ceiling: int) -> int:
    """A size strictly between: the geometric mean of bounds that are far apart, else the middle."""
    return isqrt(low * ceiling) if ceiling > 4 * low > 0 else (low + ceiling) // 2
