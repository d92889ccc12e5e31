"""Cut an effective batch over ranks into micro-batches: pure arithmetic.

A *window* holds the samples between two optimizer steps, on all ranks. It is cut into one share per
rank, and every share into the same number of *chunks*, the micro-batches. Sizes differ by one at
most, so no pass peaks higher than needed and none is nearly empty.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import index
from typing import SupportsIndex

from lightning_ga.errors import UserError

MOST_CHUNKS = 10**7
"""Micro-batches of a window on a rank: their sizes are held in memory."""


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
        kept_chunks: With ``whole=``, how many chunks of a step, the last ones, are not computed again.
        samples_at_most: With ``size_of``, most samples that a chunk may hold; ``None`` without.
        size_budget: With ``size_of``, most that samples × longest may be in a chunk of several samples.
    """

    effective_batch_size: int
    world_size: int
    micro_batch_size: int
    factor: int
    chunks: tuple[tuple[int, ...], ...]
    chunk_size: int | None = None
    whole: tuple[str, ...] = ()
    kept_chunks: int = 0
    samples_at_most: int | None = None
    size_budget: int | None = None

    def __str__(self) -> str:
        if self.chunk_size is not None:
            chunks = -(-self.micro_batch_size // self.chunk_size)
            each = f" on each of {self.world_size} ranks" if self.world_size > 1 else ""
            names = f"{' and '.join(self.whole)} in {chunks} chunk{'s' if chunks > 1 else ''} of {self.chunk_size}"
            kept = f", {self.kept_chunks} of them not computed again" if self.kept_chunks else ""
            return f"effective batch {self.effective_batch_size:,} in one loss{each}, {names}{kept}"
        effective, micro, factor, ranks = self.effective_batch_size, self.micro_batch_size, self.factor, self.world_size
        if all(size == micro for rank in self.chunks for size in rank):
            return f"effective batch {effective} = {micro} × {factor} × {ranks} (micro-batch × factor × ranks)"
        if ranks == 1 and factor <= 4:
            return f"effective batch {effective} = {' + '.join(map(str, self.chunks[0]))}, factor {factor}"
        each = f" on each of {ranks} ranks" if ranks > 1 else ""
        return f"effective batch {effective} in {factor} micro-batches of at most {micro}{each}, factor {factor}"


def split_evenly(total: int, parts: int) -> tuple[int, ...]:
    """Cut ``total`` into ``parts`` sizes that differ by one at most, the larger ones first.

    Examples:
        >>> split_evenly(10, 4)
        (3, 3, 2, 2)
    """
    quotient, larger = divmod(total, parts)
    return (quotient + 1,) * larger + (quotient,) * (parts - larger)


def plan_accumulation(effective_batch: int, *, micro_batch: int, world_size: int = 1) -> AccumulationPlan:
    """Cut an effective batch into the fewest near-equal chunks that fit in memory.

    The effective batch is kept exactly: chunks shrink and are never padded. A near-equal cut
    keeps the peak low, where full chunks plus a remainder would waste the last pass. Where the
    world size does not divide the effective batch, the first ranks hold one sample more. A rank
    whose share is smaller than the factor has chunks of zero samples at its end.

    Args:
        effective_batch: Samples behind one optimizer step, summed over ranks and chunks.
        micro_batch: Most samples that fit in one forward and backward pass on one rank.
        world_size: Data-parallel ranks; each runs the same number of chunks.

    Raises:
        UserError: If an argument is below one, the effective batch below the number of ranks, or the factor
            above ten million.

    Examples:
        >>> plan_accumulation(256, micro_batch=48, world_size=2).chunks[0]
        (43, 43, 42)
    """
    micro_batch, world_size = require_count("micro_batch", micro_batch), require_count("world_size", world_size)
    effective_batch = require_effective_batch(effective_batch, world_size)
    require_few_chunks(effective_batch, micro_batch, world_size)
    chunks = cut_window(effective_batch, micro_batch=micro_batch, world_size=world_size)
    return AccumulationPlan(effective_batch, world_size, chunks[0][0], len(chunks[0]), chunks)


def in_chunks_of(plan: AccumulationPlan, most: int, names: tuple[str, ...], kept: int = 0) -> AccumulationPlan:
    """Plan windows of one pass, over which submodules run in the fewest near-equal chunks of at most ``most`` samples.

    Examples:
        >>> print(in_chunks_of(plan_accumulation(1024, micro_batch=1024), 100, ("encoder",)))
        effective batch 1,024 in one loss, encoder in 11 chunks of 94
    """
    samples = plan.micro_batch_size
    return replace(plan, chunk_size=-(-samples // -(-samples // most)), whole=names, kept_chunks=kept)


def require_few_chunks(effective_batch: int, micro_batch: int, world_size: int) -> None:
    """Refuse an effective batch of more micro-batches than are planned."""
    if effective_batch > MOST_CHUNKS * micro_batch * world_size:
        factor = -(-effective_batch // (micro_batch * world_size))
        raise UserError(
            f"effective_batch_size={effective_batch} would take {factor:,} micro-batches of {micro_batch} for one "
            f"optimizer step, and at most {MOST_CHUNKS:,} are planned: for the whole data set in one step, give its "
            "number of samples."
        )


def in_groups(windows: Sequence[Sequence[int]], *, pieces: int) -> AccumulationPlan:
    """Plan windows of whole batches, each batch cut into the same number of near-equal chunks.

    The plan is that of the window with the most samples; where another window holds more batches, empty
    chunks are added.
    """
    largest = max(windows, key=sum, default=[1])
    factor = max(map(len, windows), default=1) * pieces
    chunks = [chunk for size in largest for chunk in split_evenly(size, pieces)]
    chunks += [0] * (factor - len(chunks))
    return AccumulationPlan(sum(largest), 1, max(chunks), factor, (tuple(chunks),))


def cut_window(samples: int, *, micro_batch: int, world_size: int) -> tuple[tuple[int, ...], ...]:
    """Cut a window of any size into chunks, one tuple per rank and all of the same length."""
    shares = split_evenly(samples, world_size)
    factor = -(-shares[0] // micro_batch)
    return tuple(split_evenly(share, factor) for share in shares)


def require_count(name: str, value: SupportsIndex | float) -> int:
    """Return a count as a plain whole number, of whatever type it was; refuse anything but one of at least one.

    Examples:
        >>> require_count("micro_batch_size", 1e3)
        1000
    """
    try:
        count = int(value) if isinstance(value, float) and value.is_integer() else index(value)  # type: ignore[arg-type]
    except TypeError:
        count = None
    if count is None or isinstance(value, bool):
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


def cut_further(plan: AccumulationPlan, *, micro_batch: int) -> AccumulationPlan:
    """Cut each chunk of a plan into the fewest near-equal chunks of at most ``micro_batch`` samples.

    Ranks may then hold different numbers of chunks; ``factor`` is the largest.
    """
    chunks = tuple(
        tuple(size for chunk in rank for size in split_evenly(chunk, max(1, -(-chunk // micro_batch))))
        for rank in plan.chunks
    )
    largest = max(max(rank) for rank in chunks)
    return AccumulationPlan(plan.effective_batch_size, plan.world_size, largest, max(map(len, chunks)), chunks)


@dataclass(slots=True)
class ChunkSize:
    """How large the chunks of forward passes are from here on."""

    samples: int | None = None  # ``None`` to run whole batches
    keep: int = 0  # chunks that keep their activations: the last of each call, or of all calls of a step if counted
    step_calls: int | None = None  # calls that a step makes, as the step before made; ``None`` if they are not counted
    calls: int = 0  # of this step so far
    window: int | None = None  # samples of the batch, if that is known: of each a module may get several views
    on_recompute: Callable[[], object] | None = None  # called once, as the first chunk is computed again
    recomputes_all: bool = False  # also a batch of one chunk: a module may be called several times in a step
    even: bool = False  # whether chunks are of near-equal size, as planned, or as large as may be

    def begin_step(self, window: int | None) -> None:
        """Begin a step on a batch of so many samples, if that is known."""
        self.window, self.calls = window, 0

    def kept(self, chunks: int) -> range:
        """Return which of a call's chunks keep their activations."""
        if self.step_calls is None:
            return range(chunks - self.keep, chunks)
        self.calls += 1
        later = self.step_calls - self.calls
        return range(chunks if later < 0 else min(chunks, chunks * (later + 1) - self.keep), chunks)

    def recomputes(self) -> None:
        """Note that the backward pass of a step has come to a chunk: all its calls are made."""
        if self.step_calls is not None:
            self.step_calls = self.calls
        notify, self.on_recompute = self.on_recompute, None
        if notify is not None:
            notify()

    def sizes(self, entries: int) -> list[int]:
        """Return the sizes of the chunks of a module's batch of so many entries; the last is none of a single one."""
        views = max(1, entries // (self.window or entries))
        most = entries if self.samples is None else min(entries, self.samples * views)
        if self.even:
            return list(split_evenly(entries, -(-entries // most)))
        sizes = [most] * (entries // most) + [entries % most] * (entries % most > 0)
        if sizes[-1] == 1 and most > 2:  # BatchNorm refuses one sample
            sizes[-2:] = [most - 1, 2]
        return sizes
