"""The weight of each micro-batch in the gradient of each optimizer step: steps are recorded, then explained.

At an optimizer step the gradient is a linear combination of the gradients of single micro-batches at the same weights.
Least squares give its coefficients, and the residual says whether any coefficients explain it.

Tested in tests/test_audit.py.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunction
from torch.nn import Module, RNNBase
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils import vector_to_parameters
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from lightning_ga.errors import UserError
from lightning_ga.plan.audit_verdicts import Audit, AuditStep, judge

EXPLAINED = 1e-6  # largest relative residual of weights that explain a gradient
NO_WEIGHT = 1e-5  # relative to the largest weight
INDEPENDENT = 1e-8  # least sine of the angle between a gradient and the span of the others
LOWER = (torch.float32, torch.float16, torch.bfloat16)
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


@dataclass(frozen=True, slots=True)
class Seen:
    """One optimizer step."""

    read: int  # micro-batches since the step before
    weights: Tensor  # of the whole model, flat
    modes: list[bool]  # whether each module is in training mode
    gradients: dict[str, Tensor]  # by the name of the parameter
    has_moved: bool  # whether weights changed since the step before


class Recorder:
    """Sees optimizer steps, and counts backward passes unless something else counts what was read."""

    def __init__(self, model: Module, read: Callable[[], int] | None = None) -> None:
        self.model = model
        self.steps: list[Seen] = []
        self.ranks = 1
        self._read = read or self._passes
        self._counts: Counter[int] = Counter()
        self._total = 0
        self._after = flat(model)
        self._is_stepping = False

    @contextmanager
    def watching(self) -> Iterator["Recorder"]:
        """See what happens within."""
        with ExitStack() as stack:
            stack.callback(register_optimizer_step_pre_hook(self._before).remove)
            stack.callback(register_optimizer_step_post_hook(self._finish).remove)
            for each in self.model.parameters():
                if each.requires_grad:
                    stack.callback(each.register_post_accumulate_grad_hook(self._count).remove)  # type: ignore[no-untyped-call]
            yield self

    def _count(self, parameter: Tensor) -> None:
        self._counts[id(parameter)] += 1  # hashing a tensor takes longer

    def _passes(self) -> int:
        return max(self._counts.values(), default=0) * self.ranks

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Note a step: now, or once its closure has computed the gradient."""
        if self._is_stepping:  # an optimizer that steps another one
            return None
        self._is_stepping = True
        closure = kwargs.get("closure") or (args[1] if len(args) > 1 else None)
        if not callable(closure):
            self._note(optimizer)
            return None
        evaluations: list[Any] = []

        def noted() -> Any:
            evaluations.append(closure())
            if len(evaluations) > 1:
                raise UserError(f"{type(optimizer).__name__} evaluates its loss several times a step: no audit.")
            self._note(optimizer)
            return evaluations[0]

        return (optimizer, noted), {}

    def _finish(self, *_: Any) -> None:
        self._is_stepping = False
        with DisableTorchFunction():  # the mode that promotes takes time
            self._after = flat(self.model)

    def _note(self, optimizer: Optimizer) -> None:
        """Keep the gradients that a step uses, and the weights they belong to."""
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        stepped = [each for group in optimizer.param_groups for each in group["params"] if each.requires_grad]
        foreign = [each for each in stepped if id(each) not in names]
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            self.ranks = torch.distributed.get_world_size()
        total = self._read()
        if len(foreign) == len(stepped) or not total:  # of another model, or before training
            return
        if foreign:
            raise UserError(
                f"The optimizer steps {len(foreign)} tensors that model= lacks: give one module that has all."
            )
        read = total - self._total
        self._total = total
        with DisableTorchFunction():
            gradients = {names[id(each)]: _gradient_of(each) for each in stepped}
            modes = [each.training for each in self.model.modules()]
            self._append(Seen(read, flat(self.model), modes, gradients, has_moved=False))

    def _append(self, seen: Seen) -> None:
        """Keep a step, unless it belongs to the one before; that one is dropped if it was a trial."""
        if self.steps:
            last = self.steps[-1]
            if not seen.read and not last.gradients.keys() & seen.gradients.keys():
                last.gradients.update(seen.gradients)  # two optimizers share a backward pass
                return
            has_moved = not torch.equal(seen.weights, self._after)
            is_put_back = torch.equal(seen.weights, last.weights)
            if is_put_back and (has_moved or not any(each.any() for each in last.gradients.values())):
                self.steps.pop()  # a trial
            else:
                seen = replace(seen, has_moved=has_moved)
        self.steps.append(seen)


def flat(model: Module) -> Tensor:
    """Copy all parameters, one behind the other."""
    return torch.cat([each.detach().flatten() for each in model.parameters()])


def _gradient_of(parameter: Tensor) -> Tensor:
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros_like(parameter).flatten()
    return gradient.detach().to_dense().flatten().clone()


