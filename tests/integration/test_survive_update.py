"""Memory runs out in an optimizer's step: it is never run twice, and the error says what to do."""

from collections.abc import Callable
from typing import Any

import pytest
import timm.optim
import torch
from faults import Faults
from reference import Regression, Samples, fit
from torch.utils.data import DataLoader
from true_support import Sharpness

from lightning_ga import AutoAccumulate

pytestmark = pytest.mark.filterwarnings("ignore:Memory ran out in:UserWarning")

Factory = Callable[[Any], torch.optim.Optimizer]
SGD, AdamW = torch.optim.SGD, torch.optim.AdamW
NOTE = "Memory ran out after the window's last backward pass"


class Updated(Regression):
    """Its own optimizer, the steps of which are counted, and faults within, if asked for in its closures too."""

    def __init__(self, factory: Factory, faults: Faults, closures: bool) -> None:
        super().__init__()
        self.factory, self.faults, self.closures = factory, faults, closures
        self.steps, self.history = 0, [self.weights()]

    def weights(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.net.parameters()]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = self.factory(self.net.parameters())
        step = optimizer.step

        def counted(*arguments: Any, **named: Any) -> Any:
            self.steps += 1
            return step(*arguments, **named)

        vars(optimizer)["step"] = counted
        return optimizer

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        self.faults.armed = self.closures
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        self.faults.armed = False
        self.history.append(self.weights())

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.faults.armed = True  # clipping comes next


def train(factory: Factory, at: int = 0, closures: bool = False, **settings: Any) -> tuple[Updated, AutoAccumulate]:
    """Train with an error at this operation."""
    faults = Faults(*([at] if at else []))
    module = Updated(factory, faults, closures)
    callback = AutoAccumulate(micro_batch_size=8, **{"effective_batch_size": 16, "verify": False, **settings})
    with faults:
        data = DataLoader(Samples(37), batch_size=8)
        error = _error_of(lambda: fit(data, callback, module=module, gradient_clip_val=0.1))
    steps = len(module.history) - 1
    if error is None:
        assert module.steps == steps
    else:
        assert [note for note in error.__notes__ if note.startswith(NOTE) and "last checkpoint" in note]
        assert (callback.oom_events, module.steps) == (0, steps + 1)  # begun once, not ended
    return module, callback


def _error_of(run: Callable[[], Any]) -> torch.OutOfMemoryError | None:
    try:
        run()
    except torch.OutOfMemoryError as error:
        return error
    return None


OPTIMIZERS: dict[str, Factory] = {
    "SGD": lambda weights: SGD(weights, lr=0.1, momentum=0.9, foreach=False),
    "Adam": lambda weights: torch.optim.Adam(weights, lr=0.05, foreach=False),
    "fused AdamW": lambda weights: AdamW([{"params": [weight]} for weight in weights], lr=0.05, fused=True),
    "Lookahead": lambda weights: timm.optim.Lookahead(SGD(weights, lr=0.1, foreach=False), k=2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_is_never_run_twice(name: str) -> None:
    """In clipping, and at each operation of the update: of SGD and Adam each weight is as before it, or after."""
    whole, _ = train(OPTIMIZERS[name])
    operations = whole.faults.count
    assert operations > 20
    for at in range(1, operations + 1, 1 + operations // 15):
        failed, _ = train(OPTIMIZERS[name], at)
        assert failed.steps == failed.trainer.global_step + 1
        if name in ("SGD", "Adam"):
            before, after = whole.history[failed.steps - 1 : failed.steps + 1]
            for now, *either in zip(failed.weights(), before, after):
                assert any(torch.equal(now, each) for each in either), at


@pytest.mark.parametrize("hook", ["on_before_batch_transfer", "on_train_batch_start", "on_train_batch_end"])
def test_a_hook_outside_of_the_passes_is_not_run_again(hook: str) -> None:
    """The error is PyTorch's, and its note says what to do."""
    module, data = Regression(), DataLoader(Samples(37), batch_size=8)
    usual, calls = getattr(module, hook), []

    def fails(*arguments: Any) -> Any:
        calls.append(arguments)
        if module.trainer.global_step == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return usual(*arguments)

    setattr(module, hook, fails)
    error = _error_of(lambda: fit(data, AutoAccumulate(), module=module))
    assert module.trainer.global_step == 2
    assert [note for note in error.__notes__ if "outside of the forward and backward passes" in note]


def test_a_step_that_evaluates_its_closure_again_is_never_run_twice() -> None:
    """Memory that runs out in one of the evaluations is survived, between them it ends the run."""
    settings = {"effective_batch_size": None, "micro_batching": "step", "closures": True}
    whole, _ = train(Sharpness, **settings)
    survived = []
    for at in range(2, whole.faults.count // whole.steps, 5):  # the first one marks the step for a profiler
        module, callback = train(Sharpness, at, **settings)
        survived.append(callback.oom_events)
        if callback.oom_events:
            torch.testing.assert_close(module.weights(), whole.weights(), rtol=1e-12, atol=1e-14)
    assert set(survived) == {0, 1}
