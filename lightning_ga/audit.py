"""Measure with which weight each micro-batch reached the optimizer, in a loop that is written in anything.

At an optimizer step the gradient is a linear combination of the gradients of single micro-batches at the same weights.
Least squares give its coefficients, and the residual says whether any coefficients explain it.

``python -m lightning_ga.audit script.py`` does so for a script; its exit code is 1 if a weight is wrong.
"""

import argparse
import copy
import runpy
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._C import DisableTorchFunction
from torch.nn import Module, RNNBase
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.utils import vector_to_parameters
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from lightning_ga.errors import UserError, printable
from lightning_ga.plan.audit import Audit, AuditStep, judge
from lightning_ga.plan.weights import Samples, TargetTokens

__all__ = ["Audit", "AuditStep", "audit"]

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


def audit(
    train: Callable[[], object],
    *,
    model: Module,
    micro_batches: Iterable[Any],
    loss: Callable[[Any, Any], Tensor],
    factor: int | None = None,
    sizes: Callable[[Any], float] | None = None,
) -> Audit:
    """Run a training loop, and measure the weight of each micro-batch in the gradient of each optimizer step.

    For the time of the audit the model is in float64 and without dropout; afterwards it is as it was before. The
    gradients of single micro-batches are computed after training, at the weights of each step. On several ranks, each
    rank calls this with the micro-batches of all of them: the first of every rank, then the second of every rank.

    Args:
        train: Runs the loop on ``model``, with optimizers of ``torch.optim`` that it makes itself.
        model: Has all the parameters that the optimizer steps.
        micro_batches: Batches of one epoch, in the order in which the loop reads them. A loop of several epochs reads
            them again; if their order changes, list those of all epochs.
        loss: Called with the model and a micro-batch; returns its mean loss.
        factor: Micro-batches (on a rank) of a whole window; read off if ``None``.
        sizes: Called with a micro-batch; returns how many items its loss is a mean over, as ``TargetTokens()`` does.
            ``None`` for its samples, the length of its first tensor.

    Raises:
        UserError: If the weights cannot be known: fewer independent gradients than micro-batches, another order of
            them, parameters that are not the model's, an optimizer that steps within the backward pass.

    Examples:
        >>> model = torch.nn.Linear(9, 1)
        >>> batches = [torch.randn(4, 9) for _ in range(3)]
        >>> def loss(model, batch):
        ...     return model(batch).square().mean()
        >>> def train():
        ...     optimizer = torch.optim.SGD(model.parameters())
        ...     for index, batch in enumerate(batches, start=1):
        ...         (loss(model, batch) / 2).backward()
        ...         if index % 2 == 0 or index == len(batches):
        ...             optimizer.step()
        ...             optimizer.zero_grad()
        >>> print(audit(train, model=model, micro_batches=batches, loss=loss))
        step  micro-batches  weight of each  wanted   verdict
        1     1-2            0.5 0.5         0.5 0.5  right
        2     3              0.5             1        the window is divided by the factor, 2
    """
    batches = [*micro_batches]
    reads = _Reads([*{id(batch): batch for batch in batches}.values()], loss, sizes or Samples())
    with _in_double(model):
        with _Promotion(), _Recorder(model).watching() as recorder:
            train()
        return _measured(recorder, reads, factor)


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


@dataclass(frozen=True, slots=True)
class _Reads:
    """Micro-batches by the place at which the loop reads them; after the last one it reads the first one again."""

    batches: Sequence[Any]
    loss: Callable[[Any, Any], Tensor]
    size: Callable[[Any], float]
    is_exact: bool = False  # whether it is known how many were read before each step

    def __getitem__(self, place: int) -> Any:
        return self.batches[place % len(self.batches)]


@dataclass(frozen=True, slots=True)
class _Seen:
    """One optimizer step."""

    read: int  # micro-batches since the step before
    weights: Tensor  # of the whole model, flat
    modes: list[bool]  # whether each module is in training mode
    gradients: dict[str, Tensor]  # by the name of the parameter
    has_moved: bool  # whether weights changed since the step before


