"""Each thing that a training step may change is put back, bit for bit and as the same object."""

import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ga.snapshot.state import OptimizerState, SwappedState, TensorValues
from lightning_ga.testing import out_of_memory_at


def own_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    return iter([*module.parameters(), *module.buffers()])


def trial(module: nn.Module, change: Callable[[Any], None], shared: tuple[object, ...] = ()) -> None:
    """Change a module as a probe does: on copies of its plain state, twice; then put everything back."""
    values, plain = TensorValues(own_tensors(module)), SwappedState(list(module.modules()), list(shared))
    for _ in range(2):
        plain.restore()
        values.restore()
        plain.swap_in_copies()
        change(module)
    plain.restore()
    values.restore()


def test_tensors_are_restored_in_place_and_bit_for_bit() -> None:
    """NaN, -0.0 and denormal numbers too; parameters stay the same objects in the same memory."""
    values = torch.tensor([1.0, float("nan"), -0.0, 1e-45, float("inf")])
    tensor, whole, half = values.clone(), torch.arange(3), values.to(torch.bfloat16)
    kept = TensorValues(iter([tensor, whole, half]))
    place, bits = tensor.data_ptr(), tensor.view(torch.int32).clone()
    for one in (tensor, whole, half):
        one.zero_()
    kept.restore()
    assert tensor.data_ptr() == place
    assert torch.equal(tensor.view(torch.int32), bits)
    assert torch.equal(whole, torch.arange(3))
    assert torch.equal(half.view(torch.int16), values.to(torch.bfloat16).view(torch.int16))


class Eventful(nn.Module):
    """Holds whatever modules hold."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        self.register_buffer("ema", torch.zeros(2))
        self.count = 0
        self.history: list[Any] = [1]
        self.nested = {"losses": [torch.tensor(1.0)], "best": {"loss": 2.0}}
        self.seen = {1, 2}
        self.array = np.zeros(3)
        self.generator = torch.Generator().manual_seed(3)
        self.numpy_generator = np.random.default_rng(3)
        self.python_generator = random.Random(3)
        self.cached = torch.ones(2)
        self.alias = [self.net[0].weight]
        self.lock = threading.Lock()
        self.data = DataLoader(TensorDataset(torch.zeros(4)))


def everything(module: Eventful) -> list[str]:
    """All values, as text that can be compared."""
    generators = module.generator.get_state().tolist(), module.numpy_generator.bit_generator.state
    kept = module.count, module.history, module.nested, module.seen, module.array, module.cached, module.training
    parts = *generators, module.python_generator.getstate(), *kept, *(each.tolist() for each in own_tensors(module))
    return [str(part) for part in parts]


def disturb(module: Eventful) -> None:
    module.net(torch.randn(4, 2))
    module.count += 1
    module.history.append(2)
    module.nested["losses"].append(torch.tensor(3.0))
    module.nested["losses"][0].add_(1)
    module.nested["best"]["loss"] = 0.0
    module.seen.add(9)
    module.array += 1
    torch.rand(3, generator=module.generator)
    module.numpy_generator.random(3)
    module.python_generator.random()
    module.cached.add_(1)
    module.eval()
    module.ema.add_(1)
    module.newcomer = 7
    module.net[0].newcomer = 8
    del module.net[1].momentum
    module.net[1].momentum_ = 0.5
    with torch.no_grad():
        module.net[0].weight.mul_(2)


def test_whatever_a_step_does_to_a_module_is_undone() -> None:
    """Counters, containers within containers, arrays, generators, cached tensors, mode, new and deleted attributes."""
    module = Eventful()
    before, objects, names = everything(module), dict(vars(module)), set(vars(module.net[0]))
    first = vars(module)["nested"]["losses"][0]
    trial(module, disturb)
    assert everything(module) == before
    assert vars(module).keys() == objects.keys()
    assert all(vars(module)[name] is value for name, value in objects.items())
    assert module.nested["losses"][0] is first
    assert set(vars(module.net[0])) == names
    assert module.net[1].momentum == 0.1
    assert not hasattr(module.net[1], "momentum_")


def test_a_trial_never_works_on_the_original_state_because_memory_ran_out_for_a_copy() -> None:
    plain = SwappedState([Eventful()], [])
    with out_of_memory_at(1), pytest.raises(torch.OutOfMemoryError):
        plain.swap_in_copies()


def snapshot_of(value: Any) -> Any:
    """Optimizer state as data that can be compared exactly."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {(id(key) if isinstance(key, torch.Tensor) else key): snapshot_of(entry) for key, entry in value.items()}
    return [snapshot_of(entry) for entry in value] if isinstance(value, (list, tuple)) else value


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "adamw, rate in a tensor": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1), foreach=False),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, history_size=3, max_iter=2),
}


def train(net: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    inputs = torch.randn(6, 3, generator=torch.Generator().manual_seed(seed))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = net(inputs).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_goes_on_as_without_the_trial(kind: str, steps: int) -> None:
    """State that a trial created is gone, state that there was is as it was; the same steps follow."""
    results = []
    for probed in (True, False):
        net = nn.Linear(3, 2)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.fill_(0.3)
        optimizer = OPTIMIZERS[kind](net.parameters())
        for seed in range(steps):
            train(net, optimizer, seed)
        if probed:
            before = snapshot_of(vars(optimizer))
            tensors = {id(v) for state in optimizer.state.values() for v in state.values() if torch.is_tensor(v)}
            values, kept = TensorValues(own_tensors(net)), OptimizerState(optimizer)
            for _ in range(2):
                train(net, optimizer, 50)
                train(net, optimizer, 51)
                values.restore()
                kept.restore()
                assert snapshot_of(vars(optimizer)) == before
            assert tensors == {
                id(v) for state in optimizer.state.values() for v in state.values() if torch.is_tensor(v)
            }
        train(net, optimizer, 99)
        train(net, optimizer, 100)
        results.append(torch.cat([parameter.detach().flatten() for parameter in net.parameters()]))
    assert torch.equal(*results)
