"""Measure exactness in a Trainer: on which samples, how precisely, and on how many of them if memory is short."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_ga.batch.layout import LayoutError, elements
from lightning_ga.batch.pytree import open_container
from lightning_ga.compat import ranks
from lightning_ga.compat.patching import replaced
from lightning_ga.errors import UserError
from lightning_ga.fit.chunks import ChunkedModules, Chunks, installed
from lightning_ga.fit.exactness.check import MULTIPLES, Count, ExactnessCheck, batch_norm_layers, is_users_error
from lightning_ga.fit.exactness.differences import Gradient, distance, norm
from lightning_ga.fit.exactness.halves import SampleBatch
from lightning_ga.fit.exactness.passes import (
    PassRunner,
    changed_names,
    numbers_of,
    rounding,
    state_sums,
    traceless_passes,
)
from lightning_ga.loading.reader import BatchReader
from lightning_ga.loading.samples import FirstSamples
from lightning_ga.loading.training_source import TrainingSource
from lightning_ga.memory.oom import attempt, is_out_of_memory
from lightning_ga.plan.accumulation import ChunkSize
from lightning_ga.plan.exactness import NO_GRADIENT, PER_CHUNK, RANDOM_CHUNKS, Exactness, Verdicts, both, unmeasured
from lightning_ga.snapshot.plain import shared_containers
from lightning_ga.snapshot.state import refuse_lazy

MOST = 32  # submodules that are tried


@dataclass(frozen=True, slots=True)
class Independent:
    """Submodules that treat samples by themselves."""

    names: tuple[str, ...] = ()
    bytes_per_sample: int = 0  # of their outputs, which a loss on the whole batch needs


def _fixed_statistics() -> AbstractContextManager[None]:
    """Return a context in which BatchNorm normalizes by its running statistics, so that samples do not meet in it.

    No ``TorchFunctionMode``, which is off in a backward pass, where chunks are computed again.
    """
    normalize = nn.functional.batch_norm

    def fixed(values: Tensor, mean: Tensor | None, variance: Tensor | None, *rest: Any, **settings: Any) -> Tensor:
        if mean is not None:
            rest, settings = rest[:2], {**settings, "training": False}
        return normalize(values, mean, variance, *rest, **settings)

    return replaced(nn.functional, batch_norm=fixed)


def _gradient(passes: PassRunner, batch: SampleBatch, size: ChunkSize, *, whole: bool = False) -> Gradient:
    """Return the gradient of a pass in which the submodules of this size run in two chunks, or ``whole``."""
    with replaced(size, samples=None if whole else (batch.size + 1) // 2, window=batch.size):
        return passes.run(batch.whole).gradients[0]


def judge_chunks(passes: PassRunner, chunked: ChunkedModules, batch: SampleBatch, tolerance: float) -> Verdicts:
    """Compare a pass over a batch whose submodules run in two chunks with one in which they run whole.

    Submodules that do not treat samples by themselves are refused, but for BatchNorm.
    """
    with replaced(chunked.size, samples=None, window=batch.size):
        whole = passes.run(batch.whole)
    return replace(both(_judge(passes, chunked, batch, tolerance, whole.gradients[0])), changing=whole.changed)


def _judge(
    passes: PassRunner, chunked: ChunkedModules, batch: SampleBatch, tolerance: float, whole: Gradient
) -> Exactness:
    before = _state_of(chunked)
    if missing := [name for name, chunks in chunked.forwards.items() if chunks.bytes is None]:
        raise _refused(
            chunked,
            f"training_step, as training begins, does not call {missing[0]} (perhaps a method of it, such as "
            "forward_features): name submodules that are called.",
        )
    if not 0 < norm(whole) < float("inf"):
        return unmeasured(tolerance, NO_GRADIENT)
    error = _error_in_chunks(passes, chunked, batch, tolerance, whole)
    if changed := changed_names(before, _state_of(chunked)):
        raise _refused(
            chunked,
            f"{changed[0]} changes in the forward pass, which runs for each chunk: change it outside, as in "
            "on_train_batch_end, or leave this submodule out.",
        )
    if error <= tolerance:
        return Exactness(error, tolerance, "exact", micro_steps=passes.steps)
    layers = tuple(layer for chunks in chunked.forwards.values() for layer in batch_norm_layers(chunks.module))
    if any(chunks.draws for chunks in chunked.forwards.values()):
        if layers:
            return Exactness(None, tolerance, "batch_norm", layers, PER_CHUNK, passes.steps)
        return Exactness(None, tolerance, "random", reason=RANDOM_CHUNKS, micro_steps=passes.steps)
    with _fixed_statistics():
        whole = _gradient(passes, batch, chunked.size, whole=True)
        if not distance(whole, _gradient(passes, batch, chunked.size)) <= tolerance:
            raise _refused(
                chunked,
                f"run in chunks, {', '.join(chunked.names)} made a gradient that is off by {error:.1g} of it, so what "
                "it computes of a sample depends on the others: name submodules that treat samples by themselves (the "
                'encoder below the loss), or let whole="auto" find them.',
            )
    return Exactness(error, tolerance, "batch_norm", layers, PER_CHUNK, passes.steps)


def _error_in_chunks(
    passes: PassRunner, chunked: ChunkedModules, batch: SampleBatch, tolerance: float, whole: Gradient
) -> float:
    """Return how far the gradient in chunks is off; an argument may be as long as the batch by chance."""
    in_chunks = attempt(partial(_gradient, passes, batch, chunked.size), is_users_error)
    if in_chunks.failure is not None or not distance(whole, in_chunks.result) <= tolerance:
        with replaced(chunked.size, samples=None):  # batches of other sizes show what belongs to no sample
            attempt(lambda: passes.run(batch.loaded().parts), is_users_error)
        in_chunks = attempt(partial(_gradient, passes, batch, chunked.size), is_users_error)
    if in_chunks.failure is not None and not isinstance(in_chunks.failure, UserError):
        raise _refused(
            chunked,
            f"run in chunks of a few samples, the step ended in {type(in_chunks.failure).__name__}: "
            f"{str(in_chunks.failure).rstrip('.')}. Name submodules of which every argument and every output has one "
            'entry for each sample, of the same shape in all chunks, or let whole="auto" find them.',
        ) from in_chunks.failure
    if in_chunks.failure is not None:
        raise in_chunks.failure
    return distance(whole, in_chunks.result)


def _state_of(chunked: ChunkedModules) -> dict[str, Any]:
    """Return what the submodules keep: numbers, and sums over tensors."""
    kept = {name: {**numbers_of(each.module), **state_sums(each.module)} for name, each in chunked.forwards.items()}
    return {f"{name}.{key}": value for name, state in kept.items() for key, value in state.items()}


def _refused(chunked: ChunkedModules, reason: str) -> UserError:
    return UserError(f"whole={chunked.names!r}: {reason}")


class Submodules:
    """The trained submodules of a model, of which each can be let run in chunks; made before passes without a trace."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._chunked = {
            part: Chunks(part, ChunkSize())
            for part in module.modules()
            if part is not module and any(p.requires_grad for p in part.parameters())
        }

    def installed(self) -> AbstractContextManager[None]:
        """Return a context in which their forward passes are seen."""
        return installed(self._chunked.values())

    def independent(self, passes: PassRunner, batch: SampleBatch, tolerance: float) -> Independent:
        """Find the largest submodules whose outputs lead with the sample axis and that treat samples by themselves."""
        with _fixed_statistics():
            whole = _gradient(passes, batch, ChunkSize(), whole=True)
            if not 0 < norm(whole) < float("inf"):
                return Independent()
            bytes_of = {part: chunks.bytes for part, chunks in self._chunked.items() if chunks.bytes}
            candidates = list(bytes_of)[:MOST]

            def treats_samples_alone(part: nn.Module) -> bool:
                run = attempt(lambda: _gradient(passes, batch, self._chunked[part].size), is_users_error)
                return run.failure is None and distance(whole, run.result) <= tolerance

            found = dict(_largest(self._module, "", lambda part: part in candidates and treats_samples_alone(part)))
        return Independent(tuple(found), sum(bytes_of[part] for part in found.values()) // batch.size)


def _largest(parent: nn.Module, prefix: str, fits: Callable[[nn.Module], bool]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the submodules that fit, with their names, and none that lie inside of one."""
    for name, child in parent.named_children():
        if fits(child):
            yield f"{prefix}{name}", child
        else:
            yield from _largest(child, f"{prefix}{name}.", fits)


SAMPLES = 5  # parts of three and two: BatchNorm refuses one sample, and unequal parts show wrong weights
CONSIDERED = 24  # samples to choose from
_MOMENT = 0.3  # seconds to read them
_UNKNOWN = 600  # micro-batches of a stream
_LOWERED = 4  # by how much errors may lower the limit
_SMALL = 2**28  # bytes of parameters


def measure_exactness(
    trainer: Any,
    source: TrainingSource,
    reader: BatchReader,
    count: Count | None,
    *,
    epoch: int,
    limit: int,
    chunked: ChunkedModules | None = None,
) -> Verdicts:
    """Run the check in passes of at most ``limit`` samples, for a small model of more, and restore all state.

    With submodules that run in chunks, these are compared with the whole, as windows are one batch.
    """
    refuse_lazy(trainer.lightning_module.parameters())
    all_samples, considered = source.scan_order(epoch).some, SAMPLES if source.keeps_groups else CONSIDERED
    micro_batches = _most_micro_batches(source, epoch, limit)
    steps = range(trainer.global_step, int(min(trainer.estimated_stepping_batches, MULTIPLES[-1])))
    shared = shared_containers(trainer.lightning_module, getattr(source.recipe.loader, "dataset", None))

    def check(size: int, plain: bool, tolerance: float, available: FirstSamples = all_samples) -> Verdicts:
        with traceless_passes(trainer, plain=plain) as passes:
            samples = telling_samples(available.read(size, most=max(size, considered), seconds=_MOMENT), size)
            if len(samples) < 2:
                return both(unmeasured(tolerance, f"the training data hold {len(samples)} samples"))
            if chunked is not None:
                batch = SampleBatch(samples, source.user_loader, reader, passes)
                return judge_chunks(passes, chunked, batch, tolerance)
            passes.shared = shared
            checking = ExactnessCheck(source, reader, passes, count, tolerance)
            fetched = available.as_fetched(samples)
            verdicts = checking.run(fetched, micro_batches=micro_batches)
            if size >= 4 and verdicts.training.cause == "exact":  # one cut is no proof: other samples, in equal parts
                verdicts = verdicts.unless(checking.run(fetched[-4:], micro_batches=micro_batches))
            if verdicts.training.cause == "exact":
                for at_step in checking.run_at_steps(fetched, micro_batches=micro_batches, steps=steps):
                    verdicts = verdicts.unless(at_step)
            changing, tables = tuple(checking.changing), tuple(checking.tables)
            return replace(verdicts, changing=changing, tables=tables, kinds=frozenset(checking.kinds))

    def within_batches(size: int) -> Verdicts | None:
        """Return the verdict on single batches if all are exact: samples of several may belong to several tasks."""
        verdicts = None
        for batch in source.some_batches(limit):
            verdicts = _measured(trainer, partial(check, available=batch), min(size, len(batch)), plain=is_small)
            if verdicts is None or not verdicts.training.cause == verdicts.splitting.cause == "exact":
                return None
        return verdicts

    # A small model may run a few samples above the limit, and in the precision of its weights.
    is_small = sum(p.numel() * p.element_size() for p in trainer.lightning_module.parameters()) <= _SMALL
    most = min(SAMPLES, len(all_samples))
    sizes = dict.fromkeys([most, min(most, limit)] if is_small else [min(most, limit)])
    for size in sizes:
        verdicts = _measured(trainer, check, size, plain=is_small or size <= limit // 2)
        while verdicts is not None and verdicts.training.reason == NO_GRADIENT and size < min(limit, len(all_samples)):
            size = min(2 * size, limit, len(all_samples))  # a loss of pairs may find none among a few samples
            verdicts = _measured(trainer, check, size, plain=is_small or size <= limit // 2)
        if verdicts is not None and chunked is None and verdicts.training.cause in ("coupled", "unmeasured"):
            verdicts = attempt(within_batches, lambda _: True, size).result or verdicts
        if verdicts is not None:
            return verdicts
    return both(unmeasured(rounding(trainer), f"memory ran out in the check, on {min(sizes)} samples"))


def depends_on_ranks(trainer: Any, source: TrainingSource, reader: BatchReader, *, epoch: int, limit: int) -> bool:
    """Return whether, on any rank, the gradient of a batch follows what the step gets from others; all ranks ask.

    Each takes other samples, as many as each other. A difference is no matter if a step draws random numbers.
    """

    def differs() -> bool:
        samples = source.scan_order(epoch).some.read(SAMPLES, most=CONSIDERED, seconds=_MOMENT)
        first = trainer.global_rank % max(1, len(samples) - 1)
        with traceless_passes(trainer, plain=True) as passes:
            make = partial(SampleBatch, samples[first : first + min(2, limit)], source.user_loader, reader, passes)
            made = attempt(lambda: (batch := make().whole, passes.run(batch).gradients[0]), lambda _: True)
            with ranks.together():
                if ranks.largest_over_ranks(trainer, made.failure is not None):
                    return False  # those that go on would wait
                batch, gradient = made.result
                return distance(gradient, passes.run(batch).gradients[0]) > rounding(trainer)

    return ranks.largest_over_ranks(trainer, differs()) > 0


def find_independent(trainer: Any, source: TrainingSource, reader: BatchReader, *, epoch: int) -> Independent:
    """Find the submodules that treat samples by themselves: none if memory runs out, and the same on all ranks."""
    submodules = Submodules(trainer.lightning_module)

    def find() -> Independent:
        with submodules.installed(), traceless_passes(trainer, plain=True) as passes:
            samples = telling_samples(
                source.scan_order(epoch).some.read(SAMPLES, most=CONSIDERED, seconds=_MOMENT), SAMPLES
            )
            batch = SampleBatch(samples, source.user_loader, reader, passes)
            return submodules.independent(passes, batch, rounding(trainer)) if batch.size > 1 else Independent()

    found: Independent = attempt(find, lambda _: True).result or Independent()
    return Independent(*ranks.of_all_ranks(trainer, (found.names, found.bytes_per_sample))[0])


def _most_micro_batches(source: TrainingSource, epoch: int, limit: int) -> int:
    """Return how many micro-batches one rank may train in an epoch, if errors lower the limit, too."""
    samples = source.recipe.total(epoch)
    if samples is None:
        return _UNKNOWN
    size = min(limit, source.recipe.largest_batch(epoch))
    return samples // (source.world_size * max(1, size // _LOWERED))


def _measured(
    trainer: Any, check: Callable[[int, bool, float], Verdicts], size: int, *, plain: bool
) -> Verdicts | None:
    """Run the check on so many samples, if these have parts; ``None`` if memory runs out."""
    tolerance = rounding(trainer, plain=plain)
    if size < 2:
        return both(unmeasured(tolerance, "a micro-batch of one sample has no parts"))
    layers = batch_norm_layers(trainer.lightning_module)
    if layers and size < 4:  # BatchNorm refuses one sample
        return both(Exactness(None, tolerance, "batch_norm", layers=layers))
    outcome = attempt(lambda: check(size, plain, tolerance), lambda _: True)  # the check must never cost a run
    verdicts: Verdicts | None = outcome.result
    failure = outcome.failure
    if failure is None or is_out_of_memory(failure):
        return verdicts
    if isinstance(failure, UserError) and not isinstance(failure, LayoutError):  # training would end in it
        raise failure
    reason = (
        f"in the check, a step on part of {size} samples ended in {type(failure).__name__}: {str(failure).rstrip('.')}"
    )
    return both(unmeasured(tolerance, reason))


def telling_samples(samples: list[Any], size: int) -> list[Any]:
    """Choose samples that differ in labels, shapes and missing values; not those that the collate function leaves out.

    The largest come first, so that padding, if any, gives the two parts of a batch different lengths.
    """
    samples = [sample for sample in samples if sample is not None]
    traits = [set(_traits("", sample)) for sample in samples]
    sizes = [elements(sample) for sample in samples]
    chosen = [sizes.index(max(sizes)), sizes.index(min(sizes))] if sizes and min(sizes) < max(sizes) else []
    while len(chosen) < min(size, len(samples)):
        known = set().union(*(traits[number] for number in chosen))
        rest = [number for number in range(len(samples)) if number not in chosen]
        chosen.append(max(rest, key=lambda number: (len(traits[number] - known), -number)))
    return [samples[number] for number in sorted(chosen, key=lambda number: -sizes[number])]


def _traits(path: str, node: Any) -> Iterator[tuple[str, str]]:
    """Yield the traits by which samples differ: small values, shapes, ignored targets, missing numbers."""
    if isinstance(node, float):
        yield path, str(node)
    elif isinstance(node, (bool, int, str, np.generic)) or node is None:
        yield path, str(node)[:40]
    elif isinstance(node, torch.Tensor) and not node.is_nested and node.layout is torch.strided:
        yield path, str(tuple(node.shape))
        if node.is_floating_point() and node.numel() == 1:
            yield path, str(float(node))
        elif node.is_floating_point():
            yield path, str(bool(node.isnan().any()))
        elif node.numel() and not node.is_complex():
            yield path, f"{int(node.min())} {int(node.max())}"
            yield path, f"{bool((node == -100).any())}"
    else:
        for name, child in open_container(node) or ():
            yield from _traits(path + name, child)
