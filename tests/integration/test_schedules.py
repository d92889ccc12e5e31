"""Effective batches and factors by epoch, step and samples: each window is the one that a plain loop cuts."""

import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from rank_records import run_ranks
from reference import (
    Regression,
    Samples,
    SaveAll,
    StreamOf,
    Validated,
    fit,
    flat_gradient,
    loss,
    network,
    quiet_trainer,
    worst_error,
)
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from lightning_ga import AutoAccumulate, ExactnessWarning, UserError
from lightning_ga.schedule import by_samples, by_step, from_lr_decay, linear, seesaw

SIZE, EPOCHS, SEED = 53, 3, 7

Count = Callable[[int, int, int], int]  # that a plain loop reads off a schedule: of (epoch, step, samples seen)


def windows_of(count: Count, orders: Sequence[Sequence[int]]) -> list[list[int]]:
    """What a plain loop would cut, one epoch's order after the other."""
    windows: list[list[int]] = []
    seen = 0
    for epoch, order in enumerate(orders):
        start = 0
        while start < len(order):
            windows.append(list(order[start : start + count(epoch, len(windows), seen)]))
            start, seen = start + len(windows[-1]), seen + len(windows[-1])
    return windows


def plain_training(data: Samples, windows: list[list[int]], rates: list[float]) -> list[torch.Tensor]:
    """Gradients of plain SGD in which each window is one batch, with a rate of its own."""
    net, gradients = network(), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for window, rate in zip(windows, rates, strict=True):
        optimizer.zero_grad()
        loss(net, data.inputs[window], data.targets[window]).backward()
        gradients.append(flat_gradient(net))
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
    return gradients


class Own(BatchSampler):
    """A batch sampler of the user's own, whose batches are not mixed."""


def in_order(samples: int = 48, batch_size: int = 4) -> Any:
    return DataLoader(Samples(samples), batch_size)


def train(loader: Any, *callbacks: pl.Callback, **settings: Any) -> tuple[Any, pl.Trainer]:
    return fit(loader, *callbacks, **{"max_epochs": EPOCHS, "seed": SEED, **settings})


def scheduled(schedule: Any, micro_batch: Any = 2, **settings: Any) -> AutoAccumulate:
    return AutoAccumulate(schedule, micro_batch_size=micro_batch, verify=False, **settings)


@pytest.mark.parametrize("mode", ["loader", "step"])
def test_seesaw_lowers_the_rate_where_windows_grow(mode: Any) -> None:
    """In the middle of an epoch, too. Other schedules are among the random trainings."""
    windows = windows_of(lambda e, k, n: 8 if n < 80 else 16, [range(SIZE)] * EPOCHS)
    falls = next(k for k in range(99) if sum(map(len, windows[:k])) >= 80)
    module, _ = train(in_order(SIZE), scheduled(seesaw(8, samples=160), micro_batching=mode))
    assert module.windows == windows
    rates = [0.1] * falls + [0.1 / 2**0.5] * (len(windows) - falls)
    assert worst_error(module.gradients, plain_training(Samples(SIZE), windows, rates)) <= 1e-12


@pytest.mark.distributed
@pytest.mark.parametrize("mode", ["loader", "step"])
def test_ranks_with_streams_of_their_own_see_samples_of_all(mode: str, tmp_path: Path) -> None:
    """Each rank has its half of a window; ends of streams count what they held, on every rank."""
    accumulate = {"effective_batch_size": by_samples({0: 4, 40: 8, 60: 12}), "micro_batch_size": 6}
    settings = {"size": 45, "batch_size": 6, "loader": "stream", "trainer": {"max_epochs": EPOCHS}}
    records = run_ranks(tmp_path, ranks=2, accumulate={**accumulate, "micro_batching": mode}, **settings)
    # 23 and 22 samples an epoch: windows of 4 (2 a rank) up to 40 samples, then of 8, of which the last holds 5.
    totals = [len(set(a) | set(b)) for a, b in zip(*(record["windows"] for record in records))]
    assert totals == [*[4] * 10, 5, 8, 8, 12, 12, 5, 12, 12, 12, 9]


def test_the_recipe_decides_when_validation_is_due(micro_batching: Any) -> None:
    """``val_check_interval`` counts its batches, whatever windows have become; a window that is open ends first."""
    callback = scheduled(by_step({0: 4, 3: 12}))
    module, _ = train(in_order(), callback, module=Validated(), max_epochs=1, val_check_interval=3)
    # After 3, 6, 9 and 12 batches: 12 samples are 3 steps, then windows of 12 follow.
    assert module.steps_at_validation == [3, 4, 5, 6]
    assert [len(window) for window in module.windows] == [4, 4, 4, 12, 12, 12]


