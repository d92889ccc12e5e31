"""Run one batch whole and in parts, compare gradients and state, and judge what differs."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch.utils.data import DataLoader

from lightning_ga.batch.counters import fitting_counter
from lightning_ga.batch.layout import LayoutError
from lightning_ga.batch.pytree import same_values
from lightning_ga.compat import trial_steps
from lightning_ga.compat.transfer import BatchTransfer
from lightning_ga.fit.batch_norm import batch_norm_layers
from lightning_ga.fit.differences import Differences, compare, distance, judge
from lightning_ga.fit.exactness_passes import Passes, PassRunner, copy_if_possible
from lightning_ga.loading.reader import BatchReader
from lightning_ga.loading.samples import collate_samples
from lightning_ga.memory.live_tensors import uncounted
from lightning_ga.memory.oom import is_out_of_memory
from lightning_ga.plan.exactness import (
    ACCUMULATED,
    COUNTED,
    HOOKED,
    Exactness,
    Verdicts,
    both,
    uncuttable,
    unmeasured,
)
from lightning_ga.plan.weights import count_items
from lightning_ga.snapshot.random_numbers import generators_of, reseed

_SEEDS = 8  # further passes with other random numbers, where some are drawn


class ExactnessCheck:
    """Runs a batch whole and in parts.

    Args:
        trainer: The Trainer, whose state is kept.
        loader: The user's DataLoader.
        reader: Cuts the loader's batches.
        prepare: Restores the state.
        count: Counts the items of a batch, or ``None`` for samples.
        tolerance: Largest difference that rounding explains.
    """

    def __init__(
        self,
        trainer: Any,
        loader: "DataLoader[Any]",
        reader: BatchReader,
        prepare: Callable[[], None],
        count: Callable[[Any], float] | None,
        tolerance: float,
    ) -> None:
        self._trainer, self._loader, self._reader, self._prepare = trainer, loader, reader, prepare
        self._passes = PassRunner(trainer, prepare)
        self._count, self._tolerance = count, tolerance
        exactly = trainer.strategy.root_device.type == "cpu" and tolerance <= 1e-4
        self._rest = tolerance / (100 if exactly else 1)  # largest difference of a repeated step
        self._seen: set[str] = set()  # names of all that changed
        self._alike: set[str] = set()  # those of them that any pass was seen to leave alike
        self._told: set[str] = set()  # those that one was not
        self._keeps: bool | None = None  # whether the module keeps what changes gradients; None until measured
        self._transfer = BatchTransfer(trainer)
        self._moves_whole = self._transfer.has_hooks  # these get the whole batch, before it is cut

    def run(self, samples: list[Any], *, in_step: bool) -> Verdicts:
        """Compare the whole batch with its parts, as the loader makes them and as the step cuts them."""
        collated = self._collate(samples)
        kept = self._reader.count(collated, expected=len(samples), on_host=True)
        if kept < 2:
            return both(unmeasured(self._tolerance, f"the collate function kept {kept} of {len(samples)} samples"))
        whole = self._passes.run([collated], seed=0)
        middle = (len(samples) + 1) // 2
        if in_step:
            return both(self._cut_and_judge(samples, collated, kept, whole))
        loaded = [self._collate(samples[:middle]), self._collate(samples[middle:])]
        sizes = middle, len(samples) - middle
        anew, one = partial(self._collate, samples), partial(self._collate, samples[-1:])
        training = self._judge(whole, loaded, sizes, anew, one, cut=False)
        try:
            slices = self._slices(samples, collated, kept)
        except LayoutError as why:
            return Verdicts(training, uncuttable(self._tolerance, str(why)))
        if (
            whole.changed == whole.changed_in_step
            and not training.reason
            and kept == len(samples)
            and all(
                same_values(part, slices(start, stop))
                for part, (start, stop) in zip(loaded, ((0, middle), (middle, kept)))
            )
        ):
            return Verdicts(training, training)
        return Verdicts(training, self._cut_and_judge(samples, collated, kept, whole))

    @property
    def changing(self) -> tuple[str, ...]:
        """Names of all that passes changed, averages that nobody froze among them."""
        return tuple(self._seen)

    @property
    def tables(self) -> tuple[str, ...]:
        """Those of them that any pass leaves alike, whatever samples it has: nothing depends on how batches are cut."""
        return tuple(self._alike - self._told)

    def _cut_and_judge(self, samples: list[Any], collated: Any, kept: int, whole: Passes) -> Exactness:
        middle = (kept + 1) // 2
        failed = None
        try:
            slices = self._slices(samples, collated, kept)
            while True:
                try:
                    parts = [slices(0, middle), slices(middle, kept)]
                    one = partial(slices, kept - 1, kept)
                    return self._judge(whole, parts, (middle, kept - middle), lambda _: collated, one, cut=True)
                except Exception as error:
                    if is_out_of_memory(error) or isinstance(error, LayoutError) or failed is not None:
                        raise
                    failed = error
                again = self._reader.samples_again(self._loader, samples)
                if again is None:
                    raise LayoutError("There are no samples at hand to make parts of anew.")
                slices = self._reader.collated_anew(self._moved(collated), again, on_host=not self._moves_whole).take
        except LayoutError as why:
            because = "" if failed is None else f" A part alone ended in {type(failed).__name__}: {failed}"
            return uncuttable(self._tolerance, f"{why}{because}")

    def _slices(self, samples: list[Any], collated: Any, kept: int) -> Callable[[int, int], Any]:
        return self._reader.slices(
            self._moved(collated),
            expected=kept,
            on_host=not self._moves_whole,
            samples=lambda: self._reader.samples_again(self._loader, samples),
        ).take

    def _moved(self, collated: Any) -> Any:
        """Return the batch in the form in which the step cuts it."""
        if not self._moves_whole:
            return collated
        self._prepare()
        reseed(1, generators_of(self._trainer.lightning_module))
        return self._transfer.moved(copy_if_possible(collated))

    def _judge(
        self,
        whole: Passes,
        parts: list[Any],
        sizes: Sequence[int],
        again: Callable[[int], Any],
        one: Callable[[], Any],
        *,
        cut: bool,
    ) -> Exactness:
        """Compare parts with the whole, which ``again`` makes once more with random numbers of a seed.

        A batch of ``one`` sample shows which of the state that changes depends on the samples.
        """
        counts = [self._items(part, size, cut=cut) for part, size in zip(parts, sizes)]
        if not all(number > 0 for number in counts):
            return unmeasured(self._tolerance, f"normalize counts {counts} in the parts of a batch")
        share = counts[0] / sum(counts)
        run = partial(self._passes.run, parts, seed=1, of_one=cut, cut=cut, moved=cut and self._moves_whole)
        changed = self._changed(whole, again, cut=cut)
        accumulated = run(weights=(share, 1 - share))
        differences = _compared(whole, accumulated, share)
        if changed and differences.error <= self._tolerance:
            few = self._of_one(one, moved=cut and self._moves_whole)
            alike = {name for name in changed if few is not None and _is_alike(name, whole, accumulated, few)}
            changed = tuple(name for name in changed if name not in alike)
            self._alike |= alike
        self._told |= set(changed)
        if not differences.error <= self._tolerance:  # the cause shows in gradients that are not accumulated
            alone = _compared(whole, run(), share)
            changed = changed or (ACCUMULATED if alone.error <= self._tolerance else ())
            if alone.error > self._tolerance:
                differences = replace(alone, error=differences.error)  # the difference is that of training
        noise = self._noise(whole, again)
        verdict = judge(
            differences,
            tolerance=self._tolerance,
            noise=noise,
            layers=tuple(batch_norm_layers(self._trainer.lightning_module)),
            tensors=changed,
            micro_steps=self._passes.steps,
        )
        if verdict.cause not in ("coupled", "weighted", "sum"):
            return verdict
        with trial_steps.without_gradient_hooks(self._trainer) as left_out:
            if left_out and _compared(self._passes.run([again(0)], seed=0), run(), share).error <= self._tolerance:
                return replace(verdict, cause="stateful", reason=HOOKED)
        if not cut and _compared(whole, run(of_one=True), share).error <= self._tolerance:
            return replace(verdict, cause="stateful", reason=COUNTED)
        if verdict.cause != "weighted":
            return verdict
        return replace(verdict, counter=fitting_counter(again(0), parts, differences.share))

    def _of_one(self, one: Callable[[], Any], *, moved: bool) -> Passes | None:
        """Run a batch of one sample; ``None`` where there is no such step."""
        try:
            return self._passes.run([one()], seed=2, moved=moved)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return None

    def _changed(self, whole: Passes, again: Callable[[int], Any], *, cut: bool) -> tuple[str, ...]:
        """Name the state that a pass changes, or that the next one depends on.

        State that no gradient depends on yet may come to matter later: a queue that is filled, a count, a teacher
        whose part in the loss grows.
        """
        found = whole.changed_in_step if cut else whole.changed
        self._seen |= set(found)
        trained = {name for name, weight in self._trainer.lightning_module.named_parameters() if weight.requires_grad}
        changed = tuple(name for name in found if name not in trained)
        if changed or whole.draws or not self._depends_on_last(again):
            return changed
        return ("what the module keeps from one step to the next",)

    def _depends_on_last(self, again: Callable[[int], Any]) -> bool:
        """Return whether the same batch gets another gradient in the next step, as the module keeps something."""
        if self._keeps is None:
            twice = self._passes.run([again(0), again(0)], seed=0, of_one=True)
            with uncounted():
                self._keeps = distance(*twice.gradients) > self._rest
        return self._keeps

    def _noise(self, whole: Passes, again: Callable[[int], Any]) -> float:
        """Measure how far passes over the whole batch with other random numbers differ; several if some are drawn."""
        noise = 0.0
        for seed in range(1, 2 + _SEEDS):
            batch = again(seed)
            ran = self._passes.run([batch], seed=seed)
            with uncounted():
                noise = max(noise, distance(*whole.gradients, *ran.gradients))
            if noise > self._tolerance or not ran.draws:
                break
        return noise

    def _items(self, part: Any, samples: int, *, cut: bool) -> float:
        if self._count is not None:
            return count_items(self._count, part)
        return self._reader.count(part, expected=samples, on_host=not (cut and self._moves_whole))

    def _collate(self, samples: list[Any], seed: int = 0) -> Any:
        return self._transfer.on_host(collate_samples(self._loader, samples, len(samples), seed=seed))


def _is_alike(name: str, *passes: Passes) -> bool:
    """Return whether each micro-batch of each of these has left the same, as where a table is filled once."""
    sums = set[int | None]().union(*(each.leave(name) for each in passes))
    return len(sums) == 1 and None not in sums


def _compared(whole: Passes, parts: Passes, share: float) -> Differences:
    with uncounted():
        return compare(*whole.gradients, *parts.gradients, share=share)
