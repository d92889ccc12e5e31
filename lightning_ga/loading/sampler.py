"""The window batch sampler: an epoch's order, the same on every rank, cut into micro-batches.

Every order is a function of a seed and the epoch and of nothing else, neither of the random
numbers that training has used up nor of the hardware. So window k of epoch e holds the same samples
whatever the micro-batch and the number of ranks are, after a resume too.
"""

from collections.abc import Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from itertools import count, islice
from typing import Any, Protocol

import torch
from torch.utils.data import Sampler

from lightning_ga.loading.permutation import Permutation
from lightning_ga.memory.live_tensors import uncounted
from lightning_ga.plan.windows import Chunk, EpochPlan
from lightning_ga.snapshot import random_numbers
from lightning_ga.snapshot.contents import ObjectState, reachable

_FEW = 8  # windows
_SEEDS = 2**63  # torch.Generator takes seeds of 64 bits
# The largest epoch whose order is written down, in 512 MiB and a few seconds on every rank. Beyond it both would
# hold the training up.
LARGEST_WRITTEN_ORDER = 2**27


class Order(Protocol):
    """The samples of an epoch, in order."""

    @property
    def size(self) -> int | None:
        """Samples of an epoch; ``None`` for a stream of unknown length."""

    def draw(self, epoch: int, seed: int) -> Sequence[Any] | torch.Tensor | None:
        """The indices of one epoch; ``None`` if there are none."""


class Sequential:
    """As the dataset lies."""

    def __init__(self, size: int) -> None:
        self.size = size

    def draw(self, epoch: int, seed: int) -> Sequence[int]:
        """Every index, rising."""
        return range(self.size)


class Shuffled:
    """A permutation: ``torch.randperm`` seeded with seed + epoch, as in torch's ``DistributedSampler``.

    Above ``LARGEST_WRITTEN_ORDER`` samples, one that is computed index by index. It is drawn of the ``whole``
    dataset, of which an epoch may leave out some samples.
    """

    def __init__(self, size: int, seed: int | None = None, *, whole: int | None = None) -> None:
        self.size, self.seed = size, seed
        self.whole = size if whole is None else whole

    def draw(self, epoch: int, seed: int) -> Sequence[int] | torch.Tensor:
        """The permutation of one epoch, at most four bytes a sample."""
        seed = seed if self.seed is None else self.seed
        if self.whole > LARGEST_WRITTEN_ORDER:
            return Permutation(self.whole, seed=seed, epoch=epoch)
        generator = torch.Generator()
        generator.manual_seed((seed + epoch) % _SEEDS)
        with uncounted():  # it lies on the host
            return torch.randperm(self.whole, generator=generator, dtype=torch.int32)


def draws_a_seed(order: Order) -> bool:
    """Whether torch's ``RandomSampler`` would draw a seed for this order: it has no generator of its own."""
    return isinstance(order, Shuffled) and order.seed is None


