"""Run passes as training would, each from the same state or one after the other, and see what they change.

They run without dropout, and as precisely as memory allows. Evaluation mode would switch off more: detectors, for
example, return losses in training mode only.

Tested in tests/fit/exactness/test_measure.py.
"""

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from io import BytesIO
from operator import attrgetter
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DataLoader, Dataset

from lightning_ga.compat import ranks
from lightning_ga.compat.patching import replaced, shadowed
from lightning_ga.compat.steps import PassPlace, isolated, run_pass
from lightning_ga.dropout import stop_dropping, without_dropout
from lightning_ga.fit.exactness.differences import Gradient
from lightning_ga.memory.live_tensors import LiveTensorMeter, compiled_run_eagerly, uncounted
from lightning_ga.snapshot.copies import checksums, copied_if_possible, is_metric, is_writable
from lightning_ga.snapshot.random_numbers import GENERATORS, generators_of, reseed
from lightning_ga.snapshot.window_savepoint import LIGHTNINGS_OWN

PERTURBATION = 1e-2  # how far weights are moved: even a teacher of momentum 0.9999 then changes by more than rounding
_SMALL = 2**16  # elements of a tensor that gets noise
_LONGEST = 1000  # longer containers are data: only their length is compared
_SINGLE = 1e-4  # of single precision, and of any that is not named below
# With float64 weights, a loss may still be computed in single precision: its own rounding is allowed for.
_ROUNDING = {torch.float64: 1e-6, torch.float16: 1e-2, torch.bfloat16: 5e-2}
_OPAQUE = (Dataset, DataLoader, torch.optim.Optimizer, FunctionType, MethodType, BuiltinFunctionType, *GENERATORS)


@contextmanager
def passes_of(trainer: Any, *, plain: bool, begins: bool, in_step: bool = False) -> Iterator["Passes"]:
    """Return a context in which passes run without a trace and TF32; with ``plain``, in the weights' precision."""
    with ExitStack() as stack:
        # No pass here steps; the module's start hooks, which run if training begins, may change optimizers.
        restore = stack.enter_context(isolated(trainer, begins=begins, steps=begins))
        stack.enter_context(compiled_run_eagerly())  # graphs that are compiled for a few samples are of no use
        try:
            stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
            torch.set_float32_matmul_precision("highest")
            stack.enter_context(replaced(torch.backends.cudnn, allow_tf32=False))
        except RuntimeError:  # each has a precision of its own (torch 2.9), which these functions refuse to read
            for name in ("cuda.matmul", "mkldnn.matmul", "cudnn.conv", "cudnn.rnn"):
                stack.enter_context(replaced(attrgetter(name)(torch.backends), fp32_precision="ieee"))
        if plain and hasattr(trainer.precision_plugin, "autocast_context_manager"):  # it would hide differences
            stack.enter_context(shadowed(trainer.precision_plugin, "forward_context", nullcontext))
        stack.enter_context(without_dropout())
        stack.enter_context(ranks.in_single_group())
        yield Passes(trainer, restore, in_step=in_step)


class Passes:
    """Runs passes from the state that ``restore`` puts back.

    The trained weights are moved a little first, as by an optimizer step. Otherwise a teacher that is still a copy of
    its student would not change, and nothing would be seen.
    """

    def __init__(self, trainer: Any, restore: Callable[[], None], *, in_step: bool) -> None:
        self.trainer = trainer
        self._restore = restore
        self._in_step = in_step
        self.module: Module = trainer.lightning_module
        self._parameters = list(self.module.parameters())
        self._trained = [parameter for parameter in self._parameters if parameter.requires_grad]
        self.is_on_host = trainer.strategy.root_device.type == "cpu"
        self.changed: tuple[str, ...] = ()

    def begin(self, seed: int = 0) -> None:
        """Put everything back, move the weights, and seed all random numbers."""
        self._restore()
        stop_dropping(self.module)
        _perturb(self._trained)
        self._begin_pass(seed)

    def _begin_pass(self, seed: int) -> None:
        """Let a pass begin without gradients, with these random numbers."""
        for parameter in self._parameters:
            parameter.grad = None
        reseed(seed, generators_of(self.module))

    def run(self, *batches: Any, seed: int = 0, watched: bool = False) -> list[Gradient]:
        """Return the gradients of batches that run one after the other; nothing is put back in between.

        Each pass begins with the same random numbers. If the step cuts batches, the given ones are pieces of one. With
        ``watched``, ``changed`` names all that has changed.
        """
        self.begin(seed)
        before = self._state() if watched else {}
        gradients = list[Gradient]()
        for number, batch in enumerate(batches):
            if number > 0:
                self._begin_pass(seed)
            begins = number == 0 or not self._in_step  # in the step, these are pieces of one batch of the loop
            ends = number == len(batches) - 1 or not self._in_step
            run_pass(self.trainer, copied_if_possible(batch), PassPlace(begins=begins, ends=ends))
            with uncounted():
                gradients.append([self._gradient(parameter) for parameter in self._trained])
        if watched:
            self.changed = tuple(name for name, mark in self._state().items() if mark != before.get(name))
        return gradients

    def run_one(self, batch: Any, *, seed: int = 0, watched: bool = False) -> Gradient:
        """Return the gradient of one batch."""
        return self.run(batch, seed=seed, watched=watched)[0]

    def _gradient(self, parameter: Tensor) -> Tensor:
        """Return the gradient, zeros if there is none, on the host.

        One that lies there is copied only if memory is counted: the next pass makes another.
        """
        if parameter.grad is None:
            return torch.zeros_like(parameter, device="cpu").detach()
        return parameter.grad.to_dense().to("cpu", copy=bool(LiveTensorMeter.active))

    def _state(self) -> dict[str, Any]:
        """Return marks of all that a pass should not change, by name: weights, buffers, attributes that pickle.

        Statistics of BatchNorm and states of metrics are left out: no gradient depends on them.
        """
        known = {id(each) for each in (self.trainer, *self.module.modules())}
        tensors = dict[str, Tensor](self.module.named_parameters())
        marks: dict[str, Any] = {}
        for path, part in self.module.named_modules():
            if is_metric(part):
                continue
            prefix = f"{path}." if path else ""
            for name, buffer in part._buffers.items():
                if buffer is not None and not isinstance(part, _BatchNorm):
                    tensors[prefix + name] = buffer
            for name, value in vars(part).items():
                if name not in LIGHTNINGS_OWN:
                    marks[prefix + name] = _mark(value, known)
        return {**dict(zip(tensors, checksums([*tensors.values()]))), **marks}


