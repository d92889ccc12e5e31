"""What a user is told: what cannot work, in one sentence each with the way out, and what is not exact."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any
from weakref import ref

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.utils.data import DataLoader

from lightning_ga.compat import closures, dataloaders, intervals, loops
from lightning_ga.compat.patching import shadowed
from lightning_ga.errors import UserError
from lightning_ga.fit.engine import Engine
from lightning_ga.fit.exactness.passes import settings_of
from lightning_ga.fit.exactness.training import TrainingExactness, is_inexact
from lightning_ga.loading.prebatched import PrebatchedSource
from lightning_ga.loading.training_source import TrainingSource
from lightning_ga.memory.device import total_memory
from lightning_ga.plan.accumulation import require_count, require_effective_batch, require_few_chunks
from lightning_ga.plan.config import Request
from lightning_ga.plan.exactness import BY_BATCH, INEXACT
from lightning_ga.plan.schedule import PiecewiseSchedule
from lightning_ga.plan.units import format_bytes, parse_budget
from lightning_ga.snapshot.copies import versions
from lightning_ga.snapshot.plain import copies_of, hidden_tensors, state_of

BY_HAND = """\
leave AutoAccumulate out of the callbacks and cut each batch in training_step with lightning_ga.plan_accumulation:

    optimizer = self.optimizers()
    optimizer.zero_grad()
    (sizes,) = plan_accumulation(len(batch), micro_batch=…).chunks
    for part in batch.split(sizes):
        self.manual_backward(self.loss(part) * len(part) / len(batch))
    optimizer.step()
