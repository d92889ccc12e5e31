"""Replace micro-batches of which a collate function leaves nothing by batches that weigh nothing.

Lightning skips a batch that is ``None`` (``loops/training_epoch_loop.py:330`` of 2.6.6). With a window's first
micro-batch it would skip the zeroing of gradients, with the last one the optimizer's step.

Tested in tests/integration/test_collate_functions.py.
"""

from collections.abc import Iterator
from typing import Any

from lightning_ga.loading.known_samples import KnownSamples
from lightning_ga.loading.sample_reader import anything_but_out_of_memory
from lightning_ga.loading.sampler import Planned, WindowBatchSampler
from lightning_ga.memory.oom import attempt
from lightning_ga.plan.recipe import Recipe
from lightning_ga.plan.windows import Window
from lightning_ga.snapshot.copies import with_own_containers


class StandIns:
    """Repeats another micro-batch in the place of one of nothing. A window of nothing is left to Lightning.

    On several ranks, another rank may have samples of that window. There its micro-batches have stand-ins, too: they
    repeat one of a window before it or, at the beginning, after it.
    """

    def __init__(self, samples: KnownSamples, sampler: WindowBatchSampler, recipe: Recipe) -> None:
        self._samples = samples
        self._sampler = sampler
        self._recipe = recipe
        self._places: set[tuple[int, int]] = set()  # of stand-ins since the loader was iterated: window, index in it

    def has(self, window: Window, index_in_window: int) -> bool:
        """Return whether a micro-batch that the loader has yielded is a stand-in."""
        return (window.index, index_in_window) in self._places

    def fill(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Return what a loader yields in an iteration that begins now, with stand-ins."""
        self._places.clear()
        return self._filled(self._read(batches, self._sampler.planned()))

    def _filled(self, read: Iterator[tuple[Window, int, Any]]) -> Iterator[Any]:
        spare = None  # a micro-batch that may stand in for those of nothing
        waiting: list[tuple[int, int]] = []  # places of those, while there is no spare
        for window, index_in_window, batch in read:
            if batch is None:
                waiting.append((window.index, index_in_window))
            else:
                spare = with_own_containers(batch)  # steps may pop labels
            if spare is not None:
                self._places.update(waiting)
                for _ in waiting:
                    yield with_own_containers(spare)
                waiting = []
            if batch is not None:
                yield batch
            is_last = index_in_window + 1 == len(window.sizes)
            if is_last and self._recipe.world_size == 1:
                yield from [None] * len(waiting)
                waiting = []
                spare = None
        yield from [None] * len(waiting)

    def _read(self, batches: Iterator[Any], planned: Iterator[Planned]) -> Iterator[tuple[Window, int, Any]]:
        """Yield micro-batches with their windows and indices in these; ``None`` for those of nothing."""
        for window, index_in_window, indices in planned:
            batch = None
            try:
                batch = next(batches)
            except StopIteration:
                return
            except Exception:  # whatever a collate function raises that gets no samples
                if not self._are_left_out(indices):
                    raise
            yield window, index_in_window, batch

    def _are_left_out(self, indices: list[Any]) -> bool:
        """Return whether the collate function leaves out all these samples in a larger batch of the recipe."""
        samples = self._samples
        if len(indices) >= self._recipe.batch_size or not samples.can_be_read_apart:
            return False
        with samples.reader.fetched([indices], list) as reads:
            read = attempt(next, anything_but_out_of_memory, reads).result
        kept = 2 * samples.examples[:1]
        expected = samples.elements_of(kept, len(kept)) if kept else 0
        if read is None or expected == 0:
            return False
        return samples.elements_of([*kept, *read], len(kept) + len(read)) == expected
