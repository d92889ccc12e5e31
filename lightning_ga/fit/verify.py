"""The exactness check in a Trainer: one batch of real samples, once whole and once in parts, cut as in training.

The parts run one after the other without restoring state between them: state that the step keeps (a
queue, a teacher that follows its student) changes as in training. The trained weights are moved a
little beforehand, as a first step would move them: so a teacher that starts as a copy of its student
is seen to follow it.
"""

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from lightning_ga.batch.counters import fitting_counter
from lightning_ga.batch.layout import LayoutError
from lightning_ga.batch.pytree import open_container, same_values
from lightning_ga.batch.sizes import elements
from lightning_ga.compat import patching, transfer, trial_steps
from lightning_ga.fit.batch_norm import batch_norm_layers
from lightning_ga.fit.deterministic import stop_dropping, without_dropout
from lightning_ga.fit.differences import Differences, compare, distance, judge
from lightning_ga.fit.window_watch import kept_buffers
from lightning_ga.loading.reader import BatchReader
from lightning_ga.loading.samples import collate_samples, fetch
from lightning_ga.memory.live_tensors import uncounted
from lightning_ga.memory.oom import is_out_of_memory, release
from lightning_ga.plan.exactness import INEXACT, Exactness, uncuttable, unmeasured
from lightning_ga.plan.weights import count_items
from lightning_ga.probe.isolation import isolated
from lightning_ga.snapshot.random_numbers import RandomState, generator_state, generators_of, have_moved, reseed

SAMPLES = 5  # parts of three and two: BatchNorm refuses one sample, and unequal parts show wrong weights
MOVED = 1e-2  # how far weights are moved, relatively: a teacher of momentum 0.9999 follows by more than rounding
CONSIDERED = 24  # samples to choose from
ACCUMULATED = (
    "gradients of earlier micro-batches, or adds some by itself (a hook that writes to .grad, a second loss)",
)
_MOMENT = 0.3  # seconds to read them
_SMALL = 2**28  # bytes of parameters
_SEEDS = 8  # further passes with other random numbers, where some are drawn


@dataclass(frozen=True, slots=True)
class Verdicts:
    """The results of the check.

    Attributes:
        training: For the micro-batches that training runs.
        splitting: For batches that are cut in the step.
    """

    training: Exactness
    splitting: Exactness

    def unless(self, other: "Verdicts") -> "Verdicts":
        """Return these verdicts, with those of the other check where only that found something inexact."""
        pairs = ((self.training, other.training), (self.splitting, other.splitting))
        steps = other.training.micro_steps
        kept = (b if b.cause in (*INEXACT, "random") and a.cause == "exact" else a for a, b in pairs)
        return Verdicts(*(replace(each, micro_steps=steps) for each in kept))


@dataclass(frozen=True, slots=True)
class _Passes:
    """The results of micro-batches run one after the other.

    Attributes:
        gradients: The gradient of each.
        changed: Names of the state that they changed besides gradients.
        changed_in_step: Those that ``training_step`` or the backward pass changed, and no hook.
        draws: Whether random numbers were drawn.
    """

    gradients: list[list[torch.Tensor]]
    changed: tuple[str, ...]
    changed_in_step: tuple[str, ...]
    draws: bool


