"""The window batch sampler: an epoch's order, cut into the micro-batches of one rank, from any window on."""

from collections.abc import Iterator
from operator import itemgetter
from typing import Any

import torch
from torch.utils.data import Sampler

from lightning_ga.loading.orders import Order
from lightning_ga.plan.windows import EpochPlan, Window

Planned = tuple[Window, int, list[Any]]  # of a micro-batch: its window, its index in that, and indices of samples


class WindowBatchSampler(Sampler[list[Any]]):
    """Yields the micro-batches of one rank, window after window.

    Until an epoch is arranged it yields nothing, so that data workers fetch nothing in vain.
    """

    plan: EpochPlan  # of the epoch that was arranged last

    def __init__(self, order: Order, *, rank: int) -> None:
        self.order = order
        self.rank = rank
        self.epoch = 0
        self.start = 0
        self.enabled = False
        self.length: int | None = None  # of an epoch in batches of the recipe, while data are set up

    @property
    def sampler(self) -> "WindowBatchSampler":
        """The sampler itself: Lightning calls ``set_epoch`` on ``batch_sampler.sampler``."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iteration draws."""
        self.epoch = epoch

    def arrange(self, epoch: int, plan: EpochPlan, *, start: int, enabled: bool) -> None:
        """Take an epoch's plan; the next iteration yields its micro-batches from window ``start`` on if ``enabled``."""
        self.epoch = epoch
        self.plan = plan
        self.start = start
        self.enabled = enabled

    def __len__(self) -> int:
        if self.length is not None:
            return self.length
        return self.plan.length

    def __iter__(self) -> Iterator[list[Any]]:
        return map(itemgetter(2), self.planned())

    def planned(self) -> Iterator[Planned]:
        """Return the micro-batches of an iteration that begins now, by the plan of when the first is asked for."""
        return self._micro_batches() if self.enabled else iter(())

    def _micro_batches(self) -> Iterator[Planned]:
        plan = self.plan
        drawn = self.order.begin(self.epoch)
        for index in range(self.start, plan.count):
            window = plan.window(index, self.rank)
            of_window = drawn[window.start : window.end]
            if isinstance(of_window, torch.Tensor):  # else the dataset gets what the sampler yields
                of_window = of_window.tolist()
            for position in range(len(window.sizes)):
                places = plan.places(window, position)
                found = [of_window[place - window.start] for place in places if place - window.start < len(of_window)]
                if found:  # always, unless hooks have made the user's sampler shorter since the plan
                    yield window, position, found


def listed(indices: Any) -> list[Any]:
    """Return indices as plain values."""
    if isinstance(indices, torch.Tensor):
        return indices.tolist()
    return [each.item() if isinstance(each, torch.Tensor) and each.dim() == 0 else each for each in indices]
