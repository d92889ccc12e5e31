"""Memory runs out where the state of a window is copied, in the smallest micro-batch, or where nobody may go on.

Random trainings show that it may run out anywhere in a step.
"""

import warnings
from typing import Any

import pytest
import torch
from faults import Arm, Faults
from reference import Regression, Samples, fit, worst_error
from torch.utils.data import DataLoader

from lightning_ga import AutoAccumulate, UserError
from lightning_ga.fit.rewind import Rewinder
from lightning_ga.snapshot.savepoint import Savepoint

pytestmark = pytest.mark.filterwarnings("ignore:Memory ran out in:UserWarning")


def train_with_faults(*at: int, mode: str = "loader", module: Any = None, **arguments: Any) -> Any:
    """A fit of one epoch with memory running out at these operations."""
    faults = Faults(*at)
    accumulate = {"effective_batch_size": 16, "micro_batch_size": 8 if mode == "loader" else 5, **arguments}
    callback = AutoAccumulate(**accumulate, micro_batching=mode, verify=False)
    module = Regression() if module is None else module
    loader = DataLoader(Samples(37), batch_size=8, shuffle=True)
    with faults:
        fit(loader, callback, Arm(faults), module=module, max_epochs=1)
    return module, callback


@pytest.mark.parametrize("mode", ["loader", "step"])
def test_memory_runs_out_where_the_state_of_a_window_is_copied(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies take memory, too: the window begins again in smaller micro-batches."""
    whole, _ = train_with_faults(mode=mode)
    take, calls = Savepoint.take, []

    def fails_once(savepoint: Savepoint) -> None:
        calls.append(None)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory, in a copy.")
        take(savepoint)

    monkeypatch.setattr(Savepoint, "take", fails_once)
    module, callback = train_with_faults(mode=mode)
    assert (callback.oom_events, len(calls) >= 3) == (1, True)
    assert worst_error(module.gradients, whole.gradients) <= 1e-12


def test_it_says_so_once_and_raises_where_that_is_asked_for() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train_with_faults(2)
    assert sum("Memory ran out" in str(warning.message) for warning in caught) == 1
    with pytest.raises(torch.OutOfMemoryError):
        train_with_faults(2, on_oom="raise")


def test_one_sample_that_does_not_fit_ends_in_a_sentence() -> None:
    """The memory, and three remedies."""

    class Huge(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(UserError) as caught:
        train_with_faults(module=Huge())
    message = str(caught.value)
    assert "one sample alone" in message
    for way_out in ("precision", 'checkpoint="auto"', "memory_budget"):
        assert way_out in message


def test_checkpoints_keep_the_count_and_the_limit(tmp_path: Any) -> None:
    module, _ = train_with_faults(2)
    module.trainer.save_checkpoint(tmp_path / "run.ckpt")
    second = AutoAccumulate(16, micro_batch_size=8, verify=False)
    loader = DataLoader(Samples(37), batch_size=8)
    fit(loader, second, module=Regression(), ckpt_path=tmp_path / "run.ckpt", max_epochs=2)
    assert second.oom_events == 1
    assert second.plan.micro_batch_size == 4


class Short:
    """Says once, after the second window, that the allocator had to free its cache in two windows running."""

    def __init__(self) -> None:
        self.windows = 0

    def after_window(self) -> bool:
        self.windows += 1
        return self.windows == 3


@pytest.mark.parametrize("mode", ["loader", "step"])
def test_retries_of_the_allocator_lower_the_limit_without_an_error(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = train_with_faults(mode=mode)
    guarding = Rewinder.guarding

    def short(rewinder: Rewinder, members: Any) -> Any:
        rewinder._retried = Short()
        return guarding(rewinder, members)

    monkeypatch.setattr(Rewinder, "guarding", short)
    with pytest.warns(UserWarning, match="in two windows running, so memory is fragmented: micro-batches have at most"):
        module, callback = train_with_faults(mode=mode)
    assert callback.oom_events == 0
    assert worst_error(module.gradients, whole.gradients) <= 1e-12
    before = [len(indices) for step, indices in whole.micro_batches if step >= 2]
    after = [len(indices) for step, indices in module.micro_batches if step >= 2]
    assert max(after) < max(before)
    assert sum(after) == sum(before)
