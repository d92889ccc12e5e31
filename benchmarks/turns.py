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
from torch.utils.data import DataLoader

from benchmarks.trainers import quiet_trainer
from lightning_ga import AutoAccumulate

Clocks = Mapping[str, Sequence[float]]  # seconds of windows, by "wall" and "cpu"
Fit = Callable[[Any], object]


class Stopwatch(pl.Callback):
    """Times every window, from the end of the last one to its own end, and lets others go in between."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []
        self.turn, self.over = threading.Semaphore(0), threading.Semaphore(0)
        self.ended: BaseException | bool = False  # or the error that ended it
        self.since = (0.0, 0.0)

    def play(self, fit: Fit) -> None:
        """Run a fit, which is given this stopwatch and must have it as its last callback."""
        self.turn.acquire()
        try:
            fit(self)
            self.ended = True
        except BaseException as error:
            self.ended = error
        self.over.release()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Let others go at the end of a window of as many micro-batches as are planned."""
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self.end_of_window()

    def end_of_window(self) -> None:
        self.stop()
        self.over.release()
        self.turn.acquire()
        self.start()

    def start(self) -> None:
        self.since = time.perf_counter(), time.thread_time()

    def stop(self) -> None:
        self.wall.append(time.perf_counter() - self.since[0])
        self.cpu.append(time.thread_time() - self.since[1])


class RanksStopwatch(Stopwatch):
    """Times windows from the moment that all ranks begin to the moment that all are done."""

    def start(self) -> None:
        torch.distributed.barrier()
        self.since = time.perf_counter(), time.process_time()

    def stop(self) -> None:
        self.cpu.append(time.process_time() - self.since[1])
        torch.distributed.barrier()
        self.wall.append(time.perf_counter() - self.since[0])


def take_turns(fits: Iterable[Fit], *, watch: type[Stopwatch] = Stopwatch, seed: int | None = None) -> list[Any]:
    """Run fits side by side, in rounds; a seed decides the order of each."""
    watches, rng = [], random.Random(seed)
    for fit in fits:
        watches.append(watch())
        threading.Thread(target=watches[-1].play, args=(fit,), daemon=True).start()
    playing = list(watches)
    while playing:
        for each in playing if seed is None else rng.sample(playing, len(playing)):
            each.turn.release()
            each.over.acquire()
            if isinstance(each.ended, BaseException):
                raise RuntimeError("a trainer failed") from each.ended
        playing = [each for each in playing if not each.ended]
    return watches


def fit(watch: Stopwatch, module: Any, data: Any, micro: int, factor: int, ours: Any = None, **settings: Any) -> None:
    """Train in windows on this rank of all, by stock Lightning or, given its settings, by ``AutoAccumulate``."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        settings |= {"devices": ranks, "strategy": DDPStrategy(process_group_backend="gloo")}
    callbacks, batch = settings.pop("callbacks", []), micro
    if ours is None:
        settings["accumulate_grad_batches"] = factor
    else:
        callbacks = [AutoAccumulate(micro * factor * ranks, micro_batch_size=micro, **ours)]
        batch *= factor if ours.get("micro_batching") == "step" else 1
    trainer = quiet_trainer(max_epochs=1, callbacks=[*callbacks, watch], **settings)
    trainer.fit(module, DataLoader(data, batch_size=batch, collate_fn=getattr(data, "collate", None)))


def in_bouts(fits: Mapping[str, Fit], number: int, warm_up: int, watch: Any = Stopwatch) -> Iterator[dict[str, Clocks]]:
    """Seconds of windows that count, in bouts of fresh fits; chance orders each round, alike on all ranks."""
    for seed in range(number):
        watches = zip(fits, take_turns(fits.values(), watch=watch, seed=seed))
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
    return statistics.median(value for one in bouts for value in one)
