"""Results of a probe: its trials and its limit, and how long these hold."""

from dataclasses import dataclass, replace
from typing import Literal

from lightning_ga.plan.attribution import Attribution
from lightning_ga.plan.lengths import SizeLimits

Method = Literal["replay", "prediction", "below", "phases", "bracket"]
Source = Literal["probe", "cache", "checkpoint", "estimate"]
_MORE = 1.02  # times an earlier budget: from here on a larger limit is worth a search
_NEAR = 0.05  # share of a limit by which memory may allow for more, and it counts as what memory allows


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
class Timing:
    """Time of a window at a micro-batch size.

    Attributes:
        micro_batch_size: Largest chunk of the window, in samples.
        factor: Micro-batches of the window on one rank.
        seconds: Wall time of the window: all its forward and backward passes and one optimizer step.
    """

    micro_batch_size: int
    factor: int
    seconds: float


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Result of a probe.

    Attributes:
        limit: Largest micro-batch that fits in the budget, or the largest that was asked for.
        budget_bytes: Memory that a step may take, in bytes.
        peak_bytes: Peak at the limit, in bytes.
        trials: Steps that were tried, in order.
        steps: Training steps run in all, warm-up included.
        seconds: Wall time of the whole probe.
        method: How the limit was found: ``"replay"`` by a verified prediction, ``"prediction"`` by one that was not
            verified, ``"below"`` by approaching it from below, ``"phases"`` from the peaks of the step's phases,
            ``"bracket"`` otherwise.
        curve: Bytes that a budget must leave by micro-batch size, as predicted: ``(samples, bytes)`` in rising order;
            empty where nothing was predicted. The peak, or on a GPU what its allocator reserves for that peak.
        timings: Windows timed at several sizes, in rising order; empty with ``objective="memory"``.
        fastest: The smallest size whose window takes at most 3 % longer than the best; ``None`` if not timed.
        source: Where it comes from: a probe of this run, the cache of earlier ones (verified by one step), the
            checkpoint that the run resumed, or an estimate for a device that is not present.
        holders: What holds the memory at the peak; ``None`` where no step was recorded.
        sizes: With ``size_of``, the limits of shorter samples; ``limit`` is that of the longest.
        kept_chunks: With ``whole=`` and ``objective="throughput"``, the last chunks of a step that need not be computed
            again, as their activations fit.
    """

    limit: int
    budget_bytes: int
    peak_bytes: int
    trials: tuple[Trial, ...]
    steps: int
    seconds: float
    method: Method
    curve: tuple[tuple[int, int], ...] = ()
    timings: tuple[Timing, ...] = ()
    fastest: int | None = None
    source: Source = "probe"
    holders: Attribution | None = None
    sizes: SizeLimits | None = None
    kept_chunks: int = 0


def still_holds(known: ProbeResult, budget: int, high: int) -> bool:
    """Return whether an earlier result of the same step is what a search would find now.

    It is not where its peak is above the budget, where nothing larger was asked for then, and where more memory is
    free. That is never twice the same to the byte: up to two percent more counts as the same.
    """
    if known.peak_bytes > budget:
        return False
    if known.limit >= high:
        return True
    refused = [trial.peak_bytes for trial in known.trials if not trial.fits and trial.micro_batch_size > known.limit]
    larger = [(samples, peak) for samples, peak in known.curve if samples > known.limit]
    beyond = refused or [peak for _, peak in larger[:1]]
    near = known.limit + int(_NEAR * known.limit) + 1
    if not refused and all(peak <= known.budget_bytes for samples, peak in larger if samples <= near):
        return False
    return budget < min(beyond) or budget <= _MORE * known.budget_bytes


def lowered(found: ProbeResult, limit: int) -> ProbeResult:
    """Return a probe's result after memory ran out in training with more samples than ``limit``."""
    refused = Trial(limit + 1, found.budget_bytes + 1, False, 0.0)
    peak = next((peak for samples, peak in found.curve if samples >= limit), found.peak_bytes)
    curve = tuple(point for point in found.curve if point[0] <= limit)
    fastest = None if found.fastest is None else min(found.fastest, limit)
    found = replace(found, sizes=found.sizes and found.sizes.lowered(limit, of=found.limit), kept_chunks=0)
    return replace(found, limit=limit, peak_bytes=peak, trials=(*found.trials, refused), curve=curve, fastest=fastest)