def measure_exactness(
    trainer: Any,
    loader: "DataLoader[Any]",
    indices: list[Any],
    *,
    reader: BatchReader,
    count: Callable[[Any], float] | None,
    limit: int,
    in_step: bool,
) -> Verdicts:
    """Run the check without dropout, and restore all state.

    Args:
        trainer: A Trainer at ``on_train_start``.
        loader: The user's DataLoader.
        indices: Indices of samples to run on.
        reader: Cuts the loader's batches.
        count: Counts the items of a batch that the loss is a mean over; ``None`` for samples.
        limit: Largest micro-batch that is known to fit, in samples.
        in_step: Whether training cuts batches in the step.
    """
    sizes = [min(SAMPLES, len(indices))] if _is_small(trainer.lightning_module) else []
    sizes += [size for size in [min(SAMPLES, limit, len(indices))] if size not in sizes]
    for size in sizes:
        verdicts = _measured(trainer, loader, indices, size, reader, count, in_step, spare=size <= limit // 2)
        if verdicts is not None:
            return verdicts
    return _both(unmeasured(rounding(trainer), f"memory ran out in the check, on {sizes[-1]} samples"))


def _measured(
    trainer: Any,
    loader: "DataLoader[Any]",
    indices: list[Any],
    size: int,
    reader: BatchReader,
    count: Callable[[Any], float] | None,
    in_step: bool,
    *,
    spare: bool,
) -> Verdicts | None:
    """Run the check on so many samples; ``None`` if memory runs out.

    ``spare`` says that there is memory for more precision.
    """
    module = trainer.lightning_module
    plain = spare or _is_small(module)
    tolerance = rounding(trainer, plain=plain)
    if size < 2:
        return _both(unmeasured(tolerance, "a micro-batch of one sample has no parts"))
    layers = tuple(batch_norm_layers(module))
    if layers and size < 4:  # BatchNorm refuses one sample
        return _both(Exactness(None, tolerance, "batch_norm", layers=layers))
    failure = None
    try:
        with isolated(trainer) as prepare, _exact_arithmetic(trainer, plain=plain), without_dropout():
            check = _Check(trainer, loader, reader, prepare, count, tolerance)
            samples = telling_samples(loader, indices, size)
            if len(samples) < 2:
                return _both(unmeasured(tolerance, f"the training data hold {len(samples)} samples"))
            verdicts = check.run(samples, in_step=in_step)
            if (
                size >= 4 and verdicts.training.cause == "exact"
            ):  # one exact cut is no proof: other samples, in equal parts
                verdicts = verdicts.unless(check.run(samples[-4:], in_step=in_step))
            return verdicts
    except Exception as error:  # the check must never cost a run
        failure = error
    if is_out_of_memory(failure):
        release(failure)
        return None
    reason = f"in the check, a step on part of {size} samples ended in {type(failure).__name__}: {failure}"
    return _both(unmeasured(tolerance, reason))


def telling_samples(loader: "DataLoader[Any]", indices: list[Any], size: int) -> list[Any]:
    """Choose samples that differ in labels, shapes and missing values, among those that can be read in a moment.

    The largest come first, so that padding, if any, gives the two parts of a batch different lengths.

    Args:
        loader: The user's DataLoader.
        indices: Indices to choose from.
        size: Samples to choose.
    """
    started, found = time.monotonic(), list[Any]()
    with closing(fetch(loader, ([index] for index in indices[:CONSIDERED]), list)) as reads:
        for samples in reads:
            found += samples
            if len(found) >= size and time.monotonic() - started > _MOMENT:
                break
    traits = [set(_traits("", sample)) for sample in found]
    sizes = [elements(sample) for sample in found]
    chosen = [sizes.index(max(sizes)), sizes.index(min(sizes))] if sizes and min(sizes) < max(sizes) else []
    while len(chosen) < min(size, len(found)):
        known = set().union(*(traits[number] for number in chosen))
        rest = [number for number in range(len(found)) if number not in chosen]
        chosen.append(max(rest, key=lambda number: (len(traits[number] - known), -number)))
    return [found[number] for number in sorted(chosen, key=lambda number: -sizes[number])]


def _traits(path: str, node: Any) -> Iterator[tuple[str, str]]:
    """Yield the traits by which samples differ: small values, shapes, ignored targets, missing numbers."""
    if isinstance(node, (bool, int, str)) or node is None:
        yield path, str(node)[:40]
    elif isinstance(node, float):
        yield path, str(node > 0) if node == node else "nan"
    elif isinstance(node, torch.Tensor) and not node.is_nested and node.layout is torch.strided:
        yield path, str(tuple(node.shape))
        whole = not node.is_floating_point() and not node.is_complex()
        if whole and node.numel():
            yield path, f"{int(node.min())} {int(node.max())}"
            yield path, f"{bool((node == -100).any())}"
        elif node.is_floating_point():
            yield path, str(bool(node.isnan().any()))
    elif isinstance(node, np.generic):
        yield path, str(node)
    else:
        for name, child in open_container(node) or ():
            yield from _traits(path + name, child)


class _Check:
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
        self._met: tuple[str, ...] | None = None  # what the module keeps; None until measured
        self._steps = 0
        self._moves_whole = transfer.hooks_move_batches(trainer)  # these hooks get the whole batch, before it is cut

    def run(self, samples: list[Any], *, in_step: bool) -> Verdicts:
        """Compare the whole batch with its parts, as the loader makes them and as the step cuts them."""
        collated = self._collate(samples)
        kept = self._reader.count(collated, expected=len(samples), on_host=True)
        if kept < 2:
            return _both(unmeasured(self._tolerance, f"the collate function kept {kept} of {len(samples)} samples"))
        whole = self._pass([collated], seed=0)
        middle = (len(samples) + 1) // 2
        if in_step:
            return _both(self._cut_and_judge(samples, collated, kept, whole))
        loaded = [self._collate(samples[:middle]), self._collate(samples[middle:])]
        sizes = middle, len(samples) - middle
        training = self._judge(whole, loaded, sizes, lambda seed: self._collate(samples, seed), cut=False)
        try:
            slices = self._slices(samples, collated, kept)
        except LayoutError as why:
            return Verdicts(training, uncuttable(self._tolerance, str(why)))
        if (
            whole.changed == whole.changed_in_step
            and kept == len(samples)
            and all(
                same_values(part, slices(start, stop))
                for part, (start, stop) in zip(loaded, ((0, middle), (middle, kept)))
            )
        ):
            return Verdicts(training, training)
        return Verdicts(training, self._cut_and_judge(samples, collated, kept, whole))

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
        """Compare parts with the whole.

        Args:
            whole: The pass of the whole batch.
            parts: Its parts.
            sizes: Samples of each part.
            again: Returns the whole batch once more, with random numbers of some seed.
            cut: Whether the parts are cut in the step, and are one batch of the loop.
        """
        changed = (whole.changed_in_step if cut else whole.changed) or self._kept(whole, again)
        counts = [self._items(part, size, cut=cut) for part, size in zip(parts, sizes)]
        if not all(number > 0 for number in counts):
            return unmeasured(self._tolerance, f"normalize counts {counts} in the parts of a batch")
        share = counts[0] / sum(counts)
        run = partial(self._pass, parts, seed=1, of_one=cut, moved=cut and self._moves_whole)
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
        if verdict.cause != "weighted":
            return verdict
        return replace(verdict, counter=fitting_counter(again(0), parts, differences.share))

    def _kept(self, whole: _Passes, again: Callable[[int], Any]) -> tuple[str, ...]:
        """Name what the module keeps from one step to the next, as the same batch then gets another gradient."""
        if whole.draws or self._met is not None:
            return self._met or ()
        twice = self._pass([again(0), again(0)], seed=0, of_one=True)
        with uncounted():
            apart = distance(*twice.gradients)
        self._met = ("what the module keeps from one step to the next",) if apart > self._rest else ()
        return self._met

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
        moved: bool = False,
        weights: Sequence[float] = (),
    ) -> _Passes:
        """Run micro-batches one after the other, from the state that training begins with.

        Args:
            batches: The micro-batches.
            seed: Seed of the random numbers that they draw.
            of_one: Whether they are parts of one batch of the loop, whose hooks run once.
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
        states: list[dict[str, tuple[float, float]]] = []
        gradients: list[list[torch.Tensor]] = []
        for number, batch in enumerate(batches):
            if number == 0 or not weights:
                for parameter in module.parameters():
                    parameter.grad = None
            batch = _copied(batch)
            trial_steps.accumulate_only(
                self._trainer,
                batch if moved else transfer.transferred(self._trainer, batch),
                number,
                lambda: states.append(_watched(module)),
                begins=not of_one or number == 0,
                ends=not of_one or number == len(batches) - 1,
                weight=weights[number] if weights else 1.0,
            )
            self._steps += 1
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
    return tuple(name for name in after if before.get(name) != after[name])


def _both(verdict: Exactness) -> Verdicts:
    return Verdicts(verdict, verdict)


def _is_small(module: torch.nn.Module) -> bool:
    """Return whether the check may use a few samples above the limit, and the precision of the weights."""
    return sum(p.numel() * p.element_size() for p in module.parameters()) <= _SMALL


def _copied(batch: Any) -> Any:
    """Return a copy if the batch can be copied: a step may change its batch in place."""
    try:
        return copy.deepcopy(batch)
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
def _exact_arithmetic(trainer: Any, *, plain: bool) -> Iterator[None]:
    """Return a context in which steps compute in the precision of the weights, if memory allows for it.

    Autocast would hide differences.
    """
    plugin = trainer.precision_plugin
    if not plain or not hasattr(plugin, "autocast_context_manager"):
        yield
        return
    patching.shadow(plugin, "forward_context", nullcontext)
    try:
        yield
    finally:
        patching.unshadow(plugin, "forward_context")


@torch.no_grad()
def _move_weights(module: torch.nn.Module) -> None:
    """Move the trained weights a little, the same way each time."""
    for parameter in module.parameters():
        if parameter.requires_grad and parameter.is_floating_point() and not parameter.is_sparse:
            parameter.mul_(1.0 + MOVED)
            if parameter.numel() <= 2**16:
                generator = torch.Generator(parameter.device).manual_seed(parameter.numel())
                noise = torch.empty(parameter.shape, device=parameter.device).normal_(generator=generator)
                parameter.add_(noise.to(parameter.dtype), alpha=MOVED)


def _watched(module: torch.nn.Module) -> dict[str, tuple[float, float]]:
    """Return sums over the state that a step should not change.

    That is buffers, except those of normalization, and untrained parameters.
    """
    untrained = ((name, parameter) for name, parameter in module.named_parameters() if not parameter.requires_grad)
    named = (*kept_buffers(module), *untrained)
    return {name: _sums(tensor) for name, tensor in named if tensor.layout is torch.strided and not tensor.is_nested}


def _sums(tensor: torch.Tensor) -> tuple[float, float]:
    with uncounted(), torch.no_grad():
        values = tensor.detach().abs() if tensor.is_complex() else tensor.detach()
        return float(values.sum(dtype=torch.float64)), float(values.double().pow(2).sum())


def _gradients(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    for parameter in module.parameters():
        if parameter.requires_grad:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach()
            yield gradient.coalesce() if gradient.is_sparse else gradient


def _on_host(gradient: torch.Tensor) -> torch.Tensor:
    with uncounted():
        return gradient.to("cpu", copy=True)
