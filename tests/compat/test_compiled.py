"""Compiled modules have one graph for all micro-batches; a backend that compiles nothing counts them."""

from typing import Any

import pytest
import torch
from reference import Regression, Samples, fit
from torch.utils.data import DataLoader

from lightning_ga import AutoAccumulate
from lightning_ga.compat.compiled import CompiledModules


class Counter:
    """A backend that runs graphs as they are."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, examples: Any) -> Any:
        self.graphs += 1
        return graph.forward


def compiled(way: str, counter: Counter, **settings: Any) -> Regression:
    module = Regression()
    if way == "wrapped":
        module.net = torch.compile(module.net, backend=counter, **settings)
    else:
        module.net.compile(backend=counter, **settings)
    return module


@pytest.fixture(autouse=True)
def _forget_graphs() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("mode", ["loader", "step"])
@pytest.mark.parametrize("way", ["wrapped", "in place"])
def test_micro_batches_of_all_sizes_have_one_graph(way: str, mode: str) -> None:
    """Windows of 5 + 5 + 4 samples, and a last one of 4 + 4."""
    counter = Counter()
    ours = AutoAccumulate(micro_batch_size=5, micro_batching=mode, verify=False)
    fit(DataLoader(Samples(36), batch_size=14), ours, module=compiled(way, counter))
    assert counter.graphs == 1


@pytest.mark.parametrize("way", ["wrapped", "in place"])
def test_axes_stay_static_if_that_was_asked_for(way: str) -> None:
    """``dynamic=False`` compiles for each size."""
    counter = Counter()
    ours = AutoAccumulate(micro_batch_size=5, verify=False)
    fit(DataLoader(Samples(28), batch_size=14), ours, module=compiled(way, counter, dynamic=False), max_epochs=1)
    assert counter.graphs == 2


@pytest.mark.parametrize(
    "settings", [{"mode": "reduce-overhead"}, {"options": {"triton.cudagraphs": True}}, {"dynamic": True}]
)
@pytest.mark.parametrize("in_place", [False, True])
def test_modules_whose_graphs_are_recorded_are_not_marked(settings: dict[str, Any], in_place: bool) -> None:
    """CUDA graphs are recorded for each size; with ``dynamic=True`` PyTorch marks all axes itself."""

    class Fitting:
        lightning_module = Regression()

    net = Fitting.lightning_module.net
    if in_place:
        net.compile(**settings)
    else:
        Fitting.lightning_module.net = torch.compile(net, **settings)
    batch = torch.ones(4, 5)
    CompiledModules(Fitting).mark([batch], 4)
    assert not hasattr(batch, "_dynamo_weak_dynamic_indices")


def test_a_module_that_lightning_unwraps_is_marked() -> None:
    counter = Counter()
    ours = AutoAccumulate(micro_batch_size=5, verify=False)
    fit(DataLoader(Samples(28), batch_size=14), ours, module=torch.compile(Plain(), backend=counter), max_epochs=1)
    assert counter.graphs == 1


class Plain(Regression):
    """Keeps nothing in its step, so that the step has one graph."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Keep nothing."""
