"""Memory runs out in an optimizer's step: it is never run twice, and the error says what to do."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from faults import Faults
from reference import Regression, Samples, fit
from torch.utils.data import DataLoader
from true_support import Sharpness

from lightning_ga import AutoAccumulate

pytestmark = pytest.mark.filterwarnings("ignore:Memory ran out in:UserWarning")


class Updated(Regression):
    """Its own optimizer, and faults within its steps, if asked for in their closures too."""

    def __init__(self, factory: Callable[[Any], torch.optim.Optimizer], faults: Faults, closures: bool) -> None:
        super().__init__()
        self.factory, self.faults, self.closures = factory, faults, closures
        self.begun, self.history = 0, [self.weights()]

    def weights(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.net.parameters()]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.factory(self.net.parameters())

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        self.begun += 1
        self.faults.armed = self.closures
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        self.faults.armed = False
        self.history.append(self.weights())

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.faults.armed = True  # clipping comes next


def train_with_error_in_update(
    factory: Any, at: int = 0, closures: bool = False, **settings: Any
) -> tuple[Updated, AutoAccumulate]:
    """Train with an error at this operation, which is survived or says what to do."""
    faults = Faults(*([at] if at else []))
    module = Updated(factory, faults, closures)
    callback = AutoAccumulate(micro_batch_size=8, **{"effective_batch_size": 16, "verify": False, **settings})
    notes = None
    try:
        with faults:
            fit(DataLoader(Samples(37), batch_size=8), callback, module=module, gradient_clip_val=0.1)
    except torch.OutOfMemoryError as error:
        notes = error.__notes__
    completed = len(module.history) - 1
    if notes is None:
        assert module.begun == completed + callback.oom_events
    else:
        assert (callback.oom_events, module.begun) == (0, completed + 1)
        told = "Memory ran out after the window's last backward pass"
        assert [note for note in notes if note.startswith(told) and "last checkpoint" in note]
    return module, callback


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_an_update_is_never_run_twice(kind: type[torch.optim.Optimizer]) -> None:
    """In clipping, and at each operation of the update: each weight is as before it, or after."""
    factory = partial(kind, lr=0.05, foreach=False)
    whole, _ = train_with_error_in_update(factory)
    operations = whole.faults.count
    assert operations > 20
    for at in range(1, operations + 1, 1 + operations // 9):
        failed, _ = train_with_error_in_update(factory, at)
        assert failed.begun == failed.trainer.global_step + 1
        before, after = whole.history[failed.begun - 1 : failed.begun + 1]
        for now, *either in zip(failed.weights(), before, after):
            assert any(torch.equal(now, each) for each in either), at


def test_a_step_that_evaluates_its_closure_again_begins_again_until_its_update_begins() -> None:
    """Memory that runs out in the first evaluation is survived; in the update and what follows it ends the run."""
    settings = {"effective_batch_size": None, "micro_batching": "step", "closures": True}
    whole, _ = train_with_error_in_update(Sharpness, **settings)
    survived = []
    for at in range(2, whole.faults.count // whole.begun, 9):  # the first one marks the step for a profiler
        module, callback = train_with_error_in_update(Sharpness, at, **settings)
        survived.append(callback.oom_events)
        if callback.oom_events:
            torch.testing.assert_close(module.weights(), whole.weights(), rtol=1e-12, atol=1e-14)
    assert set(survived) == {0, 1}
