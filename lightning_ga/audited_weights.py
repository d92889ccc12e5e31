"""Explain the gradient of each recorded step by the gradients of single micro-batches: what does each weigh in it?

At an optimizer step the gradient is a linear combination of the gradients of single micro-batches at the same weights.
Least squares give its coefficients, and the residual says whether any coefficients explain it.

Tested in tests/test_audit.py.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.batchnorm import _NormBase

from lightning_ga.audited_steps import Recorder, Seen, real
from lightning_ga.double_precision import Promotion
from lightning_ga.errors import UserError
from lightning_ga.plan.audit_verdicts import Audit, AuditStep, judge

EXPLAINED = 1e-6  # largest relative residual of weights that explain a gradient
NO_WEIGHT = 1e-5  # relative to the largest weight
INDEPENDENT = 1e-8  # least sine of the angle between a gradient and the span of the others
NO_STEP = (
    "No optimizer of torch.optim stepped parameters of model= with gradients: it has to be the module that is trained, "
    "and optimizers that step within the backward pass cannot be audited."
)
MOVED = (
    "The weights changed between two optimizer steps, and no weights of micro-batches explain the gradient: an "
    "optimizer that steps within the backward pass cannot be audited, turn that off."
)
ORDER = (
    "The loop reads all of micro_batches= equally often, but in another order: list them in the order in which they "
    "are read, those of all epochs if it changes."
)


@dataclass(frozen=True, slots=True)
class Reads:
    """Micro-batches by the place at which the loop reads them; after the last one it reads the first one again."""

    batches: Sequence[Any]
    loss: Callable[[Any, Any], Tensor]
    size: Callable[[Any], float]
    is_exact: bool = False  # whether it is known how many were read before each step

    def __getitem__(self, place: int) -> Any:
        return self.batches[place % len(self.batches)]

    def number(self, place: int) -> int:
        """Return which micro-batch is read at a place, counted from 1."""
        return place % len(self.batches) + 1


def measured(recorder: Recorder, reads: Reads, factor: int | None) -> Audit:
    """Fit each step to the micro-batches since the step before."""
    if not recorder.steps:
        raise UserError(NO_STEP)
    steps: list[AuditStep] = []
    dropped: list[int] = []
    used = Counter[int]()  # how often each micro-batch has a weight
    start = 0
    previous: Tensor | None = None
    for seen in recorder.steps:
        columns = _Columns(recorder.model, seen, reads)
        start, step, lost = _one_step(columns, previous, start)
        steps.append(step)
        dropped += lost
        used.update(compress(step.micro_batches, step.weights))
        previous = columns.gradient
    dropped += range(start, start + -start % len(reads.batches))  # to the end of the epoch
    is_each_used = len(used) == len(reads.batches) and len(set(used.values())) == 1
    if is_each_used and not reads.is_exact and any(0.0 in step.weights for step in steps):
        raise UserError(ORDER)
    if factor is not None:
        factor *= recorder.ranks
    return judge(steps, factor=factor, dropped=[*dict.fromkeys(map(reads.number, dropped))], ranks=recorder.ranks)


def _one_step(columns: "_Columns", previous: Tensor | None, start: int) -> tuple[int, AuditStep, list[int]]:
    """Return the place behind the micro-batches of a step, what they weigh, and those that no step used."""
    reads = columns.reads
    stop = start + columns.seen.read
    found = _explained(columns, previous, range(start, stop))
    weights = found.weights
    used = [place for place, weight in weights.items() if weight]
    if used and not reads.is_exact:  # later ones may not have been read
        stop = used[-1] + 1
    read = [*weights][: stop - start]
    epoch = max(read, default=0)
    epoch -= epoch % len(reads.batches)  # the first place of the epoch in which the step is
    before = range(start, epoch)
    lost = [place for place in before if not weights[place]]
    late = [place for place in before if weights[place]]  # from the epoch before, though this one has begun
    places = late + read[len(before) :]
    sizes = [float(reads.size(reads[place])) for place in places]
    own = sizes[len(late) :]
    total = sum(own) or 1.0
    step = AuditStep(
        micro_batches=tuple(map(reads.number, places)),
        weights=tuple(weights[place] for place in places),
        wanted=(0.0,) * len(late) + tuple(size / total for size in own),
        sizes=tuple(sizes),
        residual=found.residual,
        norm=float(columns.gradient.norm()),
        carried=found.carried,
    )
    if columns.seen.has_moved and (step.residual > EXPLAINED or not step.norm):
        raise UserError(MOVED)
    if step.residual > EXPLAINED:
        step = columns.unexplained(step, places)
    return stop, step, lost


@dataclass(frozen=True, slots=True)
class _Fitted:
    weights: dict[int, float]  # by place
    residual: float
    carried: float  # weight of the gradient of the step before


def _explained(columns: "_Columns", previous: Tensor | None, read: range) -> _Fitted:
    """Explain a gradient by the micro-batches that were read.

    If it is not known what was read, the backward passes are a first guess. It is wrong if losses are added before one
    pass, or if micro-batches are cut further. Then all micro-batches of an epoch are tried.
    """
    epoch = range(read.start, read.start + len(columns.reads.batches))
    found = _fitted(columns, previous, read[: len(epoch)])
    if found.residual <= EXPLAINED or columns.reads.is_exact:
        return found
    other = _fitted(columns, previous, epoch)
    return other if other.residual <= EXPLAINED else found


def _fitted(columns: "_Columns", previous: Tensor | None, places: range) -> _Fitted:
    """Fit the weights of micro-batches, and that of the gradient of the step before if they do not explain all."""
    known = [columns[place] for place in places]
    weights, residual = fit_weights(known, columns.gradient)
    carried = 0.0
    if residual > EXPLAINED and previous is not None and len(previous) == len(columns.gradient):
        with suppress(UserError):
            more, rest = fit_weights([*known, previous], columns.gradient)
            if rest <= EXPLAINED:
                carried = more.pop()
                weights = more
                residual = rest
    least = NO_WEIGHT * max(map(abs, weights), default=0.0)
    large = {place: weight for place, weight in zip(places, weights) if abs(weight) > least}
    return _Fitted({**dict.fromkeys(places, 0.0), **large}, residual, carried)


def fit_weights(columns: Sequence[Tensor], gradient: Tensor) -> tuple[list[float], float]:
    """Return the weights with which columns add up to a gradient, and the relative norm of what they leave.

    Raises:
        UserError: If other weights would do as well.

    Examples:
        >>> one, two = torch.tensor([2.0, 0.0, 0.0]), torch.tensor([0.0, 1.0, 0.0])
        >>> fit_weights([one, two], torch.tensor([1.0, 3.0, 0.0]))
        ([0.5, 3.0], 0.0)
    """
    norm = float(gradient.norm())
    if not columns or not norm:
        return [0.0] * len(columns), min(norm, 1.0)
    matrix = torch.stack([*columns], dim=1)
    lengths = matrix.norm(dim=0)
    orthogonal, triangle = torch.linalg.qr(matrix / lengths.clamp(min=1e-300))
    independent = int((triangle.diagonal().abs() > INDEPENDENT).sum())
    if independent < len(columns) or len(columns) == len(gradient):
        raise UserError(
            f"{len(columns)} micro-batches have {independent} independent gradients of {len(gradient)} numbers, so "
            "their weights cannot be known: audit a larger model, a smaller factor, or samples that differ."
        )
    solution = torch.linalg.solve_triangular(triangle, (orthogonal.T @ gradient)[:, None], upper=True)
    weights = solution.flatten() / lengths
    return weights.tolist(), float((matrix @ weights - gradient).norm()) / norm


class _Columns:
    """Gradients of single micro-batches at the weights of a step, which the model is put back to."""

    def __init__(self, model: Module, seen: Seen, reads: Reads) -> None:
        self.model = model
        self.seen = seen
        self.reads = reads
        self.gradient = torch.cat([*seen.gradients.values()])
        self._known: dict[int, Tensor] = {}
        parameters = [real(each.data) for each in model.parameters()]
        parts = torch.split(seen.weights, [*map(torch.numel, parameters)])
        for parameter, part in zip(parameters, parts):
            parameter.copy_(part.view_as(parameter))
        for module, mode in zip(model.modules(), seen.modes):
            module.training = mode

    def __getitem__(self, place: int) -> Tensor:
        place %= len(self.reads.batches)
        if place not in self._known:
            with Promotion():
                loss = self.reads.loss(self.model, self.reads[place])
            wanted = [self.model.get_parameter(name) for name in self.seen.gradients]
            gradients = torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True)
            self._known[place] = torch.cat([real(gradient.to_dense()).flatten() for gradient in gradients])
        return self._known[place]

    def unexplained(self, step: AuditStep, places: Sequence[int]) -> AuditStep:
        """Say why no weights explain the gradient, unless it is the wanted one and its numbers were clipped."""
        mean = torch.zeros_like(self.gradient)
        for place, weight in zip(places, step.wanted):
            mean += weight * self[place]
        most = float(self.gradient.abs().max())
        if float((mean.clamp(-most, most) - self.gradient).norm()) <= EXPLAINED * step.norm:
            return replace(step, weights=step.wanted)
        detail = "a loss that couples micro-batches, noise, other batches, or another loss"
        if any(isinstance(module, _NormBase) for module in self.model.modules()):
            detail = "BatchNorm, " + detail
        return replace(step, detail=self._scaled_apart(mean) or detail)

    def _scaled_apart(self, mean: Tensor) -> str:
        """Name the parameters whose gradients are the wanted ones at another scale, if all others have one scale."""
        gradients = self.seen.gradients
        parts = torch.split(mean, [*map(torch.numel, gradients.values())])
        scales = {}
        for (name, gradient), part in zip(gradients.items(), parts):
            scale = float(part @ gradient) / max(float(part @ part), 1e-300)
            if float((scale * part - gradient).norm()) > EXPLAINED * float(self.gradient.norm()):
                return ""
            scales[name] = f"{scale:.3g}"
        usual = Counter(scales.values()).most_common(1)[0][0]
        apart = [f"{name} (× {float(scale) / float(usual):.3g})" for name, scale in scales.items() if scale != usual]
        more = ", …" if len(apart) > 3 else ""
        return f"scaled apart: {', '.join(apart[:3])}{more}"
