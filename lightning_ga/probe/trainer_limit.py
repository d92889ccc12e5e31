"""Find the limit in a Trainer, or say that a window fits; choose what is computed again if not one sample fits.

Tested in tests/integration/test_probe.py and tests/integration/test_remembered.py.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_ga.compat import ranks
from lightning_ga.compat.steps import FIRST_OF_WINDOW, LAST_OF_WINDOW, PassPlace, isolated, run_pass
from lightning_ga.errors import UserError
from lightning_ga.loading.trial_batches import TrialBatches
from lightning_ga.memory.device import synchronize, total_memory
from lightning_ga.memory.oom import attempt, is_out_of_memory, may_be_out_of_memory
from lightning_ga.plan.accumulation import ceil_div
from lightning_ga.plan.config import Options
from lightning_ga.plan.records import Fits, ProbeResult, Recomputed, Timing
from lightning_ga.plan.size_cuts import SizeLimits
from lightning_ga.probe.budget import Budget, DoesNotFitError
from lightning_ga.probe.cache import remember, remembered
from lightning_ga.probe.meters import StepMeter
from lightning_ga.probe.probed_trainer import ProbedTrainer, TrainingSetup
from lightning_ga.probe.prober import Prober
from lightning_ga.probe.size_limits import limits_by_size
from lightning_ga.probe.throughput import fastest, time_windows
from lightning_ga.probe.trials import Trials
from lightning_ga.recompute.choice import PARTS, Candidate, ChosenSet, choose

TIMED = 3  # passes of a size, after one to warm up


class Found(NamedTuple):
    """What is known of a limit; nothing if there is no sample."""

    fits: Fits | None = None  # a window that fits, so that no limit was looked for
    result: ProbeResult | None = None
    cache_key: Mapping[str, Any] | None = None  # describes the step; ``None`` without a cache


def _look_further(batches: TrialBatches) -> None:
    """Look for the heaviest samples; warn if there was no time to read all, and they vary in size."""
    largest = batches.largest
    if largest is None:
        return
    largest.look_further()
    if not largest.complete:
        rank_zero_warn(
            f"Samples vary in size, and there was time to read {largest.seen:,} of {largest.total:,}: a batch of "
            "heavier ones may not fit at the limit found. Sort the dataset by size (its first and its last sample are "
            "always read), or give max_micro_batch_size=…"
        )


def find_limit(
    setup: TrainingSetup,
    options: Options,
    *,
    high: int,
    recomputed: Recomputed | None = None,
    whole_first: bool = False,
) -> Found:
    """Find the largest micro-batch of a training step of a Trainer, or remember it.

    ``recomputed`` says which submodules are computed again already. With ``whole_first``, one step says whether
    ``high`` samples are sure to fit, so that nothing is looked for.
    """
    trainer = setup.trainer
    batches = setup.batches
    started = time.perf_counter()
    if batches.empty:
        return Found()
    if memory_grows_over_steps(trainer):
        raise UserError(
            "LBFGS keeps a history that grows over many steps, so that no trial of one step shows its memory: give "
            "micro_batch_size=… to do without a probe."
        )
    rank_zero_info("AutoAccumulate: looking for the largest micro-batch …")
    with _probed(setup) as training:
        prober = Prober(training, StepMeter(training.device, training), _budget(training, options))
        if whole_first:
            # Ranks ask together: one that runs out of memory between two questions cannot go on alone.
            catches = may_be_out_of_memory if trainer.world_size == 1 else lambda _: False
            fits: Fits | None = attempt(prober.fits, catches, high).result
            if fits is not None:
                return Found(fits)
        _look_further(batches)
        cache_key = training.describe(options) if options.cache else None
        known = None
        if cache_key is not None and recomputed is None:
            known = _remembered_by_all(training, cache_key)
        predict_only = True if ranks.is_sharded(trainer) else None
        found = prober.find(high, known=known, predict_only=predict_only)
        is_new = found.source != "cache"
        if is_new:
            found = replace(found, recomputed=recomputed)
        if options.objective == "throughput" and not training.agree(found.fastest is not None):
            timings = timed_windows(training, rank_samples=setup.rank_samples, limit=found.limit)
            found = replace(found, timings=timings, fastest=fastest(timings))
        if setup.sizes is not None:  # also from the cache, whose key does not tell how large smaller samples are
            longest = setup.sizes.largest
            limits = SizeLimits(found.limit * longest, found.limit)
            steps = 0
            if batches.largest is not None:  # else training alone reads samples, and others cannot be tried
                least = ceil_div(found.limit * longest, high)  # of even smaller samples, more than ``high`` would fit
                shorter, smaller_batches = setup.sizes.trials_of_smaller(least, batches.cutter)
                training.use_batches(smaller_batches)
                confirm = partial(prober.confirm, predict_only=predict_only)
                limits, steps = limits_by_size(confirm, found.limit, longest=longest, shorter=shorter)
            found = replace(found, sizes=limits, steps=steps or found.steps)
        if is_new and cache_key is not None:
            remember(cache_key, found)
    return Found(result=replace(found, seconds=time.perf_counter() - started), cache_key=cache_key)


def memory_grows_over_steps(trainer: Any) -> bool:
    """Return whether the optimizer's memory grows over many steps, as LBFGS's does: one step does not show it."""
    return any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in trainer.optimizers)


def _remembered_by_all(training: ProbedTrainer, cache_key: Mapping[str, Any]) -> ProbeResult | None:
    """Return what an earlier probe found, with submodules that all ranks then compute again."""
    known = remembered(cache_key)
    names: tuple[str, ...] = ()
    if known is not None and known.recomputed is not None:
        names = known.recomputed.names
    if not training.are_alike(names):
        return None
    training.recompute(names)
    return known


def _budget(training: ProbedTrainer, options: Options) -> Budget:
    advice = ""
    if options.whole:
        advice = "give a smaller effective_batch_size, as whole= makes a window one pass; or "
    if options.checkpoint != "auto":
        advice += 'give checkpoint="auto", which computes activations again; or '
    return Budget(options.budget, total_memory(training.device), advice=advice)


def choose_recomputed(setup: TrainingSetup, options: Options, without: DoesNotFitError) -> Recomputed:
    """Choose submodules to compute again so that the smallest micro-batch that runs fits, which it does not without.

    ``without`` is the error of the probe without this. Ranks choose from what the first of them has seen, unless each
    probes alone.
    """
    with _probed(setup) as training:
        training.see_gradients()
        seen = attempt(training.survey)
        if not training.agree(seen.failure is None):  # not even a forward pass fits
            raise without
        size, root = seen.result
        if not setup.alone:
            size, root = ranks.of_all_ranks(setup.trainer, seen.result)[0]
        training.reset()
        chosen = _chosen_within(_budget(training, options), training, root, size)
    return Recomputed(
        chosen.names,
        chosen.share,
        samples=size,
        plain_bytes=max(without.needed, (chosen.peak_bytes or 0) + chosen.frees),  # that step stopped before its peak
        budget_bytes=without.left,
    )


def _chosen_within(budget: Budget, training: ProbedTrainer, root: Candidate, size: int) -> ChosenSet:
    """Return the submodules that are computed again so that a step of so many samples fits; raise if no set does.

    The first step with an optimizer needs less memory than later ones, so its state is made before; if the optimizer
    refuses gradients of zeros, in the first trial.
    """
    trials = Trials(training, StepMeter(training.device, training), budget.asked)
    with trials.running():
        failure = attempt(training.warm_up, lambda error: isinstance(error, Exception)).failure
        has_room = failure is None or not is_out_of_memory(failure)
        alive, budget_bytes = trials.prepare()
        budget_bytes = training.smallest(budget_bytes)
        if not training.agree(has_room and alive <= budget_bytes):
            what = "The model, its gradients and its optimizer's states, which checkpointing cannot lower, take"
            raise budget.shortage(what, alive, budget_bytes)

        def peak_with(names: tuple[str, ...]) -> int | None:
            training.recompute(names)
            trial = trials.run(size, record=False, lenient=True).trial
            return training.largest(trial.peak_bytes) if trial.fits else None

        chosen = choose(root, peak_with, budget_bytes)
    if not chosen.names:
        what = f"With micro_batch_size={size} and all submodules computed again that can be, a step takes more than"
        raise budget.shortage(what, budget_bytes, budget_bytes)  # how much more was not measured
    return chosen


def recomputable(setup: TrainingSetup) -> tuple[str, ...]:
    """Return all submodules that can be computed again, as the last resort of a window; ranks do not wait."""
    with _probed(setup) as training:
        seen = attempt(training.survey).result
    if seen is None:
        return ()
    root = seen[1]
    # The smallest parts, which ``choose`` tries first: no trial chooses here, and the backward pass makes the
    # activations of one part at a time again.
    return tuple(root.chosen(root.frees / PARTS[0]))


@contextmanager
def _probed(setup: TrainingSetup) -> Iterator[ProbedTrainer]:
    """Yield the training for trial steps, of which no trace is left."""
    with isolated(setup.trainer, begins=setup.begins) as put_back:
        yield ProbedTrainer(setup, put_back)


def timed_windows(training: ProbedTrainer, *, rank_samples: int, limit: int) -> tuple[Timing, ...]:
    """Time windows at several micro-batches up to the limit, from passes and steps of a Trainer.

    Each runs once to warm up. The time is the best of some runs on the slowest rank, because ranks wait for each other.
    """
    trainer = training.trainer

    def best_seconds(place: PassPlace, size: int) -> float:
        seconds = []
        for _ in range(1 + TIMED):
            training.reset()
            batch, _whole = training.batch(size)
            synchronize(training.device)
            started = time.perf_counter()
            run_pass(trainer, batch, place)
            synchronize(training.device)
            seconds.append(time.perf_counter() - started)
        training.reset()
        return float(max(ranks.of_all_ranks(trainer, min(seconds[1:]))))

    pass_seconds = partial(best_seconds, FIRST_OF_WINDOW)
    size = training.few(limit)
    optimizer = max(0.0, best_seconds(LAST_OF_WINDOW, size) - pass_seconds(size))
    return time_windows(pass_seconds, optimizer, rank_samples=rank_samples, limit=limit, multiple=training.multiple)
