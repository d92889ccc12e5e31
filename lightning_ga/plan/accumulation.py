"""Cut an effective batch over ranks into micro-batches: pure arithmetic.

A *window* is all samples between two optimizer steps, on all ranks. It is cut into one share per
rank, and every share into the same number of *chunks*, the micro-batches. Sizes differ by one at
most, so no pass peaks higher than needed and none is nearly empty.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from operator import index, truediv
from typing import SupportsIndex

from lightning_ga.errors import UserError
from lightning_ga.plan.units import counted

LEAST_GAIN = 0.03  # part of a window's time that other shares must save
MOST_MICRO_BATCHES = 10**7  # micro-batches of a window on a rank: their sizes are kept in memory


@dataclass(frozen=True, slots=True)
class AccumulationPlan:
    """The cut of one full window: effective batch = sum of all chunks of all ranks.

    Attributes:
        effective_batch_size: Samples behind one optimizer step, over all ranks and chunks.
        world_size: Data-parallel ranks.
        micro_batch_size: Samples of the largest chunk.
        factor: Chunks per rank, the value of ``trainer.accumulate_grad_batches``.
        chunks: Samples of each chunk, one tuple per rank.
        chunk_size: With ``whole=``, the most samples of a chunk of its submodules; else ``None``.
        whole: With ``whole=``, the names of these submodules.
        samples_at_most: With ``size_of``, the most samples of a chunk; else ``None``.
        size_budget: With ``size_of``, the most that samples × largest size may be in a chunk of several.
    """

    effective_batch_size: int
    world_size: int
    micro_batch_size: int
    factor: int
    chunks: tuple[tuple[int, ...], ...]
    chunk_size: int | None = None
    whole: tuple[str, ...] = ()
    samples_at_most: int | None = None
    size_budget: int | None = None

    @property
    def has_several_passes(self) -> bool:
        """Whether a window is several micro-batches, or its submodules of ``whole=`` run in several chunks."""
        if self.chunk_size is None:
            return self.factor > 1
        return self.chunk_size < self.micro_batch_size

    def __str__(self) -> str:
        effective = self.effective_batch_size
        micro = self.micro_batch_size
        factor = self.factor
        ranks = self.world_size
        each = f" on each of {ranks} ranks" if ranks > 1 else ""
        if self.chunk_size is not None:
            chunks = counted(ceil_div(micro, self.chunk_size), "chunk")
            names = " and ".join(self.whole)
            return f"effective batch {effective:,} in one loss{each}, {names} in {chunks} of {self.chunk_size}"
        shares = [*map(sum, self.chunks)]
        if len({*map(len, self.chunks)}) > 1 or max(shares) - min(shares) > 1:
            sizes = ", ".join(f"{sum(rank)} in {len(rank)} × {rank[0]}" for rank in self.chunks)
            return f"effective batch {effective} in shares of {sizes} at most (rank by rank)"
        if effective == micro * factor * ranks:
            return f"effective batch {effective} = {micro} × {factor} × {ranks} (micro-batch × factor × ranks)"
        if ranks == 1 and factor <= 4:
            return f"effective batch {effective} = {' + '.join(map(str, self.chunks[0]))}, factor {factor}"
        passes = counted(factor, "micro-batch", "es")
        return f"effective batch {effective} in {passes} of at most {micro}{each}, factor {factor}"


def ceil_div(total: int, parts: int) -> int:
    """Divide and round up."""
    whole, rest = divmod(total, parts)
    return whole + (rest > 0)


def split_evenly(total: int, parts: int, multiple: int = 1) -> tuple[int, ...]:
    """Cut ``total`` into ``parts`` near-equal multiples, the larger ones first; the last one has what is left.

    If there are fewer multiples than parts, sizes are no multiples and differ by one at most.

    Examples:
        >>> split_evenly(14, 3), split_evenly(14, 3, multiple=2), split_evenly(13, 3, multiple=2)
        ((5, 5, 4), (6, 4, 4), (6, 4, 3))
    """
    units = ceil_div(total, multiple)
    if units < parts:
        units = total
        multiple = 1
    quotient, larger = divmod(units, parts)
    sizes = [(quotient + 1) * multiple] * larger + [quotient * multiple] * (parts - larger)
    sizes[-1] -= units * multiple - total
    return tuple(sizes)


def split_share(share: int, factor: int, multiple: int = 1) -> tuple[int, ...]:
    """Cut the share of a rank into near-equal micro-batches; if it has fewer multiples than these, the last are empty.

    Examples:
        >>> split_share(5, 2), split_share(4, 3, multiple=2)
        ((3, 2), (2, 2, 0))
    """
    full = min(factor, max(1, ceil_div(share, multiple)))
    return split_evenly(share, full, multiple) + (0,) * (factor - full)


def split_in_proportion(total: int, ratio: tuple[int, ...], multiple: int = 1) -> tuple[int, ...]:
    """Cut ``total`` in multiples that are as near to a ratio as they can be; the last one has what is left.

    Examples:
        >>> split_in_proportion(36, (24, 12)), split_in_proportion(35, (24, 12), multiple=2)
        ((24, 12), (24, 11))
    """
    units = ceil_div(total, multiple)
    whole = sum(ratio)
    edges = [0]
    for part in accumulate(ratio):
        end = (2 * units * part + whole) // (2 * whole)  # rounded
        edges.append(min(total, end * multiple))
    return tuple(end - start for start, end in pairwise(edges))


def ratio_of_speeds(speeds: Sequence[float], *, before: tuple[int, ...]) -> tuple[int, ...]:
    """Return the ratio of the samples a second of ranks, or the one ``before`` if a window would hardly be shorter.

    A rank whose speed is not known, 0, leaves the ratio as it was.

    Examples:
        >>> ratio_of_speeds((300.0, 100.0), before=(1, 1)), ratio_of_speeds((101.0, 100.0), before=(1, 1))
        ((7500, 2500), (1, 1))
    """
    if not all(speeds):
        return before
    total = sum(speeds)
    seconds = max(map(truediv, before, speeds))
    least_seconds = sum(before) / total
    if seconds <= least_seconds * (1 + LEAST_GAIN):
        return before
    return tuple(max(1, round(10_000 * speed / total)) for speed in speeds)


def plan_unequal_shares(
    effective_batch: int, *, limits: tuple[int, ...], ratio: tuple[int, ...], rank: int, multiple: int
) -> AccumulationPlan:
    """Cut an effective batch into shares of ranks in a ``ratio``, each in chunks within the rank's limit.

    Micro-batch and factor are those of one ``rank``.
    """
    shares = split_in_proportion(effective_batch, ratio, multiple)
    chunks = tuple(micro_batch_sizes(share, limit, multiple) for share, limit in zip(shares, limits))
    return AccumulationPlan(effective_batch, len(limits), chunks[rank][0], len(chunks[rank]), chunks)


def whole_multiples(most: int, multiple: int) -> int:
    """Return the largest multiple that is at most ``most``, or ``most`` itself if there is none."""
    return most - most % usable_multiple(multiple, most)


def micro_batch_sizes(share: int, most: int, multiple: int = 1) -> tuple[int, ...]:
    """Cut a share into the fewest near-equal chunks of at most ``most`` samples, multiples if that many fit."""
    parts = max(1, ceil_div(share, whole_multiples(most, multiple)))
    return split_evenly(share, parts, usable_multiple(multiple, most))


def halved(failed: int) -> int | None:
    """Return the limit after a pass of so many samples has run out of memory; ``None`` if it had one sample.

    Examples:
        >>> halved(85)
        43
    """
    return None if failed <= 1 else ceil_div(failed, 2)


def usable_multiple(multiple: int, most: int) -> int:
    """Return of what chunks of at most ``most`` samples are multiples: 1 if none of them could be."""
    return multiple if most >= multiple else 1


def plan_accumulation(
    effective_batch: int, *, micro_batch: int, world_size: int = 1, multiple: int = 1
) -> AccumulationPlan:
    """Cut an effective batch into the fewest near-equal chunks that fit in memory.

    The effective batch is kept exactly: chunks shrink and are never padded. A near-equal cut
    keeps the peak low; full chunks plus a remainder would waste the last pass. If the world
    size does not divide the effective batch, the first ranks have one sample (or one ``multiple``)
    more. A rank whose share is smaller than the factor has chunks of zero samples at its end.

    Args:
        effective_batch: Samples behind one optimizer step, summed over ranks and chunks.
        micro_batch: Most samples that fit in one forward and backward pass on one rank.
        world_size: Data-parallel ranks; each runs the same number of chunks.
        multiple: Chunks are multiples of this if ``micro_batch`` is at least as large, and the effective batch has one
            for each rank; the last may have fewer samples if it does not divide the effective batch.

    Raises:
        UserError: If an argument is below one, the effective batch below the number of ranks, or the factor
            above ten million.

    Examples:
        >>> plan_accumulation(256, micro_batch=48, world_size=2).chunks[0]
        (43, 43, 42)
    """
    micro_batch = require_count("micro_batch", micro_batch)
    world_size = require_count("world_size", world_size)
    effective_batch = require_effective_batch(effective_batch, world_size)
    require_few_micro_batches(effective_batch, micro_batch, world_size)
    multiple = usable_multiple(require_count("multiple", multiple), micro_batch)
    shares = split_evenly(effective_batch, world_size, multiple)
    factor = len(micro_batch_sizes(shares[0], micro_batch, multiple))
    chunks = tuple(split_share(share, factor, multiple) for share in shares)
    return AccumulationPlan(effective_batch, world_size, chunks[0][0], len(chunks[0]), chunks)


def in_chunks_of(plan: AccumulationPlan, most: int, names: tuple[str, ...]) -> AccumulationPlan:
    """Plan windows of one pass, in which submodules run in the fewest near-equal chunks of at most ``most`` samples."""
    samples = plan.micro_batch_size
    return replace(plan, chunk_size=ceil_div(samples, ceil_div(samples, most)), whole=names)


def plan_in_step(
    units: int, *, batches: int, micro_batch: int, weight: int = 1, world_size: int = 1, multiple: int = 1
) -> AccumulationPlan:
    """Plan windows of whole ``batches`` on each rank, each batch cut into the fewest near-equal chunks that fit.

    Batch and micro-batch are cut in ``units``, each of which counts as ``weight`` samples.
    """
    batch = units * weight
    require_few_micro_batches(batch * batches, micro_batch * weight, 1)
    chunks = tuple(size * weight for size in micro_batch_sizes(units, micro_batch, multiple)) * batches
    return AccumulationPlan(batch * batches * world_size, world_size, chunks[0], len(chunks), (chunks,) * world_size)


def require_few_micro_batches(effective_batch: int, micro_batch: int, world_size: int) -> None:
    """Refuse an effective batch of more micro-batches than are planned."""
    if effective_batch > MOST_MICRO_BATCHES * micro_batch * world_size:
        factor = ceil_div(effective_batch, micro_batch * world_size)
        raise UserError(
            f"effective_batch_size={effective_batch} would need {factor:,} micro-batches of {micro_batch} for one "
            f"optimizer step, and at most {MOST_MICRO_BATCHES:,} are planned: for the whole data set in one step, give "
            "its number of samples."
        )


def require_count(name: str, value: SupportsIndex | float) -> int:
    """Return a whole number of at least 1, of any type, as an ``int``; refuse anything else."""
    try:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        count = None if isinstance(value, bool) else index(value)  # type: ignore[arg-type]
    except TypeError:
        count = None
    if count is None:
        raise UserError(f"{name}={value!r} must be a whole number of at least 1.")
    if count < 1:
        raise UserError(f"{name}={value} must be at least 1.")
    return count


def require_effective_batch(effective_batch: int, world_size: int) -> int:
    """Return an effective batch as a whole number; refuse one that leaves a rank without a sample."""
    effective_batch = require_count("effective_batch_size", effective_batch)
    if effective_batch < world_size:
        raise UserError(
            f"effective_batch_size={effective_batch} is below the number of ranks, {world_size}: every rank needs "
            f"at least one sample per optimizer step. Use effective_batch_size={world_size} or fewer devices."
        )
    return effective_batch
