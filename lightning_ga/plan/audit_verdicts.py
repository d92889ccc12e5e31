"""Name how optimizer steps weigh the gradients of micro-batches. Pure.

At the weights of a step let gᵢ be the gradient of the mean loss of micro-batch i, with nᵢ samples (or tokens). The
optimizer sees Σ wᵢ gᵢ; a mean over the samples of the window has wᵢ = nᵢ / Σ nⱼ. ``lightning_ga.audit`` measures the
wᵢ, and this file compares them with the weights of the usual mistakes.

Tested in tests/plan/test_audit_verdicts.py.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isclose
from operator import attrgetter
from statistics import mode
from typing import Literal

Verdict = Literal[
    "mean over samples",
    "mean over micro-batches",
    "sum",
    "last window divided by the factor",
    "dropped",
    "carried over",
    "only the last",
    "clipped",
    "scaled",
    "other weights",
    "not a combination",
]
SAME_WEIGHT = 1e-4  # relative; weights in float64 are known far better
SAME_NORM = 1e-3  # relative; clipping adds a constant to the norm that it divides by

_SENTENCES: dict[Verdict, str] = {
    "mean over samples": "right",
    "mean over micro-batches": "a mean over micro-batches, of unequal sizes",
    "sum": "a sum: not divided by the micro-batches",
    "last window divided by the factor": "the window is divided by the factor, {factor}",
    "dropped": "micro-batches are dropped",
    "carried over": "gradients are carried over from before",
    "only the last": "only the last micro-batch arrives",
    "clipped": "right, and clipped",
    "scaled": "all are scaled, by {scale:.3g}",
    "other weights": "the weights of no mean or sum",
    "not a combination": "not a combination: {detail}",
}


@dataclass(frozen=True, slots=True)
class AuditStep:
    """Weights of the micro-batches of one optimizer step.

    Attributes:
        micro_batches: Their places in ``micro_batches=``, counted from 1.
        weights: Weight of each one's mean gradient in the gradient that the optimizer saw.
        wanted: Weights of a mean over the samples of the window; 0 for micro-batches of an earlier epoch.
        sizes: Samples (or what ``sizes=`` counts) of each.
        residual: ‖gradient − weighted sum‖ ÷ ‖gradient‖.
        norm: ‖gradient‖.
        carried: Weight of the gradient of the step before, if it was never zeroed.
        verdict: What the weights amount to.
        detail: Why no weights explain the gradient.
    """

    micro_batches: tuple[int, ...]
    weights: tuple[float, ...]
    wanted: tuple[float, ...]
    sizes: tuple[float, ...]
    residual: float
    norm: float
    carried: float = 0.0
    verdict: Verdict = "mean over samples"
    detail: str = ""

    @property
    def is_right(self) -> bool:
        """Whether the weights are the wanted ones, up to a common factor of clipping."""
        return self.verdict in ("mean over samples", "clipped")


@dataclass(frozen=True, slots=True)
class Audit:
    """Result of an audit.

    Attributes:
        steps: One record for each optimizer step, in order.
        factor: Micro-batches of a whole window, over all ranks.
        dropped: Micro-batches that belong to no step, counted from 1.
    """

    steps: tuple[AuditStep, ...]
    factor: int
    dropped: tuple[int, ...] = ()

    @property
    def is_right(self) -> bool:
        """Whether every micro-batch reached the optimizer with the wanted weight."""
        return not self._wrong and not self.dropped

    @property
    def verdict(self) -> Verdict:
        """The verdict of most wrong steps, else of most steps."""
        if self.dropped and not self._wrong:
            return "dropped"
        verdicts = Counter(step.verdict for step in self._wrong or self.steps)
        return verdicts.most_common(1)[0][0]

    @property
    def _wrong(self) -> list[AuditStep]:
        return [step for step in self.steps if not step.is_right]

    def __str__(self) -> str:
        rows = [("step", "micro-batches", "weight of each", "wanted", "verdict")]
        for number, step in enumerate(self.steps, start=1):
            sentence = _SENTENCES[step.verdict].format(factor=self.factor, scale=sum(step.weights), detail=step.detail)
            weights = "–" if step.verdict == "not a combination" else _numbers(step.weights)
            rows.append((str(number), _ranges(step.micro_batches), weights, _numbers(step.wanted), sentence))
        if self.dropped:
            rows.append(("–", _ranges(self.dropped), "0", "", "dropped: no step uses them"))
        widths = [max(map(len, column)) for column in zip(*rows)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def judge(
    steps: Sequence[AuditStep], *, factor: int | None = None, dropped: Sequence[int] = (), ranks: int = 1
) -> Audit:
    """Name what was measured.

    Args:
        steps: The weights that were found.
        factor: Micro-batches of a whole window, over all ranks; read off if ``None``.
        dropped: Micro-batches that belong to no step.
        ranks: Ranks over which gradients are averaged.

    Examples:
        >>> def step(*weights, norm=1.0):
        ...     many = len(weights)
        ...     return AuditStep((*range(1, many + 1),), weights, (1 / many,) * many, (8.0,) * many, 0.0, norm)
        >>> judge([step(0.25, 0.25, 0.25, 0.25), step(0.25, 0.25)]).verdict
        'last window divided by the factor'
        >>> judge([step(0.0, 0.0, 0.0, 1.0)]).verdict
        'only the last'
        >>> judge([step(0.11, 0.11, norm=2.0), step(0.5, 0.5, norm=1.2), step(0.33, 0.33, norm=2.0)]).is_right
        True
    """
    if factor is None:  # the most common length, if possible of windows that are right
        right = [each for each in steps if _same(each.weights, each.wanted)]
        windows = sorted((each.weights for each in right or steps), key=len, reverse=True)
        factor = mode(map(len, windows))  # of several lengths that are as frequent, the largest
    named = [replace(each, verdict=_name(each, factor, ranks)) for each in steps]
    return Audit(tuple(_with_clipping(named)), factor, tuple(dropped))


def _name(step: AuditStep, factor: int, ranks: int) -> Verdict:
    """Compare the weights of one step with those of the usual mistakes."""
    weights = step.weights
    length = len(weights)
    if step.detail:
        return "not a combination"
    if step.carried or any(weight and not wanted for weight, wanted in zip(weights, step.wanted)):
        return "carried over"
    if _same(weights, step.wanted):
        return "mean over samples"
    if 0.0 in weights:
        if weights[-1] and not any(weights[:-1]):
            return "only the last"
        return "dropped"
    if _same(weights, [1 / length] * length):
        return "mean over micro-batches"
    scale = sum(weights)
    is_mean = _same(weights, step.wanted, scale)
    is_full = isclose(scale * factor * max(step.sizes), sum(step.sizes), rel_tol=SAME_WEIGHT)  # ÷ samples of a window
    if _same(weights, [1 / factor] * length) or (is_mean and is_full):
        return "last window divided by the factor" if length < factor else "carried over"
    if _same(weights, [1 / ranks] * length) or _same(weights, step.sizes, 1 / ranks):
        return "sum"
    return "scaled" if is_mean else "other weights"


def _with_clipping(steps: list[AuditStep]) -> list[AuditStep]:
    """Tell a norm that was clipped from a wrong scale: scaled steps have one norm, and no step has a larger one.

    A gradient of this norm whose weights were scaled down is what clipping makes of the mean; one whose weights were
    scaled up was clipped, too, but was a sum.
    """
    norms = [step.norm for step in steps if step.verdict == "scaled"]
    has_others = len(norms) > 1 or any(map(attrgetter("is_right"), steps))
    largest = max(map(attrgetter("norm"), steps), default=0.0)
    if not norms or not has_others or not isclose(min(norms), largest, rel_tol=SAME_NORM):
        return steps
    named = []
    for step in steps:
        verdict = step.verdict
        if verdict == "scaled":
            verdict = "clipped" if sum(step.weights) < 1 else "sum"
        named.append(replace(step, verdict=verdict))
    return named


def _same(weights: Sequence[float], others: Sequence[float], scale: float = 1.0) -> bool:
    """Return whether weights are others times a scale."""
    tolerance = SAME_WEIGHT * max(map(abs, others), default=0.0)
    return all(abs(weight - scale * other) <= abs(scale) * tolerance for weight, other in zip(weights, others))


def _numbers(weights: Sequence[float]) -> str:
    """Return weights in a short text; many are shown by the first two and the last."""
    texts = [f"{weight:.2g}" for weight in weights]
    if len(texts) > 5:
        texts[2:-1] = ["…"]
    return " ".join(texts)


def _ranges(numbers: Sequence[int]) -> str:
    """Return numbers as ranges.

    Examples:
        >>> _ranges([9, 10, 11, 1])
        '9-11, 1'
    """
    runs: list[list[int]] = []  # first and last
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs)
