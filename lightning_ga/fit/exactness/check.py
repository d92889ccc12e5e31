"""Run one batch whole and in parts, compare gradients and state, and judge what differs."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_ga.batch.counters import Kind, fitting_counter
from lightning_ga.batch.layout import LayoutError
from lightning_ga.batch.pytree import same_values
from lightning_ga.compat import closures, trial_steps
from lightning_ga.fit.exactness.differences import Differences, compare, distance, judge, norm
from lightning_ga.fit.exactness.halves import Halves, SampleBatch, uneven_kinds
from lightning_ga.fit.exactness.passes import Passes, PassRunner, named_state
from lightning_ga.loading.reader import BatchReader
from lightning_ga.loading.streams import length_of
from lightning_ga.loading.training_source import TrainingSource
from lightning_ga.memory.oom import is_out_of_memory
from lightning_ga.plan.exactness import (
    ACCUMULATED,
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

_MULTIPLES = (3, 6, 10, 12, 30, 60, 100, 120, 200, 300, 600, 1200, 3000, 6000, 12000)  # of many small numbers
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
        micro_batches: int = 0,
    ) -> None:
        self._micro_batches = micro_batches  # of an epoch
        self._numbers_matter: bool | None = None  # whether gradients depend on a number of them; ``None`` if not known
        self._loader, self._cut_in_step = source.user_loader, source.cut_in_step
        self._reader, self._passes, self._count, self._tolerance = reader, passes, count, tolerance
        self._while_training = while_training  # then only what is inexact has to be found
        self._module = passes.trainer.lightning_module
        is_precise = passes.trainer.strategy.root_device.type == "cpu" and tolerance <= 1e-4
        self._repeated = tolerance / (100 if is_precise else 1)  # largest difference of a repeated step
        # Whether it keeps something that the next step's gradients depend on; ``None`` until that is measured.
        self._keeps_something = False if while_training else None
        self._draws = False  # whether the step draws random numbers
        self._alike: set[str] = set()  # names of state that changed, and for which it was no matter how batches are cut
        self._unlike: set[str] = set()  # and for which it was
        self.changing: set[str] = set()  # names of all that changed, averages that nobody froze among them
        self.kinds: set[Kind] = set()  # of values of which one part held more than the other

    @property
    def tables(self) -> set[str]:
        """Names of state that changes and is the same however batches are cut: tables, memories of samples."""
        return self._alike - self._unlike

    def run(self, samples: list[Any]) -> Verdicts:
        """Compare a batch of samples with its parts, as the loader makes them and as the step cuts them."""
        batch = SampleBatch(samples, self._loader, self._reader, self._passes)
        if batch.size < 2:
            reason = f"the collate function kept {batch.size} of {batch.fetched} samples"
            return both(unmeasured(self._tolerance, reason))
        batch_pass = self._passes.run([batch.collated], seed=0)
        if self._cut_in_step:
            return both(self._judge_cut(batch_pass, batch))
        loaded = batch.loaded()
        training = self.judge(batch_pass, loaded)
        if training.cause == "exact" and self._depends_on_number(batch_pass, batch):
            training = replace(training, relative_error=None, cause="stateful", reason=COUNTED)
        hooks_matter = batch_pass.changed != batch_pass.changed_in_step or training.reason
        known = None if hooks_matter or batch.size < batch.fetched else (loaded, training)
        return Verdicts(training, self._judge_cut(batch_pass, batch, known))

    def _depends_on_number(self, batch_pass: Passes, batch: SampleBatch) -> bool:
        """Return whether the gradient is another one at other places of the epoch, which micro-batches number."""
        if self._numbers_matter is None:
            self._numbers_matter, steps = (
                False,
                closures.has_hook([self._passes.trainer.lightning_module], "optimizer_step"),
            )
            names = [name for name, weight in self._module.named_parameters() if weight.requires_grad] if steps else []
            run = partial(self._passes.run, [batch.collated], seed=0, keep=names, steps=steps)
            try:
                first = run() if steps else batch_pass
            except Exception as error:  # the hook may need more of the loop than there is in a pass
                if is_out_of_memory(error):
                    raise
                return False
            for number in telling_numbers(self._micro_batches):
                try:
                    later = run(ahead=number)
                except Exception as error:  # the user's code may have no such batch
                    if is_out_of_memory(error):
                        raise
                    continue
                pairs = [(first.gradients[0], later.gradients[0])] + ([(first.moves, later.moves)] if steps else [])
                self._numbers_matter |= any(distance(*pair) > self._repeated for pair in pairs)
        return self._numbers_matter

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
                if known is not None and all(map(same_values, known[0].parts, halves.parts)):
                    return known[1]
                return self.judge(batch_pass, halves)
            except Exception as error:
                if is_out_of_memory(error) or isinstance(error, LayoutError):
                    raise
                failed = f" A part alone ended in {type(error).__name__}: {error}"
            return self.judge(batch_pass, batch.cut(batch.slices(anew=True)))
        except LayoutError as why:
            return uncuttable(self._tolerance, f"{why}{failed}")

    def which_matter(
        self, batch_pass: Passes, batch: Any, suspects: Mapping[str, float | None], *, on_device: bool
    ) -> tuple[str, ...]:
        """Return which of these the gradient may depend on: tensors, numbers with their former values, and others."""
        tensors = [name for name in suspects if name in batch_pass.states[0]]
        numbers = {name: value for name, value in suspects.items() if value is not None and name not in tensors}
        others = tuple(name for name in suspects if name not in (*tensors, *numbers))
        if numbers:
            former = self._passes.run([batch], seed=0, on_device=on_device, numbers=numbers)
            if distance(batch_pass.gradients[0], former.gradients[0]) > self._repeated:
                others += tuple(numbers)
        if not tensors:
            return others
        run = partial(self._passes.run, seed=0, on_device=on_device, moved=tensors, keep=tensors)
        moved = run([batch])
        matter = distance(batch_pass.gradients[0], moved.gradients[0]) > self._repeated
        if matter and set(tensors) <= set(moved.changed):  # the pass may bring them to where the next one leaves them
            again = run([batch, batch])
            stay = all(map(_is_rounding, moved.kept[1], again.kept[1]))
            matter = not stay or distance(*again.gradients) > self._repeated
        return (*tensors, *others) if matter else others

    def judge(self, batch_pass: Passes, halves: Halves) -> Exactness:
        """Compare the parts of a batch with a pass over the whole batch."""
        counts = [self._items(part, size, halves) for part, size in zip(halves.parts, halves.sizes)]
        if not all(number > 0 for number in counts):
            return unmeasured(self._tolerance, f"normalize counts {counts} in the parts of a batch")
        weight = counts[0] / sum(counts)
        self.kinds |= uneven_kinds(halves.parts, halves.sizes)
        changed, alone = self._changed(batch_pass, halves), None
        accumulated = self._run(halves, weights=(weight, 1 - weight))
        error = distance(batch_pass.gradients[0], accumulated.gradients[-1])
        if error <= self._tolerance:
            changed = self._without_tables(changed, halves, batch_pass, accumulated)
            changed = self._without_rows(changed, halves)
            changed = self._without_counts(changed, halves, batch_pass)
        self._unlike |= set(changed)
        size = norm(batch_pass.gradients[0])
        if not error <= self._tolerance:  # the cause shows in gradients that are not accumulated
            parts = self._run(halves).gradients
            if self._while_training and error * size <= self._tolerance * max(map(norm, parts)):
                error = self._tolerance  # near a minimum those of samples cancel each other, and rounding is left
            else:
                alone = compare(batch_pass.gradients[0], *parts, weight=weight)
                trained = self._trained(batch_pass)
                late = tuple(name for name in accumulated.changed_in_step if name not in trained)
                changed = changed or late or (ACCUMULATED if alone.error <= self._tolerance else ())
        if not 0 < size < math.inf:
            return unmeasured(self._tolerance, f"the norm of the gradient is {size}" if size else NO_GRADIENT)
        is_clear = self._while_training and alone is None and not changed
        noise, layers = 0.0 if is_clear else self._noise(batch_pass, halves), batch_norm_layers(self._module)
        measured = Exactness(error, self._tolerance, "exact", layers, micro_steps=self._passes.steps, tensors=changed)
        verdict = judge(measured, alone, noise=noise)
        if verdict.cause == "exact" and self._ends_otherwise(halves, (weight, 1 - weight)):
            return replace(verdict, relative_error=None, cause="stateful", reason=KEPT)
        return verdict if alone is None else self._explained(verdict, alone, batch_pass, halves, weight)

    def _explained(
        self, verdict: Exactness, alone: Differences, batch_pass: Passes, halves: Halves, weight: float
    ) -> Exactness:
        """Look for what else may cause a difference that looks like one of the loss; propose a counter if it is not."""
        if verdict.cause not in ("coupled", "weighted", "sum"):
            return verdict
        with trial_steps.without_gradient_hooks(self._passes.trainer) as has_hooks:
            if has_hooks and self._is_same(self._run_whole(halves), self._run(halves), weight):
                return replace(verdict, cause="stateful", reason=HOOKED)
        if not halves.cut and self._is_same(batch_pass, self._run(replace(halves, cut=True)), weight):
            return replace(verdict, cause="stateful", reason=COUNTED)
        if verdict.cause != "weighted":
            return verdict
        return replace(verdict, counter=fitting_counter(halves.batch(0), halves.parts, alone.best_weight))

    def _run(self, halves: Halves, weights: Sequence[float] = (), keep: Collection[str] = ()) -> Passes:
        cut, on_device = halves.cut, halves.on_device
        return self._passes.run(halves.parts, seed=1, as_pieces=cut, on_device=on_device, weights=weights, keep=keep)

    def _run_whole(
        self, halves: Halves, *, seed: int = 0, times: int = 1, keep: Collection[str] = (), moved: Collection[str] = ()
    ) -> Passes:
        """Run the whole batch; several times as one batch of the loop."""
        batches, on_device = [halves.batch(seed) for _ in range(times)], halves.batch_on_device
        return self._passes.run(batches, seed=seed, as_pieces=times > 1, on_device=on_device, keep=keep, moved=moved)

    def _is_same(self, batch_pass: Passes, parts: Passes, weight: float) -> bool:
        return compare(batch_pass.gradients[0], *parts.gradients, weight=weight).error <= self._tolerance

    def _changed(self, batch_pass: Passes, halves: Halves) -> tuple[str, ...]:
        """Name the state that a pass changes, or that the next one depends on.

        State that no gradient depends on yet may come to matter later: a queue that is filled, a count, a teacher
        whose part in the loss grows.
        """
        names = batch_pass.changed_in_step if halves.cut else batch_pass.changed
        self.changing |= set(names)
        trained = self._trained(batch_pass)
        changed = tuple(name for name in names if name not in trained)
        if changed or batch_pass.draws or not self._depends_on_last(halves):
            return changed
        return ("what the module keeps from one step to the next",)

    def _trained(self, batch_pass: Passes) -> set[str]:
        """Return the names of parameters with a gradient: a copy of the model may have parameters without one."""
        names = [name for name, weight in self._module.named_parameters() if weight.requires_grad]
        return {name for name, gradient in zip(names, batch_pass.gradients[0], strict=True) if norm([gradient])}

    def _depends_on_last(self, halves: Halves) -> bool:
        """Return whether the same batch gets another gradient in the next step, as the module keeps something."""
        if self._keeps_something is None:
            self._keeps_something = distance(*self._run_whole(halves, times=2).gradients) > self._repeated
        return self._keeps_something

    def _without_tables(self, changed: tuple[str, ...], halves: Halves, *passes: Passes) -> tuple[str, ...]:
        """Leave out what all micro-batches leave the same, one of a single sample too, as a table that is filled once.

        A single sample shows which of the state that changes depends on the samples.
        """
        if not changed:
            return ()
        try:
            single = self._passes.run([halves.one_sample()], seed=2, on_device=halves.on_device)
        except Exception as error:  # there may be no step on one sample
            if is_out_of_memory(error):
                raise
            return changed
        states = [state for each in (*passes, single) for state in each.states]
        sums = {name: {state.get(name) for state in states} for name in changed}
        alike = {name for name, values in sums.items() if len(values) == 1 and None not in values}
        self._alike |= alike
        return tuple(name for name in changed if name not in alike)

    def _without_rows(self, changed: tuple[str, ...], halves: Halves) -> tuple[str, ...]:
        """Leave out memories with a row for each sample of the data, if each part changes its own, whatever ran before.

        No part met what another had changed, as the gradients show. In a queue, a part writes where the one before
        ended; a row of a class may be met by several parts.
        """
        tensors, rows = named_state(self._module), length_of(getattr(self._loader, "dataset", None))
        if rows is None:
            return changed
        names = [n for n in changed if n in tensors and tensors[n].dim() and len(tensors[n]) >= rows]
        if not names:
            return changed
        parts = halves.parts, *([part] for part in halves.parts)
        runs = [self._run_whole(halves, keep=names)]
        runs += [self._run(replace(halves, parts=each), keep=names) for each in parts]
        values = zip(runs[0].kept[0], *(run.kept[1] for run in runs))
        by_sample = {name for name, tensors in zip(names, values) if _is_in_rows(*tensors)}
        self._alike |= by_sample
        return tuple(name for name in changed if name not in by_sample)

    def _without_counts(self, changed: tuple[str, ...], halves: Halves, batch_pass: Passes) -> tuple[str, ...]:
        """Leave out what the parts leave as the whole batch does, and no gradient depends on: counts, histograms.

        A gradient may come to depend on them later; then a later measurement does not leave them out.
        """
        tensors = named_state(self._module)
        names = [name for name in changed if name in tensors]
        if not names:
            return changed
        whole, parts = (run.kept[1] for run in (self._run_whole(halves, keep=names), self._run(halves, keep=names)))
        counts = {name for name, one, other in zip(names, whole, parts) if torch.allclose(one, other, rtol=1e-5)}
        if not counts or self._depends_on(counts, halves, batch_pass):
            return changed
        self._alike |= counts
        return tuple(name for name in changed if name not in counts)

    def _depends_on(self, names: Collection[str], halves: Halves, batch_pass: Passes) -> bool:
        moved = self._run_whole(halves, moved=names)
        return distance(batch_pass.gradients[0], moved.gradients[0]) > self._repeated

    def _ends_otherwise(self, halves: Halves, weights: Sequence[float]) -> bool:
        """Return whether hooks, or the next window, make another gradient if the window before was one of parts."""
        if self._while_training or self._draws:
            return False
        settings: dict[str, Any] = {
            "on_device": (halves.batch_on_device, halves.batch_on_device),
            "as_pieces": halves.cut,
        }
        after, batch = halves.batch(1), halves.batch(0)
        whole = self._passes.run_windows([batch], after, weights=[1.0], **settings)
        settings["on_device"] = halves.on_device, halves.batch_on_device
        parts = self._passes.run_windows(halves.parts, after, weights=weights, **settings)
        return any(distance(*pair) > self._tolerance for pair in zip(whole, parts, strict=True))

    def _noise(self, batch_pass: Passes, halves: Halves) -> float:
        """Measure how far passes over the whole batch with other random numbers differ; several if some are drawn."""
        noise = 0.0
        for seed in range(1, 2 + _SEEDS):
            passes = self._run_whole(halves, seed=seed)
            noise = max(noise, distance(*batch_pass.gradients, *passes.gradients))
            self._draws |= passes.draws
            if noise > self._tolerance or not passes.draws:
                break
        return noise

    def _items(self, part: Any, samples: int, halves: Halves) -> float:
        if self._count is not None:
            return count_items(self._count, part)
        return self._reader.count(part, expected=samples, on_host=not halves.on_device)


def telling_numbers(batches: int) -> list[int]:
    """Return numbers of an epoch's batches that a step may treat unlike the first.

    Steps do something every n batches, mostly in the last of them, where ``(batch_idx + 1) % n == 0``. So they are as
    late as the epoch allows, and followed by multiples of many n.

    Examples:
        >>> telling_numbers(200), telling_numbers(3), telling_numbers(1)
        ([127, 199], [1, 2], [])
    """
    multiples = [1 << max(0, batches.bit_length() - 1), *[n for n in _MULTIPLES if n <= batches][-1:]]
    return sorted({number - 1 for number in multiples if number > 1})


def batch_norm_layers(module: torch.nn.Module) -> tuple[str, ...]:
    """Return the names of BatchNorm layers in training mode, which normalize by the samples of a micro-batch."""
    layers = (name for name, layer in module.named_modules() if isinstance(layer, _BatchNorm) and layer.training)
    return tuple(layers)


def _is_rounding(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors differ by no more than a value that is computed again."""
    if not one.is_floating_point():
        return torch.equal(one, other)
    return torch.allclose(one, other, rtol=4 * torch.finfo(one.dtype).eps, atol=0.0)


def _is_in_rows(
    before: torch.Tensor, whole: torch.Tensor, parts: torch.Tensor, one: torch.Tensor, other: torch.Tensor
) -> bool:
    """Return whether two parts change different values of a tensor, each by itself, and together those of the whole."""
    by_one, by_other = one != before, other != before
    together = torch.where(by_one, one, torch.where(by_other, other, before))
    alike = all(torch.allclose(each, together, rtol=1e-3, atol=1e-5) for each in (whole, parts))
    return alike and bool(by_one.any()) and bool(by_other.any()) and not bool((by_one & by_other).any())
