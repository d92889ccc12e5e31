"""Records of a probe (skeleton; the search is being written)."""

from dataclasses import dataclass


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
