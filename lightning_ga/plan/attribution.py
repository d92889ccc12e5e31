"""What holds the memory at the peak of a training step, as a record and in words."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
