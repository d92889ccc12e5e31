"""Find the largest micro-batch of a real training step, with PyTorch alone: see ``examples/plain_pytorch.py``."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_ga.memory.device import total_memory
from lightning_ga.memory.step_recorder import StepRecorder
from lightning_ga.memory.vendors import WITH_STATISTICS
from lightning_ga.plan.accumulation import require_count
from lightning_ga.plan.records import ProbeResult
from lightning_ga.probe.budget import Budget
from lightning_ga.probe.meters import StepMeter
from lightning_ga.probe.prober import Prober
from lightning_ga.probe.training import ProbedTraining


def find_micro_batch(
    step: Callable[[int], object],
    *,
    high: int,
    budget: int | float | str | None = None,
    device: torch.device | str | None = None,
    resident: Callable[[], Iterable[Tensor | None]] | None = None,
    reset: Callable[[], object] | None = None,
    agree: Callable[[bool], bool] | None = None,
    predict_only: bool | None = None,
    known: ProbeResult | None = None,
) -> ProbeResult:
    """Find the largest number of samples with which a training step fits in memory.

    One warm-up step makes the optimizer's state. Two small steps are traced and predict the peak
    of every size, and one step at the predicted limit verifies it; more follow only if it misses.

    Args:
        step: Runs one whole training step on that many samples: forward, backward and optimizer.
        high: Largest micro-batch that is of use.
        budget: Memory of the whole training, model included: bytes, a share of the device
            (``0.8``, ``"80%"``) or text (``"10GiB"``). ``None`` is what the device has free.
        device: The device of the step's memory; ``None`` is the current accelerator, or the CPU.
        resident: Tensors that are alive when a step starts (parameters, buffers, gradients,
            optimizer state, batch), asked for before every step and after ``reset``. Without it,
            parameters, their gradients and the state of optimizers that step are found by themselves.
        reset: Puts the training's state back; called after every step, also one that failed. If it
            drops the optimizer's state, later trials get the state of the warm-up step: without
            it, a step needs less memory than in training.
        agree: True only if its argument is true on every rank. All ranks then run the same sizes
            and find the same limit.
        predict_only: Never run a step near the budget; predict it. ``None`` does so on a CPU
            unless a budget is given that is well within the memory available (running out of
            memory there means that the system kills the process).
        known: The result of an earlier probe of the same step. If it is valid for this budget, one
            step at its limit verifies it, and there is no search.

    Returns:
        The limit, and how it was found. ``peak_bytes`` is predicted if the limit was not tried.

    Raises:
        UserError: If an argument is wrong, or if not even the smallest step fits.
        Exception: Whatever ``step`` raises that is not about memory, after ``reset``.
    """
    require_count("high", high)
    training = ProbedLoop(step, resident, reset, agree or bool)
    chosen = numbered(device)
    total_bytes = None if budget is None else total_memory(chosen)
    advice = "compute submodules again, within lightning_ga.recomputed; or "
    allowed = Budget(budget, total_bytes, name="budget", advice=advice)
    return Prober(training, StepMeter(chosen, training), allowed).find(high, known=known, predict_only=predict_only)


@dataclass(eq=False)
class ProbedLoop(ProbedTraining):
    """A training given by the functions that ``find_micro_batch`` gets."""

    _step: Callable[[int], object]
    _resident: Callable[[], Iterable[Tensor | None]] | None
    _reset: Callable[[], object] | None
    _agree: Callable[[bool], bool]

    def __post_init__(self) -> None:
        super().__init__()

    def step(self, samples: int, meter: StepRecorder) -> object:
        """Run the user's step."""
        return self._step(samples)

    def resident(self) -> Iterable[Tensor | None]:
        """Return what the user names, or what is seen of the optimizers."""
        return super().resident() if self._resident is None else self._resident()

    def reset(self) -> bool:
        """Put back what the user puts back."""
        if self._reset is not None:
            self._reset()
        return self._reset is not None

    def agree(self, value: bool) -> bool:
        """Ask the user's function."""
        return self._agree(value)


def numbered(device: torch.device | str | None) -> torch.device:
    """Give a device its number: some of PyTorch's functions refuse a bare ``"cuda"``. ``None`` is the current one."""
    current = torch.device("cpu")
    if torch.accelerator.is_available():
        current = torch.accelerator.current_accelerator() or current
    chosen = torch.device(current if device is None else device)
    if chosen != current or chosen.type not in WITH_STATISTICS:
        return chosen
    return torch.device(chosen.type, getattr(torch, chosen.type).current_device())
