"""Trainers that take turns, a window each, so that each is timed beside the others.

On a busy machine two runs a minute apart differ by more than what is to be measured. Here every trainer has a thread
of its own and only the one whose turn it is computes: windows that are compared are a second apart.
"""

import os
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, Dataset

from benchmarks.trainers import quiet_trainer
from lightning_ga import AutoAccumulate

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

    def __init__(self, turns: Turns, player: int) -> None:
        self.turns, self.player = turns, player
        self.wall: list[float] = []
        self.cpu: list[float] = []
        self._since = (0.0, 0.0)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Let others go at the end of a window of as many micro-batches as are planned."""
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self.end_of_window()

    def end_of_window(self) -> None:
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


Fit = Callable[[Any], object]


def take_turns(fits: Sequence[Fit], *, watch: type[Stopwatch] = Stopwatch, seed: int | None = None) -> list[Any]:
    """Run fits side by side; each is given the stopwatch that it must have as its last callback."""
    turns = Turns(len(fits), seed)
    watches = [watch(turns, player) for player in range(len(fits))]
    threads = [threading.Thread(target=_play, args=(turns, fit, watch)) for fit, watch in zip(fits, watches)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if turns.failure:
        raise RuntimeError("a trainer failed") from turns.failure
    return watches


def _play(turns: Turns, fit: Fit, watch: Stopwatch) -> None:
    try:
        turns.wait(watch.player)
        fit(watch)
        turns.pass_on(leave=True)
    except BaseException as failure:
        turns.fail(failure)


def fit(
    watch: Stopwatch,
    module: pl.LightningModule,
    data: Dataset[Any],
    micro: int,
    factor: int,
    ours: Mapping[str, Any] | None = None,
    *,
    callbacks: Iterable[pl.Callback] = (),
    **settings: Any,
) -> None:
    """Train in windows on this rank of all, by stock Lightning or, given its settings, by ``AutoAccumulate``."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        settings |= {"devices": ranks, "strategy": DDPStrategy(process_group_backend="gloo")}
    if ours is None:
        settings["accumulate_grad_batches"] = factor
    else:
        callbacks = [AutoAccumulate(micro * factor * ranks, micro_batch_size=micro, **ours), *callbacks]
    batch = micro * factor if ours is not None and ours.get("micro_batching") == "step" else micro
    trainer = quiet_trainer(max_epochs=1, callbacks=[*callbacks, watch], **settings)
    trainer.fit(module, DataLoader(data, batch_size=batch, collate_fn=getattr(data, "collate", None)))


def in_bouts(
    fits: Mapping[str, Fit], number: int, warm_up: int, *, watch: type[Stopwatch] = Stopwatch
) -> Iterator[dict[str, Clocks]]:
    """Seconds of the windows that count, by program and clock, in bouts of fresh fits.

    Chance decides the order of each round, alike on all ranks.
    """
    for seed in range(number):
        watches = zip(fits, take_turns([*fits.values()], watch=watch, seed=seed))
        yield {name: {"wall": each.wall[warm_up:], "cpu": each.cpu[warm_up:]} for name, each in watches}


def ratio(bouts: Sequence[Mapping[str, Clocks]], name: str, beside: str, clock: str, key: str) -> dict[str, Any]:
    """Median ratio of each window of a program to the other's of the same round, with its 95 % interval.

    Examples:
        >>> ratio([{"stock": {"wall": [1.0, 2.0]}, "ours": {"wall": [1.5, 2.0]}}], "ours", "stock", "wall", "added")
        {'added': 1.25, 'added_95': (1.25, 1.25)}
    """
    ratios = [[a / b for a, b in zip(one[name][clock], one[beside][clock])] for one in bouts]
    rng, draws = random.Random(0), 2000
    medians = sorted(pooled_median(rng.choices(ratios, k=len(ratios))) for _ in range(draws))
    low, high = medians[int(0.025 * draws)], medians[int(0.975 * draws)]
    return {key: round(pooled_median(ratios), 4), f"{key}_95": (round(low, 4), round(high, 4))}


def pooled_median(bouts: Iterable[Sequence[float]]) -> float:
    """Median over the windows of all bouts."""
    return statistics.median(value for one in bouts for value in one)