"""
_RIVALS = ("GradientAccumulationScheduler", "BatchSizeFinder")


def check_trainer(trainer: Any, module: Any, request: Request) -> None:
    """Refuse a Trainer or module under which accumulation would go wrong."""
    require_count("accumulate_grad_batches", trainer.accumulate_grad_batches)
    check_automatic(module)
    if trainer.strategy.handles_gradient_accumulation:
        raise UserError(
            f"{type(trainer.strategy).__name__} accumulates gradients on its own, with a factor fixed at its start: "
            "use another strategy, such as ddp, or set the factor there and leave AutoAccumulate out."
        )
    if closures.takes_an_iterator(module):
        raise UserError(
            "training_step takes a dataloader_iter and so fetches batches on its own, which hides the micro-batches "
            "from AutoAccumulate: let it take (batch, batch_idx)."
        )
    ours = [type(each).__name__ for each in trainer.callbacks if _is_named(each, ("AutoAccumulate",))]
    if len(ours) > 1:
        raise UserError(f"The callbacks hold AutoAccumulate more than once ({', '.join(ours)}): leave one of them.")
    for other in trainer.callbacks:
        if _is_named(other, _RIVALS):
            tuner = " (Tuner.scale_batch_size adds one)" if _is_named(other, ("BatchSizeFinder",)) else ""
            raise UserError(
                f"The callbacks hold AutoAccumulate and {type(other).__name__}, which set the same things: "
                f"remove {type(other).__name__}{tuner}."
            )
    if request.factor(0) is not None and trainer.accumulate_grad_batches != 1:
        raise UserError(
            f"accumulate={request.factor(0)} and Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches}) "
            "both set the factor: remove one of them."
        )


def check_automatic(module: Any) -> None:
    """Refuse manual optimization, also if it is set after the start of training."""
    if not module.automatic_optimization:
        raise UserError(
            f"{type(module).__name__} sets automatic_optimization=False, and AutoAccumulate steers the automatic one: "
            f"{BY_HAND}"
        )


def _is_named(callback: Any, names: tuple[str, ...]) -> bool:
    return any(kind.__name__ in names for kind in type(callback).__mro__)


def check_schedule(request: Request, epochs: range, world_size: int, *, micro_batch: int | None = None) -> int:
    """Refuse a schedule that would fail in a later epoch; return the largest effective batch, 0 if none is asked for.

    An effective batch holds a sample for each rank and, once the micro-batch is known, not too many of them.
    """
    asked = [effective for epoch in epochs if (effective := request.effective(epoch)) is not None]
    for effective in asked:
        require_effective_batch(effective, world_size)
        if micro_batch is not None:
            require_few_chunks(effective, micro_batch, world_size)
    return max(asked, default=0)


def check_end_of_epoch(trainer: Any, source: TrainingSource) -> None:
    """Refuse a loader whose own ``__iter__`` has ended the epoch early: its windows are not those planned."""
    done, planned = loops.batches_processed(trainer), source.length
    if planned is None or done >= planned or not dataloaders.ran_out(trainer):
        return
    if isinstance(source, PrebatchedSource):  # its own batches, fewer than it said
        return
    loader = type(source.user_loader)
    if loader.__iter__ is not DataLoader.__iter__:
        raise UserError(
            f"The training loader {loader.__name__} has an __iter__ of its own, which ended after {done} of {planned} "
            'micro-batches: it seems to count the recipe\'s batches. Use micro_batching="step", or let its sampler say '
            "where an epoch ends."
        )


class Told:
    """Makes the sentences on one fit (``fit/fit.py``, which makes this)."""

    def __init__(self, fit: Any) -> None:
        self._fit = fit
        self._workers_are_told = False  # that they change what windows hold

    def warnings(self) -> list[str]:
        """Return what the user should know before training: inexact gradients, wrong horizons of schedules."""
        found, steps = [*self.of_gradients(), *self._beyond()], self._fit.optimizer_steps()
        found += self._of_joined_batches()
        by_tokens = self._fit.options.tokens is not None  # which no recipe counts
        is_another = steps is not None and (by_tokens or steps != self._fit.optimizer_steps(of_recipe=True))
        for name, length in intervals.wrong_horizons(self._fit.trainer, steps) if steps and is_another else []:
            found.append(
                f"{name} ends after {length} steps and training takes {steps}: make it with "
                "lightning_ga.optimizer_steps(self.trainer)."
            )
        return found

    def _of_joined_batches(self) -> list[str]:
        """Return the sentence on batches of the recipe that are one pass here, if that gives another gradient."""
        verdict, joined = self._fit.exactness.training, self._fit.fed.micro_batch_size
        alone = self._fit.source.recipe.largest_batch(self._fit.progress.position.epoch)
        is_told = verdict is not None and verdict.cause == "batch_norm" and self._fit.options.batch_norm != "warn"
        if self._fit.source.cut_in_step or self._fit.plans_several_passes or joined <= alone or is_told:
            return []
        if not is_inexact(verdict):
            return []
        return [
            f"Up to {joined} samples are in one pass here, and {alone} in one of the recipe's, which gives another "
            f"gradient: {str(verdict).removesuffix('.')}. micro_batch_size={alone} keeps the recipe's passes."
        ]

    def _beyond(self) -> Iterator[str]:
        """Yield what was asked for beyond what there is: samples of an epoch, memory of the device."""
        asked = self._fit.largest_asked
        samples, budget = (
            self._fit.source.recipe.total(loops.training_epoch(self._fit.trainer)),
            self._fit.options.budget,
        )
        if samples is not None and asked > (samples := samples * self._fit.source.sharded_ranks):
            yield (
                f"The effective batch of {asked:,} samples is above the {samples:,} of an epoch: it is a "
                "single optimizer step over all of them, and a larger batch changes nothing."
            )
        if self._replaces_decay and samples is not None and asked * 10 > samples:
            yield (
                f"from_lr_decay ends with batches of {asked:,} samples, above a tenth of the {samples:,} "
                "of an epoch: beyond that, a larger batch trains worse than a lower learning rate (arXiv 1711.00489)."
            )
        probed = self._fit.probe is not None and self._fit.probe.source != "estimate"
        memory = total_memory(self._fit.trainer.strategy.root_device) if probed else None
        if memory is not None and (parse_budget(budget, memory) or 0) > memory:
            yield f"memory_budget={budget!r} is above the {format_bytes(memory)} of the device: what is free counts."

    @property
    def _replaces_decay(self) -> bool:
        schedules = self._fit.request.effective, self._fit.request.factor
        return any(isinstance(each, PiecewiseSchedule) and each.replaces_decay for each in schedules)

    def of_gradients(self) -> list[str]:
        """Return the sentences on windows that are not exact, if the user does not know them yet."""
        found = [self._fit.exactness.untold()] if self._fit.plans_several_passes else []
        source, loader = self._fit.source, self._fit.source.recipe.loader
        recipe_batch = source.recipe.largest_batch(loops.training_epoch(self._fit.trainer))
        is_another = self._fit.fed.micro_batch_size != recipe_batch
        if is_another and source.streams and loader.num_workers > 1 and not self._workers_are_told:
            self._workers_are_told = True
            early_end = "" if source.length is None else ", and an epoch may end before its last samples"
            found.append(
                "Several data workers read an iterable dataset in turn, a micro-batch each, so windows hold other "
                f"samples than batches of the recipe would{early_end}: use num_workers=1 for the same windows."
            )
        return [sentence for sentence in found if sentence is not None]

    def summary(self) -> str:
        """Return plan and probe in one line."""
        found, probe = "", self._fit.probe
        if probe is not None:
            of_longest = "" if probe.sizes is None else " of the longest"
            how = probe.method if probe.source == "probe" else probe.source
            found = (
                f"; limit {probe.limit}{of_longest} within {format_bytes(probe.budget_bytes)}, found by "
                f"{how} in {probe.steps} steps and {probe.seconds:.1f} s"
            )
        exactness = self._fit.exactness.training
        silent = exactness is None or exactness.cause in ("exact", *INEXACT)
        measured = "" if silent else f"; exactness: {str(exactness).removesuffix('.')}"
        grows = "" if self._fit.request.by_window is None else f", the largest of {self._fit.request.by_window!r}"
        unit = "" if self._fit.source.is_counted else "; each batch counts as one sample, as its own are not known"
        return f"{self._fit.plan}{unit}{grows}{found}{measured}."


_HOOKS = ("on_train_batch_start", "on_train_batch_end")
_WINDOWS = 3  # in which it is looked at what a hook changes, wherever it lies
_LOOKS = 1000  # micro-batches, if the hook reads what belongs to one: it may act in some only


class ByBatch:
    """Watches hooks of callbacks and module that act batch by batch: where the loader cuts, they see micro-batches."""

    def __init__(self, trainer: Any, engine: Engine, exactness: TrainingExactness) -> None:
        self._trainer, self._engine, self._exactness = trainer, engine, exactness
        self._is_cut = self._is_told = self._has_warned_of_monitors = False

    def begin_epoch(self, *, is_cut: bool) -> None:
        """Begin an epoch, whose batches of the loop may not be the recipe's."""
        self._is_cut = is_cut

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Return a context in which it is seen what these hooks change."""
        with ExitStack() as stack:
            for owner, name in product((*self._trainer.callbacks, self._trainer.lightning_module), _HOOKS):
                if closures.has_hook([owner], name):
                    run = getattr(owner, name)
                    reads = closures.reads_batch(run, of_module=owner is self._trainer.lightning_module)
                    hook = _Hook(owner, name, run, reads, _LOOKS if reads else 0)
                    stack.enter_context(shadowed(owner, name, partial(self._run, hook)))
            yield

    def _run(self, hook: "_Hook", *arguments: Any, **named: Any) -> Any:
        is_looked_at = self._is_cut and self._engine.is_active and (hook.windows or hook.looks)
        if not is_looked_at or self._is_told:
            return hook.run(*arguments, **named)
        is_at_edge = loops.window_is_over if hook.name == "on_train_batch_end" else loops.begins_window
        within = not is_at_edge(self._trainer)
        hook.looks -= hook.looks > 0
        weights = [*self._trainer.lightning_module.parameters()]
        trained = [weight for weight in weights if weight.grad is not None]
        if is_searched := hook.windows > 0:
            hook.tensors = [*map(ref, _tensors_of(hook.owner, trained))]
        hook.windows -= is_searched and not within
        known = [tensor for each in hook.tensors if (tensor := each()) is not None]
        former, before = dict(zip(map(id, known), versions(known))), self._settings(weights) if hook.reads_batch else {}
        result = hook.run(*arguments, **named)
        changed = [name for name, value in self._settings(weights).items() if value != before[name]] if before else []
        if within or hook.reads_batch:
            tensors = _tensors_of(hook.owner, trained) if is_searched else known
            written = [each for each in tensors if former.get(id(each)) != each._version]
            changed += ["its copy of the weights"] * _follow(written, trained, any_copy=hook.reads_batch)
            changed += ["where the epoch ends (it returns -1)"] * (isinstance(result, int) and result == -1)
        if changed:
            self._is_told = True
            who = f"{type(hook.owner).__name__}.{hook.name}"
            self._exactness.found_unknown(BY_BATCH.format(hook=who, what=" and ".join(changed)))
        return result

    def _settings(self, weights: list[torch.Tensor]) -> dict[str, Any]:
        """Return what training depends on, and hooks may change."""
        return {
            "weights": versions(weights),
            "which weights are trained": [weight.requires_grad for weight in weights],
            "learning rates or the like": settings_of(self._trainer.optimizers),
            "trainer.should_stop": self._trainer.should_stop,
        }

    def check_monitors(self) -> None:
        """Warn, as an epoch ends, of what decides by a value of the last batch."""
        if self._has_warned_of_monitors or not self._is_cut:
            return
        # This hook may log the mean over the epoch by the same name.
        if closures.has_hook([self._trainer.lightning_module], "on_train_epoch_end"):
            return
        for who, value in intervals.followed_by_step(self._trainer):
            self._has_warned_of_monitors = True
            rank_zero_warn(
                f"{who} follows {value!r}, which training_step logs by step: where the loader cuts, that is the value "
                'of a micro-batch. Log it with on_epoch=True, or use micro_batching="step".'
            )


@dataclass(slots=True)
class _Hook:
    """A hook of a callback, or of the module."""

    owner: Any
    name: str
    run: Callable[..., Any]
    reads_batch: bool  # whether it reads more of its arguments than trainer and module
    looks: int  # that are left
    windows: int = _WINDOWS  # that are left, in which its tensors are searched
    tensors: list["ref[torch.Tensor]"] = field(default_factory=list)  # as they were found last


def _follow(tensors: list[torch.Tensor], weights: list[torch.Tensor], *, any_copy: bool) -> bool:
    """Return whether there is an average of all weights among tensors, or ``any_copy`` of them."""
    pairs = copies_of(tensors, weights)
    return bool(pairs) if any_copy else any(bool((copy != weight).any()) for copy, weight in pairs)


def _tensors_of(owner: Any, trained: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors that an owner holds, but for those that are trained.

    None that were made in inference mode, as outputs of validation: they have no versions.
    """
    found = {**(state_of(owner) if isinstance(owner, torch.nn.Module) else {}), **hidden_tensors(owner)}
    known = set(map(id, trained))
    return [tensor for tensor in found.values() if id(tensor) not in known and not tensor.is_inference()]
