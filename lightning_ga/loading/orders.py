"""The order of an epoch's samples, the same on every rank: a function of seed and epoch, or a sampler's own.

So window k of epoch e has the same samples for every micro-batch and number of ranks, also after a resume.
"""

import zlib
from array import array
from base64 import b64decode, b64encode
from collections.abc import Callable, Sequence
from itertools import islice
from operator import eq
from typing import Any

import torch

from lightning_ga.batch.pytree import same_values
from lightning_ga.memory.live_tensors import uncounted
from lightning_ga.memory.oom import attempt
from lightning_ga.plan.accumulation import ceil_div
from lightning_ga.snapshot.random_numbers import own_generators, seed_generator
from lightning_ga.snapshot.user_objects import borrowed, seeded

MOST_KEPT = 2**20  # indices of an order that a checkpoint keeps
MOST_DRAWN = 2**24  # indices of an order that is read off a sampler: more take a minute, and gigabytes
_SEEDS = 2**63  # seeds go on from 0 here, within the 64 bits of torch.Generator


class Sequential:
    """The dataset's order.

    Args:
        length: The samples of the dataset, or a function that returns them: they may change from epoch to epoch.
        multiple: An epoch has a multiple of so many samples; the rest is left out.
    """

    def __init__(self, length: int | Callable[[], int], *, multiple: int = 1) -> None:
        self._length = length
        self._multiple = multiple
        self._begun: tuple[int, int] | None = None  # the last epoch that training has begun, and its ``_dataset_size``

    def size(self, epoch: int) -> int:
        """Return the samples of an epoch, by the length of the dataset now, or when training has begun that epoch."""
        samples = self._dataset_size(epoch)
        return samples - samples % self._multiple

    def draw(self, epoch: int) -> Any:
        """Return the indices of one epoch, of which slices are read."""
        return range(self.size(epoch))

    def begin(self, epoch: int) -> Any:
        """Return the order that training begins an epoch with; the length of the dataset is kept for it from now on."""
        self._begun = epoch, self._dataset_size(epoch)
        return self.draw(epoch)

    def pool(self, epoch: int) -> Sequence[Any]:
        """Return the indices that training may meet."""
        return range(self._dataset_size(epoch))

    def _dataset_size(self, epoch: int) -> int:
        if self._begun is not None and self._begun[0] == epoch:
            return self._begun[1]
        return self._length() if callable(self._length) else self._length


class Shuffled(Sequential):
    """A permutation: ``torch.randperm`` seeded with seed + epoch, as in torch's ``DistributedSampler``.

    It is drawn over the whole dataset; an epoch may leave some samples out.
    """

    def __init__(self, length: int | Callable[[], int], seed: int, *, multiple: int = 1) -> None:
        super().__init__(length, multiple=multiple)
        self._seed = seed

    def draw(self, epoch: int) -> torch.Tensor:
        """Return the permutation of one epoch, four bytes a sample of up to 2³¹."""
        seed = (self._seed + epoch) % _SEEDS
        samples = self._dataset_size(epoch)
        dtype = torch.int32 if samples < 2**31 else torch.int64
        with uncounted():  # it lies on the host
            return torch.randperm(samples, generator=torch.Generator().manual_seed(seed), dtype=dtype)


class FromSampler:
    """The indices that a sampler of the user's own yields, shuffled if Lightning ``shuffles`` them; at most ``len()``.

    The length is rounded up to a multiple of ``batch``, because stock Lightning counts batches. Random numbers depend
    on seed + epoch, those of its own generators on their ``seeds`` + epoch. To plan an epoch, a copy of the sampler is
    read. When training begins the epoch, the sampler itself is read, because hooks may have changed it meanwhile.
    """

    def __init__(
        self,
        sampler: Any,
        dataset: Any = None,
        *,
        seed: int,
        seeds: Sequence[int] = (),
        batch: int = 1,
        shuffles: bool = False,
    ) -> None:
        self._sampler = sampler
        self._dataset = dataset
        self._seed = seed
        self._seeds = seeds
        self._batch = batch
        self._shuffles = shuffles
        self._drawn: tuple[Any, list[Any]] = (None, [])  # to plan: epoch and length of the sampler, and indices
        self._begun: tuple[int | None, list[Any]] = (None, [])  # by training: epoch and indices
        # Generators of NumPy and Python may be seeded anew in each process.
        self._changes = not all(isinstance(each, torch.Generator) for each in own_generators(sampler))

    def size(self, epoch: int) -> int:
        """Return the samples of an epoch: those that the sampler yields."""
        return len(self.draw(epoch))

    def draw(self, epoch: int) -> list[Any]:
        """Return the sampler's own order for one epoch; of the epoch that training has begun, what that runs."""
        if self._begun[0] == epoch:
            return self._begun[1]
        wanted = epoch, len(self._sampler)  # which may change before the epoch begins
        if self._drawn[0] != wanted:
            with borrowed(self._sampler, self._dataset) as sampler:
                drawn = self._read(sampler, epoch)
                if sampler is not self._sampler:  # one that cannot be copied would move on if it were read again
                    again = self._read(sampler, epoch)
                    # Millions of plain numbers are compared at once.
                    is_same = attempt(eq, lambda _: True, drawn, again).result or same_values(drawn, again)
                    self._changes |= not is_same
            self._drawn = wanted, drawn
        return self._drawn[1]

    def begin(self, epoch: int) -> list[Any]:
        """Return the order that training begins an epoch with: the sampler is read once."""
        if self._begun[0] != epoch:
            self._begun = epoch, self._read(self._sampler, epoch)
            self._drawn = (None, [])
        return self._begun[1]

    def changes(self, epoch: int) -> bool:
        """Return whether the sampler may yield another order when it is asked for one epoch again."""
        self.draw(epoch)
        return self._changes

    def kept(self) -> str | None:
        """Return the running epoch's order for a checkpoint, if nothing else gives it again; ``None`` if too long."""
        _, indices = self._begun
        if not self._changes or len(indices) > MOST_KEPT:
            return None
        try:
            return b64encode(zlib.compress(array("q", indices).tobytes())).decode()
        except (TypeError, OverflowError):  # indices may be of any type, and of any size
            return None

    def restore(self, kept: str, epoch: int) -> None:
        """Begin an epoch with the order that a checkpoint has kept."""
        indices = array("q")
        indices.frombytes(zlib.decompress(b64decode(kept)))
        self._begun = epoch, indices.tolist()
        self._changes = True

    pool = draw  # training may meet the indices of the epoch

    def _read(self, sampler: Any, epoch: int) -> list[Any]:
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        with seeded(self._seed + epoch, sampler):
            for generator, seed in zip(own_generators(sampler), self._seeds):
                seed_generator(generator, seed + epoch)
            iterator = iter(sampler)
            found = list(islice(iterator, ceil_div(len(sampler), self._batch) * self._batch))
            next(iterator, None)  # one that yields no more comes to its end, where it may count its epochs
        if self._shuffles and found:
            permutation = Shuffled(len(found), self._seed).draw(epoch)
            return [found[place] for place in permutation.tolist()]
        return found


Order = Sequential | FromSampler
