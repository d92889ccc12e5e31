"""Run one batch whole and in parts, compare gradients and state, and judge what differs."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, cast

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DataLoader

from lightning_ga.batch.layout import LayoutError
from lightning_ga.batch.pytree import same_values
from lightning_ga.compat import closures, trial_steps
from lightning_ga.compat.patching import replaced
from lightning_ga.compat.trial_steps import PassPlace
from lightning_ga.fit.exactness.differences import Differences, compare, distance, judge, norm
from lightning_ga.fit.exactness.halves import Halves, Kind, SampleBatch, fitting_counter, uneven_kinds
from lightning_ga.fit.exactness.passes import MicroBatches, Passes, PassRunner, named_state
from lightning_ga.loading.reader import BatchReader
from lightning_ga.loading.rebatch import length_of
from lightning_ga.loading.samples import counts_batches
from lightning_ga.loading.training_source import TrainingSource
from lightning_ga.memory.oom import attempt, is_out_of_memory
from lightning_ga.plan.exactness import (
    ACCUMULATED,
    COLLATE_COUNTS,
    COUNTED,
    HOOKED,
    KEPT,
    NO_GRADIENT,
    Exactness,
    Verdicts,
    both,
    uncuttable,
    unmeasured,
)
from lightning_ga.plan.weights import count_items

Count = Callable[[Any], float]  # counts the items of a batch that the loss is a mean over

MULTIPLES = (3, 6, 10, 12, 30, 60, 100, 120, 200, 300, 600, 1200, 3000, 6000, 12000)  # of many small numbers
_OF_THE_STEP = "optimizer_step", "on_before_optimizer_step", "configure_gradient_clipping", "lr_scheduler_step"
_SEEDS = 8  # further passes with other random numbers, if some are drawn


class ExactnessCheck:
    """Compares batches with their parts, and gathers which state passes change."""

    def __init__(
        self,
        source: TrainingSource,
        reader: BatchReader,
        passes: PassRunner,
        count: Count | None,
        tolerance: float,
        *,
        while_training: bool = False,
    ) -> None:
        self._source, self._cut_in_step = source, source.cut_in_step
        self._reader, self._passes, self._count, self._tolerance = reader, passes, count, tolerance
        self._while_training = while_training  # then only what is inexact has to be found
        self._module = passes.trainer.lightning_module
        is_precise = passes.trainer.strategy.root_device.type == "cpu" and tolerance <= 1e-4
        self._repeated = tolerance / (100 if is_precise else 1)  # largest difference of a repeated step
        # Whether it keeps something that the next step's gradients depend on; ``None`` until that is measured.
        self._keeps_something = False if while_training else None
        self._numbers_matter: bool | None = None  # whether gradients depend on the number of a batch; the same
        self._draws = False  # whether the step draws random numbers
        self._alike: set[str] = set()  # names of state that changed, and for which it was no matter how batches are cut
        self._unlike: set[str] = set()  # and for which it was
        self.changing: set[str] = set()  # names of all that changed, averages that nobody froze among them
        self.kinds: set[Kind] = set()  # of values of which one part held more than the other

    @property
    def tables(self) -> set[str]:
        """Names of state that changes and is the same however batches are cut: tables, memories of samples."""
        return self._alike - self._unlike

    def run(self, samples: Sequence[Any], *, micro_batches: int) -> Verdicts:
        """Compare a batch of samples with its parts, as the loader makes them and as the step cuts them.

        An epoch has so many ``micro_batches``.
        """
        batch = SampleBatch(samples, self._loader, self._reader, self._passes)
        if batch.size < 2:
            reason = f"the collate function kept {batch.size} of {batch.fetched} samples"
            return both(unmeasured(self._tolerance, reason))
        batch_pass = self._passes.run(batch.whole)
        if self._cut_in_step:
            return both(self._judge_cut(batch_pass, batch))
        loaded = batch.loaded()
        training = self.judge(batch_pass, loaded)
        if training.cause == "exact" and self._depends_on_number(batch_pass, batch, micro_batches):
            training = replace(training, relative_error=None, cause="stateful", reason=COUNTED)
        if training.cause == "exact" and counts_batches(self._loader, samples):
            training = replace(training, relative_error=None, cause="stateful", reason=COLLATE_COUNTS)
        hooks_matter = batch_pass.changed != batch_pass.changed_in_step or training.reason
        known = None if hooks_matter or batch.size < batch.fetched else (loaded, training)
        return Verdicts(training, self._judge_cut(batch_pass, batch, known))

    def run_at_steps(self, samples: Sequence[Any], *, micro_batches: int, steps: range) -> Iterator[Verdicts]:
        """Yield verdicts for those of these steps that are unlike the one before or after, as a hundredth may be."""
        batch = SampleBatch(samples, self._loader, self._reader, self._passes).whole

        def change_after(step: int) -> float:
            """Return how far the gradients of a step and of the next one differ; not at all if one cannot be run."""
            runs = [attempt(self._passes.run_after, is_users_error, at, batch).result for at in (step, step + 1)]
            return distance(*(run.gradients[0] for run in runs)) if all(runs) else 0.0

        for last in filter(steps.__contains__, telling_numbers(steps.stop, multiples=3)):
            change = change_after(last)
            if change > self._repeated and min(change_after(last - 1), change_after(last + 1)) < change / 2:
                for step in range(last, min(last + 2, steps.stop)):  # and not where all steps differ (annealing)
                    with replaced(self._passes, after=step):
                        yield self.run(samples, micro_batches=micro_batches)

    @cached_property
    def _loader(self) -> "DataLoader[Any]":
        """A loader of samples; a ``LayoutError`` where they are made of a batch that cannot be cut."""
        return self._source.user_loader

    def _judge_cut(
        self, batch_pass: Passes, batch: SampleBatch, known: tuple[Halves, Exactness] | None = None
    ) -> Exactness:
        """Judge a batch in the parts that the step cuts, unless the verdict on the same parts is known.

        They are slices. If one of them alone ends in an error of the user's code, parts are collated anew.
        """
        failed = ""
        try:
            slices = batch.slices()
            try:
                halves = batch.cut(slices)
                if known is not None and all(map(same_values, known[0].parts.batches, halves.parts.batches)):
                    return known[1]
                return self.judge(batch_pass, halves)
            except Exception as error:
                if is_out_of_memory(error) or isinstance(error, LayoutError):
                    raise
                failed = f" A part alone ended in {type(error).__name__}: {error}"
            return self.judge(batch_pass, batch.cut(batch.slices(anew=True)))
        except LayoutError as why:
            return uncuttable(self._tolerance, f"{why}{failed}")

    def judge(self, batch_pass: Passes, halves: Halves) -> Exactness:
        """Compare the parts of a batch with a pass over the whole batch."""
        counts = [self._items(part, size, halves) for part, size in zip(halves.parts.batches, halves.sizes)]
        if not (min(counts) >= 0 and sum(counts) > 0):
            return unmeasured(self._tolerance, f"normalize counts {counts} in the parts of a batch")
        weights = counts[0] / sum(counts), counts[1] / sum(counts)
        self.kinds |= uneven_kinds(halves.parts.batches, halves.sizes)
        changed, alone = self._changed(batch_pass, halves), None
        window = replace(halves.parts, weights=weights)
        accumulated = self._passes.run(window, seed=1)
        error = distance(batch_pass.gradients[0], accumulated.gradients[-1])
        same = {name for name in self._passes.shared if batch_pass.ends.get(name) == accumulated.ends.get(name)}
        changed = tuple(name for name in changed if name not in same)
        if error <= self._tolerance:
            changed = self._without_harmless(changed, halves, batch_pass)
        self._unlike |= set(changed)
        size = norm(batch_pass.gradients[0])
        if not error <= self._tolerance:  # the cause shows in gradients that are not accumulated
            parts = self._passes.run(halves.parts, seed=1).gradients
            if self._while_training and error * size <= self._tolerance * max(map(norm, parts)):
                error = self._tolerance  # near a minimum those of samples cancel each other, and rounding is left
            else:
                alone = compare(batch_pass.gradients[0], *parts, weight=weights[0])
                changed = changed or (ACCUMULATED if alone.error <= self._tolerance else ())
        if not 0 < size < math.inf:
            return unmeasured(self._tolerance, f"the norm of the gradient is {size}" if size else NO_GRADIENT)
        is_clear = self._while_training and alone is None and not changed
        noise, layers = 0.0 if is_clear else self._noise(batch_pass, halves), batch_norm_layers(self._module)
        measured = Exactness(error, self._tolerance, "exact", layers, micro_steps=self._passes.steps, tensors=changed)
        verdict = judge(measured, alone, noise=noise)
        if verdict.cause == "exact" and self._ends_otherwise(window, halves):
            return replace(verdict, relative_error=None, cause="stateful", reason=KEPT)
        return verdict if alone is None else self._explained(verdict, alone, batch_pass, halves, weights[0])

    def _items(self, part: Any, samples: int, halves: Halves) -> float:
        if self._count is not None:
            return count_items(self._count, part)
        return self._reader.count(part, expected=samples, on_host=not halves.parts.on_device)

    def _explained(
        self, verdict: Exactness, alone: Differences, batch_pass: Passes, halves: Halves, weight: float
    ) -> Exactness:
        """Look for what else may cause a difference that looks like one of the loss; propose a counter if it is not."""
        if verdict.cause not in ("coupled", "weighted", "sum"):
            return verdict

        def is_same(whole: Passes, parts: MicroBatches) -> bool:
            gradients = self._passes.run(parts, seed=1).gradients
            return compare(whole.gradients[0], *gradients, weight=weight).error <= self._tolerance

        with trial_steps.without_gradient_hooks(self._passes.trainer) as has_hooks:
            if has_hooks and is_same(self._passes.run(halves.whole()), halves.parts):
                return replace(verdict, cause="stateful", reason=HOOKED)
        if not halves.parts.as_pieces and is_same(batch_pass, replace(halves.parts, as_pieces=True)):
            return replace(verdict, cause="stateful", reason=COUNTED)
        if verdict.cause != "weighted":
            return verdict
        counter = fitting_counter(halves.make_batch(0), halves.parts.batches, alone.best_weight)
        return replace(verdict, counter=counter)

    def _differs(self, one: Passes, other: Passes) -> bool:
        """Return whether two passes over one batch make other gradients, or move otherwise what both of them kept."""
        pairs = ((one.gradients[0], other.gradients[0]), (one.moves, other.moves))
        return any(distance(*pair) > self._repeated for pair in pairs)

    def _depends_on_number(self, batch_pass: Passes, batch: SampleBatch, micro_batches: int) -> bool:
        """Return whether the gradient depends on how micro-batches number the batches of an epoch.

        The batch runs at some places of the epoch, and as one of m micro-batches at the same places: its number, the
        length of the epoch and the factor are m times as large there. If the module has hooks at the start of
        training, these meet as many batches, and twice as many. If it has hooks that set how the optimizer steps, the
        step belongs to the passes, and weights and learning rates have to move alike.
        """
        if self._numbers_matter is None:
            whole, number = PassPlace(), self._passes.trainer.fit_loop.max_batches
            trained = [*self._passes.trained]

            def run(place: PassPlace) -> Passes | None:  # the module may have no such batch, or need more of the loop
                passes = partial(self._passes.run, batch.whole, keep=trained if place.steps else [], place=place)
                return cast("Passes | None", attempt(passes, is_users_error).result)

            def moves_else(one: Passes, other: Passes) -> bool:  # as a network that is copied every few batches
                names = dict.fromkeys({*one.changed}.symmetric_difference(other.changed).difference(trained))
                return bool(names) and bool(self.which_matter(batch_pass, batch.whole, names))

            def differ(place: PassPlace, *places: PassPlace) -> bool:
                one, others = batch_pass if place == whole else run(place), map(run, places)
                return one is not None and any(o and (self._differs(one, o) or moves_else(one, o)) for o in others)

            lasts = [PassPlace(ahead=n, batches=n + 1) for n in telling_numbers(micro_batches)]
            alike = [(whole, *lasts)]
            if isinstance(number, int) and number > 0:
                end = PassPlace(ahead=number - 1, may_be_last=True)
                alike.append((end, replace(end, ahead=2 * end.ahead, batches=2)))
            if steps := closures.has_hook([self._module], *_OF_THE_STEP):
                # A line search reads the loss, which the factor divides.
                again = closures.evaluates_again(self._passes.trainer.optimizers[0])
                scaled = ((place, 1 if again else place.batches) for place in lasts)
                alike.append((replace(whole, steps=True), *(replace(p, steps=True, batches=n) for p, n in scaled)))
            if closures.has_hook([self._module], "on_train_start", "on_train_epoch_start"):
                alike.append((PassPlace(amid=1, steps=steps), PassPlace(amid=2, steps=steps)))
            self._numbers_matter = any(differ(*places) for places in alike)
        return self._numbers_matter

    def which_matter(
        self, batch_pass: Passes, batch: MicroBatches, suspects: Mapping[str, float | None]
    ) -> tuple[str, ...]:
        """Return which of these the gradient may depend on: tensors, numbers with their former values, and others."""
        state = named_state(self._module)
        tensors = {name: None for name in suspects if name in state}
        numbers = {name: value for name, value in suspects.items() if value is not None and name not in state}
        matter = tuple(name for name in suspects if name not in tensors and name not in numbers)
        if numbers and self._differs(batch_pass, self._passes.run(batch, altered=numbers)):
            matter += tuple(numbers)
        if not tensors:
            return matter
        moved = self._passes.run(batch, altered=tensors, keep=tensors)
        if not self._differs(batch_pass, moved):
            return matter
        if set(tensors) <= set(moved.changed):  # the pass may bring them to where the next one leaves them
            twice = replace(batch, batches=[*batch.batches, *batch.batches])
            again = self._passes.run(twice, altered=tensors, keep=tensors)
            if (
                all(map(_is_rounding, moved.kept[-1], again.kept[-1]))
                and not distance(*again.gradients) > self._repeated
            ):
                return matter
        return (*tensors, *matter)

    def _changed(self, batch_pass: Passes, halves: Halves) -> tuple[str, ...]:
        """Name the state that a pass changes, or that the next one depends on.

        State that no gradient depends on yet may come to matter later: a queue that is filled, a count, a teacher
        whose part in the loss grows.
        """
        names = batch_pass.changed_in_step if halves.parts.as_pieces else batch_pass.changed
        self.changing |= set(names)
        gradients = dict(zip(self._passes.trained, batch_pass.gradients[0], strict=True))
        # A copy of the model may have none.
        changed = tuple(name for name in names if name not in gradients or not norm([gradients[name]]))
        if changed or batch_pass.draws:
            return changed
        if self._keeps_something is None:  # whether the same batch gets another gradient in the next step
            twice = self._passes.run(halves.whole(times=2))
            self._keeps_something = distance(*twice.gradients) > self._repeated
        return ("what the module keeps from one step to the next",) if self._keeps_something else ()

    def _without_harmless(self, changed: tuple[str, ...], halves: Halves, batch_pass: Passes) -> tuple[str, ...]:
        """Leave out state that ends alike however a batch is cut, though each pass changes it.

        No part met what another had changed, as the gradients show. What is left out, is one of these:

        - A table that is filled once: all passes leave it the same, one over a single sample, too.
        - A memory with a row for each sample of the data: each part changes rows of its own, whatever ran before. In a
          queue, a part writes where the one before ended; a row of a class may be met by several parts.
        - Counts and histograms: the parts leave what the whole batch does, and no gradient depends on it. One may come
          to depend on it later; then a later measurement does not leave it out.
        """
        state = named_state(self._module)
        names = [name for name in changed if name in state]
        if not names:
            return changed
        rows = attempt(lambda: length_of(self._loader.dataset), is_users_error).result
        whole = self._passes.run(halves.whole(), keep=names)
        parts = self._passes.run(halves.parts, seed=1, keep=names)
        left = dict(zip(names, zip(whole.kept[1], parts.kept[2], parts.kept[1])))  # by all, by both parts, by the first
        single = replace(halves.parts, batches=[halves.one_sample()], as_pieces=False)
        one_sample = attempt(lambda: self._passes.run(single, seed=2, keep=names), is_users_error).result
        alike: set[str] = set()
        if one_sample is not None:
            pairs = zip(names, one_sample.kept[1])
            alike |= {name for name, one in pairs if all(same_values(one, each) for each in left[name])}
        before = {} if rows is None else {n: t for n, t in zip(names, whole.kept[0]) if t.dim() and len(t) >= rows}
        if memories := [name for name in before if name not in alike]:
            second = replace(halves.parts, batches=halves.parts.batches[1:])
            pairs = zip(memories, self._passes.run(second, seed=1, keep=memories).kept[1])
            alike |= {name for name, by_second in pairs if _is_in_rows(before[name], *left[name], by_second)}
        counts = {name: None for name in names if name not in alike and _is_count(*left[name][:2])}
        if counts and not self._differs(batch_pass, self._passes.run(halves.whole(), altered=counts)):
            alike |= counts.keys()
        self._alike |= alike
        return tuple(name for name in changed if name not in alike)

    def _ends_otherwise(self, window: MicroBatches, halves: Halves) -> bool:
        """Return whether hooks, or the next window, make another gradient if the window before was one of parts."""
        if self._while_training or self._draws:
            return False
        whole = replace(halves.whole(), as_pieces=window.as_pieces, weights=[1.0])
        moves = not window.on_device  # parts were moved to the device by hooks that may use weights
        both = (self._passes.run_windows(each, moves=moves) for each in (whole, window))
        return any(distance(*pair) > self._tolerance for pair in zip(*both, strict=True))

    def _noise(self, batch_pass: Passes, halves: Halves) -> float:
        """Measure how far passes over the whole batch with other random numbers differ; several if some are drawn."""
        noise = 0.0
        for seed in range(1, 2 + _SEEDS):
            passes = self._passes.run(halves.whole(seed=seed), seed=seed)
            noise = max(noise, distance(*batch_pass.gradients, *passes.gradients))
            self._draws |= passes.draws
            if noise > self._tolerance or not passes.draws:
                break
        return noise


def telling_numbers(batches: int, *, multiples: int = 1) -> list[int]:
    """Return numbers of an epoch's batches that a step may treat unlike the first.

    Steps do something every n batches, mostly in the last of them, where ``(batch_idx + 1) % n == 0``. So they are as
    late as the epoch allows, and followed by so many ``multiples`` of many n.

    Examples:
        >>> telling_numbers(200), telling_numbers(3), telling_numbers(1)
        ([127, 199], [1, 2], [])
    """
    numbers = [1 << max(0, batches.bit_length() - 1), *[n for n in MULTIPLES if n <= batches][-multiples:]]
    return sorted({number - 1 for number in numbers if number > 1})


def is_users_error(error: Exception) -> bool:
    """Return whether the user's code may have refused to run, since memory has not run out."""
    return not is_out_of_memory(error)


