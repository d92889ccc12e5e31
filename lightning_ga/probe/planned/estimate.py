"""The probe for a device that is not here: the same trials, on tensors without values.

Everything that a trial step of ``probe`` goes through runs here too: Lightning's loop, precision and
clipping, the module's hooks, the optimizer. Nothing is computed, so that the largest batch of a
large device takes no memory of this one, and even the limit itself is tried.

CPU operators are made to keep as much for the backward pass as those of CUDA (``LikeCuda``). Two things differ: under
mixed precision, CUDA computes normalizations, losses and softmax in 32 bits and so keeps larger activations
(``aten/src/ATen/autocast_mode.h``, ``AT_FORALL_FP32`` and ``AT_FORALL_FP32_SET_OPT_DTYPE``), and dropout keeps one byte
for an element of its mask, where the CPU keeps a float (``aten/src/ATen/native/Dropout.cpp``); with dropout, attention
on the CPU has no fused kernel.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from lightning_ga.compat import ranks
from lightning_ga.errors import UserError
from lightning_ga.loading.largest_samples import largest_samples
from lightning_ga.memory.holders import OriginMeter
from lightning_ga.memory.oom import is_out_of_memory
from lightning_ga.plan.planned_device import PlannedDevice
from lightning_ga.plan.records import ProbeResult
from lightning_ga.plan.units import format_bytes, least_budget
from lightning_ga.probe.meters import TensorMeter
from lightning_ga.probe.planned.fakes import Answers, PlainCopies, grown, hidden_workspaces, without_values
from lightning_ga.probe.prober import Budget, Prober
from lightning_ga.probe.training import isolated
from lightning_ga.probe.trials import ProbedTrainer, TrainingSetup

# Under autocast, floating arguments of these are cast to 32 bits ...
_IN_FLOAT = (
    *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log1p", "log2", "pow", "reciprocal", "rsqrt"),
    *("sinh", "softplus", "tan", "group_norm", "layer_norm", "logsumexp", "norm", "normalize", "renorm", "cdist"),
    *("cosine_similarity", "dist", "pdist", "binary_cross_entropy_with_logits", "cosine_embedding_loss", "kl_div"),
    *("cross_entropy", "hinge_embedding_loss", "huber_loss", "l1_loss", "margin_ranking_loss", "mse_loss"),
    *("multi_margin_loss", "multilabel_margin_loss", "nll_loss", "poisson_nll_loss", "smooth_l1_loss"),
    *("soft_margin_loss", "triplet_margin_loss"),
)
# ... and these give 32 bits unless they are told a dtype.
_TO_FLOAT = ("cumprod", "cumsum", "log_softmax", "prod", "softmax", "sum")
_HALVES = (torch.float16, torch.bfloat16)


class LikeCuda(TorchFunctionMode):
    """Let functions whose memory differs between CPU and CUDA take what they take on CUDA, as a context."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the function as CUDA would."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "dropout":
            return _dropout(func, args, kwargs)
        if name == "scaled_dot_product_attention":
            return _attention(func, args, kwargs)
        if (name in _IN_FLOAT or name in _TO_FLOAT) and torch.is_autocast_enabled("cpu"):
            return _in_float(func, args, kwargs, to=name in _TO_FLOAT)
        return func(*args, **kwargs)


def _in_float(func: Callable[..., Any], args: Any, kwargs: Any, *, to: bool) -> Any:
    """Run a function in 32 bits, as autocast does."""
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    if not any(tensor.dtype in _HALVES for tensor in tensors):
        return func(*args, **kwargs)
    with torch.autocast("cpu", enabled=False):
        if not to:
            return func(*map(_cast, args), **{name: _cast(value) for name, value in kwargs.items()})
        given = any(isinstance(value, torch.dtype) for value in args) or kwargs.get("dtype") is not None
        return func(*args, **(kwargs if given else {**kwargs, "dtype": torch.float32}))


