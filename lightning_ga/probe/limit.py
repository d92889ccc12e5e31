"""The probe inside a Trainer: real training steps on samples of the real data, leaving no trace.

A trial is the worst micro-batch of an accumulated window, its last: the gradients of the others are
alive, then forward, backward, clipping and the optimizer step, through the strategy and the
precision plugin (``trials``). Afterwards everything that a step changes is put back (``isolation``).
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.utils.data import DataLoader

from lightning_ga.compat import agreement, transfer
from lightning_ga.loading.largest_samples import ScanOrder, largest_samples
from lightning_ga.loading.reader import BatchReader
from lightning_ga.memory.live_tensors import uncounted
from lightning_ga.plan.config import Options
from lightning_ga.plan.records import ProbeResult, Timing
from lightning_ga.probe.announce import probe_line
from lightning_ga.probe.cache import LimitCache
from lightning_ga.probe.finder import find_micro_batch
from lightning_ga.probe.fingerprint import describe_step
from lightning_ga.probe.isolation import isolated
from lightning_ga.probe.throughput import fastest
from lightning_ga.probe.trials import (
    TrialStep,
    WindowGradientsAlive,
    WindowTimer,
    make_optimizer_state,
    resident_tensors,
)


def probe(
    trainer: Any,
    loader: "DataLoader[Any]",
    looks: ScanOrder,
    *,
    high: int,
    share: int,
    options: Options,
    beside: Callable[[], Iterable[torch.Tensor]] = tuple,
    whole: int | None = None,
    reader: BatchReader | None = None,
) -> tuple[ProbeResult, Mapping[str, Any]] | None:
    """Find the largest micro-batch of a training step of this Trainer, or remember it.

    Args:
        trainer: A Trainer that has set up data, model and optimizer, at ``on_train_start``.
        loader: The user's DataLoader, for its dataset and the way it collates samples.
        looks: Which samples to look at; the heaviest of them make up the trial batches.
        high: Largest micro-batch that is of use, in samples.
        share: Samples of a window on one rank.
        options: What the user said about the budget, the objective and the cache.
        beside: Tensors that training holds on the device beside the model.
        whole: Samples of the batches that micro-batches are cut from in the step; ``None`` if the loader yields them.
        reader: Cuts them.

    Returns:
        What was found, and the description of the step that it is remembered for; ``None`` if there is no sample.

    Raises:
        UserError: If not even the smallest micro-batch fits.
    """
    started = time.perf_counter()
    with probe_line(trainer) as line, isolated(trainer) as restore:
        samples = largest_samples(loader, looks)
        if not samples.by_weight:
            return None
        if not samples.complete:
            _warn_of_unseen(samples.seen, looks.total)
        step = TrialStep(trainer, loader, samples, whole=whole, reader=reader)
        with uncounted():
            few = transfer.to_device(trainer, samples.batch(loader, min(2, high)))
            alive = WindowGradientsAlive(trainer, few, share)
            del few

        def reset() -> None:
            restore()
            alive.fill()

        reset()
        search = partial(
            find_micro_batch,
            step,
            high=high,
            budget=options.budget,
            device=trainer.strategy.root_device,
            resident=lambda: chain(resident_tensors(trainer), beside()),
            reset=reset,
            warm_up=partial(make_optimizer_state, trainer),
            agree=lambda fits: agreement.sum_over_ranks(trainer, float(not fits)) == 0,
            predict_only=True if agreement.is_sharded(trainer) else None,
            on_step=line.step,
        )
        timer = WindowTimer(trainer, step, reset, line.timing)
        kind = describe_step(trainer, loader.collate_fn, samples.by_weight, share=share, options=options, whole=whole)
        found = _remembered(search, kind, options, partial(timer.time_windows, share))
    return replace(found, seconds=time.perf_counter() - started), kind


def _remembered(
    search: Callable[..., ProbeResult],
    kind: Mapping[str, Any],
    options: Options,
    time_windows: Callable[[int], tuple[Timing, ...]],
) -> ProbeResult:
    """Search with what is remembered of this kind of step, time windows if that is asked for, and remember both."""
    cache = LimitCache() if options.cache else None
    found = search(known=cache.read(kind) if cache else None)
    if options.objective == "throughput" and not found.timings:
        timings = time_windows(found.limit)
        found = replace(found, timings=timings, fastest=fastest(timings))
    if cache and found.method != "cache":
        cache.write(kind, found)
    return found


def _warn_of_unseen(seen: int, total: int | None) -> None:
    of = "" if total is None else f" of {total:,}"
    rank_zero_warn(
        f"Samples vary in size, and there was time to look at {seen:,}{of}: a batch of heavier ones may not fit at the "
        "limit found. Sort the dataset by size (its first and its last sample are always looked at), or give "
        "max_micro_batch_size=…"
    )