class _Recorder:
    """Sees optimizer steps, and counts backward passes unless something else counts what was read."""

    def __init__(self, model: Module, read: Callable[[], int] | None = None) -> None:
        self.model = model
        self.steps: list[_Seen] = []
        self.ranks = 1
        self._read = read or self._passes
        self._counts: Counter[int] = Counter()
        self._total = 0
        self._after = _flat(model)
        self._is_stepping = False

    @contextmanager
    def watching(self) -> Iterator["_Recorder"]:
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
            with DisableTorchFunction():
                self._note(optimizer)
            return None
        results: list[Any] = []

        def noted() -> Any:
            results.append(closure())
            if len(results) > 1:
                raise UserError(f"{type(optimizer).__name__} evaluates its loss several times a step: no audit.")
            self._note(optimizer)
            return results[0]

        return (optimizer, noted), {}

    def _finish(self, *_: Any) -> None:
        self._is_stepping = False
        with DisableTorchFunction():  # the mode that promotes takes time
            self._after = _flat(self.model)

    def _note(self, optimizer: Optimizer) -> None:
        """Keep the gradients that a step uses, and the weights they belong to."""
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        stepped = [each for group in optimizer.param_groups for each in group["params"] if each.requires_grad]
        foreign = len([each for each in stepped if id(each) not in names])
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            self.ranks = torch.distributed.get_world_size()
        total = self._read()
        if foreign == len(stepped) or not total:  # of another model, or before training
            return
        read = total - self._total
        self._total = total
        if foreign:
            raise UserError(f"The optimizer steps {foreign} tensors that model= lacks: give one module that has all.")
        gradients = {}
        for parameter in stepped:
            gradient = parameter.grad
            gradient = torch.zeros_like(parameter) if gradient is None else gradient
            gradients[names[id(parameter)]] = gradient.detach().to_dense().flatten().clone()
        if self.steps and not read and not self.steps[-1].gradients.keys() & gradients.keys():
            self.steps[-1].gradients.update(gradients)  # two optimizers share a backward pass
            return
        weights = _flat(self.model)
        has_moved = bool(self.steps) and not torch.equal(weights, self._after)
        is_put_back = bool(self.steps) and torch.equal(weights, self.steps[-1].weights)
        if is_put_back and (has_moved or not any(each.any() for each in self.steps[-1].gradients.values())):
            self.steps.pop()  # a trial
            has_moved = False
        self.steps.append(_Seen(read, weights, [each.training for each in self.model.modules()], gradients, has_moved))


def _flat(model: Module) -> Tensor:
    return torch.cat([each.detach().flatten() for each in model.parameters()])


