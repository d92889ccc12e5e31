"""The user's own code: its errors stay where they are raised, its hooks run once, and events say what is left to it."""

import weakref
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from reference import Regression, Samples, fit, quiet_trainer
from torch.utils.data import DataLoader

from lightning_ga import AutoAccumulate

MODES = ("loader", "step")


def data(samples: int = 64, batch_size: int = 16) -> "DataLoader[Any]":
    return DataLoader(Samples(samples), batch_size=batch_size)


def ours(mode: str, micro_batch: int = 8, **settings: Any) -> AutoAccumulate:
    return AutoAccumulate(micro_batch_size=micro_batch, micro_batching=mode, verify=False, **settings)


def out_of_memory() -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError("CUDA out of memory")


class RaisesOnce(Regression):
    """An error of the user's own in one hook, once."""

    def __init__(self, hook: str) -> None:
        super().__init__()
        self.hook, self.raised, self.steps = hook, 0, 0

    def fail(self, hook: str) -> None:
        if hook == self.hook and not self.raised:
            self.raised += 1
            raise RuntimeError("mine")

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.steps += 1
        self.fail("training_step")
        return super().training_step(batch, batch_idx)

    def on_before_zero_grad(self, *_: Any) -> None:
        self.fail("on_before_zero_grad")

    def on_before_backward(self, *_: Any) -> None:
        self.fail("on_before_backward")

    def on_after_backward(self, *_: Any) -> None:
        self.fail("on_after_backward")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("hook", ["training_step", "on_before_zero_grad", "on_before_backward", "on_after_backward"])
def test_an_error_of_the_users_own_ends_the_run_where_it_is_raised(hook: str, mode: str) -> None:
    module = RaisesOnce(hook)
    with pytest.raises(RuntimeError, match="mine"):
        fit(data(), ours(mode), module=module)
    assert (module.raised, module.steps) == (1, 2 if (hook, mode) == ("on_after_backward", "step") else 1)


class WithoutIndex(Regression):
    """Steps that take the batch alone, of which each runs out of memory with more samples than it is told."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most, self.seen = most, []

    def look(self, batch: Any) -> torch.Tensor:
        if len(batch[0]) > self.most:
            raise out_of_memory()
        self.seen.append(len(batch[0]))
        return self.net(batch[0])

    def validation_step(self, batch: Any) -> None:
        self.log("validated", self.look(batch).mean())

    def test_step(self, batch: Any) -> None:
        self.log("tested", self.look(batch).mean())

    def predict_step(self, batch: Any) -> torch.Tensor:
        return self.look(batch)


@pytest.mark.filterwarnings("ignore:Memory ran out in:UserWarning")
@pytest.mark.parametrize("most", [16, 4])
@pytest.mark.parametrize("mode", MODES)
def test_steps_of_evaluation_need_not_take_the_number_of_their_batch(mode: str, most: int) -> None:
    module, callback = WithoutIndex(most), ours(mode)
    trainer = quiet_trainer(callback, max_epochs=1)
    trainer.fit(module, data(), data(32))
    stock = quiet_trainer()
    whole = WithoutIndex(16)
    whole.load_state_dict(module.state_dict())
    for name in ("validate", "test"):
        found = getattr(trainer, name)(module, data(32), verbose=False)
        torch.testing.assert_close(found, getattr(stock, name)(whole, data(32), verbose=False))
    torch.testing.assert_close(trainer.predict(module, data(32)), stock.predict(whole, data(32)))
    assert set(module.seen) == {most}


class FixedSize(Regression):
    """Needs batches of sixteen samples, for which there is no memory after the second."""

    attempts = 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.attempts += 1
        if self.attempts == 3:
            raise out_of_memory()
        predicted = self.net(batch[0]) + torch.zeros(16, 1, dtype=torch.float64)
        return torch.nn.functional.mse_loss(predicted, batch[1])


@pytest.mark.parametrize("mode", MODES)
def test_an_error_in_a_part_of_a_batch_keeps_its_type_and_says_which_part_ran(mode: str) -> None:
    module = FixedSize()
    with pytest.raises(RuntimeError, match="size of tensor a") as caught:
        fit(data(), ours(mode, 16), module=module)
    (note,) = caught.value.__notes__
    assert "samples 0 to 7 of 16, because memory had run out with more" in note
    assert "micro_batch_size=" in note
    assert "split_batch" in note
    assert "training_step" in {frame.name for frame in caught.traceback}


class Remembers(Regression):
    """Looks whether batches of before are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.earlier, self.alive = list[Any](), list[int]()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.alive.append(sum(reference() is not None for reference in self.earlier))
        self.earlier.append(weakref.ref(batch[0]))
        return super().training_step(batch, batch_idx)


def test_a_window_keeps_no_batch_on_the_device_but_the_current_one() -> None:
    module = Remembers()
    fit(data(64, 4), AutoAccumulate(16, micro_batch_size=4, verify=False), module=module, max_epochs=1)
    assert module.alive == [0] * 16


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


class Scaled(Regression):
    """Reads a buffer, and the number of its batch where the loop keeps it; runs out of memory once."""

    def __init__(self, at: int = 0) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones((), dtype=torch.float64))
        self.at, self.attempts = at, 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.attempts += 1
        if self.attempts == self.at:
            raise out_of_memory()
        weight = self.scale * (1 + 0.1 * (self.trainer.fit_loop.total_batch_idx % 3))
        return weight * super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:Memory ran out in:UserWarning")
@pytest.mark.parametrize("callback", [Anneals, Mixes])
@pytest.mark.parametrize("at", [12, 14, 15, 16])
def test_what_hooks_changed_between_two_micro_batches_is_met_again(callback: Any, at: int) -> None:
    """A buffer, the batch itself, and the number of the batch in the loop."""

    def weights(at: int) -> list[torch.Tensor]:
        module, accumulate = Scaled(at), AutoAccumulate(16, micro_batch_size=4, verify=False)
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


class RunsOutOnce(Regression):
    """Runs out of memory in its second window, after the passes of the check."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at, self.failed = at, False

    def on_before_backward(self, *_: Any) -> None:
        if self.trainer.fit_loop.total_batch_idx == self.at and not self.failed:
            self.failed = True
            raise out_of_memory()


class Augmented(Samples):
    """Changes few of its samples at random."""

    def __getitem__(self, index: int) -> Any:
        inputs, targets, index = super().__getitem__(index)
        return (-inputs if torch.rand(()) < 0.01 else inputs), targets, index


def test_samples_that_are_drawn_anew_are_told_however_rarely_they_differ() -> None:
    """On a CPU those of earlier micro-batches are read again."""
    ours_on_few = AutoAccumulate(16, micro_batch_size=4)
    module = RunsOutOnce(at=14)
    with pytest.warns(UserWarning, match="Its parts draw random numbers of their own"):
        fit(DataLoader(Augmented(64), batch_size=4), ours_on_few, module=module, max_epochs=1)
