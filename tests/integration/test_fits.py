"""A window that fits is asked about once, and starts; the limit is looked for only where a window does not fit."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
from reference import Samples, fit
from torch.utils.data import DataLoader
from true_support import Sharpness
from wide import BUDGET, Wide

from lightning_ga import AutoAccumulate
from lightning_ga.compat import ranks
from lightning_ga.fit import limit_search
from lightning_ga.fit.limit import Limit
from lightning_ga.fit.limit_search import LimitSearch
from lightning_ga.plan.records import Recomputed
from lightning_ga.probe.trainer_limit import Found, find_limit
from lightning_ga.schedule import by_step, linear
from lightning_ga.testing import limit_memory

SIZES: list[int] = []  # of the passes of all modules here, trials included; no attribute, which trials would copy
ROOM = 8 * BUDGET  # all windows here fit


class Counted(Wide):
    """Counts the samples of its passes; it draws random numbers, and has a buffer that each pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.net.insert(2, torch.nn.Dropout(0.1))
        self.register_buffer("passes", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        SIZES.append(len(batch[0]))
        self.passes += 1
        return super().training_step(batch, batch_idx)


@pytest.fixture(autouse=True)
def _uncounted() -> Iterator[None]:
    SIZES.clear()
    yield
    SIZES.clear()


def before_training(room: int | None, *arguments: Any, batch: int = 16, **settings: Any) -> tuple[Any, list[int]]:
    """Return the callback after an epoch of 96 samples, and the samples of the passes before its first batch."""
    begun: list[int] = []
    first = pl.callbacks.LambdaCallback(on_train_batch_start=lambda *_: begun.append(len(SIZES)))
    callback = AutoAccumulate(*arguments, cache=False)
    dataset = Samples(96)  # it lies on the host
    with nullcontext() if room is None else limit_memory(room):
        fit(DataLoader(dataset, batch_size=batch), callback, first, module=Counted(), max_epochs=1, **settings)
    return callback, SIZES[: begun[0]]


@pytest.mark.loader_only(reason="the step keeps the loader's batches apart, and accumulates them")
def test_a_window_that_fits_is_tried_once_and_nothing_else_is_asked() -> None:
    """As a whole; if running out of memory would end the process, two samples and a bound decide."""
    for room, tried in ((ROOM, [48]), (None, [2])):
        SIZES.clear()
        callback, sizes = before_training(room, accumulate_grad_batches=3)
        assert sizes == tried
        assert (callback.plan.micro_batch_size, callback.plan.factor) == (48, 1)
        assert callback.probe is callback.exactness is None
        words = "48 samples took " if room else "48 samples take at most "
        assert str(callback.fits).startswith(words)
        assert callback.fits.peak_bytes <= callback.fits.budget_bytes


def test_the_bound_is_above_what_the_window_takes() -> None:
    """The same step, counted whole."""
    for batch in (3, 16, 64):
        bound = before_training(None, batch=batch)[0].fits
        counted = before_training(ROOM, batch=batch)[0].fits
        assert bound.samples == counted.samples == batch
        assert bound.peak_bytes >= counted.peak_bytes


def test_a_bound_that_does_not_fit_leads_to_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which predicts that the window fits: it is not cut, and so not measured."""
    needed = before_training(None, batch=64)[0].fits.peak_bytes
    monkeypatch.setattr("lightning_ga.probe.meters.available_memory", lambda _: needed // 4)
    SIZES.clear()
    callback, sizes = before_training(None, batch=64)
    assert sizes[0] == 2
    assert max(sizes) < 64
    assert (callback.fits, callback.exactness) == (None, None)
    assert (callback.probe.limit, callback.plan.factor) == (64, 1)


class Preconditioned(torch.optim.SGD):
    """Keeps a matrix that is out of proportion to the gradients."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter].setdefault("matrix", torch.zeros(1000, 1000))
        return super().step(closure)


def test_of_an_optimizer_that_is_not_pytorchs_a_step_is_measured() -> None:
    """No bound is known for its state, so that a forward and backward pass alone shows too little."""
    callback = AutoAccumulate(cache=False)
    module = Counted()
    module.configure_optimizers = lambda: Preconditioned(module.parameters(), lr=0.1)  # type: ignore[method-assign]
    fit(DataLoader(Samples(64), batch_size=32), callback, module=module, max_epochs=1)
    assert callback.fits is None
    assert callback.probe.peak_bytes > 4 * 1000 * 1000 * len([*module.parameters()])


def test_of_sparse_gradients_a_step_is_measured() -> None:
    """Their optimizer's state is as large as the whole weight, which the rows of a pass do not show."""

    class Lookup(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(1000, 16, sparse=True)

        def training_step(self, words: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return self.table(words).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SparseAdam(self.parameters())

    callback = AutoAccumulate(cache=False)
    fit(DataLoader(torch.arange(64), batch_size=32), callback, module=Lookup(), max_epochs=1)
    assert callback.fits is None
    assert callback.probe.peak_bytes > 3 * 4 * 1000 * 16


@pytest.mark.loader_only(reason="its micro-batches are larger than the loader's batches")
def test_the_limit_is_exact_where_a_window_does_not_fit() -> None:
    """By one step more than if it is looked for at once; training at the limit fits, and one sample more does not."""
    found = before_training(BUDGET, 64)[0]
    limit = found.probe.limit
    assert 1 < limit < 64
    assert found.fits is None
    assert found.exactness.cause == "exact"  # measured, because windows are cut

    def train(micro_batch: int) -> None:
        callback = AutoAccumulate(4 * micro_batch, micro_batch_size=micro_batch, verify=False, on_oom="raise")
        dataset = Samples(4 * micro_batch)
        with limit_memory(BUDGET):
            fit(DataLoader(dataset, batch_size=8), callback, module=Counted(), max_epochs=2)

    train(limit)
    with pytest.raises(torch.OutOfMemoryError):
        train(limit + 1)


class PartlyUsed(Wide):
    """Has a parameter that no step uses: its optimizer keeps no state for it."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = torch.nn.Parameter(torch.zeros(1000, dtype=torch.float64))


@pytest.mark.loader_only(reason="its micro-batches are larger than the loader's batches")
def test_a_window_that_failed_does_not_change_the_limit() -> None:
    """All trained parameters are treated as having gradients there; the search sees which have."""
    limits = []
    for settings in ({}, {"memory_budget": 1.0}):
        callback = AutoAccumulate(64, cache=False, verify=False, **settings)  # type: ignore[arg-type]
        dataset = Samples(64)
        with limit_memory(BUDGET):
            fit(DataLoader(dataset, batch_size=64), callback, module=PartlyUsed(), max_epochs=1)
        limits.append(callback.probe.limit)
    assert 1 < limits[0] == limits[1] < 64


class Plain(Wide):
    """Trains by SGD, from the same weights each time."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        SIZES.append(len(batch[0]))
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.loader_only(reason="the step keeps the loader's batches, however large a window is")
@pytest.mark.parametrize("room", [ROOM, 50_000])
def test_windows_that_grow_are_asked_about_when_they_have_grown(room: int) -> None:
    """The first ones fit. Later ones are tried as their epoch begins; if they do not fit, the limit is looked for."""
    begun: list[int] = []
    begin = pl.callbacks.LambdaCallback(on_train_batch_start=lambda *_: begun.append(len(SIZES)))
    callback = AutoAccumulate({0: 8, 1: 96}, cache=False)  # type: ignore[arg-type]
    module = Plain()
    with limit_memory(room):
        fit(DataLoader(Samples(96), batch_size=8, shuffle=False), callback, begin, module=module, max_epochs=2)
    assert SIZES[: begun[0]] == [8]
    assert SIZES[begun[11] + 1] == 96  # tried
    if room == ROOM:
        assert callback.fits.samples == 96
        assert (callback.probe, callback.exactness, callback.plan.factor) == (None, None, 1)
    else:
        limit = callback.probe.limit
        assert 8 <= limit < 96
        assert callback.plan.micro_batch_size <= limit
        assert (callback.fits, callback.exactness.cause) == (None, "exact")
    whole = Plain()
    fit(DataLoader(Samples(96), batch_size=8), AutoAccumulate({0: 8, 1: 96}, micro_batch_size=96, verify=False),
        module=whole, max_epochs=2)  # type: ignore[arg-type]  # fmt: skip
    for ours, oracle in zip(module.parameters(), whole.parameters(), strict=True):
        assert torch.allclose(ours, oracle, rtol=0, atol=1e-12)


def passes_by_step(room: int, schedule: Any) -> tuple[AutoAccumulate, Plain, list[list[int]]]:
    """Return callback, module, and the samples of each step's passes, trials before its first one included."""
    ends = [0]

    def note(trainer: Any, *_: Any) -> None:
        if trainer.global_step == len(ends):
            ends.append(len(SIZES))

    SIZES.clear()
    callback = AutoAccumulate(schedule, cache=False)
    module = Plain()
    end = pl.callbacks.LambdaCallback(on_train_batch_end=note)
    with limit_memory(room):
        fit(DataLoader(Samples(96), batch_size=8, shuffle=False), callback, end, module=module, max_epochs=1)
    return callback, module, [SIZES[start:end] for start, end in pairwise(ends)]


@pytest.mark.loader_only(reason="the step keeps the loader's batches, however large a window is")
@pytest.mark.parametrize("room", [ROOM, 50_000])
def test_windows_that_grow_within_an_epoch_are_asked_about_at_the_window(room: int) -> None:
    """At the start the first window alone is tried; the rest of the epoch is cut anew by the answer."""
    schedule = by_step({0: 8, 4: 64})
    callback, module, passes = passes_by_step(room, schedule)
    assert passes[:4] == [[8, 8], [8], [8], [8]]
    if room == ROOM:
        assert passes[4] == [64, 64]
        assert (callback.fits.samples, callback.probe, callback.exactness) == (64, None, None)  # type: ignore[union-attr]
    else:
        assert passes[4][0] == 64
        assert 8 <= callback.probe.limit < 64  # type: ignore[union-attr]
        assert callback.exactness.cause == "exact"  # type: ignore[union-attr]
        assert callback.plan.micro_batch_size <= callback.probe.limit  # type: ignore[union-attr]
    whole = Plain()
    given = AutoAccumulate(schedule, micro_batch_size=64, verify=False)
    fit(DataLoader(Samples(96), batch_size=8, shuffle=False), given, module=whole, max_epochs=1)
    for ours, oracle in zip(module.parameters(), whole.parameters(), strict=True):
        assert torch.allclose(ours, oracle, rtol=0, atol=1e-12)


@pytest.mark.loader_only(reason="the step keeps the loader's batches, however large a window is")
def test_the_limit_is_the_same_whenever_it_is_looked_for() -> None:
    """Trial steps add to the gradients of the last window, which need no further memory, and are put back."""
    limits = []
    for schedule in (64, by_step({0: 8, 4: 64}), {0: 8, 1: 64}):
        seen: list[float] = []

        def look(trainer: pl.Trainer, module: Any, *_: Any, seen: list[float] = seen) -> None:
            gradients = [p.grad for p in module.parameters() if p.grad is not None]
            seen.append(sum(float(gradient.abs().sum()) for gradient in gradients))

        records = []
        for settings in ({"cache": False}, {"micro_batch_size": 32, "verify": False}):
            callback = AutoAccumulate(schedule, max_micro_batch_size=32, **settings)  # type: ignore[arg-type]
            loader = DataLoader(Samples(96), batch_size=8, shuffle=False)
            begin = pl.callbacks.LambdaCallback(on_train_batch_start=look)
            with limit_memory(50_000):
                fit(loader, callback, begin, module=Plain(), max_epochs=2)
            records.append([*seen])
            seen.clear()
        assert records[0] == pytest.approx(records[1], rel=1e-9)
        callback = AutoAccumulate(schedule, cache=False, verify=False)
        loader = DataLoader(Samples(96), batch_size=8)
        with limit_memory(50_000):
            fit(loader, callback, module=Plain(), max_epochs=2)
        limits.append(callback.probe.limit)
    assert 8 < limits[0] < 64
    assert limits == [limits[0]] * 3


@pytest.mark.loader_only(reason="the step keeps the loader's batches, however large a window is")
def test_a_ramp_is_asked_about_at_each_doubling() -> None:
    """Not in every window: one pass fits twice as many samples as are needed."""
    callback, _, passes = passes_by_step(ROOM, linear(4, 16, steps=6))
    windows = [4, 6, 8, 10, 12, 14, 16, 16, 10]
    assert callback.fits.samples == 16  # type: ignore[union-attr]
    assert [each[-1] for each in passes] == windows
    assert [each[:-1] for each in passes if len(each) > 1] == [[4], [12], [16]]


class Hoard(pl.Callback):
    """Takes memory in the third step, and keeps it."""

    kept: torch.Tensor | None = None

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 2 and self.kept is None:
            self.kept = torch.zeros(int(0.55 * BUDGET), dtype=torch.uint8)


def hoarded(**settings: Any) -> tuple[Counted, AutoAccumulate, torch.Tensor]:
    """Train while memory becomes short; return module, callback and random numbers afterwards."""
    torch.manual_seed(3)
    module = Counted()
    callback = AutoAccumulate(cache=False, **settings)
    with limit_memory(int(1.35 * BUDGET)), pytest.warns(UserWarning, match="Memory ran out in training with 32"):
        fit(DataLoader(Samples(192), batch_size=32), callback, Hoard(), module=module, max_epochs=2)
    return module, callback, torch.get_rng_state()


@pytest.mark.parametrize("mode", ["loader", "step"])
def test_the_limit_is_looked_for_after_an_error_and_leaves_no_trace(mode: Any) -> None:
    """Training goes on bit for bit as if that limit had been known."""
    module, callback, random_numbers = hoarded(micro_batching=mode)
    assert callback.fits is None
    assert callback.oom_events == 1
    limit = callback.probe.limit
    assert 1 < limit < 32
    with patch.object(LimitSearch, "below", lambda *_: limit):
        told, _, drawn = hoarded(micro_batching=mode)
    for ours, other in zip(module.state_dict().values(), told.state_dict().values(), strict=True):
        assert torch.equal(ours, other)
    assert torch.equal(random_numbers, drawn)


def test_what_a_remembered_limit_computes_again_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an error the cache may know a limit that holds with submodules computed again alone."""
    used: list[tuple[str, ...]] = []

    def remembered(*arguments: Any, whole_first: bool = False, **settings: Any) -> Found:
        found = find_limit(*arguments, whole_first=whole_first, **settings)
        if found.result is None:
            return found
        names = Recomputed(("net.0",), 0.1, samples=1, plain_bytes=1, budget_bytes=1)
        return found._replace(result=replace(found.result, limit=4, recomputed=names))

    monkeypatch.setattr(limit_search, "find_limit", remembered)
    callback = AutoAccumulate(cache=False, checkpoint="auto")
    watch = pl.callbacks.LambdaCallback(
        on_train_batch_end=lambda *_: used.append(callback._fit.search.recomputed.names)  # type: ignore[union-attr]
    )
    with limit_memory(int(1.35 * BUDGET)), pytest.warns(UserWarning, match="Memory ran out in training with 32"):
        fit(DataLoader(Samples(192), batch_size=32), callback, Hoard(), watch, module=Counted(), max_epochs=1)
    assert callback.probe is not None
    assert callback.probe.limit == 4
    assert (used[0], used[-1]) == ((), ("net.0",))


def test_a_search_that_refutes_an_error_leaves_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that was short for a moment is there again in trials: micro-batches are halved, and no limit is known."""
    below = LimitSearch.below
    hoard = Hoard()

    def after_it_is_free(search: LimitSearch, failed: int) -> int | None:
        hoard.kept = torch.zeros(0)
        return below(search, failed)

    monkeypatch.setattr(LimitSearch, "below", after_it_is_free)
    callback = AutoAccumulate(cache=False)
    with limit_memory(int(1.35 * BUDGET)), pytest.warns(UserWarning, match="Memory ran out in training with 32"):
        fit(DataLoader(Samples(192), batch_size=32), callback, hoard, module=Counted(), max_epochs=2)
    assert (callback.oom_events, callback.fits, callback.probe) == (1, None, None)
    assert callback.plan is not None
    assert callback.plan.micro_batch_size == 16


@pytest.mark.parametrize("room", [ROOM, BUDGET])
def test_an_optimizer_that_evaluates_twice_is_asked_about(room: int) -> None:
    """Unlike LBFGS, it keeps no history that one step does not show."""
    callback = AutoAccumulate(cache=False)
    module = Counted()
    module.configure_optimizers = lambda: Sharpness(module.parameters())  # type: ignore[method-assign]
    with limit_memory(room):
        fit(DataLoader(Samples(128), batch_size=64), callback, module=module, max_epochs=1)
    assert callback.oom_events == 0
    if room == ROOM:
        assert callback.fits is not None
        assert callback.fits.samples == 64
    else:
        assert callback.probe is not None
        assert 1 < callback.probe.limit < 64


def test_a_limit_falls_to_a_smaller_one_alone() -> None:
    """A resumed run may have less to run at once than what errors of the run before have left."""
    limit = Limit(None, ())
    limit.use(8)
    limit.fall(16)
    assert (limit.samples, limit.after_errors) == (8, None)
    limit.fall(4)
    assert (limit.samples, limit.after_errors) == (4, 4)


class Labelled(torch.Tensor):
    """Made in a way that PyTorch refuses while operations are recorded."""

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> Any:
        return super().__new__(cls, values)


class Labels(Plain):
    """Makes a tensor of a class of its own in each step."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step([Labelled(batch[0].detach()).as_subclass(torch.Tensor), *batch[1:]], batch_idx)


def test_a_step_that_the_probe_itself_disturbs_trains() -> None:
    """The sentence says that the probe is the cause."""
    with pytest.warns(
        UserWarning, match=r"no limit, .* in which the probe records memory, .*Creating a new Tensor subclass"
    ):
        fit(DataLoader(Samples(32), batch_size=8), AutoAccumulate(cache=False), module=Labels(), max_epochs=1)


def test_a_limit_that_is_merely_lower_on_another_rank_has_not_fallen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only an error lowers a limit for good: then no larger one is looked for, and a checkpoint keeps it."""
    limit = Limit(None, ())
    limit.use(8)
    for has_fallen in (False, True):
        others = [(6, has_fallen), (12, False)]
        monkeypatch.setattr(ranks, "of_all_ranks", lambda _, own, others=others: [own, *others])
        limit.agree()
        assert (limit.samples, limit.has_fallen) == (6, has_fallen)


class Reloads(Plain):
    """Loads larger batches from the second epoch on."""

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Samples(64), batch_size=64 if self.current_epoch else 8)


@pytest.mark.parametrize("budget", [None, "1GiB"])
def test_batches_that_are_loaded_later_are_asked_about_themselves(budget: str | None) -> None:
    """Not about the last batch of the loader before."""
    SIZES.clear()
    callback = AutoAccumulate(micro_batching="step", cache=False, verify=False, memory_budget=budget)
    fit(None, callback, module=Reloads(), max_epochs=2, reload_dataloaders_every_n_epochs=1)
    assert SIZES[-1] == 64
    if budget is None:
        assert callback.fits is not None
        assert callback.fits.samples == 64
