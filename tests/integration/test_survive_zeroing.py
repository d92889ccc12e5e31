"""Memory runs out where a window begins, and gradients are not zeroed there as PyTorch does it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from reference import Regression, Samples, fit
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader

from lightning_ga import AutoAccumulate
from lightning_ga.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore:Memory ran out in:UserWarning")
BATCH, FACTOR, WINDOWS = 8, 2, 4


class RunsOut(Regression):
    """Memory runs out in a backward pass, when the gradients of the last layer are there, or before it.

    Args:
        at: The attempt, from 1; 0 for none.
        before: Whether that is before the backward pass, when gradients have been zeroed.
    """

    def __init__(self, at: int, before: bool = False) -> None:
        super().__init__()
        self.at, self.before, self.attempts = at, before, 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.attempts += 1
        hidden = self.net[1](self.net[0](batch[0]))
        if self.attempts == self.at and not self.before:
            hidden.register_hook(self.fail)
        return torch.nn.functional.mse_loss(self.net[2](hidden), batch[1])

    def on_before_backward(self, loss: torch.Tensor) -> None:
        if self.attempts == self.at and self.before:
            self.fail(loss)

    def fail(self, _: torch.Tensor) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")


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
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)


class ByTheOptimizer(RunsOut):
    """The optimizer keeps gradients of its own accord."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        class Keeping(torch.optim.SGD):
            def zero_grad(self, set_to_none: bool = True) -> None:
                for group in self.param_groups:
                    for parameter in group["params"]:
                        if parameter.grad is not None:
                            parameter.grad.mul_(0.1)

        return Keeping(self.parameters(), lr=0.1)


class ByOneOptimizer(RunsOut):
    """One optimizer alone has a way of its own."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        vars(optimizer)["zero_grad"] = lambda set_to_none=True: Decaying.optimizer_zero_grad(self)
        return optimizer


class BodyAlone(RunsOut):
    """Nobody zeroes the gradients of the last layer, and they count in the norm that is clipped."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.net[0].parameters(), lr=0.1)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        clip_grad_norm_(self.parameters(), 0.05)


def weights(module: RunsOut, *callbacks: Any) -> torch.Tensor:
    data = DataLoader(Samples(BATCH * FACTOR * WINDOWS), batch_size=BATCH)
    fit(data, *callbacks, module=module, accumulate_grad_batches=FACTOR)
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


@pytest.mark.parametrize("program", [ZeroedElsewhere, Decaying, ByTheOptimizer, ByOneOptimizer, BodyAlone])
@pytest.mark.parametrize(("mode", "micro_batch"), [("loader", BATCH), ("step", BATCH), ("step", BATCH // 2)])
@pytest.mark.parametrize("window", [0, 2])
@pytest.mark.parametrize("before", [False, True])
def test_a_retry_begins_with_the_gradients_that_were_left(
    program: Callable[..., RunsOut], mode: Any, micro_batch: int, window: int, before: bool
) -> None:
    """Gradients are zeroed once, also if memory runs out between that and the backward pass."""
    passes = window * FACTOR * BATCH // micro_batch
    ours = AutoAccumulate(micro_batch_size=micro_batch, micro_batching=mode, verify=False)
    torch.testing.assert_close(weights(program(passes + 1, before), ours), weights(program(0)), rtol=1e-12, atol=1e-14)
    assert ours.oom_events == 1


class HalfZeroed(Decaying):
    """Memory runs out while gradients are zeroed.

    Args:
        at: The attempt, from 1; 0 for none.
        layer: The layer whose gradients are next.
    """

    def __init__(self, at: int, layer: int) -> None:
        super().__init__(0)
        self.fails_at, self.layer = at, layer

    def optimizer_zero_grad(self, *_: Any) -> None:
        for place in (0, 2):
            if self.attempts == self.fails_at and place == self.layer:
                raise torch.OutOfMemoryError("CUDA out of memory")
            for parameter in self.net[place].parameters():
                parameter.grad = None if parameter.grad is None else parameter.grad * 0.5


def test_memory_runs_out_while_gradients_are_zeroed() -> None:
    """Before any has changed, it is done again; after, nobody can tell what they were."""
    attempt = 2 * FACTOR + 1
    ours = AutoAccumulate(micro_batch_size=BATCH, micro_batching="loader", verify=False)
    found = weights(HalfZeroed(attempt, 0), ours)
    torch.testing.assert_close(found, weights(Decaying(0)), rtol=1e-12, atol=1e-14)
    assert ours.oom_events == 1
    ours = AutoAccumulate(micro_batch_size=BATCH, micro_batching="loader", verify=False)
    with pytest.raises(UserError, match="gradients in part"):
        weights(HalfZeroed(attempt, 2), ours)


class UnfrozenLate(BodyAlone):
    """The last layer is trained from the second window on."""

    def on_fit_start(self) -> None:
        self.net[2].requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.net[2].requires_grad_(batch_idx >= FACTOR)


def test_gradients_that_came_within_an_epoch_are_told() -> None:
    """Nothing zeroes them, and what they were is not known any more."""
    ours = AutoAccumulate(micro_batch_size=BATCH, micro_batching="loader", verify=False)
    with pytest.raises(UserError, match="no optimizer zeroes"):
        weights(UnfrozenLate(2 * FACTOR + 1), ours)
