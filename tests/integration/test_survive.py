"""Memory runs out where the state of a window is copied, in the smallest micro-batch, or where nobody may go on.

Random trainings show that it may run out anywhere in a step.
"""

import os
import warnings
from typing import Any

import pytest
import torch
from faults import Arm, Faults
from lightning.pytorch.callbacks import StochasticWeightAveraging
from reference import Regression, Samples, fit, worst_error
from torch.utils.data import DataLoader

from lightning_ga import AutoAccumulate, ExactnessWarning, UserError
from lightning_ga.fit.rerun_windows import Rewinder
from lightning_ga.memory.allocator import RepeatedRetries
from lightning_ga.plan.exactness_verdicts import SAME_RESULT
from lightning_ga.snapshot.window_savepoint import Savepoint

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


class FailsAgain(Regression):
    """Memory runs out in the first step; then the first batch that is moved ends the run."""

    has_failed = False

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if self.has_failed:
            raise RuntimeError("The file is gone")
        return super().on_before_batch_transfer(batch, dataloader_idx)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.global_step == 1:
            self.has_failed = True
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("default:Memory ran out in:UserWarning")
@pytest.mark.parametrize(
    ("verify", "said"), [(True, "training ended before the window began again"), (False, "verify")]
)
def test_an_error_whose_window_never_begins_again_says_why_nothing_was_measured(verify: bool, said: str) -> None:
    callback = AutoAccumulate(verify=verify, micro_batching="step")
    with (
        pytest.warns(UserWarning, match=rf"Memory ran out in training.*{said}"),
        pytest.raises(RuntimeError, match="The file is gone"),
    ):
        fit(DataLoader(Samples(32), batch_size=8), callback, module=FailsAgain(), max_epochs=1)


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


def memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    guarding = Rewinder.guarding

    def short(rewinder: Rewinder, members: Any) -> Any:
        rewinder._allocator_retries = Short()
        return guarding(rewinder, members)

    monkeypatch.setattr(Rewinder, "guarding", short)


@pytest.mark.filterwarnings("ignore:Whether accumulation is exact:UserWarning")
def test_the_warning_of_retries_names_chunks_where_submodules_run_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    memory_is_short(monkeypatch)
    name = next(name for name, _ in Regression().named_children())
    with pytest.warns(UserWarning, match="memory is fragmented: chunks have at most"):
        train_with_faults(mode="step", whole=(name,), effective_batch_size=8)


def test_an_error_after_retries_is_no_window_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator frees its cache before each of two errors of one window: the limit falls twice, not thrice."""
    failed: list[None] = []

    class FailsTwice(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if self.global_step == 1 and len(failed) < 2:
                failed.append(None)
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return super().training_step(batch, batch_idx)

    guarding = Rewinder.guarding

    def counted(rewinder: Rewinder, members: Any) -> Any:
        rewinder._allocator_retries = RepeatedRetries(torch.device("cpu"))
        return guarding(rewinder, members)

    monkeypatch.setattr(RepeatedRetries, "_retries", lambda _: len(failed))
    monkeypatch.setattr(Rewinder, "guarding", counted)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module, callback = train_with_faults(module=FailsTwice())
    assert callback.oom_events == 2
    assert not any("memory is fragmented" in str(each.message) for each in caught)
    assert max(len(indices) for step, indices in module.micro_batches if step >= 1) == 2


@pytest.mark.parametrize("mode", ["loader", "step"])
def test_retries_of_the_allocator_lower_the_limit_without_an_error(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = train_with_faults(mode=mode)
    memory_is_short(monkeypatch)
    with pytest.warns(UserWarning, match="in two windows running, so memory is fragmented: micro-batches have at most"):
        module, callback = train_with_faults(mode=mode)
    assert callback.oom_events == 0
    assert worst_error(module.gradients, whole.gradients) <= 1e-12
    before = [len(indices) for step, indices in whole.micro_batches if step >= 2]
    after = [len(indices) for step, indices in module.micro_batches if step >= 2]
    assert max(after) < max(before)
    assert sum(after) == sum(before)


class Normalized(Regression):
    """BatchNorm couples the samples of a pass."""

    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, torch.nn.BatchNorm1d(7).double())


@pytest.mark.parametrize("mode", ["loader", "step"])
def test_windows_that_are_cut_after_retries_are_measured_and_told(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole windows fitted before, so nothing was measured; no report of an error tells the verdict."""
    memory_is_short(monkeypatch)
    callback = AutoAccumulate(micro_batching=mode)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(DataLoader(Samples(37), batch_size=8), callback, module=Normalized(), max_epochs=1)
    assert callback.exactness.cause == "batch_norm"
    told = [str(each.message) for each in caught if issubclass(each.category, ExactnessWarning)]
    assert ["BatchNorm" in text for text in told] == [True]


