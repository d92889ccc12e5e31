"""Parameters in half precision: their gradients are summed in float32 and rounded once."""

import copy

import pytest
import torch
from lightning.pytorch import LightningModule
from reference import quiet_trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ga import AutoAccumulate
from lightning_ga.compat import gradient_dtype
from lightning_ga.errors import ExactnessWarning
from lightning_ga.testing import limit_memory

sums_in_float32 = pytest.mark.skipif(not gradient_dtype.has_grad_dtype(), reason="torch without grad_dtype")


class Regressor(LightningModule):
    """Notes the gradient that the optimizer is given."""

    def __init__(self, optimizer=torch.optim.SGD, width=16):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 1))
        self.make_optimizer = optimizer
        self.seen = []

    def training_step(self, batch, _):
        inputs, targets = (part.to(self.dtype) for part in batch)
        return nn.functional.mse_loss(self.net(inputs).float(), targets.float())

    def configure_optimizers(self):
        optimizer = self.make_optimizer(self.parameters(), lr=1e-3)
        optimizer.register_step_post_hook(lambda *_: self.seen.append([p.grad.clone() for p in self.parameters()]))
        return optimizer


def data(samples):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(samples, 8, generator=generator)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True) + 2.0)


def fit(module, samples, *, batch_size=None, **settings):
    callback = AutoAccumulate(verify=False, cache=False, **settings)
    trainer = quiet_trainer(callback, precision="bf16-true", max_epochs=1)
    trainer.fit(module, DataLoader(data(samples), batch_size=batch_size or samples))
    return callback


def in_double(module, samples):
    """The gradient of the whole batch of the same rounded weights and samples, in float64."""
    twin = copy.deepcopy(module).to(torch.bfloat16).double()
    inputs, targets = (part.to(torch.bfloat16).double() for part in data(samples).tensors)
    twin.zero_grad()
    nn.functional.mse_loss(twin.net(inputs), targets).backward()
    return [parameter.grad for parameter in twin.parameters()]


def error(gradients, wanted):
    apart = sum(float((g.double() - w).square().sum()) for g, w in zip(gradients, wanted))
    return (apart / sum(float(w.square().sum()) for w in wanted)) ** 0.5


@sums_in_float32
def test_sums_of_many_micro_batches_lose_nothing():
    module = Regressor()
    wanted = in_double(module, 512)
    fit(module, 512, micro_batch_size=2)
    assert module.seen[0][0].dtype == torch.bfloat16
    assert error(module.seen[0], wanted) < 6e-3


@sums_in_float32
@pytest.mark.parametrize(
    ("optimizer", "micro_batching"),
    [(torch.optim.SGD, "step"), (torch.optim.AdamW, "loader"), (torch.optim.LBFGS, "step")],
)
def test_optimizers_get_gradients_of_the_type_of_their_weights(optimizer, micro_batching):
    """Fused, listed and evaluating optimizers alike; after the fit gradients have that type again."""
    module = Regressor(optimizer)
    fit(module, 24, batch_size=12, effective_batch_size=12, micro_batch_size=4, micro_batching=micro_batching)
    assert len(module.seen) == 2
    assert all(gradient.dtype == torch.bfloat16 for seen in module.seen for gradient in seen)
    for parameter in module.parameters():
        assert parameter.grad is None or parameter.grad.dtype == parameter.dtype
        assert parameter.grad_dtype == parameter.dtype


def test_an_older_torch_rounds_sums_and_says_so_once(monkeypatch):
    """Without ``Tensor.grad_dtype`` training goes on as without the callback, and one sentence says what is lost."""
    monkeypatch.setattr(gradient_dtype, "has_grad_dtype", lambda: False)
    module = Regressor()
    wanted = in_double(module, 1024)
    with pytest.warns(ExactnessWarning, match="newer torch .* sums them in float32") as warned:
        fit(module, 1024, micro_batch_size=2)
    assert len([each for each in warned if "float32" in str(each.message)]) == 1
    assert error(module.seen[0], wanted) > 2e-2
    fit(Regressor(), 24, batch_size=8)  # nothing is summed, so nothing is told


@sums_in_float32
def test_pieces_after_an_error_are_summed_in_float32():
    """A batch that runs out of memory is run in pieces, and the sum of these is rounded once."""
    wide = 2048
    module = Regressor(width=wide)
    wanted = in_double(module, 512)
    with limit_memory("1600KiB"), pytest.warns(UserWarning, match="ran out"):
        callback = fit(module, 512, micro_batch_size=512)
    assert callback.oom_events
    assert error(module.seen[0], wanted) < 6e-3


@sums_in_float32
def test_the_probe_counts_sums_in_float32():
    """The limit leaves room for them: at it a window of many micro-batches fits, to the byte."""
    module = Regressor(torch.optim.AdamW, width=4096)
    budget = 2 * 1024 * 1024
    with limit_memory(budget):
        callback = fit(module, 4096, memory_budget=budget)
    assert callback.plan.factor > 1
    assert callback.oom_events == 0
    assert callback.probe.peak_bytes <= budget
