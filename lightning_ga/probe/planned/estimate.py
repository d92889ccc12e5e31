"""The probe for a device that is not here: the same trials, on tensors without values.

Everything that a trial step of ``probe`` goes through runs here too: Lightning's loop, precision and
clipping, the module's hooks, the optimizer. Nothing is computed, so that the largest batch of a
large device takes no memory of this one, and even the limit itself is tried.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import chain
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.data import DataLoader

from lightning_ga.compat import agreement, transfer
from lightning_ga.errors import UserError
from lightning_ga.loading.largest_samples import LargestSamples, ScanOrder, largest_samples
from lightning_ga.memory.live_tensors import LiveTensorMeter
from lightning_ga.memory.oom import is_out_of_memory
from lightning_ga.plan.records import ProbeResult
from lightning_ga.probe.isolation import isolated
from lightning_ga.probe.planned.device import PlannedDevice
from lightning_ga.probe.planned.fakes import Answers, PlainCopies
from lightning_ga.probe.planned.like_cuda import LikeCuda
from lightning_ga.probe.planned.stand_ins import grown, hidden_workspaces, without_values
from lightning_ga.probe.prober import Prober, quick_collection
from lightning_ga.probe.trials import TrialStep, WindowGradientsAlive, resident_tensors


def estimate(
    trainer: Any,
    loader: "DataLoader[Any]",
    looks: ScanOrder,
    device: PlannedDevice,
    *,
    high: int,
    share: int,
    budget: int | float | str | None,
    beside: Callable[[], Iterable[torch.Tensor]] = tuple,
) -> ProbeResult:
    """Estimate the largest micro-batch of a training step of this Trainer on another device.

    Args:
        trainer: A Trainer that has set up data, model and optimizer on the CPU, at ``on_train_start``.
        loader: The user's DataLoader, for its dataset and the way it collates samples.
        looks: Which samples to look at; the heaviest of them make up the trial batches.
        device: What is planned for; what makes the estimate less certain is noted in it.
        high: Largest micro-batch that is of use, in samples.
        share: Samples of a window on one rank.
        budget: ``memory_budget`` as the user wrote it.
        beside: Tensors that training holds on the device beside the model.

    Returns:
        What was found, with ``method="estimate"``. Seconds are those of working the step out, not of running it.

    Raises:
        UserError: If the step needs values that are not there, or if not even the smallest micro-batch fits.
    """
    samples = largest_samples(loader, looks)
    with steps_without_values(trainer, loader, samples, device, share=share) as (step, reset):
        allowed = device.budget(budget, buckets=_bucket_bytes(trainer))
        prober = EstimatingProber(step, budget=allowed, reset=reset, trainer=trainer, device=device, beside=beside)
        hook = register_optimizer_step_pre_hook(prober.on_optimizer_step)
        try:
            with quick_collection(first=True):
                found = prober.find(high, False, None)
        finally:
            hook.remove()
    return ProbeResult(
        found.limit, allowed, found.peak_bytes, found.trials, found.steps, found.seconds, "estimate", found.curve
    )


@contextmanager
def steps_without_values(
    trainer: Any, loader: "DataLoader[Any]", samples: LargestSamples, device: PlannedDevice, *, share: int
) -> Iterator[tuple["StepWithoutValues", Callable[[], None]]]:
    """Within, training steps run on tensors without values; afterwards all is as it was.

    Yields:
        A step on a batch of a given size, and the function that prepares for the next one.
    """
    module = trainer.lightning_module
    for reason in hidden_workspaces(module):
        device.doubt(reason)
    with ExitStack() as stack:
        mode, stand_ins = stack.enter_context(without_values(module, trainer.optimizers, foreach=device.like_cuda))
        prepare = stack.enter_context(isolated(trainer, stand_ins))
        step = StepWithoutValues(trainer, loader, samples)
        stack.enter_context(_quiet_and_eager())
        stack.enter_context(mode)
        stack.enter_context(Answers(device.doubt))
        stack.enter_context(PlainCopies())
        if device.like_cuda:
            stack.enter_context(LikeCuda())
        _let_steps_go_on(trainer, device.doubt)
        with _explained():
            alive = WindowGradientsAlive(trainer, step.batch(2), share)

        def reset() -> None:
            with unset_fake_temporarily():
                prepare()
            _let_steps_go_on(trainer, device.doubt)
            alive.fill()

        reset()
        yield step, reset


class StepWithoutValues(TrialStep):
    """A training step on a batch of any size, made out of two small ones.

    Args:
        trainer: The Trainer.
        loader: The user's loader, which collates the samples.
        samples: Samples to fill batches with.
    """

    def __init__(self, trainer: Any, loader: "DataLoader[Any]", samples: LargestSamples) -> None:
        super().__init__(trainer, loader, samples)
        self._period = len(samples.by_field)

    def __call__(self, micro_batch_size: int) -> None:
        """Forward, backward, clipping and the optimizer step on so many samples."""
        with _explained():
            super().__call__(micro_batch_size)

    def batch(self, micro_batch_size: int) -> Any:
        """So many samples on the device, without values.

        Batches repeat the samples at hand in turn, so two of them that are one period apart tell every larger one.
        """
        periods = max(0, micro_batch_size // self._period - 1)
        first = micro_batch_size - periods * self._period
        with _disable_current_modes():
            small = self._on_host(first)
            large = self._on_host(first + self._period) if periods else small
        return transfer.transferred(self._trainer, grown(small, large, periods))

    def _on_host(self, count: int) -> Any:
        return transfer.before_transfer(self._trainer, self._samples.batch(self._loader, count))


class EstimatingProber(Prober):
    """A prober whose device is not here.

    Args:
        step: Runs a training step on that many samples.
        budget: Bytes that it may take.
        reset: Puts the training's state back.
        trainer: The Trainer.
        device: What is planned for.
        beside: Tensors that training holds on the device beside the model.
    """

    def __init__(
        self,
        step: Callable[[int], object],
        *,
        budget: int,
        reset: Callable[[], object],
        trainer: Any,
        device: PlannedDevice,
        beside: Callable[[], Iterable[torch.Tensor]] = tuple,
    ) -> None:
        super().__init__(
            step,
            device=torch.device("cpu"),
            budget=budget,
            resident=lambda: chain(resident_tensors(trainer), beside()),
            reset=reset,
            agree=None,
            on_step=None,
        )
        self._budget = budget
        self._planned = device
        self.meter = LiveTensorMeter(device="cpu", rounding=device.rounding)

    def _room(self) -> int:
        """All of the budget: the memory of this machine is no bound."""
        return self._budget

    def _too_large(self, budget: int) -> UserError:
        needed = min((trial.peak_bytes for trial in self.trials), default=self.meter.live_bytes)
        what = f"A training step of {self.trials[-1].micro_batch_size} samples" if self.trials else "The model alone"
        return UserError(
            f"{what} takes at least {needed:,} bytes, and a device of {self._planned.total_bytes:,} bytes leaves "
            f"{budget:,} to it: plan for a larger device, a lower precision or a smaller model, or use activation "
            "checkpointing."
        )


def _let_steps_go_on(trainer: Any, doubt: Callable[[str], None]) -> None:
    """Before a trial: what would end a step for want of values does without. All of these are a trial's copies."""
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
    """A method of a metric that gives zero where it fails."""

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
    """Errors of a step that has no values, as one sentence."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        first = (str(error).strip().splitlines() or [""])[0].rstrip(".")
        raise UserError(
            "The training step cannot be planned for another device, because it fails on tensors without values "
            f"({type(error).__name__}: {first}): train on the device itself, where the probe measures the limit."
        ) from error


def _bucket_bytes(trainer: Any) -> int:
    """What data parallelism keeps beside the gradients: buckets to reduce them in."""
    if not agreement.is_distributed(trainer):
        return 0
    wanting = [p for p in trainer.lightning_module.parameters() if p.requires_grad]
    return sum(parameter.numel() * parameter.element_size() for parameter in wanting)


@contextmanager
def _quiet_and_eager() -> Iterator[None]:
    """Within, PyTorch does not log what is answered, and compiled functions run as they were written."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level, stance = log.level, getattr(torch.compiler, "set_stance", None)  # since torch 2.6
    log.setLevel(logging.CRITICAL + 1)
    try:
        with nullcontext() if stance is None else stance("force_eager"):
            yield
    finally:
        log.setLevel(level)
