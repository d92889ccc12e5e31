"""Memory runs out after weights have changed that no optimizer's step has changed: put back, named, or an error."""

import warnings
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any, ClassVar

import pytest
import torch
from faults import CountAttempts
from reference import FEATURES, Regression, Samples, fit, loss
from torch.utils.data import DataLoader

from lightning_ga import AutoAccumulate, UserError

MODES = pytest.mark.parametrize("mode", ["loader", "step"])
AdamW, SGD = torch.optim.AdamW, torch.optim.SGD
NAMED = "(net.2.bias, net.2.weight) is as the failed attempt left it."


class OutOfMemory(Regression):
    """Runs out of memory at an attempt (from 1): in the forward pass, or in the backward pass after the last layer."""

    def __init__(self, at: int = 0, forward: bool = False) -> None:
        super().__init__()
        self.at, self.forward_fails, self.attempts = at, forward, iter(())

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        hidden = self.net[1](self.net[0](batch[0]))
        if next(self.attempts, None) == self.at:
            if self.forward_fails:
                self.fail(hidden)
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


UPDATES = {  # and whether they raise versions
    "fused AdamW": (partial(stepping, partial(AdamW, lr=0.05, fused=True)), False),
    "foreach AdamW": (partial(stepping, partial(AdamW, lr=0.05, foreach=True)), True),
    "by data": (by_data, False),
}


def train(module: OutOfMemory, mode: str = "loader", verify: bool = False) -> str:
    """Train with an error; what the warning says of it."""
    callback = AutoAccumulate(16, micro_batch_size=8, micro_batching=mode, verify=verify)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        batch_size = 8 if mode == "loader" else 16
        fit(DataLoader(Samples(192), batch_size=batch_size), callback, CountAttempts(), module=module, max_epochs=1)
    assert callback.oom_events == 1
    (text,) = [str(each.message) for each in caught if "Memory ran out in" in str(each.message)]
    return text


@MODES
@pytest.mark.parametrize("name", UPDATES)
@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.filterwarnings("ignore::lightning_ga.ExactnessWarning")
def test_weights_that_are_updated_in_the_backward_pass(name: str, mode: str, verify: bool) -> None:
    """Where versions tell, a window that has updated some of them is not run again; else the warning names them."""
    update, raises_versions = UPDATES[name]
    for at, forward in [(1, False), (2, False), (2, True), (5, False), (20, False)]:
        module = InBackward(update, at=at, forward=forward)
        if raises_versions:
            with pytest.raises(
                UserError, match=r"weights or buffers of which no copies are made \(net.2.(weight|bias)\)"
            ):
                train(module, mode, verify)
        else:
            text = train(module, mode, verify)
            assert NAMED in text
            assert "with the same result" not in text


@pytest.mark.parametrize("name", UPDATES)
def test_a_window_that_fails_before_it_updates_weights_is_run_again(name: str) -> None:
    for at in (1, 19):
        assert NAMED in train(InBackward(UPDATES[name][0], at=at, forward=True))


class Following(OutOfMemory):
    """A teacher that follows before the backward pass of every so many batches, as that of MoCo; it is in the loss."""

    seen: ClassVar[list[float]] = []  # of the teacher, by each attempt in training

    def __init__(self, by_data: bool, every: int, **trouble: Any) -> None:
        super().__init__(**trouble)
        self.teacher = torch.nn.Linear(FEATURES, 1, dtype=torch.float64).requires_grad_(False)
        torch.nn.init.ones_(self.teacher.weight)
        self.by_data, self.every = by_data, every
        self.seen.clear()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if isinstance(self.attempts, count):
            self.seen.append(float(self.teacher.weight.sum()))
        if batch_idx % self.every == self.every - 1:
            self.follow()
        return super().training_step(batch, batch_idx) + loss(self.net, batch[0], self.teacher(batch[0]))

    def follow(self) -> None:
        (self.teacher.weight.data if self.by_data else self.teacher.weight).mul_(0.9)


@pytest.mark.parametrize("by_data", [False, True])
@pytest.mark.parametrize("at", [1, 2, 3, 6, 20])
@pytest.mark.filterwarnings("ignore::lightning_ga.ExactnessWarning")
def test_a_teacher_that_the_check_saw_change_comes_back(by_data: bool, at: int) -> None:
    text = train(Following(by_data, every=1, at=at), verify=True)
    assert Following.seen[at] == Following.seen[(at - 1) // 2 * 2]
    assert "changes teacher.weight, which the next micro-batch meets" in text
    assert "as the failed attempt left it" not in text


@pytest.mark.parametrize("by_data", [False, True])
@pytest.mark.parametrize(("at", "every"), [(1, 1), (1, 2), (2, 2), (3, 2), (6, 1), (20, 2)])
def test_a_teacher_that_nobody_saw_change_is_told(by_data: bool, at: int, every: int) -> None:
    """By its version the run ends; without one the warning names it. If it has not changed, all is well."""
    module = Following(by_data, every, at=at)
    if at % every:
        assert "as the failed attempt left it" not in train(module)
        assert Following.seen[at] == Following.seen[at - 1]
    elif by_data:
        assert "(teacher.weight) is as the failed attempt left it." in train(module)
    else:
        with pytest.raises(UserError, match=r"weights or buffers of which no copies are made \(teacher.weight\)"):
            train(module)


class FollowingBetween(Following):
    """It follows after each batch instead."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.follow()


def test_a_teacher_that_a_hook_changes_within_a_window_is_told() -> None:
    assert "as the failed attempt left it" not in train(FollowingBetween(False, every=999, at=3))
    assert Following.seen[3] == Following.seen[2]
    assert "A hook had changed teacher.weight since the window began" in train(FollowingBetween(False, every=999, at=4))
