"""The user's own code: its errors stay where they are raised, hooks run once, and what they changed is met again."""

import weakref
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from reference import Regression, Samples, fit, quiet_trainer
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

from lightning_ga import AutoAccumulate

MODES = pytest.mark.parametrize("mode", ["loader", "step"])


def data(samples: int = 64, batch_size: int = 16) -> "DataLoader[Any]":
    return DataLoader(Samples(samples), batch_size=batch_size)


def ours(mode: Any, micro_batch: int = 8, **settings: Any) -> AutoAccumulate:
    return AutoAccumulate(micro_batch_size=micro_batch, micro_batching=mode, verify=False, **settings)


class RunsOut(Regression):
    """Runs out of memory in one of its steps, from 1; its loss is a function of it and a batch."""

    def __init__(self, at: int = 0, loss: Callable[[Any, Any], torch.Tensor] | None = None) -> None:
        super().__init__()
        self.at, self.attempts, self.own = at, 0, loss

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.attempts += 1
        if self.attempts == self.at:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return mse_loss(self.net(batch[0]), batch[1]) if self.own is None else self.own(self, batch)


class RaisesOnce(Regression):
    """An error of the user's own in one hook, once."""

    def __init__(self, hook: str) -> None:
        super().__init__()
        self.hook, self.raised, self.steps = hook, 0, 0
        for name in ("on_before_zero_grad", "on_before_backward", "on_after_backward"):
            setattr(self, name, lambda *_, name=name: self.fail(name))

    def fail(self, hook: str) -> None:
        if hook == self.hook and not self.raised:
            self.raised += 1
            raise RuntimeError("mine")

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.steps += 1
        self.fail("training_step")
        return super().training_step(batch, batch_idx)


@MODES
@pytest.mark.parametrize("hook", ["training_step", "on_before_zero_grad", "on_before_backward", "on_after_backward"])
def test_an_error_of_the_users_own_ends_the_run_where_it_is_raised(hook: str, mode: str) -> None:
    module = RaisesOnce(hook)
    with pytest.raises(RuntimeError, match="mine"):
        fit(data(), ours(mode), module=module)
    assert (module.raised, module.steps) == (1, 2 if (hook, mode) == ("on_after_backward", "step") else 1)


def of_sixteen(module: RunsOut, batch: Any) -> torch.Tensor:
    """Needs batches of sixteen samples."""
    return mse_loss(module.net(batch[0]) + torch.zeros(16, 1, dtype=torch.float64), batch[1])


@MODES
def test_an_error_in_a_part_of_a_batch_keeps_its_type_and_says_which_part_ran(mode: str) -> None:
    with pytest.raises(RuntimeError, match="size of tensor a") as caught:
        fit(data(), ours(mode, 16), module=RunsOut(3, of_sixteen))
    (note,) = caught.value.__notes__
    assert "samples 0 to 7 of 16, because memory had run out with more" in note
    assert "micro_batch_size=" in note
    assert "split_batch" in note
    assert "training_step" in {frame.name for frame in caught.traceback}


def test_a_window_keeps_no_batch_on_the_device_but_the_current_one() -> None:
    earlier, alive = list[Any](), list[int]()

    def remembers(module: RunsOut, batch: Any) -> torch.Tensor:
        alive.append(sum(reference() is not None for reference in earlier))
        earlier.append(weakref.ref(batch[0]))
        return mse_loss(module.net(batch[0]), batch[1])

    fit(data(64, 4), ours("loader", 4, effective_batch_size=16), module=RunsOut(0, remembers), max_epochs=1)
    assert alive == [0] * 16


class Anneals(pl.Callback):
    """Changes a buffer between two micro-batches, once, late in the training."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.fit_loop.total_batch_idx == 12:
            pl_module.scale *= 0.5


class Mixes(pl.Callback):
    """Changes some batches after their transfer, before the step."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % 3 == 0:
            batch[0].lerp_(batch[0].flip(0), 0.4)


@pytest.mark.filterwarnings("ignore:Memory ran out in:UserWarning")
@pytest.mark.parametrize("callback", [Anneals, Mixes])
@pytest.mark.parametrize("at", [12, 14, 15, 16])
def test_what_hooks_changed_between_two_micro_batches_is_met_again(callback: Any, at: int) -> None:
    """A buffer, the batch itself, and the number of the batch in the loop."""

    def scaled(module: RunsOut, batch: Any) -> torch.Tensor:
        weight = module.scale * (1 + 0.1 * (module.trainer.fit_loop.total_batch_idx % 3))
        return weight * mse_loss(module.net(batch[0]), batch[1])

    def weights(at: int) -> list[torch.Tensor]:
        module, accumulate = RunsOut(at, scaled), ours("loader", 4, effective_batch_size=16)
        module.register_buffer("scale", torch.ones((), dtype=torch.float64))
        fit(data(96, 4), accumulate, callback(), module=module, max_epochs=1)
        assert accumulate.oom_events == (at > 0)
        return [parameter.detach() for parameter in module.parameters()]

    torch.testing.assert_close(weights(at), weights(0), rtol=1e-12, atol=1e-14)


def test_a_mistake_after_a_fit_is_told_as_it_is(tmp_path: Any) -> None:
    """What the fit has left does not get in its way."""
    trainer = quiet_trainer(ours("loader"), max_epochs=1, default_root_dir=tmp_path)
    trainer.fit(Regression(), data())
    with pytest.raises(ValueError, match="best"):
        trainer.test(Regression(), data(), ckpt_path="best")


class Augmented(Samples):
    """Changes few of its samples at random."""

    def __getitem__(self, index: int) -> Any:
        inputs, targets, index = super().__getitem__(index)
        return (-inputs if torch.rand(()) < 0.01 else inputs), targets, index


def test_samples_that_are_drawn_anew_are_told_however_rarely_they_differ() -> None:
    """On a CPU those of earlier micro-batches are read again; memory runs out after the passes of the check."""
    module = Regression()
    failed = iter([True])

    def fails(*_: Any) -> None:
        if module.trainer.fit_loop.total_batch_idx == 14 and next(failed, False):
            raise torch.OutOfMemoryError("CUDA out of memory")

    module.on_before_backward = fails
    with pytest.warns(UserWarning, match="Its parts draw random numbers of their own"):
        fit(DataLoader(Augmented(64), 4), AutoAccumulate(16, micro_batch_size=4), module=module, max_epochs=1)


@MODES
def test_memory_that_runs_out_in_a_part_of_the_check_is_no_mistake_of_the_model(mode: Any) -> None:
    """It is told as what it is, and training is what it is without."""
    started: list[bool] = []

    class Starts(pl.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            started.append(True)

    def fails_in_check(module: RunsOut, batch: Any) -> torch.Tensor:
        if not started and len(batch[0]) <= 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return mse_loss(module.net(batch[0]), batch[1])

    found, right = RunsOut(0, fails_in_check), RunsOut()
    checked = AutoAccumulate(micro_batch_size=8, micro_batching=mode)
    with pytest.warns(UserWarning, match="is not known: not measured: memory ran out in the check"):
        fit(data(), checked, Starts(), module=found)
    fit(data(), ours(mode), module=right)
    assert all(map(torch.equal, found.net.parameters(), right.net.parameters()))