def batch_norm_layers(module: torch.nn.Module) -> tuple[str, ...]:
    """Return the names of BatchNorm layers in training mode, which normalize by the samples of a micro-batch."""
    layers = (name for name, layer in module.named_modules() if isinstance(layer, _BatchNorm) and layer.training)
    return tuple(layers)


def _is_rounding(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors differ by no more than a value that is computed again."""
    if not one.is_floating_point():
        return torch.equal(one, other)
    return torch.allclose(one, other, rtol=4 * torch.finfo(one.dtype).eps, atol=0.0)


def _is_count(whole: torch.Tensor, parts: torch.Tensor) -> bool:
    """Return whether two parts, one after the other, leave a tensor as the whole batch does."""
    return whole.shape == parts.shape and torch.allclose(whole, parts, rtol=1e-5)


def _is_in_rows(
    before: torch.Tensor, whole: torch.Tensor, parts: torch.Tensor, one: torch.Tensor, other: torch.Tensor
) -> bool:
    """Return whether two parts change different values of a tensor, each by itself, and together those of the whole."""
    by_one, by_other = one != before, other != before
    together = torch.where(by_one, one, torch.where(by_other, other, before))
    alike = all(torch.allclose(each, together, rtol=1e-3, atol=1e-5) for each in (whole, parts))
    return alike and bool(by_one.any()) and bool(by_other.any()) and not bool((by_one & by_other).any())