class AsksForABatch(Regression):
    """Its hooks of the transfer need a batch."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [*batch]


class Noisy(Samples):
    """Its samples differ each time that they are read, so that only training reads them."""

    def __getitem__(self, index: int) -> Any:
        inputs, target, index = super().__getitem__(index)
        return inputs + int.from_bytes(os.urandom(1)) / 1000, target, index


@pytest.mark.parametrize("given", [{}, {"micro_batch_size": 8}])
@pytest.mark.parametrize("mode", ["loader", "step"])
def test_what_only_training_reads_is_measured_on_its_batch_after_an_error(mode: str, given: dict[str, Any]) -> None:
    """The window fitted whole before; the report tells the verdict."""
    faults = Faults(2)
    callback = AutoAccumulate(micro_batching=mode, cache=False, **given)
    with faults, pytest.warns(UserWarning, match="Memory ran out in training") as caught:
        fit(DataLoader(Noisy(37), batch_size=8), callback, Arm(faults), module=AsksForABatch(), max_epochs=1)
    assert callback.exactness.cause == "exact"
    assert any(SAME_RESULT in str(each.message) for each in caught)


class MovesInVain(Regression):
    """Memory runs out as each batch of several samples is moved, from the second step on."""

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        if len(batch[0]) > 1 and self.trainer.global_step == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return super().transfer_batch_to_device(batch, device, dataloader_idx)


def test_batches_that_run_forward_alone_are_not_kept() -> None:
    """The last epoch of stochastic weight averaging is one window, in which no error is survived."""
    kept: list[tuple[int, int]] = []

    class Averaged(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(5).double()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            kept.append((self.current_epoch, len(callback._running_fit.data.windows.batches)))
            return super().training_step((self.norm(batch[0]), *batch[1:]), batch_idx)

    callback = AutoAccumulate(micro_batching="step", verify=False)
    averaging = StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1)
    fit(DataLoader(Samples(32), 4), callback, averaging, module=Averaged(), max_epochs=2)
    assert {count for epoch, count in kept if epoch == 1} == {1}
    assert {count for epoch, count in kept if epoch == 2} == {0}


@pytest.mark.parametrize("micro_batch", [1, 8])
def test_a_batch_that_cannot_be_moved_before_the_step_cuts_it_ends_the_run(micro_batch: int) -> None:
    """It may not be one sample alone that needs the memory."""
    callback = AutoAccumulate(micro_batching="step", micro_batch_size=micro_batch, verify=False)
    with pytest.raises(UserError, match="a batch is moved to the device as a whole: .* smaller batches"):
        fit(DataLoader(Samples(32), batch_size=8), callback, module=MovesInVain(), max_epochs=1)


class Zeroes(Regression):
    """Zeroes gradients in its own way, and notes for which batches it is asked to."""

    def __init__(self, kept: float) -> None:
        super().__init__()
        self.kept = kept
        self.asked: list[int] = []

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        self.asked.append(batch_idx)
        for parameter in self.net.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(self.kept)


@pytest.mark.parametrize("mode", ["loader", "step"])
def test_gradients_that_a_module_does_not_zero_are_not_lost_in_silence(mode: str) -> None:
    """They would be those of the attempt that failed. A hook that zeroes is asked again."""
    whole, _ = train_with_faults(mode=mode, module=Zeroes(0.0))
    again, callback = train_with_faults(70, mode=mode, module=Zeroes(0.0))
    assert callback.oom_events == 1
    assert worst_error(again.gradients, whole.gradients) <= 1e-12
    with pytest.raises(UserError, match="had changed gradients of earlier windows, which Zeroes does not zero"):
        train_with_faults(70, mode=mode, module=Zeroes(0.9))


@pytest.mark.parametrize("mode", ["loader", "step"])
def test_a_hook_that_zeroes_gets_the_index_of_the_batch(mode: Any) -> None:
    """Whatever the index in the window is."""
    modules = []
    for callbacks in ([], [AutoAccumulate(micro_batch_size=8, micro_batching=mode)]):
        loader = DataLoader(Samples(48), batch_size=8)
        modules.append(fit(loader, *callbacks, module=Zeroes(0.0), accumulate_grad_batches=2, max_epochs=1)[0])
    stock, ours = modules
    assert ours.asked == stock.asked == [0, 2, 4]
    assert worst_error(ours.gradients, stock.gradients) <= 1e-12


class Normalizing(Regression):
    """Runs out of memory from the third step on, with more than four samples; its BatchNorm layer is not exact."""

    def __init__(self) -> None:
        super().__init__(dtype=torch.float32)
        self.net.insert(1, torch.nn.BatchNorm1d(7))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step >= 2 and len(batch[0]) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        inputs, targets, indices = batch
        return super().training_step((inputs.float(), targets.float(), indices), batch_idx)


@pytest.mark.parametrize("mode", ["loader", "step"])
def test_what_the_report_of_an_error_has_told_is_not_warned_of_again(mode: Any) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(
            DataLoader(Samples(32), batch_size=8),
            AutoAccumulate(micro_batching=mode),
            module=Normalizing(),
            max_epochs=3,
        )
    told = [each for each in caught if "BatchNorm" in str(each.message)]
    assert ["Memory ran out" in str(each.message) for each in told] == [True]
