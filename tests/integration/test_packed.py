"""Batches that pack their samples, as graphs are batched, hold no padding: windows are cut by size all the same."""

from typing import Any

import lightning.pytorch as pl
import torch
from reference import fit
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ga import AutoAccumulate

NODES = [3, 9, 1, 8, 2, 2, 1, 1]
GRAPHS = [
    torch.randn(count, 4, generator=torch.Generator().manual_seed(count + 10 * at)) for at, count in enumerate(NODES)
]


def pack(graphs: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Nodes of all graphs, and of which each is."""
    return torch.cat(graphs), torch.repeat_interleave(torch.tensor([len(graph) for graph in graphs]))


class Pooled(pl.LightningModule):
    """A mean over graphs of what their nodes add up to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.node, self.head = nn.Linear(4, 3).double(), nn.Linear(3, 1).double()

    def training_step(self, batch: Any, batch_idx: int = 0) -> Tensor:
        nodes, owner = batch
        sums = torch.zeros(int(owner[-1]) + 1, 3, dtype=torch.float64).index_add(
            0, owner, self.node(nodes.double()).tanh()
        )
        return self.head(sums).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_the_plan_claims_no_padding_of_packed_batches() -> None:
    """And the step is that of the whole window."""
    callback = AutoAccumulate(8, micro_batch_size=2, size_of=lambda data, index: len(data[index]))
    module, _ = fit(DataLoader(GRAPHS, batch_size=8, collate_fn=pack), callback, module=Pooled(), max_epochs=1)
    assert str(callback.plan).endswith(" samples, at most 18 as samples × the largest of them each")
    assert (callback.plan.padding, callback.plan.padding_as_drawn) == (None, None)
    assert callback.plan.factor > 1
    oracle = Pooled()
    oracle.training_step(pack(GRAPHS)).backward()
    for trained, parameter in zip(module.parameters(), oracle.parameters()):
        torch.testing.assert_close(trained, parameter - 0.1 * parameter.grad, rtol=1e-12, atol=1e-14)
