"""Run one batch whole and in parts, and compare gradients and state: the passes of the exactness check."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

from lightning_ga.batch.counters import fitting_counter
from lightning_ga.batch.layout import LayoutError
from lightning_ga.batch.pytree import same_values
from lightning_ga.compat import gradient_dtype, patching, transfer, trial_steps
from lightning_ga.fit.batch_norm import batch_norm_layers
from lightning_ga.fit.deterministic import stop_dropping
from lightning_ga.fit.differences import Differences, compare, distance, judge
from lightning_ga.fit.window_watch import kept_buffers
from lightning_ga.loading.reader import BatchReader
from lightning_ga.loading.samples import collate_samples, copied
from lightning_ga.memory.live_tensors import uncounted
from lightning_ga.memory.oom import is_out_of_memory
from lightning_ga.plan.exactness import INEXACT, Exactness, uncuttable, unmeasured
from lightning_ga.plan.weights import count_items
from lightning_ga.snapshot.checksums import checksums, differ
from lightning_ga.snapshot.random_numbers import RandomState, generator_state, generators_of, have_moved, reseed

MOVED = 1e-2  # how far weights are moved, relatively: a teacher of momentum 0.9999 follows by more than rounding

ACCUMULATED = (
    "gradients of earlier micro-batches, or adds some by itself (a hook that writes to .grad, a second loss)",
)

COUNTED = (
    "the step depends on the number of its batch, or of all (batch_idx, trainer.num_training_batches, or a count that "
    "a hook of batches keeps), which counts micro-batches here: use trainer.global_step, which counts optimizer steps, "
    'or micro_batching="step"'
)

HOOKED = (
    "hooks on gradients (Tensor.register_hook, on_after_backward) see those of each micro-batch, not of the whole "
    "batch: change gradients in on_before_optimizer_step, or clip them by Trainer(gradient_clip_val=…)"
)

Sums = dict[str, int | None]  # of the bits of tensors, by name

_SEEDS = 8  # further passes with other random numbers, where some are drawn


@dataclass(frozen=True, slots=True)
class Verdicts:
    """The results of the check."""

    training: Exactness  # for the micro-batches that training runs
    splitting: Exactness  # for batches that are cut in the step
    changing: tuple[str, ...] = ()  # names of all that passes change besides gradients

    def unless(self, other: "Verdicts") -> "Verdicts":
        """Return these verdicts, with those of the other check where only that found something inexact."""
        pairs = ((self.training, other.training), (self.splitting, other.splitting))
        steps = other.training.micro_steps
        training, splitting = (b if b.cause in (*INEXACT, "random") and a.cause == "exact" else a for a, b in pairs)
        return Verdicts(replace(training, micro_steps=steps), replace(splitting, micro_steps=steps))


@dataclass(frozen=True, slots=True)
class _Passes:
    """The results of micro-batches run one after the other."""

    gradients: list[list[torch.Tensor]]  # the gradient of each
    changed: tuple[str, ...]  # names of the state that they changed besides gradients
    changed_in_step: tuple[str, ...]  # those that ``training_step`` or the backward pass changed, and no hook
    draws: bool  # whether random numbers were drawn


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
        self._count, self._tolerance = count, tolerance
        exactly = trainer.strategy.root_device.type == "cpu" and tolerance <= 1e-4
        self._rest = tolerance / (100 if exactly else 1)  # largest difference of a repeated step
        self._seen: set[str] = set()  # names of all that changed
        self._keeps: bool | None = None  # whether the module keeps what changes gradients; None until measured
        self._steps = 0
        self._moves_whole = transfer.hooks_move_batches(trainer)  # these hooks get the whole batch, before it is cut

    def run(self, samples: list[Any], *, in_step: bool) -> Verdicts:
        """Compare the whole batch with its parts, as the loader makes them and as the step cuts them."""
        collated = self._collate(samples)
        kept = self._reader.count(collated, expected=len(samples), on_host=True)
        if kept < 2:
            return both(unmeasured(self._tolerance, f"the collate function kept {kept} of {len(samples)} samples"))
        whole = self._pass([collated], seed=0)
        middle = (len(samples) + 1) // 2
        if in_step:
            return both(self._cut_and_judge(samples, collated, kept, whole))
        loaded = [self._collate(samples[:middle]), self._collate(samples[middle:])]
        sizes = middle, len(samples) - middle
        training = self._judge(whole, loaded, sizes, lambda seed: self._collate(samples, seed), cut=False)
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

    def _cut_and_judge(self, samples: list[Any], collated: Any, kept: int, whole: _Passes) -> Exactness:
        middle = (kept + 1) // 2
        failed = None
        try:
            slices = self._slices(samples, collated, kept)
            while True:
                try:
                    parts = [slices(0, middle), slices(middle, kept)]
                    return self._judge(whole, parts, (middle, kept - middle), lambda _: collated, cut=True)
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
        return transfer.transferred(self._trainer, _copied(collated))

    def _judge(
        self, whole: _Passes, parts: list[Any], sizes: Sequence[int], again: Callable[[int], Any], *, cut: bool
    ) -> Exactness:
        """Compare parts with the whole, which ``again`` makes once more with random numbers of a seed."""
        counts = [self._items(part, size, cut=cut) for part, size in zip(parts, sizes)]
        if not all(number > 0 for number in counts):
            return unmeasured(self._tolerance, f"normalize counts {counts} in the parts of a batch")
        share = counts[0] / sum(counts)
        run = partial(self._pass, parts, seed=1, of_one=cut, cut=cut, moved=cut and self._moves_whole)
        changed = self._changed(whole, again, cut=cut)
        differences = _compared(whole, run(weights=(share, 1 - share)), share)
        if not differences.error <= self._tolerance:  # the cause shows in gradients that are not accumulated
            alone = _compared(whole, run(), share)
            changed = changed or (ACCUMULATED if alone.error <= self._tolerance else ())
            differences = differences if alone.error <= self._tolerance else alone
        noise = self._noise(whole, again)
        verdict = judge(
            differences,
            tolerance=self._tolerance,
            noise=noise,
            layers=tuple(batch_norm_layers(self._trainer.lightning_module)),
            tensors=changed,
            micro_steps=self._steps,
        )
        if verdict.cause not in ("coupled", "weighted", "sum"):
            return verdict
        with trial_steps.without_gradient_hooks(self._trainer) as left_out:
            if left_out and _compared(self._pass([again(0)], seed=0), run(), share).error <= self._tolerance:
                return replace(verdict, cause="stateful", reason=HOOKED)
        if not cut and _compared(whole, run(of_one=True), share).error <= self._tolerance:
            return replace(verdict, cause="stateful", reason=COUNTED)
        if verdict.cause != "weighted":
            return verdict
        return replace(verdict, counter=fitting_counter(again(0), parts, differences.share))

    def _changed(self, whole: _Passes, again: Callable[[int], Any], *, cut: bool) -> tuple[str, ...]:
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
            twice = self._pass([again(0), again(0)], seed=0, of_one=True)
            with uncounted():
                self._keeps = distance(*twice.gradients) > self._rest
        return self._keeps

    def _noise(self, whole: _Passes, again: Callable[[int], Any]) -> float:
        """Measure how far passes over the whole batch with other random numbers differ; several if some are drawn."""
        noise = 0.0
        for seed in range(1, 2 + _SEEDS):
            batch = again(seed)
            ran = self._pass([batch], seed=seed)
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
        return transfer.before_transfer(self._trainer, collate_samples(self._loader, samples, len(samples), seed=seed))

    def _pass(
        self,
        batches: Sequence[Any],
        *,
        seed: int,
        of_one: bool = False,
        cut: bool = False,
        moved: bool = False,
        weights: Sequence[float] = (),
    ) -> _Passes:
        """Run micro-batches one after the other, from the state that training begins with.

        Args:
            batches: The micro-batches.
            seed: Seed of the random numbers that they draw.
            of_one: Whether they are parts of one batch of the loop, whose hooks run once.
            cut: Whether they are pieces of it, after the last of which gradients are complete.
            moved: Whether they lie on the device.
            weights: Their weights, if gradients are accumulated as in training; otherwise each begins with none. The
                gradients returned are those that each micro-batch adds, without its weight.
        """
        self._prepare()
        module = self._trainer.lightning_module
        stop_dropping(module)
        _move_weights(module)
        own = generators_of(module)
        reseed(seed, own)
        before, drawn, places = _watched(module), RandomState(), [(each, generator_state(each)) for each in own]
        states: list[Sums] = []
        gradients: list[list[torch.Tensor]] = []
        for number, batch in enumerate(batches):
            if number == 0 or not weights:
                for parameter in module.parameters():
                    parameter.grad = None
            batch, last = _copied(batch), number == len(batches) - 1
            trial_steps.accumulate_only(
                self._trainer,
                batch if moved else transfer.transferred(self._trainer, batch),
                number,
                lambda: states.append(_watched(module)),
                begins=not of_one or number == 0,
                ends=last or not of_one,
                continues=cut and not last,
                batches=1 if of_one else len(batches),
                weight=weights[number] if weights else 1.0,
            )
            self._steps += 1
            if weights:
                gradient_dtype.widen(module.parameters())
            gradients.append([_on_host(gradient) for gradient in _gradients(module)])
        hooks, step = _changed(before, _watched(module)), _changed(*states[:2])
        if weights:
            gradients = _added(gradients, weights)
        return _Passes(gradients, hooks, step, not drawn.is_current() or have_moved(places))


def _compared(whole: _Passes, parts: _Passes, share: float) -> Differences:
    with uncounted():
        return compare(*whole.gradients, *parts.gradients, share=share)


def _added(accumulated: list[list[torch.Tensor]], weights: Sequence[float]) -> list[list[torch.Tensor]]:
    """Return the gradient that each micro-batch has added, without its weight, from the gradients after each."""
    with uncounted():
        wide = [
            [gradient.to(torch.promote_types(gradient.dtype, torch.float32)) for gradient in each]
            for each in accumulated
        ]
        first, *rest = wide
        added = [first, *([now - then for then, now in zip(*pair)] for pair in zip(wide, rest))]
        return [[gradient / weight for gradient in each] for each, weight in zip(added, weights)]


def _changed(before: dict[str, Any], after: dict[str, Any]) -> tuple[str, ...]:
    return tuple(name for name in after if differ(before.get(name), after[name]))


def both(verdict: Exactness) -> Verdicts:
    """Return one verdict for training and for splitting."""
    return Verdicts(verdict, verdict)


def _copied(batch: Any) -> Any:
    """Return a copy if the batch can be copied: a step may change its batch in place."""
    try:
        return copied(batch)
    except Exception:  # a batch may hold anything
        return batch


def rounding(trainer: Any, *, plain: bool = True) -> float:
    """Return the relative difference that precision explains: of the weights, or of autocast where it stays on."""
    if not plain and hasattr(trainer.precision_plugin, "autocast_context_manager"):
        return 5e-2 if "bf16" in str(trainer.precision) else 1e-2
    dtypes = {p.dtype for p in trainer.lightning_module.parameters() if p.requires_grad and p.is_floating_point()}
    if dtypes & {torch.float16, torch.bfloat16}:
        return 5e-2 if torch.bfloat16 in dtypes else 1e-2
    return 1e-6 if dtypes == {torch.float64} else 1e-4  # losses may be computed in fp32 all the same


@contextmanager
def exact_arithmetic(trainer: Any, *, plain: bool) -> Iterator[None]:
    """Return a context in which steps compute in the precision of the weights, if memory allows for it.

    Autocast would hide differences.
    """
    plugin = trainer.precision_plugin
    if not plain or not hasattr(plugin, "autocast_context_manager"):
        yield
        return
    with patching.shadowed(plugin, "forward_context", nullcontext):
        yield


@torch.no_grad()
def _move_weights(module: torch.nn.Module) -> None:
    """Move the trained weights a little, the same way each time."""
    for number, parameter in enumerate(module.parameters()):  # copies of a weight (averages) move apart from it
        if parameter.requires_grad and parameter.is_floating_point() and not parameter.is_sparse:
            parameter.mul_(1.0 + MOVED)
            if parameter.numel() <= 2**16:
                generator = torch.Generator(parameter.device).manual_seed(number)
                noise = torch.empty(parameter.shape, device=parameter.device).normal_(generator=generator)
                parameter.add_(noise.to(parameter.dtype), alpha=MOVED)


def _watched(module: torch.nn.Module) -> Sums:
    """Return sums over weights, and over buffers except those of normalization: state that a step should not change."""
    named = dict([*kept_buffers(module), *module.named_parameters()])
    return dict(zip(named, checksums(named.values())))


def _gradients(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    for parameter in module.parameters():
        if parameter.requires_grad:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach()
            yield gradient.coalesce() if gradient.is_sparse else gradient


def _on_host(gradient: torch.Tensor) -> torch.Tensor:
    with uncounted():
        return gradient.to("cpu", copy=True)
