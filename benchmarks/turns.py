"""Trainers that take turns, a window each, so that each is timed beside the others.

On a busy machine two runs a minute apart differ by more than what is to be measured. Here every
trainer has a thread of its own and only the one whose turn it is computes: windows that are
compared are a second apart, and what slows one down slows down all.
"""

import random
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch

Clocks = Mapping[str, Sequence[float]]  # seconds of windows, by "wall" and "cpu"


class Turns:
    """Passes the turn around in rounds, until all have had enough or one has failed."""

    def __init__(self, players: int, seed: int | None = None) -> None:
        self._changed = threading.Condition()
        self._random = None if seed is None else random.Random(seed)
        self._waiting, self._next = self._in_order(range(players)), list[int]()
        self.failure: BaseException | None = None

    def wait(self, player: int) -> None:
        """Block until it is this player's turn."""
        with self._changed:
            self._changed.wait_for(lambda: self.failure or self._waiting[0] == player)
        if self.failure:
            raise RuntimeError("another trainer failed") from self.failure

    def pass_on(self, *, leave: bool = False) -> None:
        with self._changed:
            player = self._waiting.pop(0)
            self._next += [] if leave else [player]
            if not self._waiting:
                self._waiting, self._next = self._in_order(self._next), []
            self._changed.notify_all()

    def _in_order(self, players: Iterable[int]) -> list[int]:
        order = sorted(players)
        if self._random is not None:
            self._random.shuffle(order)
        return order

    def fail(self, failure: BaseException) -> None:
        with self._changed:
            self.failure = self.failure or failure
            self._changed.notify_all()


class Stopwatch(pl.Callback):
    """Times every window, from the end of the last one to its own end, and lets others go in between."""

    def __init__(self, turns: Turns, player: int, factor: int) -> None:
        self.turns, self.player, self.factor = turns, player, factor
        self.wall: list[float] = []
        self.cpu: list[float] = []
        self._since = (0.0, 0.0)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % self.factor:
            return
        self.stop()
        self.turns.pass_on()
        self.turns.wait(self.player)
        self.start()

    def start(self) -> None:
        self._since = (time.perf_counter(), time.thread_time())

    def stop(self) -> None:
        wall, cpu = self._since
        self.wall.append(time.perf_counter() - wall)
        self.cpu.append(time.thread_time() - cpu)


class RanksStopwatch(Stopwatch):
    """Times windows from the moment that all ranks begin to the moment that all are done."""

    def start(self) -> None:
        torch.distributed.barrier()
        self._since = (time.perf_counter(), time.process_time())

    def stop(self) -> None:
        wall, cpu = self._since
        self.cpu.append(time.process_time() - cpu)
        torch.distributed.barrier()
        self.wall.append(time.perf_counter() - wall)


def take_turns(
    fits: Sequence[Callable[[Stopwatch], None]],
    factors: Sequence[int],
    *,
    watch: type[Stopwatch] = Stopwatch,
    seed: int | None = None,
) -> list[Stopwatch]:
    """Run fits side by side; each is given the stopwatch that it must have as its last callback."""
    turns = Turns(len(fits), seed)
    watches = [watch(turns, player, factor) for player, factor in enumerate(factors)]
    threads = [threading.Thread(target=_play, args=(turns, fit, watch)) for fit, watch in zip(fits, watches)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if turns.failure:
        raise RuntimeError("a trainer failed") from turns.failure
    return watches


def _play(turns: Turns, fit: Callable[[Stopwatch], None], watch: Stopwatch) -> None:
    try:
        turns.wait(watch.player)
        fit(watch)
        turns.pass_on(leave=True)
    except BaseException as failure:
        turns.fail(failure)


def bouts(
    programs: Mapping[str, tuple[Callable[[Stopwatch], None], int]], number: int, warm_up: int, seed: int = 0
) -> Iterator[dict[str, Clocks]]:
    """Seconds of the windows that count, by program and clock, in bouts of fresh fits, each in an order of its own.

    Every program is given with the micro-batches of its window; chance decides the order alike on all ranks.
    """
    rng, order = random.Random(seed), list(programs)
    for _ in range(number):
        rng.shuffle(order)
        watches = dict(zip(order, take_turns(*zip(*(programs[name] for name in order)))))
        yield {n: {"wall": watches[n].wall[warm_up:], "cpu": watches[n].cpu[warm_up:]} for n in sorted(programs)}


def ratios(bouts: Sequence[Mapping[str, Clocks]], name: str, clock: str, beside: str) -> list[list[float]]:
    """Ratio of each window of a program to the other's of the same round; a list for each bout.

    Examples:
        >>> ratios([{"stock": {"wall": [1.0, 2.0]}, "ours": {"wall": [1.5, 2.0]}}], "ours", "wall", "stock")
        [[1.5, 1.0]]
    """
    return [[a / b for a, b in zip(one[name][clock], one[beside][clock])] for one in bouts]


def pooled_median(bouts: Sequence[Sequence[float]]) -> float:
    """Median over the windows of all bouts."""
    return statistics.median(ratio for one in bouts for ratio in one)


def interval(bouts: Sequence[Sequence[float]], draws: int = 2000, seed: int = 0) -> tuple[float, float]:
    """Where the median lies with 95 % confidence."""
    rng = random.Random(seed)
    medians = sorted(pooled_median(rng.choices(bouts, k=len(bouts))) for _ in range(draws))
    return medians[int(0.025 * draws)], medians[int(0.975 * draws)]