def _cast(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in _HALVES else value


def _dropout(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run the fused kernel if CUDA would take it."""
    names = ("input", "p", "training", "inplace")
    given = {**dict(zip(names, args)), **kwargs}
    if "train" in given:  # ``torch.dropout`` calls it so
        given["training"] = given.pop("train")
    p, training, inplace = given.get("p", 0.5), given.get("training", True), given.get("inplace", False)
    if not training or inplace or not 0 < p < 1:
        return func(*args, **kwargs)
    return torch.native_dropout(given["input"], p, True)[0]


def _attention(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run attention without dropout, which a fused kernel of CUDA draws again in the backward pass."""
    args = list(args)
    if len(args) > 4:
        args[4] = 0.0
    return func(*args, **{name: value for name, value in kwargs.items() if name != "dropout_p"})


def estimate(
    setup: TrainingSetup, device: PlannedDevice, *, high: int, budget: int | float | str | None
) -> ProbeResult:
    """Estimate the largest micro-batch of a training step of a Trainer on another device.

    Seconds are those of working the step out, not of running it.
    """
    trainer, samples = setup.trainer, largest_samples(setup.loader, setup.order)
    allowed = DeviceBudget(device, budget, buckets=_bucket_bytes(trainer))
    with _without_values(trainer, device) as prepare:
        training = TrainerWithoutValues(setup, samples, prepare)
        with _explained():
            training.see_gradients([training.batch(2)], batch_samples=2)
        training.reset()
        meter = TensorMeter(torch.device("cpu"), training, rounding=device.rounding, room=allowed.asked)
        found = Prober(training, meter, allowed).find(high, predict_only=False)
    return replace(found, source="estimate")


class DeviceBudget(Budget):
    """What a device that is not here leaves to a training, or the budget if that leaves less."""

    def __init__(self, device: PlannedDevice, value: int | float | str | None, *, buckets: int) -> None:
        super().__init__(value, device.total_bytes)
        self._device, self.asked = device, device.budget(value, buckets=buckets)
        self._is_whole = value is None or self.asked >= device.total_bytes - device.reserved_bytes
        if self._is_whole:
            self.bound = f"a device of {format_bytes(device.total_bytes)}"
            self.advice = (
                "plan for a larger device, a lower precision or a smaller model, or use activation checkpointing"
            )

    def enough(self, needed: int) -> str | None:
        """Say which device, or which budget, would leave so many bytes."""
        if not self._is_whole:
            return super().enough(needed)
        return f"a device of {least_budget(self._device.total_for(needed))} is enough"


@contextmanager
def _without_values(trainer: Any, device: PlannedDevice) -> Iterator[Callable[[], None]]:
    """Return a context in which steps run on tensors without values; the yielded function prepares for each."""
    module = trainer.lightning_module
    for reason in hidden_workspaces(module):
        device.doubt(reason)
    with ExitStack() as stack:
        mode, stand_ins = stack.enter_context(without_values(module, trainer.optimizers, foreach=device.like_cuda))
        restore = stack.enter_context(isolated(trainer, stand_ins))
        for context in (_quiet_and_eager(), mode, Answers(device.doubt), PlainCopies()):
            stack.enter_context(context)
        if device.like_cuda:
            stack.enter_context(LikeCuda())

        def prepare() -> None:
            with unset_fake_temporarily():
                restore()
            _let_steps_go_on(trainer, device.doubt)

        prepare()
        yield prepare


class TrainerWithoutValues(ProbedTrainer):
    """The training of a Trainer on batches of any size without values, made out of two small ones."""

    def step(self, samples: int, meter: OriginMeter) -> None:
        """Work out forward, backward, clipping and the optimizer step on so many samples."""
        with _explained():
            super().step(samples, meter)

    def agree(self, value: bool) -> bool:
        """Return it: one process plans for all ranks."""
        return value

    def batch(self, samples: int) -> Any:
        """Make a batch of so many samples on the device, without values.

        Batches repeat the samples at hand in turn, so two of them that are one period apart tell every larger one.
        """
        period = len(self._samples.by_field)
        periods = max(0, samples // period - 1)
        first = samples - periods * period
        with _disable_current_modes():
            small = self._on_host(first)
            large = self._on_host(first + period) if periods else small
        return self._transfer.moved(grown(small, large, periods))


def _let_steps_go_on(trainer: Any, doubt: Callable[[str], None]) -> None:
    """Let what would end a step for want of values do without; all of it are copies of a trial."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    if scaler is not None:  # whether gradients overflow is not known, and a skipped step makes no state
        scaler._maybe_opt_step = lambda optimizer, _state, *args, **kwargs: optimizer.step(*args, **kwargs)
    for metric in trainer.lightning_module.modules():
        if hasattr(metric, "_defaults") and hasattr(metric, "compute"):  # torchmetrics
            if hasattr(metric, "validate_args"):
                vars(metric)["validate_args"] = False
            for name in ("update", "compute", "forward"):
                vars(metric)[name] = _tolerant(getattr(metric, name), type(metric).__name__, doubt)


def _tolerant(method: Callable[..., Any], name: str, doubt: Callable[[str], None]) -> Callable[..., Any]:
    """Make a method of a metric return zero if it fails."""

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except Exception as error:
            if is_out_of_memory(error):
                raise
        doubt(f"{name}: a metric that needs values, left out")
        return torch.zeros(())

    return call


@contextmanager
def _explained() -> Iterator[None]:
    """Turn errors of a step that has no values into one sentence."""
    try:
        yield
    except Exception as error:
        if isinstance(error, UserError) or is_out_of_memory(error):
            raise
        first = (str(error).strip().splitlines() or [""])[0].rstrip(".")
        raise UserError(
            "The training step cannot be planned for another device, because it fails on tensors without values "
            f"({type(error).__name__}: {first}): train on the device itself, where the probe measures the limit."
        ) from error


def _bucket_bytes(trainer: Any) -> int:
    """Return the bytes that data parallelism keeps besides the gradients: buckets to reduce them in."""
    if not ranks.is_distributed(trainer):
        return 0
    return sum(parameter.nbytes for parameter in trainer.lightning_module.parameters() if parameter.requires_grad)


@contextmanager
def _quiet_and_eager() -> Iterator[None]:
    """Keep PyTorch from logging what is answered, and let compiled functions run as they were written, as a context."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level, stance = log.level, getattr(torch.compiler, "set_stance", None)  # since torch 2.6
    log.setLevel(logging.CRITICAL + 1)
    try:
        with nullcontext() if stance is None else stance("force_eager"):
            yield
    finally:
        log.setLevel(level)
