"""Find the largest micro-batch of a real training step, with PyTorch alone.

A plain loop, in full::

    def step(samples: int) -> None:
        loss = loss_of(model(inputs[:samples]), targets[:samples])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    limit = find_micro_batch(step, high=512, budget="4GiB").limit
"""

import gc
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_ga.errors import UserError
from lightning_ga.live import LiveMemory
from lightning_ga.memory import CudaMeter, available_memory, enforced_budget, is_emulated, parse_budget, total_memory
from lightning_ga.oom import is_ambiguous_out_of_memory, is_out_of_memory, release
from lightning_ga.optimizers import SteppingOptimizers
from lightning_ga.plan import require_count
from lightning_ga.replay import Trace
from lightning_ga.search import ProbeResult, Search, Trial, trace_sizes

# Share of a CPU's available memory that a step may take: the rest is for kernels' scratch and other processes.
CPU_SHARE = 0.8


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
) -> ProbeResult:
    """Find the largest number of samples with which a training step fits in memory.

    One warm-up step makes the optimizer's state. Two small steps are traced and predict the peak
    of every size, and one step at the predicted limit verifies it; more follow only if it misses.

    Args:
        step: Runs one whole training step on that many samples: forward, backward and optimizer.
        high: Largest micro-batch that is of use.
        budget: Memory of the whole training, model included: bytes, a share of the device
            (``0.8``, ``"80%"``) or text (``"10GiB"``). ``None`` is what the device has free.
        device: Where the step's memory lies; ``None`` is the current accelerator, or the CPU.
        resident: Tensors that are alive when a step starts (parameters, buffers, gradients,
            optimizer state, batch), asked for before every step and after ``reset``. Without it,
            parameters, their gradients and the state of optimizers that step are found by themselves.
        reset: Puts the training's state back; called after every step, also one that failed. Where
            it drops the optimizer's state, the warmed one is lent to every further trial: a first
            step, without it, takes less memory than the ones that follow.
        agree: True only if its argument is true on every rank. All ranks then run the same sizes
            and find the same limit.
        predict_only: Never run a step near the budget; predict it. ``None`` does so on a CPU
            unless a budget is given that is well within the memory available (running out of
            memory there means that the system kills the process).

    Returns:
        The limit, and how it was found. ``peak_bytes`` is predicted where the limit was not tried.

    Raises:
        UserError: If an argument is wrong, or if not even the smallest step fits.
        Exception: Whatever ``step`` raises that is not about memory, after ``reset``.
    """
    require_count("high", high)
    chosen = _device(device)
    asked = parse_budget(budget, total_memory(chosen) if budget is not None else None)
    prober = _Prober(step, device=chosen, budget=asked, resident=resident, reset=reset, agree=agree)
    hook = register_optimizer_step_pre_hook(prober.on_optimizer_step)
    try:
        with enforced_budget(chosen, asked), _quick_collection():
            return prober.find(high, predict_only)
    finally:
        hook.remove()


@contextmanager
def _quick_collection() -> Iterator[None]:
    """Within, ``gc.collect`` leaves older objects aside: it takes half a second in a process of usual size."""
    gc.collect()
    mine = gc.get_freeze_count() == 0
    if mine:
        gc.freeze()
    try:
        yield
    finally:
        if mine:
            gc.unfreeze()


