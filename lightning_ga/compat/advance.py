"""Wrap the fit loop's ``advance``, see the batches that it fetches, and give batches back to its fetcher.

Lightning's ``loops/training_epoch_loop.py`` (``advance``) and ``loops/fetchers.py``.

Tested in tests/integration/test_survive.py.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

from lightning_ga.compat import patching
from lightning_ga.compat.loop_counters import LoopPlace
from lightning_ga.snapshot.random_numbers import RandomState


@contextmanager
def guarded_advance(
    trainer: Any, run: Callable[[Callable[[], None]], None], see: Callable[[Any], None] | None = None
) -> Iterator[None]:
    """Return a context in which the loop calls ``run(advance)`` for each of its micro-batches.

    ``see`` gets each batch on the host, before anything changes it. In Lightning 2.6 rank 0 tells the others of a
    SIGTERM in every ``advance``; here once an optimizer step, because a rank that repeats a window advances more often.
    """
    loop = trainer.fit_loop.epoch_loop
    stock = type(loop).advance
    broadcast_sigterm = getattr(type(loop), "_broadcast_sigterm_tensor", None)
    last_step = None  # in which it was called

    def advance(fetcher: Any) -> None:
        nonlocal last_step
        if broadcast_sigterm is not None and trainer.world_size > 1 and last_step != trainer.global_step:
            last_step = trainer.global_step
            broadcast_sigterm(loop)
        run(lambda: stock(loop, fetcher if see is None else _Seen(fetcher, see)))

    silent: AbstractContextManager[Any] = nullcontext()
    if broadcast_sigterm is not None:
        silent = patching.shadowed(loop, "_broadcast_sigterm_tensor", lambda: None)
    with patching.shadowed(loop, "advance", advance), silent:
        yield


class _Seen:
    """A fetcher that shows what it fetches."""

    def __init__(self, fetcher: Any, see: Callable[[Any], None]) -> None:
        self._fetcher = fetcher
        self._see = see

    def __next__(self) -> Any:
        fetched = next(self._fetcher)
        self._see(fetched[0])
        return fetched

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fetcher, name)


def first_batch(trainer: Any) -> Any:
    """Return the first batch of training, on the host; training still gets it. ``None`` if there is none.

    Random numbers are put back, so that training draws them when it gets the batch.
    """
    loop = trainer.fit_loop
    fetcher = loop._data_fetcher
    if fetcher.batches:
        return fetcher.batches[0][0]
    # Lightning has not read ahead, because the length is known, and sets samplers only as the epoch begins.
    for part in loop._combined_loader.flattened:
        patching.sibling(trainer, "loops.fit_loop")._set_sampler_epoch(part, loop.epoch_progress.current.processed)
    before = RandomState()
    starts_anew = trainer.current_epoch > 0 and not LoopPlace(trainer).keeps_iterator
    if starts_anew and hasattr(loop, "is_resuming"):  # Lightning 2.5.0 has no such property
        # In a second fit the loop starts the iterator anew as it begins to read, and the batch would be lost.
        iter(fetcher)
        loop._resuming_from_checkpoint = True  # until the epoch ends: the loop keeps this iterator
    fetched = next(fetcher, None)
    if fetched is not None:
        fetcher.iterator = _then(_as_if_read_now(fetched, before, RandomState()), fetcher.iterator)
    before.restore()
    # The fetcher has counted the batch, and may have seen the end behind it; the loop begins as if it had not.
    fetcher.fetched = 0
    fetcher.done = False
    return None if fetched is None else fetched[0]


def _as_if_read_now(fetched: Any, before: RandomState, after: RandomState) -> Iterator[Any]:
    """Yield a batch that was read already; random numbers go on ``after`` it, if none were drawn since ``before``."""
    if before.is_current():
        after.restore()
    yield fetched


def unread(trainer: Any, batches: Sequence[Any]) -> None:
    """Give batches back to the fetcher, which yields them first; it reads as far ahead as before.

    The counts of the fetcher are those of ``LoopPlace.relocate``, which runs before.
    """
    fetcher = trainer.fit_loop._data_fetcher
    waiting = [*((batch, 0, 0) for batch in batches), *fetcher.batches]
    ahead = fetcher.prefetch_batches if fetcher.length is None else 0
    fetcher.batches = waiting[:ahead]
    fetcher.iterator = _then(waiting[ahead:], fetcher.iterator)


def _then(first: Iterable[Any], others: Iterator[Any]) -> Iterator[Any]:
    """Yield some batches, then the others; ``chain`` would call ``iter``, which restarts a combined loader."""
    yield from first
    with suppress(StopIteration):
        while True:
            yield next(others)
