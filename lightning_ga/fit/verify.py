"""The exactness check in a Trainer: one batch of real samples, once whole and once in parts, cut as in training.

The parts run one after the other without restoring state between them: state that the step keeps (a
queue, a teacher that follows its student) changes as in training. The trained weights are moved a
little beforehand, as a first step would move them: so a teacher that starts as a copy of its student
is seen to follow it.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from lightning_ga.batch.pytree import open_container
from lightning_ga.batch.sizes import elements
from lightning_ga.fit.batch_norm import batch_norm_layers
from lightning_ga.fit.deterministic import WithoutDropout
from lightning_ga.fit.exactness_check import ExactnessCheck
from lightning_ga.fit.precision import exact_arithmetic, rounding
from lightning_ga.loading.reader import BatchReader
from lightning_ga.loading.samples import FirstSamples
from lightning_ga.memory.oom import attempt, is_out_of_memory
from lightning_ga.plan.exactness import Exactness, Verdicts, both, unmeasured
from lightning_ga.probe.isolation import isolated

SAMPLES = 5  # parts of three and two: BatchNorm refuses one sample, and unequal parts show wrong weights
CONSIDERED = 24  # samples to choose from
_MOMENT = 0.3  # seconds to read them
_SMALL = 2**28  # bytes of parameters


def measure_exactness(
    trainer: Any,
    loader: "DataLoader[Any]",
    available: FirstSamples,
    *,
    considered: int,
    reader: BatchReader,
    count: Callable[[Any], float] | None,
    limit: int,
    in_step: bool,
) -> Verdicts:
    """Run the check without dropout, and restore all state.

    Args:
        trainer: A Trainer at ``on_train_start``.
        loader: The user's DataLoader.
        available: Samples to run on.
        considered: How many of them to choose from, as far as these can be read in a moment.
        reader: Cuts the loader's batches.
        count: Counts the items of a batch that the loss is a mean over; ``None`` for samples.
        limit: Largest micro-batch that is known to fit, in samples.
        in_step: Whether training cuts batches in the step.
    """

    def check(size: int, prepare: Callable[[], None], tolerance: float) -> Verdicts:
        samples = telling_samples(available.read(size, most=considered, seconds=_MOMENT), size)
        if len(samples) < 2:
            return both(unmeasured(tolerance, f"the training data hold {len(samples)} samples"))
        passes = ExactnessCheck(trainer, loader, reader, prepare, count, tolerance)
        verdicts = passes.run(samples, in_step=in_step)
        if size >= 4 and verdicts.training.cause == "exact":  # one cut is no proof: other samples, in equal parts
            verdicts = verdicts.unless(passes.run(samples[-4:], in_step=in_step))
        return replace(verdicts, changing=passes.changing, tables=passes.tables)

    sizes = [min(SAMPLES, len(available))] if _is_small(trainer.lightning_module) else []
    sizes += [size for size in [min(SAMPLES, limit, len(available))] if size not in sizes]
    for size in sizes:
        verdicts = _measured(trainer, check, size, spare=size <= limit // 2)
        if verdicts is not None:
            return verdicts
    return both(unmeasured(rounding(trainer), f"memory ran out in the check, on {sizes[-1]} samples"))


def _measured(trainer: Any, check: Callable[..., Verdicts], size: int, *, spare: bool) -> Verdicts | None:
    """Run the check on so many samples, precisely if there is memory to spare; ``None`` if it runs out."""
    module = trainer.lightning_module
    plain = spare or _is_small(module)
    tolerance = rounding(trainer, plain=plain)
    if size < 2:
        return both(unmeasured(tolerance, "a micro-batch of one sample has no parts"))
    layers = tuple(batch_norm_layers(module))
    if layers and size < 4:  # BatchNorm refuses one sample
        return both(Exactness(None, tolerance, "batch_norm", layers=layers))

    def run() -> Verdicts:
        with isolated(trainer) as prepare, exact_arithmetic(trainer, plain=plain), WithoutDropout():
            return check(size, prepare, tolerance)

    ran = attempt(run, lambda _: True)  # the check must never cost a run
    verdicts: Verdicts | None = ran.result
    if ran.failure is None or is_out_of_memory(ran.failure):
        return verdicts
    reason = f"in the check, a step on part of {size} samples ended in {type(ran.failure).__name__}: {ran.failure}"
    return both(unmeasured(tolerance, reason))


def telling_samples(found: list[Any], size: int) -> list[Any]:
    """Choose samples that differ in labels, shapes and missing values.

    The largest come first, so that padding, if any, gives the two parts of a batch different lengths.
    """
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


def _is_small(module: torch.nn.Module) -> bool:
    """Return whether the check may use a few samples above the limit, and the precision of the weights."""
    return sum(p.numel() * p.element_size() for p in module.parameters()) <= _SMALL