class _UsersOrder:
    """The order of samplers of the user's own, their random numbers drawn from seed + epoch.

    An epoch is looked at without a trace, and drawn again when training begins it: hooks that run in between may
    have changed a sampler, and a sampler may count how often it is asked.
    """

    def __init__(self, *samplers: Any) -> None:
        self._samplers = samplers
        self._key: tuple[int, int] | None = None
        self._drawn: list[Any] = []

    def _read(self) -> list[Any]:
        """Read what the samplers yield."""
        raise NotImplementedError

    def _look(self, epoch: int, seed: int) -> list[Any]:
        if self._key != (epoch, seed):
            state = ObjectState(thing for sampler in self._samplers for thing in reachable(sampler))
            self._drawn, self._key = self._read_epoch(epoch, seed), (epoch, seed)
            state.restore()
        return self._drawn

    def _read_epoch(self, epoch: int, seed: int) -> list[Any]:
        for sampler in self._samplers:
            set_epoch = getattr(sampler, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(epoch)
        with seeded(seed + epoch, epoch, *self._samplers):
            return self._read()


class FromSampler(_UsersOrder):
    """What a sampler of the user's own yields."""

    def __init__(self, sampler: Iterable[Any], size: int, *, runs_out: bool = False) -> None:
        super().__init__(sampler)
        self.sampler, self.size = sampler, size
        self.runs_out = runs_out  # whether the loader asks for more: a sampler may change once it has ended

    def draw(self, epoch: int, seed: int) -> Sequence[Any]:
        """Return the sampler's own order for one epoch."""
        return self._look(epoch, seed)

    def begin(self, epoch: int, seed: int) -> Sequence[Any]:
        """Return the order that training begins an epoch with."""
        self._drawn, self._key = self._read_epoch(epoch, seed), (epoch, seed)
        return self._drawn

    def _read(self) -> list[Any]:
        return _first(self.sampler, self.size, runs_out=self.runs_out)


class FromBatches(_UsersOrder):
    """What a batch sampler of the user's own yields, joined; the sizes of its batches are kept."""

    def __init__(self, batch_sampler: Iterable[Sequence[Any]], *, runs_out: bool = False) -> None:
        super().__init__(batch_sampler, getattr(batch_sampler, "sampler", None))
        self.batch_sampler, self.runs_out = batch_sampler, runs_out
        self.size = 0  # of the epoch drawn last

    def batches(self, epoch: int, seed: int) -> list[list[Any]]:
        """Return the batches of one epoch."""
        batches = self._look(epoch, seed)
        self.size = sum(map(len, batches))
        return batches

    def draw(self, epoch: int, seed: int) -> Sequence[Any]:
        """Return all indices of one epoch, batch after batch."""
        return [index for batch in self.batches(epoch, seed) for index in batch]

    def begin(self, epoch: int, seed: int) -> Sequence[Any]:
        """Return the order that training begins an epoch with; its batches are as large as planned."""
        planned, batches = self.batches(epoch, seed), self._read_epoch(epoch, seed)
        if list(map(len, batches)) == list(map(len, planned)):
            self._drawn = batches
        return self.draw(epoch, seed)

    def _read(self) -> list[list[Any]]:
        length = len(self.batch_sampler) if isinstance(self.batch_sampler, Sized) else None
        return [list(batch) for batch in _first(self.batch_sampler, length, runs_out=self.runs_out)]


def _first(sampler: Iterable[Any], number: int | None, *, runs_out: bool) -> list[Any]:
    """Return so many of what a sampler yields; where it ``runs_out``, it has been asked for the next as well."""
    iterator = iter(sampler)
    found = list(islice(iterator, number))
    if runs_out:
        next(iterator, None)
    return found


class Stream:
    """An iterable dataset: samples come in its own order and have no index."""

    def __init__(self, size: int | None) -> None:
        self.size = size

    def draw(self, epoch: int, seed: int) -> None:
        """Samples come as they come."""


class WindowBatchSampler(Sampler[list[Any]]):
    """Yields the micro-batches of one rank, window after window.

    Until an epoch is planned it yields nothing, so that data workers fetch nothing in vain.
    """

    def __init__(
        self,
        order: Order,
        *,
        share: int,
        seed: int,
        generator: torch.Generator | None = None,
        draws: bool = False,
    ) -> None:
        self.order = order
        self.share = share  # this rank's place among the ranks that share the order
        self.seed = seed
        self.generator = generator  # of the seeds of data workers: the loader draws one for each iteration
        self.before: torch.Tensor | None = None  # where that generator was when the loop first iterated the loader
        # Whether the user's own sampler draws a seed when it begins: then this one does, so that training draws the
        # same numbers afterwards.
        self._draws = draws
        self.epoch = 0
        self.plan: EpochPlan | None = None
        self.enabled = False
        self._windows: dict[int, tuple[Chunk, ...]] = {}  # those that the loader has read last, which the loop asks for

    @property
    def sampler(self) -> "WindowBatchSampler":
        """Itself: Lightning calls ``set_epoch`` on ``batch_sampler.sampler``."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iteration draws."""
        self.epoch = epoch

    def arrange(self, epoch: int, plan: EpochPlan, *, enabled: bool) -> None:
        """Cut an epoch; the next iteration yields its micro-batches, if that is ``enabled``."""
        self.epoch, self.plan, self.enabled = epoch, plan, enabled
        self._windows = {}

    def __len__(self) -> int:
        length = self.plan.length if self.plan else None
        if length is None:
            raise TypeError("a stream of unknown length has no len()")
        return length

    def __iter__(self) -> Iterator[list[Any]]:
        # Not a generator function: the loader draws the seed of its workers right after this call.
        if self.enabled and self.plan:
            return self._chunks(self.plan)
        if self.before is None:
            self.before = (self.generator or torch.default_generator).get_state()
        return iter(())

    def take_seed_back(self) -> torch.Generator | None:
        """What draws the same seed of workers as the iteration did that yielded nothing; ``None`` if there was none."""
        if self.before is None:
            return None
        generator = torch.Generator()
        generator.set_state(self.before)
        self.before = None
        return generator

    def chunk(self, index: int) -> Chunk:
        """The ``index``-th micro-batch of the epoch on this rank."""
        assert self.plan is not None
        window, position = divmod(index, self.plan.factor)
        chunks = self._windows.get(window)
        if chunks is None:
            if len(self._windows) >= _FEW:
                self._windows.clear()
            chunks = self._windows[window] = self.plan.chunks(window, self.share)
        return chunks[position]

    def _chunks(self, plan: EpochPlan) -> Iterator[list[Any]]:
        if self._draws:
            torch.empty((), dtype=torch.int64).random_()
        begin = getattr(self.order, "begin", self.order.draw)  # of a sampler that hooks may have changed meanwhile
        order = begin(self.epoch, self.seed)
        length = plan.length
        for index in count(plan.done) if length is None else range(plan.done, length):
            yield _indices_of(self.chunk(index), order)

    def indices(self, index: int) -> list[Any]:
        """The samples of the ``index``-th micro-batch of the epoch, once more."""
        return _indices_of(self.chunk(index), self.order.draw(self.epoch, self.seed))


def _indices_of(chunk: Chunk, order: Sequence[Any] | torch.Tensor | None) -> list[Any]:
    """A rank without a sample runs a stand-in of weight 0, to take part in what the ranks do together."""
    start, count = chunk.start if chunk.count else chunk.window_end - 1, max(1, chunk.count)
    if order is None:
        return [None] * count
    found = order[start : start + count]
    return found.tolist() if isinstance(found, torch.Tensor) else list(found)


@contextmanager
def seeded(seed: int, epoch: int, *samplers: object) -> Iterator[None]:
    """Draw random numbers as a function of the seed alone, and leave every generator as it was.

    Generators that a sampler carries count too: one of torch is seeded with its own initial seed +
    epoch, those of Python and NumPy with the seed.
    """
    held = {id(value): value for sampler in samplers for value in getattr(sampler, "__dict__", {}).values()}
    own: list[Any] = [generator for generator in held.values() if isinstance(generator, random_numbers.GENERATORS)]
    kept = [(generator, random_numbers.generator_state(generator)) for generator in own]
    before = random_numbers.RandomState()
    try:
        for generator in own:
            is_torch = isinstance(generator, torch.Generator)
            random_numbers.seed_generator(generator, generator.initial_seed() + epoch if is_torch else seed)
        random_numbers.reseed(seed)
        yield
    finally:
        before.restore()
        for generator, state in kept:
            random_numbers.restore_generator(generator, state)
