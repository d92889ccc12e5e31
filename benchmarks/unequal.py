"""Do unequal ranks share a window in proportion? ``python -m benchmarks.unequal``.

Two gloo ranks. In the first pair of rows one has twice the memory of the other: how much of the summed limits does a
window use, if both run as many passes as the one with more? In the second pair one sleeps twice as long for each
sample: how long is a window, beside the ideal?
"""

import os
import time
from itertools import pairwise
from statistics import median
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.output import Record, at_least, at_most, benchmark, plain, shown
from benchmarks.processes import apart
from benchmarks.trainers import Module, mean_square, quiet_trainer
from lightning_ga import AutoAccumulate
from lightning_ga.testing import limit_memory

BUDGETS = ("400KiB", "200KiB")
SLEEPS = (0.01, 0.02)  # seconds of a sample
MEMORY_WINDOW = 4000  # samples of a window that shows the limits of both ranks
PASSES = 12  # of a window that uses these
SPEED_WINDOW = 36
BEFORE_CHANGE = 55  # windows until shares follow, and a few to settle
EQUAL, MEMORY, SPEED = "equal", "memory", "speed"


class Sleeping(Module):
    """Sleeps for each sample, and notes when its windows end."""

    def __init__(self, sleep: float) -> None:
        super().__init__(nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1)), torch.optim.SGD, mean_square)
        self.sleep = sleep
        self.ends: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        time.sleep(self.sleep * len(batch[0]))
        return super().training_step(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.ends.append(time.perf_counter())


def fit(module: pl.LightningModule, ours: AutoAccumulate, data: TensorDataset) -> None:
    strategy = DDPStrategy(process_group_backend="gloo")
    trainer = quiet_trainer(max_epochs=1, callbacks=[ours], devices=int(os.environ["WORLD_SIZE"]), strategy=strategy)
    trainer.fit(module, DataLoader(data, batch_size=8, shuffle=True))


def planned(shares: Any, window: int) -> tuple[int, int]:
    """Return the limit of this rank, and the most passes of a rank in a window of so many samples."""
    data = TensorDataset(torch.randn(window, 32))
    ours = AutoAccumulate(window, shares=shares, cache=False, verify=False)
    with limit_memory(BUDGETS[int(os.environ["RANK"])]):
        fit(Sleeping(0.0), ours, data)
    assert ours.probe is not None
    assert ours.plan is not None
    return ours.probe.limit, max(map(len, ours.plan.chunks))


def part_used(shares: Any) -> float:
    """Return the part of their own limits that ranks use in a window which these could run in so many passes."""
    found, _ = planned(MEMORY, MEMORY_WINDOW)
    limits: list[Any] = [None] * len(BUDGETS)
    torch.distributed.all_gather_object(limits, found)
    _, passes = planned(shares, PASSES * sum(limits))
    return PASSES / passes


def window_seconds(shares: Any, windows: int) -> float:
    """Return the median time of a window after shares have changed."""
    ours = AutoAccumulate(SPEED_WINDOW, micro_batch_size=12, shares=shares, verify=False)
    module = Sleeping(SLEEPS[int(os.environ["RANK"])])
    fit(module, ours, TensorDataset(torch.randn(SPEED_WINDOW * (BEFORE_CHANGE + windows), 32)))
    ends = module.ends[BEFORE_CHANGE - 1 :]
    return median(after - before for before, after in pairwise(ends))


def text(record: Record) -> str:
    used, seconds = record["used"], record["seconds_of_window"]
    rows = [(f'shares="{each}"', f"{100 * used[each]:.0f} % of the limits") for each in used]
    rows += [(f'shares="{each}"', f"{seconds[each] / record['ideal']:.2f} of the ideal time") for each in seconds]
    return shown(("two ranks", "a window uses, or takes"), (), rows)


def measure(windows: int = 60) -> dict[str, Any]:
    used = {each: apart(part_used, each, ranks=2) for each in (EQUAL, MEMORY)}
    seconds = {each: apart(window_seconds, each, windows, ranks=2) for each in (EQUAL, SPEED)}
    ideal = SPEED_WINDOW / sum(1 / sleep for sleep in SLEEPS)
    targets = [
        at_least("part of the summed limits", used[MEMORY], 0.95),
        at_most("window time ÷ ideal", seconds[SPEED] / ideal, 1.05),
    ]
    return {"used": used, "seconds_of_window": seconds, "ideal": ideal, "targets": plain(targets)}


main = benchmark("unequal", __doc__, measure, text, quick={"windows": 5})

if __name__ == "__main__":
    raise SystemExit(main())