def _mark(value: Any, known: set[int]) -> Any:
    """Return a mark that changes with the value; ``None`` if there is none."""
    try:
        if not isinstance(value, Tensor) and hasattr(value, "__len__") and len(value) > _LONGEST:
            return len(value)
        file = BytesIO()
        _Marks(file, known).dump(value)
        return file.getvalue()
    except Exception:  # a module may contain anything: locks, files
        return None


class _Marks(pickle.Pickler):
    """Writes sums of bits in place of tensors, and nothing in place of known objects and data."""

    def __init__(self, file: BytesIO, known: set[int]) -> None:
        super().__init__(file)
        self._known = known

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return str, (f"{tuple(value.shape)} {checksums([value])[0]}",)
        if id(value) in self._known or isinstance(value, _OPAQUE):
            return str, ("",)
        return NotImplemented


@torch.no_grad()
def _perturb(tensors: Sequence[Tensor]) -> None:
    """Change tensors a little, in the same way each time; add noise to small ones."""
    writable = list(filter(is_writable, tensors))
    torch._foreach_mul_(writable, 1.0 + PERTURBATION)
    small = [tensor for tensor in writable if tensor.is_floating_point() and tensor.numel() <= _SMALL]
    longest = max(map(torch.numel, small), default=0)
    noise = torch.empty(longest + len(small), device="cpu").normal_(generator=torch.Generator().manual_seed(0))
    for start, tensor in enumerate(small):  # each takes other numbers, so that equal ones become unlike
        own = noise[start : start + tensor.numel()].view(tensor.shape)
        tensor.add_(own.to(tensor.device), alpha=PERTURBATION)


def batch_norm_layers(module: Module) -> tuple[str, ...]:
    """Return the names of BatchNorm layers in training mode, which normalize by the samples of a micro-batch."""
    return tuple(name for name, layer in module.named_modules() if isinstance(layer, _BatchNorm) and layer.training)


def fixed_statistics() -> AbstractContextManager[None]:
    """Return a context in which BatchNorm normalizes by its running statistics, so that samples are independent.

    A ``TorchFunctionMode`` would be off while a backward pass recomputes activations.
    """
    normalize = functional.batch_norm

    def fixed(
        values: Tensor,
        mean: Tensor | None,
        variance: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        *momentum_and_eps: float,
        **named: float,
    ) -> Tensor:
        by_batch = training and mean is None  # there are no running statistics
        return normalize(values, mean, variance, weight, bias, by_batch, *momentum_and_eps, **named)

    return replaced(functional, batch_norm=fixed)


def statistics_of_parts(sizes: tuple[int, int]) -> AbstractContextManager[None]:
    """Return a context in which BatchNorm normalizes two parts of a batch by themselves, as if they were two batches.

    The rows of a layer's input are taken to belong to the samples in their order.
    """
    normalize = functional.batch_norm

    def in_parts(values: Tensor, *statistics: Any, **named: Any) -> Tensor:
        parts = values.tensor_split([len(values) * sizes[0] // sum(sizes)])
        return torch.cat([normalize(part, *statistics, **named) for part in parts])

    return replaced(functional, batch_norm=in_parts)


def rounding(trainer: Any, *, plain: bool = True) -> float:
    """Return the relative difference that precision explains: of the weights, and of autocast if it stays on."""
    kinds = {
        each.dtype for each in trainer.lightning_module.parameters() if each.requires_grad and each.is_floating_point()
    }
    if not plain and hasattr(trainer.precision_plugin, "autocast_context_manager"):
        kinds.add(torch.bfloat16 if "bf16" in str(trainer.precision) else torch.float16)
    return max((_ROUNDING.get(kind, _SINGLE) for kind in kinds), default=_SINGLE)
