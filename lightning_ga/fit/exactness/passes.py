"""Run micro-batches one after the other as training would, and keep their gradients and what they changed.

The check runs them without dropout, and as precise as memory allows. Evaluation mode would switch off more than that:
code that reads ``self.training`` then runs another model, as detectors do that return losses in training alone.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import torch
from torch.nn import Module, functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from torchmetrics import Metric

from lightning_ga.compat import gradient_dtype, patching, ranks, trial_steps
from lightning_ga.compat.dataloaders import BatchTransfer
from lightning_ga.compat.trial_steps import PassPlace, run_pass, without_logs
from lightning_ga.fit.exactness.differences import Gradient
from lightning_ga.loading.samples import copied_if_possible
from lightning_ga.memory.live_tensors import uncounted
from lightning_ga.probe.training import isolated
from lightning_ga.snapshot.copies import checksums, differ, is_writable
from lightning_ga.snapshot.plain import hidden_copies, summaries
from lightning_ga.snapshot.random_numbers import RandomState, generator_state, generators_of, have_moved, reseed

_DROPS = ("dropout", "droppath", "dropblock", "stochasticdepth", "layerdrop")
_OF_DROPS = ("p", "prob", "rate", "drop_prob")
_RATES = (
    *("dropout", "dropout_p", "dropout_prob", "attention_dropout", "attn_dropout", "activation_dropout"),
    *("attention_probs_dropout_prob", "hidden_dropout_prob", "layerdrop"),
)
_FUNCTIONS = (
    *("dropout", "dropout1d", "dropout2d", "dropout3d"),
    *("alpha_dropout", "feature_alpha_dropout", "feature_dropout"),
)  # of torch and torch.nn.functional; those that work in place end in an underscore
_ATTENTION = functional.scaled_dot_product_attention


@contextmanager
def without_dropout() -> Iterator[None]:
    """Return a context without functional dropout, that of attention included: it returns its input.

    Functions of torch that a step calls by themselves also need :class:`_CallsWithoutDropout` around it.
    """
    called = functional._VF  # type: ignore[attr-defined]  # by the functions of torch.nn.functional
    names = [name for base in _FUNCTIONS for name in (base, f"{base}_") if hasattr(called, name)]
    dropless, attends = {name: _dropless(getattr(called, name)) for name in names}, _dropless(_ATTENTION)
    with patching.replaced(called, **dropless), patching.replaced(functional, scaled_dot_product_attention=attends):
        yield


class _CallsWithoutDropout(TorchFunctionMode):
    """A context in which calls of torch's functions drop nothing: around steps alone, as it slows each call down.

    It is off in a backward pass: what activation checkpointing computes again there is not covered.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _undropped(func, *args, **(kwargs or {}))


def _dropless(function: Any) -> Any:
    return wraps(function)(lambda *args, **kwargs: _undropped(function, *args, **kwargs))


