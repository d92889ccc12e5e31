"""Measure exactness in a Trainer: on which samples, how precisely, and on how many of them if memory is short."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from lightning_ga.batch.layout import LayoutError
from lightning_ga.batch.pytree import open_container
from lightning_ga.batch.sizes import elements
from lightning_ga.compat import agreement
from lightning_ga.errors import UserError
from lightning_ga.fit.chunks import ChunkedModules
from lightning_ga.fit.exactness.arithmetic import rounding
from lightning_ga.fit.exactness.check import Count, ExactnessCheck, batch_norm_layers
from lightning_ga.fit.exactness.halves import SampleBatch
from lightning_ga.fit.exactness.passes import traceless_passes
from lightning_ga.fit.exactness.whole import Independent, Submodules, judge_chunks
from lightning_ga.loading.reader import BatchReader
from lightning_ga.loading.training_source import TrainingSource
from lightning_ga.memory.oom import attempt, is_out_of_memory
from lightning_ga.plan.exactness import NO_GRADIENT, Exactness, Verdicts, both, unmeasured
from lightning_ga.snapshot.plain import shared_containers
from lightning_ga.snapshot.state import refuse_lazy

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
    available, considered = source.looks(epoch).some, SAMPLES if source.keeps_groups else CONSIDERED
    micro_batches = _most_micro_batches(source, epoch, limit)
    shared = shared_containers(trainer.lightning_module, getattr(source.recipe.loader, "dataset", None))

    def check(size: int, plain: bool, tolerance: float) -> Verdicts:
        with traceless_passes(trainer, plain=plain) as passes:
            samples = telling_samples(available.read(size, most=max(size, considered), seconds=_MOMENT), size)
            if len(samples) < 2:
                return both(unmeasured(tolerance, f"the training data hold {len(samples)} samples"))
            if chunked is not None:
                batch = SampleBatch(samples, source.user_loader, reader, passes)
                return both(judge_chunks(passes, chunked, batch, tolerance))
            passes.shared = shared
            checking = ExactnessCheck(source, reader, passes, count, tolerance)
            fetched = available.as_fetched(samples)
            verdicts = checking.run(fetched, micro_batches=micro_batches)
            if size >= 4 and verdicts.training.cause == "exact":  # one cut is no proof: other samples, in equal parts
                verdicts = verdicts.unless(checking.run(fetched[-4:], micro_batches=micro_batches))
            changing, tables = tuple(checking.changing), tuple(checking.tables)
            return replace(verdicts, changing=changing, tables=tables, kinds=frozenset(checking.kinds))

    # A small model may run a few samples above the limit, and in the precision of its weights.
    is_small = sum(p.numel() * p.element_size() for p in trainer.lightning_module.parameters()) <= _SMALL
    most = min(SAMPLES, len(available))
    sizes = dict.fromkeys([most, min(most, limit)] if is_small else [min(most, limit)])
    for size in sizes:
        verdicts = _measured(trainer, check, size, plain=is_small or size <= limit // 2)
        while verdicts is not None and verdicts.training.reason == NO_GRADIENT and size < min(limit, len(available)):
            size = min(2 * size, limit, len(available))  # a loss of pairs may find none among a few samples
            verdicts = _measured(trainer, check, size, plain=is_small or size <= limit // 2)
        if verdicts is not None and verdicts.training.cause == "coupled":
            found = find_independent(trainer, source, reader, epoch=epoch)
            training = replace(verdicts.training, whole=found.names, bytes_per_sample=found.bytes_per_sample)
            verdicts = replace(verdicts, training=training)
        if verdicts is not None:
            return verdicts
    return both(unmeasured(rounding(trainer), f"memory ran out in the check, on {min(sizes)} samples"))


def find_independent(trainer: Any, source: TrainingSource, reader: BatchReader, *, epoch: int) -> Independent:
    """Find the submodules that treat samples by themselves: none if memory runs out, and the same on all ranks."""
    submodules = Submodules(trainer.lightning_module)

    def find() -> Independent:
        with submodules.installed(), traceless_passes(trainer, plain=True) as passes:
            samples = telling_samples(source.looks(epoch).some.read(SAMPLES, most=CONSIDERED, seconds=_MOMENT), SAMPLES)
            batch = SampleBatch(samples, source.user_loader, reader, passes)
            return submodules.independent(passes, batch, rounding(trainer)) if batch.size > 1 else Independent()

    found: Independent = attempt(find, lambda _: True).result or Independent()
    return Independent(*agreement.of_all_ranks(trainer, (found.names, found.bytes_per_sample))[0])


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
    reason = f"in the check, a step on part of {size} samples ended in {type(failure).__name__}: {failure}"
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