def _device(device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    current = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return current or torch.device("cpu")


class _Prober:
    """Runs the steps that a search asks for, under a meter, and tells it what came of them."""

    def __init__(
        self,
        step: Callable[[int], object],
        *,
        device: torch.device,
        budget: int | None,
        resident: Callable[[], Iterable[Tensor | None]] | None,
        reset: Callable[[], object] | None,
        agree: Callable[[bool], bool] | None,
    ) -> None:
        self.step, self.resident, self.reset, self.agree = step, resident, reset, agree or bool
        self.device = device
        self.asked = budget
        self.cuda = CudaMeter(device) if device.type == "cuda" else None
        self.meter = LiveMemory(device=device, rounding=512 if self.cuda else 1)
        self.optimizers = SteppingOptimizers()
        self.trials: list[Trial] = []
        self.steps = 0

    def find(self, high: int, predict_only: bool | None) -> ProbeResult:
        """Warm up, then do what the search proposes until it proposes nothing new."""
        started = time.perf_counter()
        high, sizes = self._warm_up(self._smallest(high))
        budget = self._prepare()
        cautious = self._invites_killer() if predict_only is None else predict_only
        search = Search(
            high=high,
            budget=budget,
            sizes=sizes,
            rounding=self.meter.rounding,
            predict_only=not self.agree(not cautious),
        )
        while (size := self._smallest(search.propose())) > search.limit:
            trial, trace = self._try(size, record=self.cuda is None or search.wants_trace)
            self.trials.append(trial)
            search.record(trial, trace)
        limit = self._smallest(search.predicted) if search.predict_only else search.limit
        if limit < 1:
            raise self._too_large(budget)
        measured = {trial.micro_batch_size: trial.peak_bytes for trial in self.trials}
        peak = measured[limit] if limit in measured else search.predict(limit) or 0
        elapsed = time.perf_counter() - started
        return ProbeResult(limit, budget, peak, tuple(self.trials), self.steps, elapsed, search.method)

    def on_optimizer_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Hook before every optimizer step: a phase of the step ends, and its state is known from now on."""
        self.meter.mark()
        self.optimizers.note(optimizer)

    def _warm_up(self, high: int) -> tuple[int, tuple[int, ...]]:
        """Run a first step, of two samples if these fit; the largest size left to search, and sizes to trace."""
        budget = self._prepare()
        if not self.agree(self.meter.live_bytes <= budget):
            raise self._too_large(budget)
        for size in range(min(2, high), 0, -1):
            trial, trace = self._try(size, record=True)
            if trial.fits:
                alive = self._prepare() and self.meter.live_bytes
                growing = trace.transient_peak(self.meter.rounding) if trace else 0
                high = high if size == 2 else 1
                return high, trace_sizes(high, budget, alive=alive, growing=growing, warm_up=size)
            self.trials.append(trial)
        raise self._too_large(budget)

    def _prepare(self) -> int:
        """Count what is alive before a step; the budget in bytes as the device stands now."""
        gc.collect()
        self.optimizers.lend()
        self.meter.add(self.resident() if self.resident else self.optimizers.tensors())
        taken = self.cuda.allocated() if self.cuda else self.meter.live_bytes
        room = taken + self._room()
        return room if self.asked is None else min(self.asked, room)

    def _room(self) -> int:
        """Bytes that the device can still give; on a real CPU, a share of them."""
        real_cpu = self.device.type == "cpu" and not is_emulated(self.device)
        return int((CPU_SHARE if real_cpu else 1) * available_memory(self.device))

    def _invites_killer(self) -> bool:
        """Whether a step that runs out of memory would bring in the operating system's killer."""
        if self.device.type != "cpu" or is_emulated(self.device):
            return False
        return self.asked is None or self.asked > self.meter.live_bytes + self._room()

    def _try(self, size: int, *, record: bool) -> tuple[Trial, Trace | None]:
        """One step from a clean start, and the state put back after it, whatever came of it."""
        budget = self._prepare()
        self.meter.budget = None if self.cuda else budget
        self.meter.start(record=record)
        graded = self.optimizers.graded()
        if self.cuda:
            self.cuda.start()
        self.steps += 1
        started = time.perf_counter()
        failure = self._run(size, record=record)
        peak, undisturbed = self.cuda.finish() if self.cuda else (self.meter.peak_bytes, True)
        seconds = time.perf_counter() - started
        fatal = failure is not None and not self._means_too_large(failure, size)
        if failure is not None and not fatal:
            release(failure)
            peak = max(peak, self.meter.wanted_bytes)
        trace = self.meter.trace(size) if record else None
        self.optimizers.borrow()
        if self.reset is not None:
            self.reset()
        elif failure is not None:
            self.optimizers.regrade(graded)
        if fatal and failure is not None:
            raise failure
        fits = self.agree(failure is None and undisturbed and peak <= budget)
        return Trial(size, peak, fits, seconds), trace if fits else None

    def _run(self, size: int, *, record: bool) -> Exception | None:
        """Run the step without the cycle collector, so that every run releases memory at the same places."""
        collecting = gc.isenabled()
        gc.disable()
        try:
            if record or not self.cuda:
                with self.meter:
                    self.step(size)
            else:
                self.step(size)
        except Exception as error:
            return error
        finally:
            if collecting:
                gc.enable()
        return None

    def _means_too_large(self, failure: Exception, size: int) -> bool:
        """Whether a failed step means that its size does not fit."""
        if is_out_of_memory(failure):
            return True
        smaller = any(trial.fits and trial.micro_batch_size < size for trial in self.trials)
        larger = any(not trial.fits and trial.micro_batch_size > size for trial in self.trials)
        # BatchNorm refuses one sample: with two known to be too many, no size is left.
        return (smaller and is_ambiguous_out_of_memory(failure)) or (size == 1 and larger)

    def _smallest(self, value: int) -> int:
        """The smallest value over ranks, from answers of ``agree`` alone: all ranks ask the same questions."""
        bound = 1
        while self.agree(value >= bound):
            bound *= 2
        low, high = bound // 2, bound - 1
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.agree(value >= middle) else (low, middle - 1)
        return low

    def _too_large(self, budget: int) -> UserError:
        alive = self.meter.live_bytes
        if not self.trials:
            return UserError(
                f"The model and its optimizer alone take {alive:,} bytes, and memory_budget leaves {budget:,}: raise "
                "memory_budget, train in a lower precision, or shard the model over more devices."
            )
        refused = [trial for trial in self.trials if trial.peak_bytes > budget] or self.trials
        least = min(refused, key=lambda trial: trial.micro_batch_size)
        return UserError(
            f"A training step with micro_batch_size={least.micro_batch_size}, the smallest that runs, takes at least "
            f"{least.peak_bytes:,} bytes, and memory_budget leaves {budget:,}: raise memory_budget, train in a lower "
            "precision, or use activation checkpointing or a smaller model."
        )