def _undropped(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function of torch so that it drops nothing."""
    if getattr(func, "__name__", "").removesuffix("_") in _FUNCTIONS:
        return args[0] if args else kwargs["input"]
    if func is _ATTENTION:
        args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
        kwargs = {**kwargs, "dropout_p": 0.0} if "dropout_p" in kwargs else kwargs
    return func(*args, **kwargs)


def eager() -> AbstractContextManager[None]:
    """Return a context in which compiled functions run as they were written: a few samples make no graphs to keep."""
    stance = getattr(torch.compiler, "set_stance", None)  # since torch 2.6
    return nullcontext() if stance is None else stance("force_eager")


def stop_dropping(module: Module) -> None:
    """Set the rates of all layers that drop values to zero: dropout, stochastic depth, attention, RNNs.

    The rates are plain attributes; a snapshot of the module's attributes restores them.
    """
    for part in module.modules():
        drops = any(name in type(part).__name__.lower() for name in _DROPS)
        for name, value in list(vars(part).items()):
            if isinstance(value, float) and 0 < value <= 1 and (name in _RATES or (drops and name in _OF_DROPS)):
                vars(part)[name] = 0.0


def rounding(trainer: Any, *, plain: bool = True) -> float:
    """Return the relative difference that precision explains: of the weights, or of autocast if it stays on."""
    if not plain and hasattr(trainer.precision_plugin, "autocast_context_manager"):
        return 5e-2 if "bf16" in str(trainer.precision) else 1e-2
    dtypes = {p.dtype for p in trainer.lightning_module.parameters() if p.requires_grad and p.is_floating_point()}
    if dtypes & {torch.float16, torch.bfloat16}:
        return 5e-2 if torch.bfloat16 in dtypes else 1e-2
    return 1e-6 if dtypes == {torch.float64} else 1e-4  # losses may be computed in fp32 all the same


@contextmanager
def exact_arithmetic(trainer: Any, *, plain: bool) -> Iterator[None]:
    """Return a context without TF32; with ``plain``, steps compute in the precision of the weights.

    Autocast would hide differences.
    """
    plugin = trainer.precision_plugin
    cudnn, matmul = torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()
    torch.backends.cudnn.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")
    casts = plain and hasattr(plugin, "autocast_context_manager")
    try:
        with patching.shadowed(plugin, "forward_context", nullcontext) if casts else nullcontext():
            yield
    finally:
        torch.backends.cudnn.allow_tf32 = cudnn
        torch.set_float32_matmul_precision(matmul)


MOVED = 1e-2  # how far weights are moved: a teacher of momentum 0.9999 follows by more than rounding
_FIRST = PassPlace()
LATER = 2  # the number of a batch after others, however many they were

Sums = dict[str, int | None]  # of the bits of tensors, and lengths of containers, by name


@dataclass(frozen=True, slots=True)
class MicroBatches:
    """Micro-batches that run one after the other, and how a batch was cut into them."""

    batches: Sequence[Any]
    as_pieces: bool = False  # of one batch of the loop, whose hooks run once
    on_device: bool = False  # whether they are there, where hooks of the transfer have run
    weights: Sequence[float] = ()  # by which gradients are accumulated; without them each pass begins with none
    whole: "MicroBatches | None" = None  # the batch that these are pieces of, which hooks of batches get


@dataclass(frozen=True, slots=True)
class Passes:
    """The results of micro-batches run one after the other."""

    gradients: list[Gradient]  # after each micro-batch
    changed: tuple[str, ...]  # names of the state that they changed besides gradients
    changed_in_step: tuple[str, ...]  # those that ``training_step`` or the backward pass changed, and no hook
    draws: bool  # whether random numbers were drawn
    ends: Sums  # of the state after them
    kept: list[list[torch.Tensor]]  # the tensors that were asked for: before the passes, and after each micro-batch

    @property
    def moves(self) -> list[torch.Tensor]:
        """How far these tensors have moved."""
        return [after - before for before, after in zip(self.kept[0], self.kept[-1])]


@contextmanager
def traceless_passes(trainer: Any, *, plain: bool, begins: bool = True) -> Iterator["PassRunner"]:
    """Return a context in which passes run without dropout, and with exact arithmetic; all state is restored."""
    with ExitStack() as stack:
        restore = stack.enter_context(isolated(trainer, begins=begins))
        for context in (eager(), exact_arithmetic(trainer, plain=plain), without_dropout(), ranks.alone()):
            stack.enter_context(context)
        yield PassRunner(trainer, restore, begins=begins)


class PassRunner:
    """Runs micro-batches, each time from the state that ``restore`` puts back.

    Between the micro-batches of a run no state is restored: state that the step keeps (a queue, a teacher that follows
    its student) changes as in training. If training ``begins``, the trained weights are moved a little beforehand, as a
    first step would move them: so a teacher that starts as a copy of its student is seen to follow it.
    """

    def __init__(self, trainer: Any, restore: Callable[[], None], *, begins: bool) -> None:
        self.trainer, self._restore, self._begins = trainer, restore, begins
        self.transfer = BatchTransfer(trainer)
        parameters = trainer.lightning_module.named_parameters()
        self.trained = {name: p for name, p in parameters if p.requires_grad}  # hooks of steps may freeze some
        self.steps = 0  # micro-batches so far
        self.after: int | None = None  # optimizer steps that count as taken before them, if others than in truth
        self.shared: frozenset[str] = frozenset()  # paths of containers that the data hold, too

    def on_device(self, batch: Any) -> Any:
        """Return a batch as its transfer to the device leaves it."""
        self._begin(seed=1)
        with _CallsWithoutDropout():
            return self.transfer.moved(copied_if_possible(batch))

    def run(
        self,
        micro_batches: MicroBatches,
        *,
        seed: int = 0,
        keep: Collection[str] = (),
        altered: Mapping[str, float | None] | None = None,
        place: PassPlace = _FIRST,
    ) -> Passes:
        """Run micro-batches one after the other, the first at this place.

        The tensors that are named in ``keep`` are returned. Before the passes, the named state is ``altered``: a number
        is set to its value, and a tensor (``None``) is moved a little.
        """
        module = self.trainer.lightning_module
        self._begin(seed)
        if place.amid:
            trial_steps.begin_amid(self.trainer, place.amid)
        _alter(module, altered or {})
        kept, sums, random_state = [_kept(module, keep)], self._sums(), RandomState()
        generators = [(generator, generator_state(generator)) for generator in generators_of(module)]
        states: list[Sums] = []
        gradients: list[Gradient] = []
        for gradient in self._window(micro_batches, place, observe=lambda: states.append(self._sums())):
            gradients.append(gradient)
            kept.append(_kept(module, keep))
        if place.steps:  # what the step, and what follows it, make of learning rates counts as a tensor, too
            trial_steps.step_schedules(self.trainer, place)
            settings = torch.tensor([*settings_of(self.trainer.optimizers).values()])
            kept = [[*kept[0], torch.zeros_like(settings)], [*kept[-1], settings]]
        in_step = [name for pair in zip(states[::2], states[1::2]) for name in changed_names(*pair)]
        ends = self._sums()
        return Passes(
            gradients,
            changed=changed_names(sums, ends),
            changed_in_step=tuple(dict.fromkeys(in_step)),
            ends=ends,
            draws=not random_state.is_current() or have_moved(generators),
            kept=kept,
        )

    def run_after(self, steps: int, micro_batches: MicroBatches) -> Passes:
        """Run micro-batches as if so many optimizer steps had been taken before them."""
        with patching.replaced(self, after=steps):
            return self.run(micro_batches)

    def _sums(self) -> Sums:
        module = self.trainer.lightning_module
        return {**state_sums(module), **summaries(module, self.shared)}

    def run_windows(self, window: MicroBatches, *, moves: bool) -> list[Gradient]:
        """Run a window three times, with all hooks of the module; the second and third meet what the first has left.

        An epoch ends after the first and after the second, because some losses are weighed by what the last two epochs
        have gathered. With ``moves``, weights move between the windows, as in training. Return what the optimizer is
        given in each window, and the numbers of its parameter groups.
        """
        module, gathers, batches = self.trainer.lightning_module, set[str](), None
        given: list[Any] = []
        self._begin(seed=1)
        place = PassPlace(batches=1 if window.as_pieces else len(window.batches))
        for ahead in (0, LATER, LATER):
            if given:
                _move(p for p in module.parameters() if p.requires_grad and moves)
                batches = trial_steps.end_epoch_of(self.trainer, gathers, batches)
            before = gathered(module)
            given.append(self._given_by(window, replace(place, ahead=ahead)))
            gathers = {name for name, value in gathered(module).items() if value != before.get(name)}
        settings = settings_of(self.trainer.optimizers).values()
        # Beside each number whether it is zero, so that it differs by much from one that is not.
        return [*given, *([torch.tensor([number, not number])] for number in settings)]

    def _given_by(self, window: MicroBatches, place: PassPlace) -> Gradient:
        """Run a window, and return the gradient that the optimizer is given."""
        list(self._window(window, place))
        trial_steps.call_before_step(self.trainer)
        return _gradients(self.trained.values())

    def _window(
        self, run: MicroBatches, first: PassPlace, observe: Callable[[], object] = lambda: None
    ) -> Iterator[Gradient]:
        """Run micro-batches from the place of the ``first`` on, and yield the gradient after each."""
        count, whole = len(run.batches), None
        self.steps += count
        if run.whole is not None:
            whole = self._there(run.whole.batches[0], run.whole)
        for index, batch in enumerate(run.batches):
            if index > 0 and not run.weights:
                Module.zero_grad(self.trainer.lightning_module)
            is_last = index == count - 1
            place = replace(
                first,
                index=index,
                begins=not run.as_pieces or index == 0,
                ends=not run.as_pieces or is_last,
                continues=run.as_pieces and bool(run.weights) and not is_last,
                batches=first.batches if run.as_pieces else max(first.batches, count),
                weight=run.weights[index] if run.weights else 1.0,
            )
            with _CallsWithoutDropout(), without_logs(self.trainer) if run.as_pieces else nullcontext():
                run_pass(self.trainer, self._there(batch, run), place, whole=whole, observe=observe)
            if run.weights:
                gradient_dtype.widen(list(self.trainer.lightning_module.parameters()))
            yield _gradients(self.trained.values())

    def _there(self, batch: Any, run: MicroBatches) -> Any:
        batch = copied_if_possible(batch)
        return batch if run.on_device else self.transfer.moved(batch)

    def _begin(self, seed: int) -> None:
        self._restore()
        if self.after is not None:
            trial_steps.count_as_taken(self.trainer, self.after)
        Module.zero_grad(self.trainer.lightning_module)
        stop_dropping(self.trainer.lightning_module)
        if self._begins:  # copies of a weight (averages) move apart from it
            _move(p for p in self.trainer.lightning_module.parameters() if p.requires_grad)
        reseed(seed, generators_of(self.trainer.lightning_module))


def settings_of(optimizers: Iterable[torch.optim.Optimizer]) -> dict[str, float]:
    """Return the numbers that parameter groups hold, by name: learning rates, weight decay, momentum."""
    groups = enumerate(group for optimizer in optimizers for group in optimizer.param_groups)
    named = [("the learning rate" if key == "lr" else key, n, group[key]) for n, group in groups for key in group]
    singles = [(f"{key} of group {n}", each) for key, n, each in named if getattr(each, "numel", lambda: 1)() == 1]
    return {name: float(each) for name, each in singles if isinstance(each, (int, float, torch.Tensor))}


def numbers_of(module: torch.nn.Module) -> dict[str, float]:
    """Return the plain numbers among the attributes of a module and its parts, but for metrics, by name."""
    parts = ((path, part) for path, part in module.named_modules() if not isinstance(part, Metric))
    named = ((path, name, value) for path, part in parts for name, value in vars(part).items())
    return {f"{path}.{name}".lstrip("."): value for path, name, value in named if isinstance(value, (int, float))}


def gathered(module: torch.nn.Module) -> dict[str, float]:
    """Return the numbers among the attributes of a module, and the lengths of what it gathers in others."""
    held = {name: len(value) for name, value in vars(module).items() if isinstance(value, (list, dict, deque))}
    return {**held, **numbers_of(module)}


def named_state(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the state that a step should not change: weights, and buffers but for those of BatchNorm and metrics.

    Copies of weights are among it, also in plain attributes.
    """
    parts = (part for part in module.modules() if isinstance(part, (_BatchNorm, Metric)))
    passed_by = {id(buffer) for part in parts for buffer in part.buffers(recurse=False)}
    named = {name: buffer for name, buffer in module.named_buffers() if id(buffer) not in passed_by}
    return named | dict(module.named_parameters()) | hidden_copies(module)


def _kept(module: torch.nn.Module, names: Collection[str]) -> list[torch.Tensor]:
    """Return copies of the tensors of these names."""
    named = named_state(module) if names else {}
    return _copies(named[name] for name in names)


def _alter(module: torch.nn.Module, altered: Mapping[str, float | None]) -> None:
    """Set the named numbers, and move the named tensors a little."""
    named = named_state(module)
    _move(named[name] for name, number in altered.items() if number is None)
    for name, number in altered.items():
        if number is not None:
            path, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(path), attribute, number)


