"""torch_geometric: graphs classified as in its tutorial, and nodes of many graphs labelled."""

from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch.nn import functional
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GCNConv, GINConv, global_mean_pool

from clients.program import Program, train

FEATURES, HIDDEN, CLASSES = 5, 16, 3


def graph(nodes: int, *, label_nodes: bool) -> Data:
    """A random graph with a label, or one for each node."""
    edges = torch.randint(nodes, (2, 3 * nodes))
    labels = torch.randint(CLASSES, (nodes if label_nodes else 1,))
    return Data(x=torch.randn(nodes, FEATURES), edge_index=edges, y=labels)


def loader(batch: int, *, label_nodes: bool) -> DataLoader:
    """Graphs of 4 to 12 nodes."""
    graphs = [graph(4 + 5 * i % 9, label_nodes=label_nodes) for i in range(20)]
    return DataLoader(graphs, batch_size=batch)


class Graphs(LightningModule):
    """The tutorial's graph classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = GCNConv(FEATURES, HIDDEN)
        self.conv2 = GCNConv(HIDDEN, HIDDEN)
        self.lin = torch.nn.Linear(HIDDEN, CLASSES)

    def training_step(self, data: Any, batch_idx: int) -> torch.Tensor:
        x = self.conv1(data.x, data.edge_index).relu()
        x = self.conv2(x, data.edge_index)
        out = self.lin(global_mean_pool(x, data.batch))
        loss = functional.cross_entropy(out, data.y)
        self.log("train_loss", loss, batch_size=data.num_graphs)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Nodes(LightningModule):
    """A mean over nodes: as many as a batch happens to hold."""

    def __init__(self) -> None:
        super().__init__()
        net = torch.nn.Sequential(torch.nn.Linear(FEATURES, HIDDEN), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, HIDDEN))
        self.conv = GINConv(net)
        self.lin = torch.nn.Linear(HIDDEN, CLASSES)

    def training_step(self, data: Any, batch_idx: int) -> torch.Tensor:
        return functional.cross_entropy(self.lin(self.conv(data.x, data.edge_index)), data.y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def fit(module: type[LightningModule], label_nodes: bool, batch: int, callbacks: Any) -> LightningModule:
    """Train on batches of graphs."""
    return train(module, partial(loader, batch, label_nodes=label_nodes), callbacks)


def count_nodes(batch: Any) -> int:
    """What the loss over nodes is a mean of."""
    return batch.num_nodes


def nodes_of(data: Any, index: int) -> int:
    """The size of a graph."""
    return data[index].num_nodes


PROGRAMS = [
    Program("torch_geometric", "graph classification", partial(fit, Graphs, False), 8),
    Program(
        "torch_geometric",
        "graph classification, by nodes",
        partial(fit, Graphs, False),
        8,
        settings={"size_of": nodes_of},
    ),
    Program(
        "torch_geometric", "graph classification, by size", partial(fit, Graphs, False), 8, settings={"size_of": "auto"}
    ),
    Program("torch_geometric", "node labels", partial(fit, Nodes, True), 8, causes=("weighted",)),
    Program(
        "torch_geometric", "node labels, counted", partial(fit, Nodes, True), 8, settings={"normalize": count_nodes}
    ),
    Program(
        "torch_geometric",
        "node labels, by size",
        partial(fit, Nodes, True),
        8,
        settings={"normalize": count_nodes, "size_of": "auto"},
    ),
]