def test_the_plan_is_that_of_the_current_window() -> None:
    """``callback.plan`` and ``trainer.accumulate_grad_batches`` change at a window's border, not in a ragged one."""
    seen: list[tuple[int, int, int]] = []

    class Watch(pl.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            factor = trainer.accumulate_grad_batches
            seen.append((callback.plan.effective_batch_size, callback.plan.factor, batch_idx % factor))  # type: ignore[union-attr]

    callback = scheduled(linear(2, 6, steps=2), micro_batching="loader")
    _, trainer = train(in_order(15), callback, Watch(), max_epochs=1)
    assert seen == [(2, 1, 0), (4, 2, 0), (4, 2, 1), (6, 3, 0), (6, 3, 1), (6, 3, 2), (6, 3, 0), (6, 3, 1)]
    assert type(trainer.accumulate_grad_batches) is int


def test_the_probe_tries_what_the_largest_window_needs() -> None:
    """A limit that holds the first windows alone would run out of memory later."""
    callback = AutoAccumulate(by_step({0: 4, 5: 24}), cache=False)
    train(in_order(), callback, max_epochs=2)
    assert callback.probe is not None
    assert callback.probe.limit == (24 if callback._options.micro_batching == "loader" else 4)


@pytest.mark.parametrize(
    ("schedule", "count"),
    [
        (by_samples({0: 4, 60: 8}), lambda e, k, n: 4 if n < 60 else 8),
        ({0: 4, 2: 12}, lambda e, k, n: 4 if e < 2 else 12),
    ],
)
def test_a_second_fit_goes_on_with_epochs_steps_and_samples(schedule: Any, count: Count) -> None:
    """All count from the start of training; the factor that the first fit left is not taken for the recipe's."""
    module, trainer = train(in_order(32), scheduled(schedule), max_epochs=1)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, in_order(32))
    assert module.windows == windows_of(count, [range(32)] * 3)


def test_a_checkpoint_of_stock_lightning_knows_steps_and_samples(tmp_path: Path) -> None:
    """The loop's counts tell how many there have been."""
    train(in_order(), SaveAll(tmp_path), max_epochs=2)
    for schedule in (by_step({0: 4, 16: 8}), by_samples({0: 4, 64: 8})):
        for step in (12, 14):
            module, _ = train(in_order(), scheduled(schedule, 4), ckpt_path=tmp_path / f"step{step}.ckpt", max_epochs=2)
            assert [len(window) for window in module.windows[step:]] == [4] * (16 - step) + [8] * 4


def test_another_schedule_after_a_resume_holds_from_the_step_on(tmp_path: Path) -> None:
    """The windows before are what they were: neither steps nor samples are counted by the new schedule."""
    train(in_order(), scheduled(4, 4), SaveAll(tmp_path), max_epochs=1)
    later = scheduled(by_step({0: 16, 6: 6, 8: 10}), 3)
    module, _ = train(in_order(), later, ckpt_path=tmp_path / "step5.ckpt", max_epochs=1)
    assert module.windows[5:] == [list(range(20, 36)), list(range(36, 42)), list(range(42, 48))]


@pytest.mark.parametrize("is_own", [True, False], ids=["batch sampler", "ready-made"])
def test_a_later_window_that_cannot_be_cut_is_refused_at_the_start(is_own: bool) -> None:
    """Before any work is lost, though the first windows could have been trained on."""
    module, own = Regression(), Own(SequentialSampler(range(SIZE)), 4, False)
    loader = DataLoader(Samples(SIZE), batch_sampler=own) if is_own else StreamOf(list(in_order(SIZE)))
    with pytest.raises(UserError, match="effective_batch_size=6 is no whole number of batches"):
        train(loader, scheduled(by_step({0: 4, 9: 6}), 4), module=module)
    assert module.micro_batches == []


def test_growth_beyond_a_tenth_of_the_data_is_warned_of() -> None:
    """There a larger batch no longer does what a lower rate does."""
    with pytest.warns(ExactnessWarning, match="ends with batches of 10 samples, above a tenth of the 60 of an epoch"):
        train(in_order(60, 2), scheduled(from_lr_decay(2, milestones=[1], gamma=0.2)), max_epochs=2)


@pytest.mark.parametrize("schedule", [None, 8, {0: 8, 2: 4}])
def test_the_callback_can_be_pickled(schedule: object) -> None:
    callback = AutoAccumulate(schedule, micro_batch_size=4)
    train(in_order(16, 8), callback, max_epochs=1)
    copied = pickle.loads(pickle.dumps(callback))
    assert copied.plan is None
    train(in_order(16, 8), copied, max_epochs=1)
    assert copied.plan == callback.plan


def test_a_failed_fit_leaves_the_trainer_as_it_was() -> None:
    """The factor and the loops are the recipe's again."""

    class Failing(Regression):
        def training_step(self, batch: object, batch_idx: int) -> None:
            raise RuntimeError("on purpose")

    trainer = quiet_trainer(AutoAccumulate(micro_batch_size=1), accumulate_grad_batches=2)
    with pytest.warns(ExactnessWarning, match="on purpose"), pytest.raises(RuntimeError, match="on purpose"):
        trainer.fit(Failing(), in_order(8))
    assert trainer.accumulate_grad_batches == 2
    assert "setup_data" not in vars(trainer.fit_loop)
    assert "dataloader" not in vars(trainer.fit_loop._data_source)
