"""Results of a probe: its trials and its limit, how long they are valid, and what holds the memory at the peak."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lightning_ga.plan.size_cuts import SizeLimits
from lightning_ga.plan.units import counted, format_bytes

PARAMETERS = "parameters"
GRADIENTS = "gradients"
OPTIMIZER = "optimizer state"
BATCH = "batch"
LOGITS = "logits and their loss"
RETRIES = "copies kept for a retry"
BEFORE = "alive before the step"
UPDATE = "the optimizer's temporaries"
UNNAMED = "held by no tensor (workspaces of kernels, rounding)"
KEPT = "kept after the step"
ACTIVATIONS = "activations"
TEMPORARIES = "temporaries"
_SHARD = "a lower precision (bf16-true), or a strategy that shards the model"
REMEDIES = {
    PARAMETERS: _SHARD,
    GRADIENTS: _SHARD,
    OPTIMIZER: "an optimizer with less state (SGD, Adafactor, 8-bit Adam), or a strategy that shards it",
    BATCH: "a smaller micro-batch, or smaller samples",
    LOGITS: "a loss that takes the logits in parts (a chunked or fused cross-entropy), or a smaller micro-batch",
    RETRIES: 'on_oom="raise", which keeps none',
    UPDATE: "foreach=False in the optimizer, or fused=True",
    BEFORE: "deleting what earlier steps have left, or keeping it on the host",
    UNNAMED: "a smaller micro-batch, or torch.backends.cudnn.benchmark=False",
    KEPT: "keeping a number or .detach().cpu() if the step appends tensors to something that outlives it",
    ACTIVATIONS: "activation checkpointing, mixed precision, or a smaller micro-batch",
    TEMPORARIES: "a smaller micro-batch, or a fused operation for a T×T attention (scaled_dot_product_attention)",
}
SMALL = 0.01  # share of the peak below which parts are summed up as "others"


@dataclass(frozen=True, slots=True)
class Attribution:
    """What is alive at the peak of a step.

    Attributes:
        samples: Micro-batch size of the step.
        peak_bytes: Most bytes alive at once.
        phase: In which phase that was: ``"forward"``, ``"backward"`` or ``"update"``.
        operation: Which operation ran then.
        parts: Bytes by kind of what holds them, the largest first; they sum to the peak.
    """

    samples: int
    peak_bytes: int
    phase: str
    operation: str
    parts: tuple[tuple[str, int], ...]

    @property
    def remedy(self) -> str:
        """What usually makes the largest kind smaller."""
        return REMEDIES.get(self.parts[0][0], "a smaller micro-batch") if self.parts else ""

    def sentence(self) -> str:
        """Say where the peak is, what holds it, and the usual remedy, to follow an error."""
        held = []
        others = 0
        for kind, size in self.parts:
            if size >= SMALL * self.peak_bytes:
                held.append(f"{kind} {format_bytes(size)}")
            else:
                others += size
        if others:
            held.append(f"others {format_bytes(others)}")
        where = f"in the {self.phase} pass, in {self.operation}"
        if self.phase == "update":
            where = "in the optimizer's step"
        return (
            f"at the peak of {format_bytes(self.peak_bytes)} with {counted(self.samples, 'sample')}, {where}, the "
            f"memory is held by: {', '.join(held)}. What usually makes the largest part smaller: {self.remedy}."
        )


Method = Literal["replay", "prediction", "below", "phases", "bracket"]
Source = Literal["probe", "cache", "checkpoint"]
_MORE = 1.02  # times an earlier budget: from here on a larger limit is worth a search
_NEAR = 0.05  # share of a limit: if less than this much more would fit, memory bounds the limit


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
class Recomputed:
    """Submodules that are computed again in the backward pass, because not one sample fits without.

    Attributes:
        names: As they are called.
        share: Their part of the forward pass, which runs once more.
        samples: The fewest samples that run: one, or two where BatchNorm trains.
        plain_bytes: What a step of these takes without: measured, or with these the peak and what they free.
        budget_bytes: Memory that a step may use.
    """

    names: tuple[str, ...]
    share: float
    samples: int
    plain_bytes: int
    budget_bytes: int

    def __str__(self) -> str:
        names = " and ".join(self.names)
        if len(self.names) > 2:
            names = f"{self.names[0]} to {self.names[-1]} ({len(self.names)} submodules)"
        take = "1 sample takes" if self.samples == 1 else f"{self.samples} samples take"
        return (
            f"{names}, {self.share:.0%} of the forward pass; without, {take} about {format_bytes(self.plain_bytes)} "
            f"of {format_bytes(self.budget_bytes)}"
        )


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Result of a probe.

    Attributes:
        limit: Largest micro-batch that fits in the budget, or the largest that was asked for.
        budget_bytes: Memory that a step may use, in bytes.
        peak_bytes: Peak at the limit, in bytes.
        trials: Steps that were tried, in order.
        steps: Training steps run in all, warm-up included.
        seconds: Wall time of the whole probe.
        method: How the limit was found: ``"replay"`` by a verified prediction, ``"prediction"`` by one that was not
            verified, ``"below"`` by approaching it from below, ``"phases"`` from the peaks of the step's phases,
            ``"bracket"`` otherwise.
        curve: Bytes that a budget must leave by micro-batch size, as predicted: ``(samples, bytes)`` in rising order;
            empty if nothing was predicted. The peak, or on a GPU what its allocator reserves for that peak.
        timings: Windows timed at several sizes, in rising order; empty with ``objective="memory"``.
        fastest: The smallest size whose window takes at most 3 % longer than the best; ``None`` if not timed.
        source: Where it comes from: a probe of this run, the cache of earlier ones (verified by one step), or the
            checkpoint that the run resumed.
        holders: What holds the memory at the peak; ``None`` if no step was recorded.
        sizes: With ``size_of``, the limits of smaller samples; ``limit`` is that of the largest.
        recomputed: With ``checkpoint="auto"``, the submodules under which the limit holds; ``None`` if plain.
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
    recomputed: Recomputed | None = None


@dataclass(frozen=True, slots=True)
class Fits:
    """A rank's share of a window that fits in one pass, so that no limit was looked for.

    Attributes:
        samples: Samples of the pass.
        peak_bytes: Most bytes alive at once in a step of these samples: measured, or the bound on it.
        budget_bytes: Memory that a step may use, in bytes.
        tried: Samples of the step that ran: all of them, or two if running out of memory would end the process.
        seconds: Wall time of the question.
    """

    samples: int
    peak_bytes: int
    budget_bytes: int
    tried: int
    seconds: float

    def __str__(self) -> str:
        took = "took" if self.tried == self.samples else "take at most"
        peak = format_bytes(self.peak_bytes)
        return f"{counted(self.samples, 'sample')} {took} {peak} of {format_bytes(self.budget_bytes)}"


def still_holds(known: ProbeResult, budget: int, high: int, multiple: int = 1) -> bool:
    """Return whether an earlier result of the same step is what a search would find now.

    It is not if its peak is above the budget, if less was asked for then, or if more memory is free now. Free memory is
    never the same to the byte: up to two percent more are treated as the same. Limits are multiples of ``multiple``.
    """
    if known.peak_bytes > budget:
        return False
    if known.limit >= high:
        return True
    beyond = [trial.peak_bytes for trial in known.trials if not trial.fits and trial.micro_batch_size > known.limit]
    if not beyond:
        near = known.limit + max(multiple, int(_NEAR * known.limit) + 1)
        beyond = [peak for samples, peak in known.curve if known.limit < samples <= near]
        if not beyond or max(beyond) <= known.budget_bytes:
            return False
    return budget < min(beyond) or budget <= _MORE * known.budget_bytes


def probe_or_none(record: Any) -> ProbeResult | None:
    """Return the record of a probe; ``None`` if it cannot be read: then a new probe runs."""
    try:
        return read_probe(record)
    except (KeyError, TypeError, ValueError):
        return None


def read_probe(record: Mapping[str, Any]) -> ProbeResult:
    """Return the record that ``asdict`` was called on, also after it went through JSON; raise if it is none."""
    result = ProbeResult(**{name: _read_field(name, value) for name, value in dict(record).items()})
    if result.limit < 1 or result.peak_bytes < 0:
        raise ValueError(f"{result.limit!r} with {result.peak_bytes!r} bytes is no limit")
    return result


_KINDS = {"trials": Trial, "timings": Timing, "holders": Attribution, "sizes": SizeLimits, "recomputed": Recomputed}


def _read_field(name: str, value: Any) -> Any:
    """Return what a field holds: tuples for lists, and for mappings the records that belong there."""
    if isinstance(value, (list, tuple)):
        return tuple(_read_field(name, each) for each in value)
    if isinstance(value, Mapping):
        return _KINDS[name](**{inner: _read_field(inner, each) for inner, each in value.items()})
    return value
