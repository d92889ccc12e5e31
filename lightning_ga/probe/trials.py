"""Find the limit in a Trainer: real training steps on samples of the real data, leaving no trace.

A trial is the worst micro-batch of an accumulated window, its last: the gradients of the others are alive, then
forward, backward, clipping and the optimizer step, through the strategy and the precision plugin. Afterwards everything
that a step changes is put back (``isolation``).
"""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any, Protocol

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_ga.batch.layout import LayoutError
from lightning_ga.batch.pytree import tensors_in
from lightning_ga.compat import ranks
from lightning_ga.compat.dataloaders import BatchTransfer
from lightning_ga.compat.gradient_dtype import dtype_of_sum
from lightning_ga.compat.trial_steps import FIRST_OF_WINDOW, LAST_OF_WINDOW, WHOLE_WINDOW, PassPlace, run_pass
from lightning_ga.loading.largest_samples import LargestSamples, ScanOrder, largest_samples
from lightning_ga.loading.reader import BatchReader
from lightning_ga.loading.samples import collate_samples
from lightning_ga.loading.sized import Sized
from lightning_ga.memory.device import synchronize, total_memory
from lightning_ga.memory.holders import OriginMeter, state_of
from lightning_ga.memory.live_tensors import uncounted
from lightning_ga.memory.oom import attempt, is_out_of_memory
from lightning_ga.plan.accumulation import ChunkSize
from lightning_ga.plan.config import Options
from lightning_ga.plan.records import RETRIES, ProbeResult, Timing
from lightning_ga.probe.cache import describe_step, remember, remembered
from lightning_ga.probe.finder import numbered
from lightning_ga.probe.meters import meter_of
from lightning_ga.probe.prober import Budget, Prober
from lightning_ga.probe.training import ProbedTraining, isolated
from lightning_ga.probe.within_limit import fastest, limits_by_size, pass_cost, time_windows

MOST_KEPT = 3  # chunks that are tried to be kept: more would fit in larger chunks
FIRST_CHUNKS = 16  # of a window: with more of them a step takes long
TIMED = 3  # passes of a size, after one to warm up


class Survival(Protocol):
    """What runs a training's passes, and keeps what it needs to run them again."""

    def memory_kept(self) -> Iterable[Tensor]:
        """Return what it holds on the device besides the model."""


@dataclass(frozen=True, slots=True)
class StepCut:
    """How the step cuts batches of so many samples."""

    reader: BatchReader
    batch_samples: int


@dataclass(frozen=True, slots=True)
class TrainingSetup:
    """A training whose limit is looked for, at ``on_train_start``: data, model and optimizer are set up."""

    trainer: Any
    loader: "DataLoader[Any]"  # the user's, for its dataset and the way it collates samples
    order: ScanOrder  # which samples to look at; the largest of them make up the trial batches
    rank_samples: int  # of a window on one rank
    survival: Survival
    cut: StepCut | None = None  # ``None`` if the loader cuts batches
    chunks: ChunkSize | None = None  # of submodules that run over whole windows: then their size is tried
    sizes: Sized | None = None  # what cuts windows by the sizes of samples, if anything does


