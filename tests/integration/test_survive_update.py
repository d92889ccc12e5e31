"""Memory runs out at every operation of an optimizer's update: the same weights, or an error that says so."""

import weakref
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import timm.optim
import torch
from faults import ArmUpdate, Faults
from reference import Regression, Samples, fit
from torch.utils.data import DataLoader

from lightning_ga import AutoAccumulate, UserError

pytestmark = pytest.mark.filterwarnings("ignore:Memory ran out in:UserWarning")

Factory = Callable[[Any], torch.optim.Optimizer]


class OldStyle(torch.optim.Optimizer):
    """Writes by ``.data``, which raises no version."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        value = None
        if closure is not None:
            with torch.enable_grad():
                value = closure()
        for group in self.param_groups:
            self.update(group)
        return value

    def update(self, group: dict[str, Any]) -> None:
        for parameter in group["params"]:
            gradient = parameter.grad.data
            gradient.add_(parameter.data, alpha=0.1)
            parameter.data.add_(gradient, alpha=-group["lr"])


class Counting(OldStyle):
    """Counts in Python before it allocates, and decays the gradient in place."""

    def update(self, group: dict[str, Any]) -> None:
        group["steps"] = group.get("steps", 0) + 1
        for parameter in group["params"]:
            state = self.state[parameter]
            state["steps"] = state.get("steps", 0) + 1
            moved = parameter * (0.1 / state["steps"] / group["steps"])
            parameter.grad.add_(moved)
            parameter.sub_(parameter.grad, alpha=group["lr"])


def hooked(weights: Any) -> torch.optim.Optimizer:
    """Decays matrices by a hook before each step."""
    optimizer = torch.optim.SGD(weights, lr=0.1, momentum=0.9, foreach=False)

    @torch.no_grad()
    def decay(*_: Any) -> None:
        for weight in optimizer.param_groups[0]["params"]:
            if weight.dim() > 1:
                weight.mul_(0.9)

    optimizer.register_step_pre_hook(decay)
    return optimizer


class Chosen(Regression):
    """Its own optimizer, a warm-up after each step, and a teacher that follows after it."""

    def __init__(self, factory: Factory, faults: Faults) -> None:
        super().__init__()
        self.factory, self.faults = factory, faults
        self.register_buffer("follower", torch.zeros(()).double())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.factory(self.net.parameters())

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Gradients are not looked at: faults are armed."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        self.faults.armed = False
        self.follower.lerp_(next(self.net.parameters()).detach().sum(), 0.1)
        for group in optimizer.param_groups:
            group["lr"] *= 0.9


def train(factory: Factory, at: int = 0) -> tuple[Any, Any, int]:
    faults = Faults(*([at] if at else []))
    module = Chosen(factory, faults)
    callback = AutoAccumulate(16, micro_batch_size=8, verify=False)
    with faults:
        fit(DataLoader(Samples(37), batch_size=8), callback, ArmUpdate(faults), module=module)
    return module, callback, faults.count


def ended(factory: Factory, at: int) -> tuple[Any, Any] | None:
    """What came of a run; ``None`` if it ended with the error that says why."""
    try:
        return train(factory, at)[:2]
    except UserError as error:
        if "inside the optimizer's step" not in str(error):
            raise
        return None


@pytest.mark.parametrize(
    ("factory", "survives"),
    [
        (lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9, foreach=False), True),
        (lambda weights: torch.optim.Adam(weights, lr=0.05, foreach=False), True),
        (lambda weights: torch.optim.AdamW(weights, lr=0.05, foreach=True), False),  # a mode hides its changes here
        (hooked, True),
        (Counting, True),
        (OldStyle, False),
        (lambda weights: timm.optim.create_optimizer_v2(weights, "lamb", lr=0.05, weight_decay=0.1), None),
        (lambda weights: timm.optim.create_optimizer_v2(weights, "madgrad", lr=0.05, weight_decay=0.1), None),
        (lambda weights: timm.optim.create_optimizer_v2(weights, "lars", lr=0.05, weight_decay=0.1), None),
    ],
    ids=["SGD", "Adam", "AdamW", "hooked", "counting", "old style", "LAMB", "MADGRAD", "LARS"],
)
def test_an_update_is_whole_or_said_to_be_broken(factory: Factory, survives: bool | None) -> None:
    whole, _, operations = train(factory)
    runs = [ended(factory, at) for at in range(1, operations, 1 + operations // 12)]
    for again, callback in [run for run in runs if run is not None]:
        assert callback.oom_events == 1
        assert again.trainer.global_step == whole.trainer.global_step == 6
        assert again.trainer.optimizers[0].param_groups[0]["lr"] == whole.trainer.optimizers[0].param_groups[0]["lr"]
        for name, value in whole.state_dict().items():
            torch.testing.assert_close(again.state_dict()[name], value, rtol=1e-12, atol=1e-14)
    if survives is not None:
        assert any(run is not None for run in runs) == survives


def test_a_fused_update_that_has_begun_is_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It raises no version of what it writes: memory runs out before the second group's first update."""

    def fused(weights: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW([{"params": [weight]} for weight in weights], lr=0.05, fused=True)

    faults = Faults()
    made: list[int] = []
    make = torch.zeros_like

    def failing(tensor: torch.Tensor, **settings: Any) -> torch.Tensor:
        made.extend([tensor.numel()] * faults.armed)
        if len(made) == 3 and faults.armed:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return make(tensor, **settings)

    module, callback = Chosen(fused, faults), AutoAccumulate(16, micro_batch_size=8, verify=False)
    monkeypatch.setattr(torch, "zeros_like", failing)
    with pytest.raises(UserError, match="after it had changed some parameters"):
        fit(DataLoader(Samples(37), batch_size=8), callback, ArmUpdate(faults), module=module)


def test_a_fused_update_that_a_scaler_unscales_is_run_again_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scaler leaves it the scale in attributes of the optimizer, after what precedes an update is done."""

    def fused(weights: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(weights, lr=0.05, fused=True)

    def ran(fails: bool) -> Regression:
        faults, make = Faults(), torch.zeros_like
        left = [fails]

        def failing(tensor: torch.Tensor, **settings: Any) -> torch.Tensor:
            if faults.armed and left[0]:
                left[0] = False
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
            return make(tensor, **settings)

        module, callback = Chosen(fused, faults), AutoAccumulate(16, micro_batch_size=8, verify=False)
        module.float()
        plugin = pl.plugins.MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**10))
        loader = DataLoader(Samples(37, torch.float32), batch_size=8)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "zeros_like", failing)
            fit(loader, callback, ArmUpdate(faults), module=module, plugins=plugin)
        assert callback.oom_events == fails
        return module

    whole, again = ran(False).state_dict(), ran(True).state_dict()
    assert all(torch.equal(value, again[name]) for name, value in whole.items())


def test_an_update_that_runs_out_twice_ends_with_a_sentence() -> None:
    """Where nothing is left that could be freed."""

    def short(weights: Any) -> torch.optim.Optimizer:
        return Short(weights, lr=0.1, foreach=False)

    with pytest.raises(UserError, match="inside the optimizer's step .* and again when all that can be freed was free"):
        train(short)


class Short(torch.optim.SGD):
    """Never has the memory for its second update."""

    updates = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        value = None
        if closure is not None:
            with torch.enable_grad():
                value = closure()
        self.updates += 1
        if self.updates > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        super().step()
        return value


def test_the_step_of_an_optimizer_is_its_own_again_after_training() -> None:
    """Where a schedule has wrapped it, the wrap stays."""
    for name in ("plain", "scheduled"):
        made: list[torch.optim.Optimizer] = []

        def factory(weights: Any, name: str = name, made: list[Any] = made) -> torch.optim.Optimizer:
            made.append(torch.optim.SGD(weights, lr=0.1))
            if name == "scheduled":
                torch.optim.lr_scheduler.StepLR(made[0], 1)
            return made[0]

        train(factory)
        assert ("step" in vars(made[0])) == (name == "scheduled")


class Skipped(pl.Callback):
    """Sees which gradients of a window are alive in the next one, once these are zeroed."""

    def __init__(self) -> None:
        self.gradients: list[weakref.ref[torch.Tensor]] = []
        self.alive: list[int] = []

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.gradients = [weakref.ref(weight.grad) for weight in module.parameters() if weight.grad is not None]

    def on_before_backward(self, trainer: Any, module: Any, loss: Any) -> None:
        if trainer.fit_loop.epoch_loop.batch_idx % trainer.accumulate_grad_batches == 0:
            optimizer = trainer.optimizers[0]
            optimizer.zero_grad()
            self.alive.append(sum(gradient() is not None for gradient in self.gradients))


def test_a_step_that_the_scaler_skips_leaves_no_gradients_behind() -> None:
    """Else the next window would hold them beside its own."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    skipped = Skipped()
    module, trainer = fit(
        DataLoader(Samples(32, torch.float32), batch_size=8),
        AutoAccumulate(micro_batch_size=4),
        skipped,
        module=Regression(dtype=torch.float32),
        max_epochs=1,
        plugins=pl.plugins.MixedPrecision("16-mixed", "cpu", scaler),
    )
    assert scaler.get_scale() < 2.0**127
    assert len(skipped.alive) > 1
    assert not any(skipped.alive)


@pytest.mark.parametrize("refused", [torch.float32, torch.int32])
def test_a_scaler_that_was_half_made_is_made_again(refused: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory runs out at one of the two numbers that a gradient scaler makes for its first loss."""

    def ran(fails: bool) -> dict[str, torch.Tensor]:
        make, left = torch.full, [fails]

        def failing(*arguments: Any, **settings: Any) -> torch.Tensor:
            if left[0] and settings.get("dtype") == refused:
                left[0] = False
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 512 bytes.")
            return make(*arguments, **settings)

        ours, module = AutoAccumulate(16, micro_batch_size=8, verify=False), Regression(dtype=torch.float32)
        plugin = pl.plugins.MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**10))
        with monkeypatch.context() as patch:
            patch.setattr(torch, "full", failing)
            fit(DataLoader(Samples(37, torch.float32), batch_size=8), ours, module=module, plugins=plugin)
        assert ours.oom_events == fails
        return module.state_dict()

    whole, again = ran(False), ran(True)
    for name, value in whole.items():
        torch.testing.assert_close(again[name], value, rtol=1e-2, atol=1e-3)  # sums of halves in half precision
