"""Each thing that a training step may change is put back, bit for bit and as the same object."""

import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ga.snapshot.trial_isolation import ModuleState, SwappedAttributes
from lightning_ga.testing import out_of_memory_at


def trial(module: nn.Module, change: Callable[[Any], None]) -> None:
    """Change a module as a probe does: on copies of its plain state, twice; then put everything back."""
    state = ModuleState([module], [], shared=[])
    for _ in range(2):
        state.restore()
        state.attributes.swap_in_copies()
        change(module)
    state.restore()


class Unsized:
    """Has no length yet."""

    added = 0

    def __len__(self) -> int:
        raise NotImplementedError("not built yet")


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
        self.loaders = CombinedLoader([self.data])  # its length raises until it is iterated
        self.indices = range(10**30)
        self.unsized = Unsized()


def everything(module: Eventful) -> list[str]:
    """All values, as text that can be compared."""
    generators = module.generator.get_state().tolist(), module.numpy_generator.bit_generator.state
    kept = (
        module.count,
        module.unsized.added,
        module.history,
        module.nested,
        module.seen,
        module.array,
        module.cached,
        module.training,
    )
    tensors = [each.tolist() for each in (*module.parameters(), *module.buffers())]
    parts = *generators, module.python_generator.getstate(), *kept, *tensors
    return [str(part) for part in parts]


def disturb(module: Eventful) -> None:
    module.net(torch.randn(4, 2))
    module.count += 1
    module.unsized.added += 1
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
    plain = SwappedAttributes([])
    plain.add_modules([Eventful()])
    with out_of_memory_at(1), pytest.raises(torch.OutOfMemoryError):
        plain.swap_in_copies()


class Preconditioner:
    """Second moments, and how many there were."""

    def __init__(self) -> None:
        self.moments = torch.zeros(2)
        self.count = 0


def test_objects_in_the_state_of_an_optimizer_are_undone() -> None:
    """Their tensors in place, so that the optimizer's state holds the same objects as before."""
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight])
    own = optimizer.state[weight]["own"] = Preconditioner()
    state = ModuleState([nn.ParameterList([weight])], [optimizer], shared=[], steps=True)
    own.moments += 1
    own.count += 1
    state.restore()
    assert optimizer.state[weight] == {"own": own}
    assert (own.moments.tolist(), own.count) == ([0, 0], 0)