def measured(recorder: Recorder, reads: Reads, factor: int | None) -> Audit:
    """Fit each step to the micro-batches since the step before."""
    if not recorder.steps:
        raise UserError(NO_STEP)
    steps: list[AuditStep] = []
    dropped: list[int] = []
    start = 0
    previous: Tensor | None = None
    for seen in recorder.steps:
        columns = _Columns(recorder.model, seen, reads)
        start, step, lost = _one_step(columns, previous, start)
        steps.append(step)
        dropped += lost
        previous = columns.gradient
    dropped += range(start, start + -start % len(reads.batches))  # to the end of the epoch
    used = Counter(each for step in steps for each, weight in zip(step.micro_batches, step.weights) if weight)
    is_each_used = len(used) == len(reads.batches) and len(set(used.values())) == 1
    if is_each_used and not reads.is_exact and any(0.0 in step.weights for step in steps):
        raise UserError(ORDER)
    if factor is not None:
        factor *= recorder.ranks
    numbers = [place % len(reads.batches) + 1 for place in dropped]
    return judge(steps, factor=factor, dropped=[*dict.fromkeys(numbers)], ranks=recorder.ranks)


def _one_step(columns: "_Columns", previous: Tensor | None, start: int) -> tuple[int, AuditStep, list[int]]:
    """Return the place behind the micro-batches of a step, what they weigh, and those that no step used."""
    reads = columns.reads
    many = len(reads.batches)
    stop = start + columns.seen.read
    found = _explained(columns, previous, range(start, stop))
    used = [place for place, weight in found.weights.items() if weight]
    if used and not reads.is_exact:  # later ones may not have been read
        stop = used[-1] + 1
    read = [place for place in found.weights if place < stop]
    epoch = max(read, default=0) // many * many  # its first place
    places = []
    lost = []
    sizes = []
    own = []  # sizes of this epoch's
    for place in read:
        if place < epoch and not found.weights[place]:
            lost.append(place)
            continue
        places.append(place)
        sizes.append(float(reads.size(reads[place])))
        own.append(sizes[-1] if place >= epoch else 0.0)
    step = AuditStep(
        micro_batches=tuple(place % many + 1 for place in places),
        weights=tuple(found.weights[place] for place in places),
        wanted=tuple(size / (sum(own) or 1.0) for size in own),
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
    return _Fitted({place: weight * (abs(weight) > least) for place, weight in zip(places, weights)}, residual, carried)


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
        vector_to_parameters(seen.weights, model.parameters())
        for module, mode in zip(model.modules(), seen.modes):
            module.training = mode

    def __getitem__(self, place: int) -> Tensor:
        place %= len(self.reads.batches)
        if place not in self._known:
            with Promotion():
                loss = self.reads.loss(self.model, self.reads[place])
            wanted = [self.model.get_parameter(name) for name in self.seen.gradients]
            gradients = torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True)
            self._known[place] = torch.cat([gradient.to_dense().flatten() for gradient in gradients])
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
        sizes = [gradient.numel() for gradient in self.seen.gradients.values()]
        scales = {}
        for name, part, gradient in zip(
            self.seen.gradients, torch.split(mean, sizes), torch.split(self.gradient, sizes)
        ):
            scale = float(part @ gradient) / max(float(part @ part), 1e-300)
            if float((scale * part - gradient).norm()) > EXPLAINED * float(self.gradient.norm()):
                return ""
            scales[name] = f"{scale:.3g}"
        usual = Counter(scales.values()).most_common(1)[0][0]
        apart = [f"{name} (× {float(scale) / float(usual):.3g})" for name, scale in scales.items() if scale != usual]
        more = ", …" if len(apart) > 3 else ""
        return f"scaled apart: {', '.join(apart[:3])}{more}"


@contextmanager
def in_double(model: Module) -> Iterator[None]:
    """Put a model into float64 and its dropout off, and put all of it back, also after an error."""
    with ExitStack() as stack:
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(torch.float64)
        for tensor in (*model.parameters(), *model.buffers()):
            stack.callback(setattr, tensor, "data", tensor.data)
            stack.callback(setattr, tensor, "grad", None)
            tensor.grad = None
            tensor.data = tensor.data.to(torch.float64 if tensor.is_floating_point() else tensor.dtype, copy=True)
        for module in model.modules():
            stack.callback(setattr, module, "training", module.training)
            if isinstance(module, RNNBase):  # it compares the types itself
                stack.callback(module.register_forward_pre_hook(lambda _, args: _promoted(args)).remove)
            for name, value in [*vars(module).items()]:
                if isinstance(value, float) and ("drop" in name or (name == "p" and "Drop" in type(module).__name__)):
                    stack.callback(setattr, module, name, value)
                    setattr(module, name, 0.0)
        yield


class Promotion(TorchFunctionMode):
    """Functions that get float64 and a lower precision compute in float64; many layers and losses refuse both."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of PyTorch."""
        for each in (*args, *kwargs.values()) if kwargs else args:
            if isinstance(each, Tensor) and each.dtype in LOWER:
                return _promoted_call(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def _promoted_call(func: Any, args: Any, kwargs: Any) -> Any:
    """Call a function with all in float64 if an argument, or the first of a list, is: unless it changes the first."""
    name = getattr(func, "__name__", "")
    changes_first = name in ("__set__", "__setitem__") or (name.endswith("_") and not name.endswith("__"))
    has_double = any(map(_is_double, (*args, *kwargs.values())))
    if changes_first or not has_double:
        return func(*args, **kwargs)
    return func(*map(_promoted, args), **{key: _promoted(each) for key, each in kwargs.items()})


def _is_double(value: Any) -> bool:
    if isinstance(value, (list, tuple)) and value:
        value = value[0]
    return isinstance(value, Tensor) and value.dtype == torch.float64


def _promoted(value: Any) -> Any:
    if type(value) in (list, tuple):  # states and weights of an LSTM
        return type(value)(map(_promoted, value))
    return value.double() if isinstance(value, Tensor) and value.dtype in LOWER else value
