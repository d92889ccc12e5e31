"""Find the limit in a Trainer: real training steps on samples of the real data, leaving no trace.

A trial is the worst micro-batch of an accumulated window, its last: the gradients of the others are alive, then
forward, backward, clipping and the optimizer step, through the strategy and the precision plugin. Afterwards everything
that a step changes is put back (``compat.steps.isolated``).

Tested in tests/integration/test_probe.py and tests/integration/test_traceless.py.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_ga.batch.pytree import tensors_in
from lightning_ga.chunks import ChunkSize
from lightning_ga.compat import ranks
from lightning_ga.compat.gradient_dtype import dtype_of_sum, narrow
from lightning_ga.compat.loaders import BatchTransfer
from lightning_ga.compat.steps import FIRST_OF_WINDOW, LAST_OF_WINDOW, WHOLE_WINDOW, run_pass
from lightning_ga.errors import UserError
from lightning_ga.loading.sample_sizes import SampleSizes
from lightning_ga.loading.trial_batches import TrialBatches
from lightning_ga.memory.live_tensors import compiled_run_eagerly, uncounted
from lightning_ga.memory.oom import attempt, is_out_of_memory
from lightning_ga.memory.step_recorder import StepRecorder, state_of
from lightning_ga.plan.accumulation import ceil_div, whole_multiples
from lightning_ga.plan.config import Options
from lightning_ga.plan.records import RETRIES
from lightning_ga.probe.cache import describe_step
from lightning_ga.probe.probed_loop import numbered
from lightning_ga.probe.training import ProbedTraining
from lightning_ga.recompute.choice import Candidate
from lightning_ga.recompute.survey import survey
from lightning_ga.recompute.wrapper import recomputed
from lightning_ga.snapshot.copies import is_writable, sparse_parameters

FIRST_CHUNKS = (16, 64, 256)  # of a window, tried in turn: with more of them a step is slow
ROW_SAMPLES = (32, 8)  # samples of a pass in which the rows of sparse gradients are counted: the first that fits


@dataclass(frozen=True, slots=True)
class TrainingSetup:
    """A training whose limit is looked for: data, model and optimizer are set up."""

    trainer: Any
    batches: TrialBatches
    rank_samples: int  # of a window on one rank; of several loaders, the parts into which its batch can be cut
    kept: Callable[[], Iterable[Tensor]]  # what is on the device for a retry, besides the model
    chunks: ChunkSize | None = None  # of submodules that run over whole windows: then their size is tried
    multiple: int = 1  # of which micro-batches are multiples
    alone: bool = False  # whether each rank finds a limit of its own, so that they do not vote
    sizes: SampleSizes | None = None  # of samples, if windows are cut by these
    begins: bool = True  # whether training begins: then the module's start hooks have not run


class FailedOnRanksError(Exception):
    """A trial step failed on one rank at least, and all ranks raise this; the argument is the rank's own error."""


