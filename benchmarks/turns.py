"""Trainers that take turns, a window each, so that each window is timed beside the others' windows of the same round.

On a busy machine two runs a minute apart differ by more than a callback costs. Here every Trainer has a thread of its
own, and only one thread computes at a time, so the windows that are compared are less than a second apart.
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

STOCK, AGAIN = "stock Lightning", "stock Lightning again"  # the second shows the error of the measurement
Clocks = Mapping[str, Sequence[float]]  # seconds of windows, by "wall" and "cpu"
Fit = Callable[[Any], object]


class Stopwatch(pl.Callback):
    """Times every window, and lets the other Trainers run at its end."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []
        self.turn, self.over = threading.Semaphore(0), threading.Semaphore(0)
        self.ended: BaseException | bool = False  # or the error that ended the fit
        self.since = (0.0, 0.0)

    def play(self, fit: Fit) -> None:
        """Run a fit, which gets this stopwatch and must have it as its last callback."""
        self.turn.acquire()
        try:
            fit(self)
            self.ended = True
        except BaseException as error:
            self.ended = error
        self.over.release()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """End the turn at the end of a window."""
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
    """Times windows from the moment that all ranks begin to the moment that all have finished."""

    def start(self) -> None:
        torch.distributed.barrier()
        self.since = time.perf_counter(), time.process_time()

    def stop(self) -> None:
        self.cpu.append(time.process_time() - self.since[1])
        torch.distributed.barrier()
        self.wall.append(time.perf_counter() - self.since[0])


def take_turns(fits: Iterable[Fit], *, watch: type[Stopwatch] = Stopwatch, seed: int | None = None) -> list[Any]:
    """Run fits side by side, in rounds; a seed decides the order of each round."""
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
    """Train on this rank of all, by stock Lightning or, if ``ours`` has its settings, by ``AutoAccumulate``."""
    ranks, callbacks = int(os.environ.get("WORLD_SIZE", "1")), []
    if ranks > 1:
        settings |= {"devices": ranks, "strategy": DDPStrategy(process_group_backend="gloo")}
    if ours is None:
        settings["accumulate_grad_batches"] = factor
    else:
        callbacks = [AutoAccumulate(micro * factor * ranks, micro_batch_size=micro, **ours)]
    batch = micro * factor if ours and ours.get("micro_batching") == "step" else micro
    trainer = quiet_trainer(max_epochs=1, callbacks=[*callbacks, watch], **settings)
    trainer.fit(module, DataLoader(data, batch_size=batch, collate_fn=getattr(data, "collate", None)))


def in_bouts(fits: Mapping[str, Fit], number: int, warm_up: int, watch: Any = Stopwatch) -> Iterator[dict[str, Clocks]]:
    """Yield the seconds of windows after the warm-up, in bouts of fresh fits; every rank draws the same order."""
    for seed in range(number):
        watches = zip(fits, take_turns(fits.values(), watch=watch, seed=seed))
        yield {name: {"wall": each.wall[warm_up:], "cpu": each.cpu[warm_up:]} for name, each in watches}


def ratio(bouts: Sequence[Mapping[str, Clocks]], name: str, beside: str, clock: str, key: str) -> dict[str, Any]:
    """Return the median ratio of two programs' windows of the same round, with its 95 % interval.

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


def with_interval(record: Mapping[str, Any], key: str, most: float | None = None) -> str:
    """Return a ratio of a record with its interval, and NO if it is above the most that is allowed.

    Examples:
        >>> with_interval({"wall": 1.05, "wall_95": (1.0, 1.1)}, "wall", most=1.02)
        '1.050 (1.00–1.10) NO'
    """
    low, high = record[f"{key}_95"]
    return f"{record[key]:.3f} ({low:.2f}–{high:.2f}){'' if most is None or record[key] <= most else ' NO'}"
