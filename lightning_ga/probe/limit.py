"""Find the limit in a Trainer: real training steps on samples of the real data, leaving no trace.

A trial is the worst micro-batch of an accumulated window, its last: the gradients of the others are
alive, then forward, backward, clipping and the optimizer step, through the strategy and the
precision plugin (``trials``). Afterwards everything that a step changes is put back (``isolation``).
"""

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain, count
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.utils.data import DataLoader

from lightning_ga.compat import agreement, transfer
from lightning_ga.loading.largest_samples import largest_samples
from lightning_ga.loading.samples import collate_samples
from lightning_ga.memory.device import total_memory
from lightning_ga.memory.live_tensors import uncounted
from lightning_ga.plan.config import Options
from lightning_ga.plan.records import ProbeResult
from lightning_ga.plan.units import parse_budget
from lightning_ga.probe.cache import describe_step, remember, remembered
from lightning_ga.probe.finder import numbered
from lightning_ga.probe.isolation import isolated
from lightning_ga.probe.meters import meter_of
from lightning_ga.probe.prober import Prober
from lightning_ga.probe.shortage import Shortage
from lightning_ga.probe.throughput import fastest
from lightning_ga.probe.training import ProbedTraining
from lightning_ga.probe.trials import (
    TrainingSetup,
    TrialStep,
    WindowGradientsAlive,
    make_optimizer_state,
    timed_windows,
)


def probe(setup: TrainingSetup, options: Options, *, high: int) -> tuple[ProbeResult, Mapping[str, Any] | None] | None:
    """Find the largest micro-batch of a training step of a Trainer, or remember it; ``None`` if there is no sample.

    Beside it is the description of the step that it is remembered for; ``None`` without a cache.
    """
    trainer, loader, rank_samples = setup.trainer, setup.loader, setup.rank_samples
    started = time.perf_counter()
    with announcing(trainer) as announce, isolated(trainer) as restore:
        samples = largest_samples(loader, setup.order)
        if not samples.by_weight:
            return None
        if not samples.complete:
            _warn_of_unseen(samples.seen, setup.order.total)
        device = numbered(trainer.strategy.root_device)
        total = total_memory(device)
        meter = meter_of(device, module=trainer.lightning_module, owners=setup.resident)
        step = TrialStep(setup, samples, meter.tensors.note_batch)
        with uncounted():
            few = min(2, high)
            batches = _small_batches(trainer, loader, samples.by_weight, few)
            different = min(few, len(samples.by_weight))
            alive = WindowGradientsAlive(trainer, batches, batch_samples=different, rank_samples=rank_samples)

        def reset() -> None:
            restore()
            alive.fill()

        reset()
        steps = count(1)
        training = ProbedTraining(
            step,
            resident=lambda: chain(*setup.resident().values()),
            reset=reset,
            agree=lambda fits: agreement.sum_over_ranks(trainer, float(not fits)) == 0,
            on_step=lambda n: announce(f"Looking for the largest micro-batch: step {next(steps)}, {n} samples …"),
            warm_up=partial(make_optimizer_state, trainer),
        )
        shortage = Shortage.of_budget(options.budget, total)
        prober = Prober(training, meter, budget=parse_budget(options.budget, total), shortage=shortage)
        described = trainer, loader.collate_fn, samples.by_weight, options, rank_samples, setup.batch_samples
        kind = describe_step(*described) if options.cache else None
        found = prober.find(
            high,
            known=remembered(kind) if kind else None,
            predict_only=True if agreement.is_sharded(trainer) else None,
        )
        if found.source != "cache" and options.objective == "throughput":
            announce("Looking for the fastest micro-batch …")
            timings = timed_windows(trainer, step, reset, rank_samples=rank_samples, limit=found.limit)
            found = replace(found, timings=timings, fastest=fastest(timings))
        if found.source != "cache" and kind:
            remember(kind, found)
    return replace(found, seconds=time.perf_counter() - started), kind


def _small_batches(trainer: Any, loader: "DataLoader[Any]", samples: list[Any], count: int) -> Iterator[Any]:
    """Yield batches of ``count`` of the samples on the device, each sample in one of them at most."""
    for first in range(0, max(1, len(samples) - count + 1), count):
        yield transfer.BatchTransfer(trainer).to_device(collate_samples(loader, samples[first : first + count], count))


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