class ProbedTrainer(ProbedTraining):
    """The training of a Trainer: steps on batches of its largest samples, from the same state each."""

    def __init__(self, setup: TrainingSetup, restore: Callable[[], None]) -> None:
        super().__init__()
        self.trainer = setup.trainer
        self.device = numbered(setup.trainer.strategy.root_device)
        self.batches = setup.batches
        self.multiple = setup.multiple
        self._setup = setup
        self._restore = restore
        self._gradients: dict[Tensor, int | None] = {}  # of a window: parameters, and rows of sparse gradients
        self._assumed: list[Tensor] = []  # parameters with a gradient as long as no step has shown which have one
        self._recomputed: tuple[str, ...] = ()  # in steps

    def use_batches(self, batches: TrialBatches) -> None:
        """Run the next steps on other batches."""
        self.batches = batches

    def batch(self, samples: int) -> tuple[Any, Any]:
        """Make a batch of so many samples on the device, and the whole batch that training has beside it."""
        return self.batches.make(samples, BatchTransfer(self.trainer).for_trial)

    def describe(self, options: Options) -> dict[str, Any]:
        """Describe the step, so that a limit of the same kind of step is found in the cache."""
        with uncounted():
            batch_and_whole = self.batch(min(2, self.batches.most))
        return describe_step(self.trainer, batch_and_whole, options, self._setup.rank_samples)

    def see_gradients(self) -> None:
        """See in a small pass which parameters have gradients, unless a step has shown that all are dense.

        Rows of sparse gradients are counted in a larger pass, because samples share rows.
        """
        if self._gradients and not any(self._gradients.values()):
            return
        if not self._gradients:
            self._run_first_that_fits((self.few(self.batches.most), 2))
        if not self._gradients:  # the prober will say that nothing fits
            self._gradients = dict.fromkeys(self._trained())
        if any(self._gradients.values()):
            self._run_first_that_fits(ROW_SAMPLES)
        self.reset()

    def _run_first_that_fits(self, sizes: Sequence[int]) -> None:
        """Run the first pass of a window on the first of these numbers of samples for which memory is enough."""
        for samples in sizes:
            with uncounted(), compiled_run_eagerly():
                tried = attempt(self.first_pass, is_out_of_memory, samples)
            if tried.failure is None:
                return

    def first_pass(self, samples: int, meter: StepRecorder | None = None) -> None:
        """Run the first pass of a window on a few samples, in one chunk, without the optimizer's step."""
        samples = whole_multiples(min(samples, self.batches.most), self.multiple)
        if self._setup.chunks is not None:
            self._setup.chunks.use(None, window=samples)
        batch, _whole = self.batch(samples)
        run_pass(self.trainer, batch, FIRST_OF_WINDOW, after_backward=partial(self._note_gradients, meter, samples))

    def _note_gradients(self, meter: StepRecorder | None, samples: int) -> None:
        """Note that a phase of the step ends, and which parameters have gradients after a pass of so many samples.

        A window has at most as many rows of a sparse gradient for each sample as one pass has.
        """
        if meter is not None:
            meter.mark()
        for parameter in self._trained():
            gradient = parameter.grad
            if gradient is None:
                continue
            rows = None
            if gradient.is_sparse:
                in_pass = gradient.coalesce().indices().shape[1]
                rows = min(len(parameter), ceil_div(in_pass * self._setup.rank_samples, samples))
            self._gradients[parameter] = rows

    @contextmanager
    def _noting_reached(self) -> Iterator[None]:
        """Return a context for a step, after which it is known whether all gradients are there that were assumed."""
        reached = set[Tensor]()
        hooks = [each.register_post_accumulate_grad_hook(reached.add) for each in self._assumed]  # type: ignore[no-untyped-call]
        try:
            yield
            self.reached_all = reached.issuperset(self._assumed)
            self._assumed = []
        finally:
            for hook in hooks:
                hook.remove()

    def _trained(self) -> list[Tensor]:
        return [each for each in self.trainer.lightning_module.parameters() if each.requires_grad]

    def updates_in_proportion(self) -> bool:
        """Return whether all optimizers are PyTorch's own: others, such as Shampoo, may keep matrices of any size."""
        return all(type(optimizer).__module__.startswith("torch.optim.") for optimizer in self.trainer.optimizers)

    def recompute(self, names: tuple[str, ...]) -> None:
        """Let steps compute these submodules again."""
        self._recomputed = names

    def forget(self) -> None:
        """Run plain steps, and see again which parameters have gradients.

        ``reached_all`` stays: if a step has not reached all, the next ``warm_up`` sees gradients and assumes none.
        """
        super().forget()
        self._recomputed = ()
        if self._gradients:
            self._gradients = {}
            self.reset()

    def survey(self) -> tuple[int, Candidate]:
        """See what submodules would free, with the fewest samples that run: BatchNorm may refuse one."""
        self._restore()  # there are no gradients
        for samples in (1, 2):
            found = attempt(self._survey_of, lambda error: not is_out_of_memory(error), samples).result
            if found is not None:
                return samples, found
        few = self.few(self.batches.most)
        return few, self._survey_of(few)

    def _survey_of(self, samples: int) -> Candidate:
        step = partial(self.first_pass, samples)
        return survey(self.trainer.lightning_module, step, step)

    def step(self, samples: int, meter: StepRecorder) -> None:
        """Run forward, backward, clipping and the optimizer step on so many samples."""
        chunks = self._setup.chunks
        window = self._setup.rank_samples
        in_pass = samples
        if chunks is not None:
            chunks.use(samples, window=window)
            in_pass = window
        batch, whole = self.batch(in_pass)
        meter.note_batch(tensors_in((whole, batch)))
        place = WHOLE_WINDOW
        after_backward: Callable[[], None] = partial(self._note_gradients, meter, in_pass)
        if self._gradients:
            after_backward = meter.mark
            if chunks is None:
                place = LAST_OF_WINDOW
        with recomputed(self.trainer.lightning_module, self._recomputed), self._noting_reached():
            run_pass(self.trainer, batch, place, after_backward=after_backward)

    def owned(self) -> dict[str, list[Tensor]]:
        """Return the tensors that lie on the device before a step, by what they are."""
        module = self.trainer.lightning_module
        state = state_of((*module.parameters(), *module.buffers()), self.trainer.optimizers)
        return {**state, RETRIES: list(self._setup.kept())}

    def reset(self) -> bool:
        """Put everything back, and let the gradients of earlier micro-batches be alive, of zeros."""
        self._restore()
        for parameter, rows in self._gradients.items():
            before = parameter.grad  # of the last window of training
            if rows is None and before is not None and _is_sum(before, parameter):
                before.zero_()
            else:
                parameter.grad = _zeros(parameter, rows)
        return True

    def first_sizes(self, high: int, *, cautious: bool = False) -> Sequence[int]:
        """Return the sizes to try for the first step: large chunks first, because a window has many chunks of two."""
        sizes = super().first_sizes(high, cautious=cautious)
        if self._setup.chunks is None:
            return sizes
        large = [self.useful(high // chunks, 0) for chunks in FIRST_CHUNKS if high // chunks > 2]
        return [*large, *sizes]

    def useful(self, samples: int, limit: int) -> int:
        """Return the size of as many chunks of near-equal size, or of one fewer if these are known to fit."""
        if self._setup.chunks is None or samples <= limit:
            return samples
        window = self._setup.rank_samples
        most = ceil_div(window, limit) - 1 if limit else window
        chunks = min(ceil_div(window, samples), most)
        return ceil_div(window, max(1, chunks))

    def agree(self, value: bool) -> bool:
        """Return whether ``value`` is true on every rank."""
        return value if self._setup.alone else ranks.sum_over_ranks(self.trainer, float(not value)) == 0

    def error_of_all(self, failure: Exception | None) -> Exception:
        """Return the error to raise on every rank: on several, one that tells that all raise it, but for bad input."""
        error = super().error_of_all(failure)
        if self._setup.alone or self.trainer.world_size == 1 or not self.agree(not isinstance(failure, UserError)):
            return error
        return FailedOnRanksError(error)

    def are_alike(self, value: object) -> bool:
        """Return whether every rank has this value."""
        return self._setup.alone or len({*ranks.of_all_ranks(self.trainer, value)}) == 1

    def warm_up(self) -> None:
        """Make what the first training step would, by a step on gradients of zeros: of all that is trained, if unseen.

        If some are sparse, or a step has not reached all, a small pass shows which gradients there are.
        """
        module = self.trainer.lightning_module
        try:
            if not self._gradients and (not self.reached_all or sparse_parameters(module)):
                self.see_gradients()
            elif not self._gradients:
                self._assumed = self._trained()
                self._gradients = dict.fromkeys(self._assumed)
            self.reset()
            narrow(module.parameters())
            for optimizer in self.trainer.optimizers:
                optimizer.step(lambda: torch.zeros(()))
        finally:
            self.put_back()


def _is_sum(gradient: Tensor, parameter: Tensor) -> bool:
    """Return whether a gradient is stored as the sum of a window's, so that a trial may take its place."""
    return is_writable(gradient) and not gradient.requires_grad and gradient.dtype == dtype_of_sum(parameter)


def _zeros(parameter: Tensor, rows: int | None) -> Tensor:
    """Return a gradient of zeros, a sparse one of so many rows if that is given."""
    if rows is None:
        return torch.zeros_like(parameter, dtype=dtype_of_sum(parameter))
    values = parameter.new_zeros(rows, *parameter.shape[1:], dtype=dtype_of_sum(parameter))
    indices = torch.arange(rows, device=parameter.device)[None]
    return torch.sparse_coo_tensor(indices, values, parameter.shape, is_coalesced=True, check_invariants=False)