def probe(setup: TrainingSetup, options: Options, *, high: int) -> tuple[ProbeResult, Mapping[str, Any] | None] | None:
    """Find the largest micro-batch of a training step of a Trainer, or remember it; ``None`` if there is no sample.

    Beside it is the description of the step that it is remembered for; ``None`` without a cache.
    """
    trainer, loader = setup.trainer, setup.loader
    started = time.perf_counter()
    with announcing(trainer) as announce, isolated(trainer) as restore:
        samples = largest_samples(loader, setup.order)
        if not samples.by_weight:
            return None
        if not samples.complete:
            _warn_of_unseen(samples.seen, setup.order.total)
        few = min(2, high)
        training = ProbedTrainer(setup, samples, restore, announce)
        with uncounted():
            batches = _small_batches(trainer, loader, samples.by_weight, few)
            training.see_gradients(batches, batch_samples=min(few, len(samples.by_weight)))
        training.reset()
        device = numbered(trainer.strategy.root_device)
        budget = Budget(options.budget, total_memory(device))
        if setup.chunks is not None:
            budget.advice = (
                f"give a smaller effective_batch_size, as whole= makes a window one pass; or {budget.advice}"
            )
        prober = Prober(training, meter_of(device, training), budget)
        whole = None if setup.cut is None else setup.cut.batch_samples
        described = trainer, loader.collate_fn, samples.by_weight, options, setup.rank_samples, whole
        kind = describe_step(*described) if options.cache else None
        predict_only = True if ranks.is_sharded(trainer) else None
        found = prober.find(high, known=remembered(kind) if kind else None, predict_only=predict_only)
        if found.source != "cache" and setup.chunks is not None and options.objective == "throughput":
            found = _kept_chunks(found, prober, setup, predict_only)
        elif found.source != "cache" and options.objective == "throughput":
            announce("Looking for the fastest micro-batch …")
            timings = timed_windows(training, rank_samples=setup.rank_samples, limit=found.limit)
            found = replace(found, timings=timings, fastest=fastest(timings))
        if setup.sizes is not None:
            longest, limit = setup.sizes.longest, found.limit
            shorter, few_samples = setup.sizes.some_of(-(-limit * longest // high))
            training.take(few_samples)
            confirm = partial(prober.confirm, predict_only=predict_only)
            limits, steps = limits_by_size(confirm, limit, longest=longest, shorter=shorter, high=high)
            cost = pass_cost(found.timings, setup.rank_samples * longest)
            found = replace(found, sizes=replace(limits, pass_cost=cost), steps=steps or found.steps)
        if found.source != "cache" and kind:
            remember(kind, found)
    return replace(found, seconds=time.perf_counter() - started), kind


def _kept_chunks(found: ProbeResult, prober: Prober, setup: TrainingSetup, predict_only: bool | None) -> ProbeResult:
    """Find how many chunks of a step may keep their activations beside the limit."""
    chunks, window = setup.chunks, setup.rank_samples
    assert chunks is not None, "submodules run in chunks"
    size, kept, steps = -(-window // -(-window // found.limit)), 0, found.steps
    fits = size < window  # a window of one chunk is not computed again
    while fits and kept < MOST_KEPT:
        chunks.keep = kept + 1
        limit, steps = prober.confirm([size], predict_only=predict_only)
        fits = limit >= size
        kept += fits
    chunks.keep = 0
    return replace(found, kept_chunks=kept, steps=steps)


def _small_batches(trainer: Any, loader: "DataLoader[Any]", samples: list[Any], count: int) -> Iterator[Any]:
    """Yield batches of ``count`` of the samples on the device, each sample in one of them at most."""
    for first in range(0, max(1, len(samples) - count + 1), count):
        yield BatchTransfer(trainer).to_device(collate_samples(loader, samples[first : first + count], count))


def _warn_of_unseen(seen: int, total: int | None) -> None:
    of = "" if total is None else f" of {total:,}"
    rank_zero_warn(
        f"Samples vary in size, and there was time to look at {seen:,}{of}: a batch of heavier ones may not fit at the "
        "limit found. Sort the dataset by size (its first and its last sample are always looked at), or give "
        "max_micro_batch_size=…"
    )


@contextmanager
def announcing(trainer: Any) -> Iterator[Callable[[str], None]]:
    """Yield what writes a line over the last one, on rank 0 in a terminal: the progress bar is not there yet."""
    bar = trainer.progress_bar_callback
    wanted = bar is not None and not getattr(bar, "is_disabled", False)
    visible = wanted and trainer.is_global_zero and sys.stderr.isatty()

    def write(text: str) -> None:
        if visible:
            print(f"\r{text:<79}", end="" if text else "\r", file=sys.stderr, flush=True)

    try:
        yield write
    finally:
        write("")


class ProbedTrainer(ProbedTraining):
    """The training of a Trainer: steps on batches of its largest samples, from the same state each."""

    def __init__(
        self,
        setup: TrainingSetup,
        samples: LargestSamples,
        restore: Callable[[], None],
        announce: Callable[[str], object] = len,
    ) -> None:
        super().__init__()
        self.trainer, self.module = setup.trainer, setup.trainer.lightning_module
        self._setup, self._samples, self._restore, self._write = setup, samples, restore, announce
        self._transfer = BatchTransfer(setup.trainer)
        self._held: Any = None  # the batch that a trial's samples are cut from
        self._gradients: WindowGradientsAlive | None = None
        self._steps = count(1)

    def take(self, samples: Sequence[Any]) -> None:
        """Make batches of other samples from here on."""
        self._samples = LargestSamples([*samples], [*samples], len(samples), complete=True)

    def see_gradients(self, batches: Iterable[Any], *, batch_samples: int) -> None:
        """See which gradients small batches of so many different samples make."""
        self._gradients = WindowGradientsAlive(self._setup, batches, batch_samples=batch_samples)

    def step(self, samples: int, meter: OriginMeter) -> None:
        """Run forward, backward, clipping and the optimizer step on so many samples."""
        chunks, window = self._setup.chunks, self._setup.rank_samples
        if chunks is not None:
            chunks.begin_step(window)
            chunks.samples, chunks.recomputes_all = samples, samples < window
            chunks.even = chunks.keep > 0  # as training cuts, once their number is known
            chunks.on_recompute = meter.mark  # a phase ends with the loss, which may take more than a chunk
        batch = self.batch(samples if chunks is None else window)
        meter.note_batch(tensors_in((self._held, batch)))
        run_pass(self.trainer, batch, LAST_OF_WINDOW if chunks is None else WHOLE_WINDOW)

    def owned(self) -> dict[str, list[Tensor]]:
        """Return the tensors that lie on the device before a step, by what they are."""
        module = self.trainer.lightning_module
        state = state_of((*module.parameters(), *module.buffers()), self.trainer.optimizers)
        return {**state, RETRIES: list(self._setup.survival.memory_kept())}

    def reset(self) -> bool:
        """Put everything back, and let the gradients of earlier micro-batches be alive."""
        self._restore()
        if self._gradients is not None:
            self._gradients.fill()
        return True

    def first_sizes(self, high: int) -> Sequence[int]:
        """Return the sizes of which the first that runs is the first step: no chunks of two, as a window has many."""
        if self._setup.chunks is None:
            return super().first_sizes(high)
        fewer = (high // (FIRST_CHUNKS * 4**power) for power in range(8))
        return [*(size for size in fewer if size > 2), *super().first_sizes(high)]

    def useful(self, samples: int, limit: int) -> int:
        """Return the size of as many chunks of near-equal size, or of one fewer if these are known to fit."""
        if self._setup.chunks is None or samples <= limit:
            return samples
        window = self._setup.rank_samples
        chunks = min(-(-window // samples), -(-window // limit) - 1 if limit else window)
        return -(-window // max(1, chunks))

    def agree(self, value: bool) -> bool:
        """Return whether something is so on every rank."""
        return ranks.sum_over_ranks(self.trainer, float(not value)) == 0

    def announce(self, samples: int) -> None:
        """Say which step runs next."""
        self._write(f"Looking for the largest micro-batch: step {next(self._steps)}, {samples} samples …")

    def warm_up(self) -> bool:
        """Make what the first training step would, by a step on gradients of zeros."""
        for optimizer in self.trainer.optimizers:
            optimizer.step(lambda: torch.zeros(()))
        return True

    def batch(self, samples: int) -> Any:
        """Make a batch of so many samples on the device, with the rest of their batch if they are cut from one."""
        cut = self._setup.cut
        if cut is None or cut.batch_samples <= samples:
            return self._transfer.moved(self._on_host(samples))
        batch = self._on_host(cut.batch_samples)
        self._held, moved = batch, None  # on a CPU, a part is a view of its batch, in the same memory
        if self._transfer.has_hooks:
            moved = attempt(partial(self._transfer.moved, batch)).result
        if moved is None:
            return self._transfer.moved(self._part(cut, batch, samples, on_host=True))
        self._held = moved
        return self._part(cut, moved, samples, on_host=False)

    def _part(self, cut: StepCut, batch: Any, samples: int, *, on_host: bool) -> Any:
        """Return the first samples of a batch, as training cuts them out."""
        if not cut.reader.makes_anew:
            with suppress(LayoutError):
                slices = cut.reader.slices(batch, expected=cut.batch_samples, on_host=on_host)
                return slices.take(0, samples)
        part = self._on_host(samples)
        return part if on_host else self._transfer.moved(part)

    def _on_host(self, samples: int) -> Any:
        return self._transfer.on_host(self._samples.batch(self._setup.loader, samples))


class WindowGradientsAlive:
    """Gradients of the window's earlier micro-batches, alive as they are in its last.

    Which parameters have one, and whether it is sparse, is seen in a backward pass on the first of some small batches.
    The rows of sparse gradients are counted in passes on the others: samples share rows, so a window has at most as
    many for each sample as these have.
    """

    def __init__(self, setup: TrainingSetup, batches: Iterable[Any], *, batch_samples: int) -> None:
        def runs(batch: Any) -> bool:
            return attempt(run_pass, is_out_of_memory, setup.trainer, batch, FIRST_OF_WINDOW).failure is None

        parameters, remaining = list(setup.trainer.lightning_module.parameters()), iter(batches)
        first_runs = runs(next(remaining))  # if not, the prober will say that nothing fits
        having = [p for p in parameters if (p.grad is not None if first_runs else p.requires_grad)]
        self._rows: dict[Tensor, int | None] = dict.fromkeys(having)  # of sparse gradients
        samples, sums = batch_samples, _sparse_gradients(parameters) if first_runs else {}
        for batch in remaining if sums else ():
            if not runs(batch):
                break
            samples += batch_samples
            for parameter, gradient in _sparse_gradients(parameters).items():
                sums[parameter] = (sums[parameter] + gradient).coalesce() if parameter in sums else gradient
        for parameter, gradient in sums.items():
            self._rows[parameter] = min(len(parameter), -(-gradient.indices().shape[1] * setup.rank_samples // samples))

    def fill(self) -> None:
        """Give every parameter its gradient, of zeros."""
        for parameter, rows in self._rows.items():
            parameter.grad = _zeros(parameter, rows)


def _sparse_gradients(parameters: Iterable[Tensor]) -> dict[Tensor, Tensor]:
    return {p: p.grad.coalesce() for p in parameters if p.grad is not None and p.grad.is_sparse}


def _zeros(parameter: Tensor, rows: int | None) -> Tensor:
    """Return a gradient of zeros, a sparse one of so many rows if that is given."""
    if rows is None:
        return torch.zeros_like(parameter, dtype=dtype_of_sum(parameter))
    values = parameter.new_zeros(rows, *parameter.shape[1:], dtype=dtype_of_sum(parameter))
    indices = torch.arange(rows, device=parameter.device)[None]
    return torch.sparse_coo_tensor(indices, values, parameter.shape, is_coalesced=True, check_invariants=False)


def timed_windows(training: ProbedTrainer, *, rank_samples: int, limit: int) -> tuple[Timing, ...]:
    """Time windows at several micro-batches up to the limit, from passes and steps of a Trainer.

    Each is run once to warm up. The best of some counts, and the slowest rank's, because ranks wait for each other.
    """
    trainer = training.trainer

    def best_seconds(place: PassPlace, size: int) -> float:
        seconds = []
        for _ in range(1 + TIMED):
            training.reset()
            batch = training.batch(size)
            synchronize(trainer.strategy.root_device)
            started = time.perf_counter()
            run_pass(trainer, batch, place)
            synchronize(trainer.strategy.root_device)
            seconds.append(time.perf_counter() - started)
        training.reset()
        return ranks.largest_over_ranks(trainer, int(1e6 * min(seconds[1:]))) / 1e6

    pass_seconds = partial(best_seconds, FIRST_OF_WINDOW)
    size = min(2, limit)
    optimizer = max(0.0, best_seconds(LAST_OF_WINDOW, size) - pass_seconds(size))
    return time_windows(pass_seconds, optimizer, rank_samples=rank_samples, limit=limit)
