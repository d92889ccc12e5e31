"""Results of a probe: its trials and its limit, how long these hold, and what holds the memory at the peak."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from lightning_ga.plan.lengths import SizeLimits
from lightning_ga.plan.units import counted, format_bytes

PARAMETERS, GRADIENTS, OPTIMIZER, BATCH = "parameters", "gradients", "optimizer state", "batch"
LOGITS, RETRIES, BEFORE = "logits and their loss", "copies kept for a retry", "alive before the step"
UPDATE = "the optimizer's temporaries"
UNNAMED = "held by no tensor (workspaces of kernels, rounding)"
KEPT, ACTIVATIONS, TEMPORARIES = "kept after the step, made in", "activations of", "temporaries of"
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
    KEPT: "keeping a number or .detach().cpu() where the step appends tensors to something that outlives it",
    ACTIVATIONS: "activation checkpointing of these blocks, mixed precision, or a smaller micro-batch",
    TEMPORARIES: "a smaller micro-batch, or a fused operation for a T×T attention (scaled_dot_product_attention)",
}
MOST_BLOCKS = 3
SMALL = 0.01  # share of the peak below which parts are told as one


@dataclass(frozen=True, slots=True)
class Attribution:
    """What is alive at the peak of a step.

    Attributes:
        samples: Micro-batch size of the step.
        peak_bytes: Most bytes alive at once.
        phase: In which phase that was: ``"forward"``, ``"backward"`` or ``"update"``.
        place: Which module ran then.
        parts: Bytes by what holds them, the largest first; they sum to the peak.
    """

    samples: int
    peak_bytes: int
    phase: str
    place: str
    parts: tuple[tuple[str, int], ...]

    def by_kind(self) -> list[tuple[str, int]]:
        """Return bytes by kind, the largest first; they sum to the peak too."""
        kinds: Counter[str] = Counter()
        for name, size in self.parts:
            kinds[kind_of(name)] += size
        return kinds.most_common()

    @property
    def remedy(self) -> str:
        """What usually makes the largest kind smaller."""
        return REMEDIES[self.by_kind()[0][0]] if self.parts else ""

    def lines(self) -> tuple[str, str, str]:
        """Say where the peak is, what holds it, and the usual remedy."""
        kinds = self.by_kind()
        large = [(kind, size) for kind, size in kinds if size >= SMALL * self.peak_bytes]
        told = [f"{kind.removesuffix(' of')} {format_bytes(size)}{self._blocks(kind)}" for kind, size in large]
        rest = sum(size for _, size in kinds) - sum(size for _, size in large)
        where = "in the optimizer's step" if self.phase == "update" else f"in the {self.phase} pass, at {self.place}"
        peak = f"{format_bytes(self.peak_bytes)} with {counted(self.samples, 'sample')}"
        return (
            f"At the peak of {peak}, {where}, the memory is held by:",
            ", ".join([*told, *([f"others {format_bytes(rest)}"] if rest else [])]),
            f"What usually makes the largest part smaller: {self.remedy}.",
        )

    def sentence(self) -> str:
        """Say the same on one line, to follow an error."""
        where, held, remedy = self.lines()
        return f"{where[0].lower()}{where[1:]} {held}. {remedy}"

    def _blocks(self, kind: str) -> str:
        blocks: Counter[str] = Counter()
        for name, size in self.parts:
            if kind_of(name) == kind and name != kind:
                blocks[name.removeprefix(kind).strip()] += size
        large = [block for block in blocks.most_common(MOST_BLOCKS) if block[1] >= SMALL * self.peak_bytes]
        told = [f"{name} {format_bytes(size)}" for name, size in large]
        more = [f"{len(blocks) - len(large)} more"] if len(blocks) > len(large) > 0 else []
        return f" ({', '.join([*told, *more])})" if told else ""


def kind_of(name: str) -> str:
    """Return the kind of a part, without its place."""
    return next(kind for kind in REMEDIES if name.startswith(kind))


def read_attribution(record: Mapping[str, Any] | None) -> Attribution | None:
    """Return the record that ``asdict`` was called on, also after JSON; ``None`` of ``None``. Raise if it is none."""
    if record is None:
        return None
    parts = tuple((str(name), int(size)) for name, size in record["parts"])
    if any(not name.startswith(tuple(REMEDIES)) for name, _ in parts):
        raise ValueError(f"{parts!r} names parts of another version")
    return Attribution(**{**record, "parts": parts})


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
