"""The same samples in the same windows as the recipe, whatever draws them: samplers, seeds, hooks that move them."""

import random
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from reference import Regression, Samples, fit, plain_loop, worst_error
from torch.utils.data import BatchSampler, DataLoader, Sampler

from lightning_ga import AutoAccumulate


class OwnRandom(Sampler[list[int]]):
    """A batch sampler of unequal batches, with random numbers of its own and no word of epochs."""

    def __init__(self) -> None:
        self.rng = random.Random(0)

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[list[int]]:
        left = list(range(40))
        self.rng.shuffle(left)
        ends = [0, *sorted(self.rng.sample(range(1, 40), 7)), 40]
        return iter([left[a:b] for a, b in pairwise(ends)])


def test_windows_are_the_batches_of_a_batch_sampler() -> None:
    """In the order in which it draws them; probe and measurement draw none. Those that fit run whole."""
    stock, _ = fit(DataLoader(Samples(40), batch_sampler=OwnRandom()), max_epochs=3)
    ours, _ = fit(DataLoader(Samples(40), batch_sampler=OwnRandom()), AutoAccumulate(micro_batch_size=3), max_epochs=3)
    whole, _ = fit(DataLoader(Samples(40), batch_sampler=OwnRandom()), AutoAccumulate(), max_epochs=3)
    assert (ours.windows, whole.micro_batches) == (stock.windows, stock.micro_batches)
    assert worst_error(ours.gradients, plain_loop(Samples(40), ours.windows)) <= 1e-12


def test_the_seed_of_everything_decides_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that are spawned begin with it, whatever else was seeded; without it torch's seed decides."""

    def order(seed: int) -> list[Any]:
        module, ours = Regression(), AutoAccumulate(micro_batch_size=4, micro_batching="loader")
        module.prepare_data = lambda: torch.manual_seed(seed)
        return fit(DataLoader(Samples(32), 8, shuffle=True), ours, module=module, max_epochs=1)[0].windows

    assert order(1) == order(2)
    monkeypatch.setattr(pl, "seed_everything", lambda *_, **__: None)
    monkeypatch.delenv("PL_GLOBAL_SEED")
    assert order(1) != order(2)


class Curriculum(Sampler[int]):
    """Yields samples from a place on that hooks move, and counts how often it is asked."""

    def __init__(self) -> None:
        self.start, self.asked = 0, 0

    def __iter__(self) -> Iterator[int]:
        self.asked += 1
        return iter(range(self.start, self.start + 12))

    def __len__(self) -> int:
        return 12


class Moved(Regression):
    """Moves its sampler when an epoch starts."""

    def __init__(self, sampler: Curriculum) -> None:
        super().__init__()
        self.sampler = sampler

    def on_train_epoch_start(self) -> None:
        self.sampler.start = 4 * (self.current_epoch + 1)


@pytest.mark.parametrize("in_batches", [False, True])
def test_what_hooks_set_in_a_sampler_counts_at_once(in_batches: bool) -> None:
    """In its first epoch too, though probe and measurement have looked at its order; the sampler counts no looks."""

    def train(*callbacks: AutoAccumulate) -> tuple[Moved, Curriculum]:
        sampler = Curriculum()
        batches = {"batch_sampler": BatchSampler(sampler, 4, drop_last=False)}
        given: dict[str, Any] = batches if in_batches else {"batch_size": 4, "sampler": sampler}
        module, _ = fit(DataLoader(Samples(64), **given), *callbacks, module=Moved(sampler), max_epochs=3)
        return module, sampler

    (stock, asked), (ours, counted) = train(), train(AutoAccumulate(max_micro_batch_size=2))
    assert counted.asked == asked.asked == 3
    assert worst_error(ours.gradients, stock.gradients) <= 1e-12


class Pairs(Regression):
    """Compares samples whose numbers agree in their last two bits; memory runs out once, in its third batch."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        if len(batch[0]) == 8 and self.trainer.global_step == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        predicted, numbers = self.net(batch[0]).flatten(), batch[2]
        pairs = (numbers[:, None] - numbers[None]) % 4 == 0
        differences = (predicted[:, None] - predicted[None] - 1) ** 2
        return loss + (differences * pairs.triu(1)).sum() / max(1, int(pairs.triu(1).sum()))


@pytest.mark.parametrize("mode", ["loader", "step"])
@pytest.mark.filterwarnings("ignore:Memory ran out in:UserWarning")
def test_the_first_measurement_after_an_error_takes_samples_that_differ(mode: str) -> None:
    """The four samples of a micro-batch make no pair, and would be called exact; the eight of a batch make four."""
    ours = AutoAccumulate(micro_batching=mode)
    fit(DataLoader(Samples(64), batch_size=8), ours, module=Pairs(), max_epochs=1)
    assert ours.oom_events == 1
    assert ours.exactness is not None
    assert ours.exactness.cause == "coupled"
