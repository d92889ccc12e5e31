"""The window batch sampler: an epoch's order, the same on every rank, cut into micro-batches.

Every order is a function of a seed and the epoch alone. So window k of epoch e holds the same samples whatever the
micro-batch and the number of ranks are, after a resume too.
"""

import warnings
from collections.abc import Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import count, islice
from math import isqrt
from typing import Any

import torch
from torch.utils.data import RandomSampler, Sampler, WeightedRandomSampler

from lightning_ga.errors import UserError
from lightning_ga.memory.live_tensors import uncounted
from lightning_ga.plan.lengths import SizedShares, sample_order
from lightning_ga.plan.windows import Chunk, EpochPlan
from lightning_ga.snapshot import random_numbers
from lightning_ga.snapshot.contents import ObjectState, reachable

_ROUNDS = 4  # two are the least that look random (Luby and Rackoff, 1988); with three, orders of ten still do not


class Permutation:
    """The numbers from 0 to ``size`` - 1 in an order that a seed determines; slices of it are computed.

    A Feistel network over a rectangle: a number is column + row × width, and in turn the column is shifted by a
    random number of its row and the row by one of its column, each modulo its length. Every shift can be undone, so
    the whole is a permutation of the rectangle; a number that lands beyond ``size`` walks on until it lands within
    (Black and Rogaway, 2002, "Ciphers with arbitrary finite domains"). Hardly any has to: the rectangle exceeds
    ``size`` by less than its square root.

    Examples:
        >>> sorted(Permutation(7, seed=1)[0:7].tolist())
        [0, 1, 2, 3, 4, 5, 6]
    """

    def __init__(self, size: int, *, seed: int) -> None:
        self._size, self._width = size, isqrt(size - 1) + 1
        self._height = -(-size // self._width)
        generator = torch.Generator().manual_seed(seed)
        self._of_columns = torch.randint(self._height, (_ROUNDS, self._width), generator=generator)
        self._of_rows = torch.randint(self._width, (_ROUNDS, self._height), generator=generator)

    def __getitem__(self, places: slice) -> torch.Tensor:
        numbers = self._shuffled(torch.tensor(range(self._size)[places], dtype=torch.int64))
        while (beyond := numbers >= self._size).any():
            numbers[beyond] = self._shuffled(numbers[beyond])
        return numbers

    def _shuffled(self, numbers: torch.Tensor) -> torch.Tensor:
        """Permute the whole rectangle."""
        row, column = numbers // self._width, numbers % self._width
        for of_columns, of_rows in zip(self._of_columns, self._of_rows):
            row = (row + of_columns[column]) % self._height
            column = (column + of_rows[row]) % self._width
        return row * self._width + column


_FEW = 8  # windows
_SEEDS = 2**63  # torch.Generator takes seeds of 64 bits
LARGEST_WRITTEN_ORDER = 2**27  # samples, which take 512 MiB and a few seconds on every rank


class Order:
    """The samples of an epoch, in order."""

    size: int | None  # samples of an epoch; ``None`` for a stream of unknown length
    per_item = 1  # samples that an index stands for: several where the dataset yields whole batches
    draws_seed = False  # whether torch's ``RandomSampler`` would draw a seed for it

    def draw(self, epoch: int, seed: int) -> Any:
        """Return the indices of one epoch, a sequence or a tensor; ``None`` if there are none."""
        raise NotImplementedError

    def begin(self, epoch: int, seed: int) -> Any:
        """Return the order that training begins an epoch with."""
        return self.draw(epoch, seed)

    def pool(self, epoch: int, seed: int) -> Sequence[Any]:
        """Return the indices that training may meet."""
        pool: Sequence[Any] = self.draw(epoch, seed)
        return pool


class Sequential(Order):
    """As the dataset lies."""

    def __init__(self, size: int) -> None:
        self.size: int = size

    def draw(self, epoch: int, seed: int) -> Sequence[int]:
        """Return every index, rising."""
        return range(self.size)


class Shuffled(Order):
    """A permutation: ``torch.randperm`` seeded with seed + epoch, as in torch's ``DistributedSampler``.

    Above ``LARGEST_WRITTEN_ORDER`` samples, one that is computed index by index. It is drawn of the ``whole``
    dataset, of which an epoch may leave out some samples.
    """

    def __init__(self, size: int, seed: int | None = None, *, whole: int | None = None) -> None:
        self.size, self.seed, self.whole = size, seed, size if whole is None else whole
        self.draws_seed = seed is None  # it has no generator of its own

    def draw(self, epoch: int, seed: int) -> Permutation | torch.Tensor:
        """Return the permutation of one epoch, at most four bytes a sample."""
        seed = ((seed if self.seed is None else self.seed) + epoch) % _SEEDS
        with uncounted():  # it lies on the host
            if self.whole > LARGEST_WRITTEN_ORDER:
                return Permutation(self.whole, seed=seed)
            return torch.randperm(self.whole, generator=torch.Generator().manual_seed(seed), dtype=torch.int32)

    def pool(self, epoch: int, seed: int) -> Sequence[int]:
        """Return every index."""
        return range(self.whole)


class _UsersOrder(Order):
    """The order of samplers of the user's own, their random numbers drawn from seed + epoch.

    An epoch is looked at without a trace, and drawn again when training begins it: hooks may have changed a sampler.
    """

    def __init__(self, *samplers: Any, runs_out: bool) -> None:
        self._samplers = samplers
        self._runs_out = runs_out  # whether the loader asks for more: a sampler may change once it has ended
        self._key: tuple[int, int] | None = None
        self._drawn: list[Any] = []

    def _read(self, number: int | None) -> list[Any]:
        """Return so many of what the sampler yields."""
        iterator = iter(self._samplers[0])
        found = list(islice(iterator, number))
        if self._runs_out:
            next(iterator, None)
        return found

    def _read_all(self, epoch: int, seed: int) -> list[Any]:
        raise NotImplementedError

    def _look(self, epoch: int, seed: int) -> list[Any]:
        if self._key != (epoch, seed):
            state = ObjectState(thing for sampler in self._samplers for thing in reachable(sampler))
            self._drawn, self._key = self._read_epoch(epoch, seed), (epoch, seed)
            state.restore()
        return self._drawn

    def _read_epoch(self, epoch: int, seed: int) -> list[Any]:
        for sampler in self._samplers:
            if callable(set_epoch := getattr(sampler, "set_epoch", None)):
                set_epoch(epoch)
        with seeded(seed + epoch, epoch, *self._samplers):
            return self._read_all(epoch, seed)


class FromSampler(_UsersOrder):
    """What a sampler of the user's own yields, shuffled if Lightning ``shuffles`` it."""

    def __init__(self, sampler: Iterable[Any], size: int, *, runs_out: bool = False, shuffles: bool = False) -> None:
        super().__init__(sampler, runs_out=runs_out)
        self.size: int = size
        self._shuffles = shuffles
        self._length = size  # of the sampler in the epoch read last

    def draw(self, epoch: int, seed: int) -> Sequence[Any]:
        """Return the sampler's own order for one epoch."""
        return self._look(epoch, seed)

    def begin(self, epoch: int, seed: int) -> Sequence[Any]:
        """Return the order that training begins an epoch with."""
        self._drawn, self._key = self._read_epoch(epoch, seed), (epoch, seed)
        name, found = type(self._samplers[0]).__name__, len(self._drawn)
        if found < self.size:
            raise UserError(
                f"The sampler {name} yields {found} samples in epoch {epoch}, and its len() was {self.size} when "
                "training began: windows are cut for that many. Let it yield as many in every epoch."
            )
        if self._length > self.size:
            warnings.warn(
                f"The sampler {name} has {self._length} samples in epoch {epoch}, and had {self.size} when training "
                "began: only so many are trained on. Let it have as many in every epoch.",
                stacklevel=2,
            )
        return self._drawn

    def pool(self, epoch: int, seed: int) -> Sequence[Any]:
        """Return the indices that a sampler of torch draws from, or those of the epoch."""
        (sampler,) = self._samplers
        if type(sampler) is RandomSampler:
            return range(len(sampler.data_source))
        if type(sampler) is WeightedRandomSampler:
            weighted: list[int] = sampler.weights.nonzero().flatten().tolist()
            return weighted
        return self.draw(epoch, seed)

    def _read_all(self, epoch: int, seed: int) -> list[Any]:
        sampler = self._samplers[0]
        self._length = len(sampler) if isinstance(sampler, Sized) else self.size  # before it changes as it ends
        found = self._read(self.size)
        if not self._shuffles or not found:
            return found
        return [found[int(place)] for place in Shuffled(len(found)).draw(epoch, seed)[:]]


class FromBatches(_UsersOrder):
    """What a batch sampler of the user's own yields, joined; the sizes of its batches are kept."""

    def __init__(self, batch_sampler: Iterable[Sequence[Any]], *, runs_out: bool = False) -> None:
        super().__init__(batch_sampler, getattr(batch_sampler, "sampler", None), runs_out=runs_out)
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

    def _read_all(self, epoch: int, seed: int) -> list[list[Any]]:
        sampler = self._samplers[0]
        return [list(batch) for batch in self._read(len(sampler) if isinstance(sampler, Sized) else None)]


class Stream(Order):
    """An iterable dataset: samples come in its own order and have no index."""

    def __init__(self, size: int | None, per_item: int = 1) -> None:
        self.size, self.per_item = size, per_item

    def draw(self, epoch: int, seed: int) -> None:
        """Samples come as they come."""


class WindowBatchSampler(Sampler[list[Any]]):
    """Yields the micro-batches of one rank, window after window.

    Until an epoch is arranged it yields nothing, so that data workers fetch nothing in vain. The ``generator``, or the
    global one, draws their seeds. If the user's own sampler ``draws`` a seed when it begins, this one does, so that
    training draws the same numbers afterwards.
    """

    def __init__(
        self, order: Order, *, share: int, seed: int, generator: torch.Generator | None = None, draws: bool = False
    ) -> None:
        self.order, self.seed, self.generator, self._draws = order, seed, generator, draws
        self.share = share  # this rank's place among the ranks that share the order
        self.before: torch.Tensor | None = None  # where that generator was when the loop first iterated the loader
        self.epoch = 0
        self.plan: EpochPlan | None = None
        self.enabled = False

    @property
    def sampler(self) -> "WindowBatchSampler":
        """The sampler itself: Lightning calls ``set_epoch`` on ``batch_sampler.sampler``."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iteration draws."""
        self.epoch = epoch

    def arrange(self, epoch: int, plan: EpochPlan, *, enabled: bool) -> None:
        """Cut an epoch; the next iteration yields its micro-batches if that is ``enabled``."""
        self.epoch, self.plan, self.enabled = epoch, plan, enabled
        # The loop asks for the windows that the loader has read last.
        self._window = lru_cache(maxsize=_FEW)(partial(plan.chunks, rank=self.share))

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
        """Return what draws the workers' seed of the iteration that yielded nothing; ``None`` if there was none."""
        if self.before is None:
            return None
        generator = torch.Generator()
        generator.set_state(self.before)
        self.before = None
        return generator

    def chunk(self, index: int) -> Chunk:
        """Return the ``index``-th micro-batch of the epoch on this rank."""
        assert self.plan is not None
        window, position = self.plan.place(index)
        return self._window(window)[position]

    def _chunks(self, plan: EpochPlan) -> Iterator[list[Any]]:
        if self._draws:
            torch.empty((), dtype=torch.int64).random_()
        drawn = self.order.begin(self.epoch, self.seed)
        length = plan.length
        for index in count(plan.done) if length is None else range(plan.done, length):
            yield self._indices(index, drawn)

    def indices(self, index: int) -> list[Any]:
        """Return the samples of the ``index``-th micro-batch of the epoch, once more."""
        return self._indices(index, self.order.draw(self.epoch, self.seed))

    def between(self, start: int, stop: int) -> list[Any]:
        """Return the samples at some places of the epoch."""
        drawn = self.order.draw(self.epoch, self.seed)
        return [None] * (stop - start) if drawn is None else _listed(drawn[start:stop])

    def _indices(self, index: int, drawn: Any) -> list[Any]:
        """Return indices; a rank without a sample gets a stand-in of weight 0, to join in what ranks do together."""
        chunk = self.chunk(index)
        if drawn is None:
            return [None] * max(1, chunk.count // self.order.per_item)
        start = chunk.start if chunk.count else chunk.window_end - 1
        if self.plan is not None and isinstance(self.plan.cut, SizedShares) and chunk.count:
            first, order = chunk.window_end - chunk.window_samples, sample_order(self.plan, chunk.window)
            window = _listed(drawn[first : chunk.window_end])
            return [window[place] for place in order[start - first : start - first + chunk.count]]
        return _listed(drawn[start : start + max(1, chunk.count)])


def _listed(indices: Any) -> list[Any]:
    return indices.tolist() if isinstance(indices, torch.Tensor) else list(indices)


@contextmanager
def seeded(seed: int, epoch: int, *samplers: object) -> Iterator[None]:
    """Draw random numbers as a function of the seed alone, and leave every generator as it was.

    Those that samplers carry, too: one of torch is seeded with its own initial seed + epoch.
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