def _measured(recorder: _Recorder, reads: _Reads, factor: int | None) -> Audit:
    """Fit each step to the micro-batches since the step before."""
    if not recorder.steps:
        raise UserError(NO_STEP)
    steps: list[AuditStep] = []
    dropped: list[int] = []
    start = 0
    previous: Tensor | None = None
    for seen in recorder.steps:
        columns = _Columns(recorder.model, seen, reads)
        stop = start + seen.read
        places, weights, residual, carried = _explained(columns, previous, start, stop)
        if not reads.is_exact and any(weights):  # later ones may not have been read
            places = places[: max(number for number, weight in enumerate(weights, start=1) if weight)]
            stop = places[-1] + 1
        own = [place // len(reads.batches) == places[-1] // len(reads.batches) for place in places]
        lost = [place for place, weight, is_own in zip(places, weights, own) if not (weight or is_own)]
        kept = [number for number, place in enumerate(places) if place not in lost]
        sizes = [float(reads.size(reads[places[number]])) for number in kept]
        own_sizes = [size * own[number] for number, size in zip(kept, sizes)]
        step = AuditStep(
            micro_batches=tuple(places[number] % len(reads.batches) + 1 for number in kept),
            weights=tuple(weights[number] for number in kept),
            wanted=tuple(size / (sum(own_sizes) or 1.0) for size in own_sizes),
            sizes=tuple(sizes),
            residual=residual,
            norm=float(columns.gradient.norm()),
            carried=carried,
        )
        if seen.has_moved and (residual > EXPLAINED or not step.norm):
            raise UserError(MOVED)
        steps.append(step if residual <= EXPLAINED else columns.unexplained(step, [places[number] for number in kept]))
        dropped += lost
        start = stop
        previous = columns.gradient
    end = start + -start % len(reads.batches)
    numbers = [place % len(reads.batches) + 1 for place in [*dropped, *range(start, end)]]
    used = Counter(each for step in steps for each, weight in zip(step.micro_batches, step.weights) if weight)
    is_each_used = len(used) == len(reads.batches) and len(set(used.values())) == 1
    if is_each_used and not reads.is_exact and any(0.0 in step.weights for step in steps):
        raise UserError(ORDER)
    factor = None if factor is None else factor * recorder.ranks
    return judge(steps, factor=factor, dropped=[*dict.fromkeys(numbers)], ranks=recorder.ranks)


def _explained(
    columns: "_Columns", previous: Tensor | None, start: int, stop: int
) -> tuple[Sequence[int], list[float], float, float]:
    """Return micro-batches, their weights, the residual, and the weight of the gradient of the step before.

    If it is not known what was read, the backward passes are a first guess. It is wrong if losses are added before one
    pass, or if micro-batches are cut further. Then all micro-batches of an epoch are tried.
    """
    epoch = range(start, start + len(columns.reads.batches))
    guess = range(start, min(stop, epoch.stop))
    first = None
    for places in (guess,) if columns.reads.is_exact else (guess, epoch):
        known = [columns[place] for place in places]
        weights, residual = fit_weights(known, columns.gradient)
        carried = 0.0
        if residual > EXPLAINED and previous is not None and len(previous) == len(columns.gradient):
            with suppress(UserError):
                (*others, last), rest = fit_weights([*known, previous], columns.gradient)
                if rest <= EXPLAINED:
                    weights, residual, carried = others, rest, last
        least = NO_WEIGHT * max(map(abs, weights), default=0.0)
        found = places, [weight if abs(weight) > least else 0.0 for weight in weights], residual, carried
        first = first or found
        if residual <= EXPLAINED:
            return found
    assert first is not None
    return first


class _Columns:
    """Gradients of single micro-batches at the weights of a step, which the model is put back to."""

    def __init__(self, model: Module, seen: _Seen, reads: _Reads) -> None:
        self.model = model
        self.seen = seen
        self.reads = reads
        self.gradient = torch.cat([*seen.gradients.values()])
        self._known: dict[int, Tensor] = {}
        named = dict(model.named_parameters())
        self._wanted = [named[name] for name in seen.gradients]
        vector_to_parameters(seen.weights, named.values())
        for module, mode in zip(model.modules(), seen.modes):
            module.training = mode

    def __getitem__(self, place: int) -> Tensor:
        place %= len(self.reads.batches)
        if place not in self._known:
            with _Promotion():
                loss = self.reads.loss(self.model, self.reads[place])
            gradients = torch.autograd.grad(loss, self._wanted, allow_unused=True, materialize_grads=True)
            self._known[place] = torch.cat([gradient.to_dense().flatten() for gradient in gradients])
        return self._known[place]

    def unexplained(self, step: AuditStep, places: Sequence[int]) -> AuditStep:
        """Say why no weights explain the gradient, unless it is the wanted one and its numbers were clipped."""
        known = [self[place] for place in places]
        mean = sum((weight * each for weight, each in zip(step.wanted, known)), torch.zeros_like(self.gradient))
        most = float(self.gradient.abs().max())
        if float((mean.clamp(-most, most) - self.gradient).norm()) <= EXPLAINED * step.norm:
            return replace(step, weights=step.wanted)
        detail = "a loss that couples micro-batches, noise, other batches, or another loss"
        if any(isinstance(module, _NormBase) for module in self.model.modules()):
            detail = "BatchNorm, " + detail
        with suppress(UserError):
            detail = self._scaled_apart(known) or detail
        return replace(step, detail=detail)

    def _scaled_apart(self, known: Sequence[Tensor]) -> str:
        """Name the parameters whose gradients have another scale, if that explains the whole gradient."""
        sizes = [gradient.numel() for gradient in self.seen.gradients.values()]
        parts = [*zip(*(torch.split(each, sizes) for each in known))]
        targets = torch.split(self.gradient, sizes)
        largest = sizes.index(max(sizes))
        weights, residual = fit_weights(parts[largest], targets[largest])
        scales = {}
        for name, part, target in zip(self.seen.gradients, parts, targets):
            expected = torch.stack(part, dim=1) @ target.new_tensor(weights)
            scale = float(expected @ target) / max(float(expected @ expected), 1e-300)
            residual = max(residual, float((scale * expected - target).norm() / self.gradient.norm()))
            scales[name] = f"{scale:.3g}"
        usual = Counter(scales.values()).most_common(1)[0][0]
        apart = [f"{name} (× {float(scale) / float(usual):.3g})" for name, scale in scales.items() if scale != usual]
        return f"scaled apart: {', '.join(apart[:3])}{', …' * (len(apart) > 3)}" if residual <= EXPLAINED else ""


@contextmanager
def _in_double(model: Module) -> Iterator[None]:
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


class _Promotion(TorchFunctionMode):
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
    firsts = [each[0] if isinstance(each, (list, tuple)) and each else each for each in (*args, *kwargs.values())]
    if changes_first or not any(isinstance(each, Tensor) and each.dtype == torch.float64 for each in firsts):
        return func(*args, **kwargs)
    return func(*map(_promoted, args), **{key: _promoted(each) for key, each in kwargs.items()})


def _promoted(value: Any) -> Any:
    if type(value) in (list, tuple):  # states and weights of an LSTM
        return type(value)(map(_promoted, value))
    return value.double() if isinstance(value, Tensor) and value.dtype in LOWER else value


class _EnoughError(BaseException):
    """Ends a script whose training was seen."""


class _Script:
    """The training of a script: of a LightningModule, or of a model that returns its loss."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.calls: list[tuple[Any, Any]] = []  # arguments and keywords of the micro-batches' losses
        self.result: Audit | None = None
        self._recorder: _Recorder | None = None
        self._is_fit = False
        self._stack = ExitStack()

    def run(self, path: Path, arguments: Sequence[str]) -> Audit:
        """Run a script as a program of its own until its training was seen."""
        with self._stack as stack:
            stack.enter_context(mock.patch.object(sys, "argv", [str(path), *arguments]))
            stack.enter_context(mock.patch.object(sys, "path", [str(path.resolve().parent), *sys.path]))
            stack.enter_context(_Promotion())
            stack.callback(register_module_forward_pre_hook(self._before_forward).remove)
            stack.callback(register_module_forward_hook(self._after_forward, with_kwargs=True).remove)
            for library in ("lightning.pytorch", "pytorch_lightning"):
                with suppress(ImportError):  # the older name may not be installed
                    trainer = import_module(library).Trainer
                    stack.enter_context(mock.patch.object(trainer, "fit", self._instead_of(trainer.fit)))
            with suppress(_EnoughError):
                runpy.run_path(str(path), run_name="__main__")
            if self.result is None:
                self.result = self._of_calls()
        return self.result

    def _instead_of(self, fit: Callable[..., Any]) -> Callable[..., Any]:
        """Return a ``fit()`` of two short epochs, which are audited."""

        def short_fit(trainer: Any, model: Any, *args: Any, **kwargs: Any) -> None:
            if not model.automatic_optimization or trainer.world_size > 1:
                raise UserError(
                    f"A script is audited on one device, with automatic optimization: this has {trainer.world_size} "
                    f"devices and automatic_optimization={model.automatic_optimization}; use audit(…)."
                )
            from lightning.pytorch.callbacks import LambdaCallback  # only scripts need Lightning

            self._is_fit = True
            factor = trainer.accumulate_grad_batches
            batches = min(_batches_of(model, *args, **kwargs), _limit_of(trainer))
            trainer.limit_train_batches = self._shortened(batches, factor)
            trainer.fit_loop.max_epochs = 2
            given = model.training_step.__code__.co_argcount - 1  # with or without batch_idx

            def note(_: Any, __: Any, batch: Any, index: int) -> None:
                self.calls.append(((copy.copy(batch), index)[:given], {}))

            trainer.callbacks.append(LambdaCallback(on_train_batch_start=note))
            with _in_double(model):
                with _Recorder(model, lambda: len(self.calls)).watching() as recorder:
                    fit(trainer, model, *args, **kwargs)
                with mock.patch.multiple(model, log=mock.DEFAULT, log_dict=mock.DEFAULT):
                    reads = _Reads(self.calls, _loss_of, lambda call: Samples()(call[0]), is_exact=True)
                    self.result = _measured(recorder, reads, factor if factor > 1 else None)
            raise _EnoughError

        return short_fit

    def _shortened(self, batches: int, factor: int) -> int:
        """Return how many micro-batches of an epoch to train on, so that its last window is as long."""
        most = self.most // 2
        return batches if batches <= most else most - (most - batches) % factor

    def _before_forward(self, module: Module, _: Any) -> None:
        parameter = next(module.parameters(), None)
        if module.training and not self._is_fit and parameter is not None and parameter.dtype in LOWER:
            self._stack.enter_context(_in_double(module))

    def _after_forward(self, module: Module, args: Any, kwargs: Any, output: Any) -> None:
        """Record calls of the first module that returns a loss."""
        loss = _loss_in(output)
        if self._is_fit or not isinstance(loss, Tensor) or not loss.requires_grad:
            return
        if self._recorder is None:
            self._recorder = self._stack.enter_context(_Recorder(module, lambda: len(self.calls)).watching())
        if module is self._recorder.model:
            if len(self.calls) == self.most:
                raise _EnoughError
            given = {name: value for name, value in kwargs.items() if name != "num_items_in_batch"}  # of a window
            self.calls.append((args, given))

    def _of_calls(self) -> Audit:
        if self._recorder is None:
            raise UserError("The script trained no LightningModule, and no model that returns its loss: use audit(…).")
        self._is_fit = True  # its calls are no more training
        model = self._recorder.model
        if len(self.calls) == self.most:
            del self.calls[sum(step.read for step in self._recorder.steps) :]  # the last window was cut off
        reads = _Reads(self.calls, _loss_of, lambda call: _targets(model, *call), is_exact=True)
        return _measured(self._recorder, reads, None)


def _limit_of(trainer: Any) -> int:
    limit = trainer.limit_train_batches
    return limit if isinstance(limit, int) else sys.maxsize


def _batches_of(model: Any, loader: Any = None, *_: Any, **given: Any) -> int:
    """Return how many batches an epoch of a fit has, or a large number if that is not known."""
    loader = given.get("train_dataloaders", loader)
    source = given.get("datamodule") or (model if loader is None else loader)
    if hasattr(source, "train_dataloader"):
        source.prepare_data()
        source.setup("fit")
        loader = source.train_dataloader()
    return len(loader) if hasattr(loader, "__len__") else sys.maxsize


def _loss_of(module: Any, call: tuple[Any, Any]) -> Any:
    """Return the loss of one micro-batch, of a LightningModule or of a model that returns it."""
    output = getattr(module, "training_step", module)(*call[0], **call[1])
    return output if isinstance(output, Tensor) else _loss_in(output)


def _loss_in(output: Any) -> Any:
    return output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)


def _targets(module: Module, args: Any, kwargs: Mapping[str, Any]) -> int:
    """Count what the loss of a model of Transformers is a mean over: targets that are not ignored, or samples."""
    labels = kwargs.get("labels")
    if labels is None or labels.dim() < 2:
        return Samples()([*args, *kwargs.values()])
    return TargetTokens(shift="CausalLM" in getattr(getattr(module, "loss_function", None), "__name__", ""))(kwargs)


def main(arguments: Sequence[str] | None = None) -> int:
    """Audit a script, print its table, and return 1 if a weight is wrong."""
    parser = argparse.ArgumentParser(prog="python -m lightning_ga.audit", description=__doc__)
    parser.add_argument("--micro-batches", type=int, default=32, help="the most to train on; default: 32")
    parser.add_argument("script", type=Path)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")
    given = parser.parse_args(arguments)
    found = _Script(given.micro_batches).run(given.script, given.arguments)
    print(f"{found}\n{'right' if found.is_right else 'WRONG'}: {found.verdict}")
    return int(not found.is_right)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        print(f"Error: {printable(str(error))}", file=sys.stderr)
        sys.exit(2)