def state_sums(module: torch.nn.Module) -> Sums:
    """Return sums over the named state."""
    named = named_state(module)
    return dict(zip(named, checksums(named.values())))


def changed_names(before: Mapping[str, float | None], after: Mapping[str, float | None]) -> tuple[str, ...]:
    """Return the names of numbers, or of sums over tensors, that have changed."""
    return tuple(name for name in after if differ(before.get(name), after[name]))


@torch.no_grad()
def _move(tensors: Iterable[torch.Tensor]) -> None:
    """Move tensors a little, the same way each time; whole numbers by one."""
    for number, tensor in enumerate(tensors):
        if not is_writable(tensor):
            continue
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.mul_(1.0 + MOVED)
        elif tensor.dtype != torch.bool:
            tensor.add_(1)
        if tensor.is_floating_point() and tensor.numel() <= 2**16:
            generator = torch.Generator(tensor.device).manual_seed(number)
            noise = torch.empty(tensor.shape, device=tensor.device).normal_(generator=generator)
            tensor.add_(noise.to(tensor.dtype), alpha=MOVED)


def _gradients(parameters: Iterable[torch.nn.Parameter]) -> Gradient:
    """Return copies of the gradients on the host, zeros if there is none."""
    gradients = (torch.zeros_like(p, device="cpu") if p.grad is None else p.grad for p in parameters)
    with uncounted():
        return _copies(g.coalesce() if g.is_sparse else g for g in gradients)


def _copies(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.detach().to("cpu", copy=True) for tensor in tensors]
