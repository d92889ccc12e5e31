"""Memory runs out, and gradients are not zeroed as PyTorch does it: the same weights, or the program says why not."""

import warnings
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch
from faults import CountAttempts
from reference import Regression, Samples, fit
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader

from lightning_ga import AutoAccumulate
from lightning_ga.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore:Memory ran out in:UserWarning")
BATCH, FACTOR, WINDOWS = 8, 2, 4
MODES = pytest.mark.parametrize(("mode", "micro_batch"), [("loader", BATCH), ("step", BATCH), ("step", BATCH // 2)])


class RunsOut(Regression):
    """Memory runs out at an attempt in training (from 1), when the gradients of the last layer are there, or before."""

    def __init__(self, at: int, before: bool = False) -> None:
        super().__init__()
        self.at, self.before, self.attempts = at, before, iter(())

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        fails = next(self.attempts, 0) == self.at and self.at > 0
        hidden = self.net[1](self.net[0](batch[0]))
        value = torch.nn.functional.mse_loss(self.net[2](hidden), batch[1])
        if fails:
            (value if self.before else hidden).register_hook(self.fail)
        return value

    def fail(self, _: torch.Tensor) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")


def decay(parameters: Any, factor: float = 0.5) -> None:
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(factor)


class ZeroedElsewhere(RunsOut):
    """Another hook does it."""

    def optimizer_zero_grad(self, *_: Any) -> None:
        """Do nothing."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx % self.trainer.accumulate_grad_batches == 0:
            self.zero_grad()


class Decaying(RunsOut):
    """Half of each gradient goes on to the next window."""

    def optimizer_zero_grad(self, *_: Any) -> None:
        decay(self.parameters())


class ByTheOptimizer(RunsOut):
    """The optimizer keeps gradients of its own accord."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        class Keeping(torch.optim.SGD):
            def zero_grad(self, set_to_none: bool = True) -> None:
                for group in self.param_groups:
                    decay(group["params"], 0.1)

        return Keeping(self.parameters(), lr=0.1)


class BodyAlone(RunsOut):
    """Nobody zeroes the gradients of the last layer, and they count in the norm that is clipped."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.net[0].parameters(), lr=0.1)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        clip_grad_norm_(self.parameters(), 0.05)


def weights(module: RunsOut, *callbacks: Any) -> torch.Tensor:
    data = DataLoader(Samples(BATCH * FACTOR * WINDOWS), batch_size=BATCH)
    fit(data, *callbacks, CountAttempts(), module=module, accumulate_grad_batches=FACTOR, max_epochs=1)
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def ours(mode: str, micro_batch: int, verify: bool = False) -> AutoAccumulate:
    return AutoAccumulate(micro_batch_size=micro_batch, micro_batching=mode, verify=verify)


def close(found: torch.Tensor, program: Callable[..., RunsOut]) -> None:
    torch.testing.assert_close(found, weights(program(0)), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("program", [ZeroedElsewhere, Decaying, ByTheOptimizer])
@MODES
@pytest.mark.parametrize(("window", "later", "before"), [(0, 0, True), (0, 0, False), (0, 1, True), (2, 0, True)])
def test_gradients_that_zeroing_leaves_are_told(
    program: Callable[..., RunsOut], mode: str, micro_batch: int, window: int, later: int, before: bool
) -> None:
    """If there are none to leave, the window runs again with the same result."""
    callback = ours(mode, micro_batch)
    module = program(window * FACTOR * BATCH // micro_batch + later + 1, before)
    if before and not later and (window == 0 or program is ZeroedElsewhere):
        close(weights(module, callback), program)
        assert callback.oom_events == 1
    else:
        with pytest.raises(UserError, match="had changed gradients, in a way of its own to zero them, so it cannot"):
            weights(module, callback)


@MODES
@pytest.mark.parametrize("verify", [False, True])
def test_gradients_that_no_optimizer_zeroes_are_named(mode: str, micro_batch: int, verify: bool) -> None:
    """And never is the result called the same; it is if they had not come yet."""
    passes = FACTOR * BATCH // micro_batch
    for at in (1, 2, 2 * passes + 1):
        for before in (True, False):
            callback = ours(mode, micro_batch, verify)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                found = weights(BodyAlone(at, before), callback)
            assert callback.oom_events == 1
            (text,) = [str(each.message) for each in caught if "Memory ran out in" in str(each.message)]
            if at == 1 and before:
                close(found, BodyAlone)
                assert "as the failed attempt left it" not in text
            else:
                assert "(net.2.bias.grad, net.2.weight.grad) is as the failed attempt left it." in text
                assert "with the same result" not in text


class HalfZeroed(Decaying):
    """Memory runs out while gradients are zeroed for the ``at``-th time, before those of a layer."""

    def __init__(self, at: int, layer: int) -> None:
        super().__init__(0)
        self.failing, self.zeroings, self.layer = at, count(1), layer

    def optimizer_zero_grad(self, *_: Any) -> None:
        zeroing = next(self.zeroings)
        for place in (0, 2):
            if zeroing == self.failing and place == self.layer:
                self.fail(torch.zeros(()))
            decay(self.net[place].parameters())


class HalfFollowed(RunsOut):
    """Memory runs out in a hook before gradients are zeroed."""

    def __init__(self, at: int, _: int) -> None:
        super().__init__(0)
        self.failing, self.zeroings = at, count(1)
        self.teacher = torch.nn.Linear(2, 2).requires_grad_(False)

    def on_before_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        self.teacher.weight.data.mul_(0.9)
        if next(self.zeroings) == self.failing:
            self.fail(self.teacher.weight)


HALF = [(HalfZeroed, 0), (HalfZeroed, 2), (HalfFollowed, 0)]


@pytest.mark.parametrize(("program", "layer"), HALF)
def test_memory_that_runs_out_while_gradients_are_zeroed_ends_the_run(program: Any, layer: int) -> None:
    with pytest.raises(UserError, match="had changed what hooks around the zeroing of gradients change"):
        weights(program(3, layer), ours("loader", BATCH))
