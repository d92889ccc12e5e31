"""A pass outside training: the hooks that run, the counters that they see, and what is left of it."""

from typing import Any, ClassVar

import lightning.pytorch as pl
import pytest
import torch
from reference import Regression, Samples, fit
from torch.utils.data import DataLoader

from lightning_ga.compat.trial_steps import FIRST_OF_WINDOW, LAST_OF_WINDOW, PassPlace, run_pass
from lightning_ga.probe.isolation import isolated

FIRST = ["start 0", "step 0", "zero", "backward"]
LAST = ["start 1", "optimizer 1", "step 1", "backward", "end 1"]


class Told(Regression):
    """Notes the hooks that run and the counters that they see."""

    notes: ClassVar[list[tuple[str, tuple[int, int, int]]]] = []

    def note(self, hook: str) -> None:
        progress = self.trainer.fit_loop.epoch_loop.batch_progress
        counters = progress.current.ready, self.trainer.accumulate_grad_batches, self.trainer.num_training_batches
        self.notes.append((hook, counters))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.note(f"start {batch_idx}")

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.note(f"step {batch_idx}")
        return super().training_step(batch, batch_idx)

    def on_before_zero_grad(self, _: Any) -> None:
        self.note("zero")

    def on_after_backward(self) -> None:
        self.note("backward")

    def optimizer_step(self, epoch: int, batch_idx: int, *given: Any) -> None:
        self.note(f"optimizer {batch_idx}")
        super().optimizer_step(epoch, batch_idx, *given)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.note(f"end {batch_idx}")


class Passes(pl.Callback):
    """Runs passes where training begins, and notes whether it is called in them."""

    def __init__(self, *places: PassPlace) -> None:
        self.places, self.calls, self.steps, self.gradients = places, 0, 0, []

    def on_train_batch_start(self, *_: Any) -> None:
        self.calls += 1

    def on_train_start(self, trainer: Any, module: Any) -> None:
        batch = next(iter(DataLoader(Samples(4), batch_size=4)))
        weights = [parameter.clone() for parameter in module.parameters()]
        module.notes.clear()
        with isolated(trainer):
            for place in self.places:
                run_pass(trainer, batch, place)
                self.gradients.append(torch.cat([p.grad.flatten() for p in module.parameters()]))
            self.steps = trainer.global_step
            self.notes = list(module.notes)  # lists of classes are put back, too
        self.calls_in_passes = self.calls
        assert all(map(torch.equal, weights, module.parameters()))
        assert trainer.global_step == 0


def passes(*places: PassPlace, batches: int = 3) -> Passes:
    callback = Passes(*places)
    fit(DataLoader(Samples(4 * batches), batch_size=4), callback, module=Told(), max_epochs=1)
    assert callback.calls_in_passes == 0
    assert callback.calls == batches
    return callback


def hooks(callback: Passes) -> list[str]:
    return [hook for hook, _ in callback.notes]


def counters(callback: Passes) -> set[tuple[int, int, int]]:
    """The number of the batch, the factor, the batches of an epoch."""
    return {seen for _, seen in callback.notes}


@pytest.mark.parametrize("batches", [1, 2, 5, 6, 10])
def test_the_first_pass_of_a_window_zeroes_and_does_not_step(batches: int) -> None:
    """Whatever the length of the epoch, at whose end the loop would step."""
    callback = passes(FIRST_OF_WINDOW, batches=batches)
    assert hooks(callback) == FIRST
    assert callback.steps == 0


def test_the_last_pass_of_a_window_steps() -> None:
    """It is the second of two, so it zeroes no gradients."""
    callback = passes(LAST_OF_WINDOW)
    assert hooks(callback) == LAST
    assert counters(callback) == {(2, 2, 3)}
    assert callback.steps == 1


def test_pieces_are_one_batch_for_the_hooks() -> None:
    """``on_after_backward`` waits for the last."""
    callback = passes(PassPlace(ends=False, continues=True), PassPlace(index=1, begins=False))
    assert hooks(callback) == ["start 0", "step 0", "zero", "step 0", "backward", "end 0"]
    assert counters(callback) == {(1, 4, 3)}


def test_several_batches_of_the_loop_make_one_of_the_recipe() -> None:
    """Epoch and window count as many times more, and the gradient is the weighted mean."""
    alone = passes(PassPlace()).gradients[0]
    both = passes(PassPlace(batches=2, weight=0.25), PassPlace(index=1, batches=2, weight=0.75))
    assert counters(both) == {(1, 8, 6), (2, 8, 6)}
    assert torch.allclose(both.gradients[0], 0.25 * alone)
    assert torch.allclose(both.gradients[1], alone)
