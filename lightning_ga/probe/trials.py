"""Run trial steps of a training within a budget, each from the same state.

Tested in tests/integration/test_probe.py and tests/probe/test_probed_loop.py.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from math import inf

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lightning_ga.memory.device import enforced_budget, lifted_budget
from lightning_ga.memory.oom import is_ambiguous_out_of_memory, is_out_of_memory, release
from lightning_ga.plan.records import Trial
from lightning_ga.probe.curve import Step
from lightning_ga.probe.meters import Measurement, PeakHolders, StepMeter
from lightning_ga.probe.training import ProbedTraining

_is_frozen = ContextVar("is_frozen", default=False)


@contextmanager
def older_objects_frozen() -> Iterator[None]:
    """Return a context in which the cycle collector looks at new objects alone: PyTorch has made a million before.

    Nothing is done within another such context, or if the user has frozen objects.
    """
    if _is_frozen.get() or gc.get_freeze_count():  # counting a million takes as long as a small step
        yield
        return
    token = _is_frozen.set(True)
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        _is_frozen.reset(token)


class Trials:
    """Runs steps of a training and puts its state back after each. Ranks vote on what fits.

    With several ranks, all run steps of the same sizes.
    """

    def __init__(self, training: ProbedTraining, meter: StepMeter, asked: int | None) -> None:
        self.steps = 0  # that have run so far
        self.holders = PeakHolders(meter.rounding)
        self._training = training
        self._meter = meter
        self._asked = asked  # bytes of the budget; ``None`` is what the device has free
        self._smallest: float = inf  # size whose step ran
        self._largest_failed = 0
        self._collects = True
        self._records = True

    @contextmanager
    def running(self, *, collects: bool = True) -> Iterator[None]:
        """Watch optimizers, keep to the budget and let ``gc.collect`` leave older objects aside, as a context.

        Unless it ``collects``, no step needs the memory of garbage. A full collection of new objects alone would let
        Python collect all older ones soon after, which may take longer than a step.
        """
        self._collects = collects
        if not self._meter.deadly:  # tensors that nobody refers to use memory of the device
            gc.collect()
        before_steps = register_optimizer_step_pre_hook(self._on_optimizer_step)
        with before_steps, register_optimizer_step_post_hook(self._training.note), older_objects_frozen():
            try:
                with enforced_budget(self._meter.device, self._asked):
                    yield
            finally:
                if self._meter.allocator is not None:
                    self._meter.allocator.stop()
                if collects:
                    gc.collect()  # a failed step that computes again in its backward pass leaves cycles with its batch

    def _on_optimizer_step(self, optimizer: Optimizer, *_: object) -> None:
        """End a phase of the step and remember the optimizer, as a hook before every optimizer step."""
        self._meter.tensors.mark()
        self._training.note(optimizer)

    def prepare(self) -> tuple[int, int]:
        """Prepare a step; return the bytes alive before it, and the budget in bytes as the device stands now."""
        if self._collects:
            gc.collect()
        self._training.lend()
        alive = self._meter.count(self._training.resident())
        room = alive + self._meter.room()
        return alive, room if self._asked is None else min(self._asked, room)

    def could_use_more(self, budget: int) -> bool:
        """Return whether the device has more than the budget."""
        with lifted_budget(self._meter.device):
            return self.prepare()[0] + self._meter.room() > budget

    def run(self, size: int, *, record: bool, bounded: bool = True, lenient: bool = False) -> Step:
        """Run a step from a clean start, and put the state back after it, whatever came of it.

        A step that is not ``bounded`` by the budget is bounded by the device alone, and raises no error. If the caller
        is ``lenient``, an error that may mean that memory ran out does: a search follows, which judges it.
        """
        alive, budget = self.prepare()
        had_gradients = self._training.graded()
        record = record and self._records
        self.steps += 1
        with nullcontext() if bounded else lifted_budget(self._meter.device):
            if not bounded:
                budget = alive + self._meter.room()
            measured = self._meter.run(self._training.step, size, budget=budget, record=record)
        if measured.origins is not None:
            self.holders.record(measured.traces[-1], measured.origins)
        failure = measured.failure
        is_fatal = failure is not None and bounded and not self._means_too_large(failure, size, lenient=lenient)
        if failure is not None and not is_fatal:
            release(failure)
        self._training.put_back(None if failure is None else had_gradients)
        if not self._training.agree(not is_fatal):  # ranks fail together, as each waits for the others' votes
            if not record or self._meter.allocator is None:
                raise self._training.error_of_all(failure)
            # A dispatch mode refuses some steps that run without it.
            self._records = False
            return self.run(size, record=False, bounded=bounded, lenient=lenient)
        return Step(self._judge(size, measured, budget), measured.traces, measured.reserved_bytes)

    def _judge(self, size: int, measured: Measurement, budget: int) -> Trial:
        """Decide whether a step fits, on all ranks."""
        ran = measured.failure is None
        peak = measured.peak_bytes
        is_short = measured.strained or (measured.failure is not None and is_out_of_memory(measured.failure))
        if is_short:  # an allocator that ran out has handed out less than was needed
            peak = max(peak, budget + 1)
        if ran:
            self._smallest = min(self._smallest, size)
        fits = self._training.agree(ran and not is_short and peak <= budget)
        if not fits:
            self._largest_failed = max(self._largest_failed, size)
        return Trial(size, peak, fits, measured.seconds)

    def _means_too_large(self, failure: Exception, size: int, *, lenient: bool) -> bool:
        if is_out_of_memory(failure):
            return True
        if is_ambiguous_out_of_memory(failure) and (lenient or self._smallest < size):
            return True
        # BatchNorm refuses one sample: with two known to be too many, no size is left.
        return size == 1 < self._largest_failed
