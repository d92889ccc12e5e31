"""Memory runs out after a kernel has written what no version tells of: the same weights, or an error that says so."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from reference import FEATURES, Regression, Samples, fit, loss
from torch.utils.data import DataLoader

from lightning_ga import AutoAccumulate, UserError

pytestmark = pytest.mark.filterwarnings("ignore:Memory ran out in:UserWarning")
MODES = ("loader", "step")
AdamW, SGD = torch.optim.AdamW, torch.optim.SGD
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "fused AdamW": partial(AdamW, lr=0.05, fused=True),
    "foreach AdamW": partial(AdamW, lr=0.05, foreach=True),
    "AdamW one by one": partial(AdamW, lr=0.05, foreach=False),
    "fused SGD": partial(SGD, lr=0.1, momentum=0.9, fused=True),
}


class OutOfMemory(Regression):
    """Runs out of memory where it is told to: in the forward pass, or in the backward pass after the last layer.

    Args:
        at: The attempt at a micro-batch, from 1; 0 for none.
        forward: Whether that is before anything has changed.
    """

    def __init__(self, at: int = 0, forward: bool = False) -> None:
        super().__init__()
        self.at, self.forward_fails, self.attempts = at, forward, 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.attempts += 1
        hidden = self.net[1](self.net[0](batch[0]))
        if self.attempts == self.at:
            if self.forward_fails:
                raise torch.OutOfMemoryError("CUDA out of memory")
            hidden.register_hook(self.fail)
        return torch.nn.functional.mse_loss(self.net[2](hidden), batch[1])

    def fail(self, _: torch.Tensor) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")


class InBackward(OutOfMemory):
    """The last layer is updated within the backward pass, the first by the optimizer."""

    def __init__(self, update: Callable[[Any], Callable[[torch.Tensor], None]], **trouble: Any) -> None:
        super().__init__(**trouble)
        for parameter in self.net[2].parameters():
            parameter.register_post_accumulate_grad_hook(update(parameter))

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Some gradients are gone."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return SGD(self.net[0].parameters(), lr=0.1)


def stepping(optimizer: Callable[[Any], torch.optim.Optimizer], parameter: Any) -> Callable[[torch.Tensor], None]:
    """As in PyTorch's tutorial on optimizers in the backward pass."""
    inner = optimizer([parameter])

    def step(_: torch.Tensor) -> None:
        inner.step()
        inner.zero_grad()

    return step


def by_data(parameter: Any) -> Callable[[torch.Tensor], None]:
    """As LOMO does."""

    def step(changed: torch.Tensor) -> None:
        changed.data.add_(changed.grad, alpha=-0.1)
        changed.grad = None

    return step


UPDATES = {**{name: partial(stepping, factory) for name, factory in OPTIMIZERS.items()}, "by data": by_data}


def train(module: OutOfMemory, mode: str = "loader") -> AutoAccumulate:
    callback = AutoAccumulate(16, micro_batch_size=8, micro_batching=mode, verify=False)
    batch_size = 8 if mode == "loader" else 16
    fit(DataLoader(Samples(192), batch_size=batch_size), callback, module=module, max_epochs=1)
    return callback


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", UPDATES)
def test_weights_that_are_updated_in_the_backward_pass(name: str, mode: str) -> None:
    """A failed pass that has updated some of them cannot be run again, however they were written to."""
    for at in (1, 2, 5, 20):
        with pytest.raises(UserError, match=r"after the step had changed weights (by|without) an optimizer"):
            train(InBackward(UPDATES[name], at=at), mode)


@pytest.mark.parametrize("name", UPDATES)
def test_a_pass_that_fails_before_it_updates_weights_is_run_again(name: str) -> None:
    for at in (1, 20):
        again = InBackward(UPDATES[name], at=at, forward=True)
        assert train(again).oom_events == 1


class Following(OutOfMemory):
    """A teacher that follows before the backward pass, which MoCo and BYOL write by ``.data``; it ends in the loss."""

    def __init__(self, every: int = 1, **trouble: Any) -> None:
        super().__init__(**trouble)
        self.teacher = torch.nn.Linear(FEATURES, 1, dtype=torch.float64).requires_grad_(False)
        torch.nn.init.ones_(self.teacher.weight)
        self.every, self.seen = every, []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen.append(float(self.teacher.weight.sum()))
        if batch_idx % self.every == self.every - 1:
            self.teacher.weight.data = self.teacher.weight.data * 0.9
        return super().training_step(batch, batch_idx) + loss(self.teacher, batch[0], batch[1])


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("at", [1, 2, 3, 6, 20])
def test_a_teacher_that_is_written_by_its_data_comes_back(every: int, at: int) -> None:
    """Or it is said that it cannot, the first time, which shows what has to be copied."""
    again = Following(every, at=at)
    if at == every:  # the first time
        with pytest.raises(UserError, match=r"weights without an optimizer \(teacher.weight\)"):
            train(again)
        return
    train(again)
    assert again.seen[at] == again.seen[at - 1]


def half_made(optimizer: torch.optim.Optimizer, calls: int) -> torch.optim.Optimizer:
    """Let memory run out where an optimizer makes the state of its weights, in the call of that number."""
    make, made = optimizer._init_group, []

    def fail(*arguments: Any, **settings: Any) -> Any:
        found = make(*arguments, **settings)
        made.append(True)
        if len(made) == calls:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return found

    vars(optimizer)["_init_group"] = fail
    return optimizer


class TwoGroups(Regression):
    """A layer each; the second is updated after the first."""

    def __init__(self, factory: Callable[[Any], torch.optim.Optimizer], calls: int = 0) -> None:
        super().__init__()
        self.factory, self.calls = factory, calls

    def configure_optimizers(self) -> torch.optim.Optimizer:
        groups = [{"params": list(self.net[part].parameters())} for part in (0, 2)]
        return half_made(self.factory(groups), self.calls)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_that_is_half_done_is_said_to_be(name: str) -> None:
    """In the first step and later; what has not begun is run again where that can be seen: SGD counts no steps."""
    whole = TwoGroups(OPTIMIZERS[name])
    train(whole)
    for calls in (2, 4):
        with pytest.raises(UserError, match="inside the optimizer's step"):
            train(TwoGroups(OPTIMIZERS[name], calls))
    for calls in (1, 3):
        again = TwoGroups(OPTIMIZERS[name], calls)
        if name == "fused SGD":
            with pytest.raises(UserError, match="inside the optimizer's step"):
                train(again)
        else:
            assert train(again).oom_events == 1
            assert all(torch.equal(a, b) for a, b in zip(again.parameters(), whole.parameters()))
