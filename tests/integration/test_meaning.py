"""What users write for Lightning keeps its meaning: intervals by time, streams with a limit, forgotten closures."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loops.optimization.automatic import Closure
from reference import Regression, Samples, Validated, fit
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler

from lightning_ga import AutoAccumulate, UserError


def loader(samples: int = 32, **settings: Any) -> DataLoader[Any]:
    return DataLoader(Samples(samples), batch_size=8, **settings)


@pytest.mark.parametrize("interval", ["00:00:00:00", {"seconds": 0}])
@pytest.mark.parametrize("micro_batch_size", [8, 3])
def test_validation_by_time(interval: Any, micro_batch_size: int) -> None:
    """An interval of no seconds is due after every batch."""
    callback, settings = AutoAccumulate(micro_batch_size=micro_batch_size), {"val_check_interval": interval}
    module, trainer = fit(loader(), callback, module=Validated(), max_epochs=1, **settings)
    assert trainer.global_step == module.steps_at_validation[-1] == 4


@pytest.mark.parametrize("mode", ["loader", "step"])
def test_validation_waits_for_windows_that_hold_more_than_full_batches(mode: Any) -> None:
    """Two batches of 16 are full, and five windows of 7 of the 41 samples: the last begins before 32 are done."""
    ours, module = AutoAccumulate(7, micro_batch_size=3, micro_batching=mode, verify=False), Validated()
    fit(DataLoader(Samples(41), batch_size=16, drop_last=True), ours, module=module)
    assert module.steps_at_validation == [5, 10]


class OwnStep(Regression):
    """Looks at the closure that it is given, or forgets it."""

    def __init__(self, forgets: bool) -> None:
        super().__init__()
        self.forgets = forgets

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        assert isinstance(optimizer_closure, Closure)
        optimizer.optimizer.step(*([] if self.forgets else [optimizer_closure]))


@pytest.mark.parametrize("micro_batching", ["loader", "step"])
def test_an_optimizer_step_gets_lightnings_closure_and_may_not_forget_it(micro_batching: str) -> None:
    callback = AutoAccumulate(micro_batch_size=4, micro_batching=micro_batching)
    _, trainer = fit(loader(), callback, module=OwnStep(forgets=False))
    assert trainer.global_step == 8
    with pytest.raises(MisconfigurationException, match="The closure hasn't been executed"):
        fit(loader(), callback, module=OwnStep(forgets=True))


def test_the_seed_of_everything_decides_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that are spawned begin with it, whatever else was seeded; without it torch's seed decides."""

    def order(seed: int) -> list[Any]:
        module = Regression()
        module.prepare_data = lambda: torch.manual_seed(seed)
        return fit(loader(shuffle=True), AutoAccumulate(micro_batch_size=4), module=module, max_epochs=1)[0].windows

    assert order(1) == order(2)
    monkeypatch.setattr(pl, "seed_everything", lambda *_, **__: None)
    monkeypatch.delenv("PL_GLOBAL_SEED")
    assert order(1) != order(2)


class Nothing(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(())


EMPTY = {
    "stream": lambda: DataLoader(Nothing(), batch_size=2),
    "dataset": lambda: DataLoader(Samples(0), batch_size=2),
    "loaders": lambda: [DataLoader(Samples(0)), DataLoader(Samples(0))],
    "stream in a list": lambda: [DataLoader(Nothing(), batch_size=2)],
    "dropped": lambda: DataLoader(Samples(3), batch_size=4, drop_last=True),
    "list": list,
}


@pytest.mark.filterwarnings("ignore:Total length of")
@pytest.mark.parametrize("micro_batching", ["loader", "step"])
@pytest.mark.parametrize("name", EMPTY)
def test_data_that_hold_nothing_are_passed_over(name: str, micro_batching: Any) -> None:
    ends = []
    for callbacks in ((), (AutoAccumulate(micro_batching=micro_batching),)):
        _, trainer = fit(EMPTY[name](), *callbacks, module=Regression(), max_epochs=2)
        ends.append((trainer.global_step, trainer.current_epoch))
    assert ends[0] == ends[1]
    assert ends[0][0] == 0


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
@pytest.mark.parametrize("settings", [{"micro_batch_size": 4}, {}, {"micro_batch_size": 2, "verify": False}])
def test_what_hooks_set_in_a_sampler_counts_at_once(settings: dict[str, Any], in_batches: bool) -> None:
    """In its first epoch too, though probe and check have looked at its order; the sampler counts no looks."""

    def train(*callbacks: AutoAccumulate) -> tuple[Moved, Curriculum]:
        sampler = Curriculum()
        batches = {"batch_sampler": BatchSampler(sampler, 4, drop_last=False)}
        given: dict[str, Any] = batches if in_batches else {"batch_size": 4, "sampler": sampler}
        module, _ = fit(DataLoader(Samples(64), **given), *callbacks, module=Moved(sampler), max_epochs=3)
        return module, sampler

    (stock, asked), (ours, counted) = train(), train(AutoAccumulate(**settings))
    assert counted.asked == asked.asked == 3
    for mine, theirs in zip(ours.parameters(), stock.parameters()):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)


class Short(DataLoader[Any]):
    """Ends its epochs after two batches."""

    def __iter__(self) -> Any:
        return islice(super().__iter__(), 2)

    def __len__(self) -> int:
        return 2


def test_a_loader_that_ends_its_epochs_itself_is_not_cut_in_silence() -> None:
    """It counts batches of the recipe: of micro-batches it would yield too few. Cut in the step, it is right."""
    with pytest.raises(UserError, match=r"Short has an __iter__ of its own, which ended after 2 of 8 micro-batches"):
        fit(Short(Samples(32), batch_size=8), AutoAccumulate(micro_batch_size=2))
    whole, _ = fit(Short(Samples(32), batch_size=8))
    for callback in (AutoAccumulate(micro_batch_size=2, micro_batching="step"), AutoAccumulate()):
        cut, trainer = fit(Short(Samples(32), batch_size=8), callback)
        assert trainer.global_step == 4
        for mine, theirs in zip(cut.parameters(), whole.parameters()):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)
