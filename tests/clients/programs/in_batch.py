"""Losses that compare the samples of a batch, each in its project's own code, with ``whole=``.

lightly's SimCLR, Barlow Twins and CLIP-like pairs; NT-Xent of pytorch-metric-learning; MultipleNegativesRankingLoss of
sentence-transformers in a LightningModule.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from lightly.loss import BarlowTwinsLoss, NTXentLoss
from lightly.models.modules import BarlowTwinsProjectionHead
from lightning.pytorch import LightningModule
from pytorch_metric_learning.losses import NTXentLoss as MetricNTXent
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from clients.program import Program, train
from clients.programs import lightly
from clients.programs.lightly import without_batch_norm as group_norm

WORDS, LENGTH = 30, 16


class BarlowTwins(lightly.SimCLR):
    """Cross-correlation of the outputs over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.projection_head = BarlowTwinsProjectionHead(lightly.FEATURES, lightly.FEATURES, 16)
        self.criterion = BarlowTwinsLoss()


class Pairs(lightly.SimCLR):
    """As CLIP: an encoder for each side of a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.other = lightly.backbone()
        self.criterion = NTXentLoss(temperature=0.1)

    def training_step(self, batch: Any, batch_index: int) -> torch.Tensor:
        x0, x1 = batch[0]
        return self.criterion(self.backbone(x0).flatten(1), self.other(x1).flatten(1))


class MetricLearning(LightningModule):
    """Embeddings of labelled samples; all of one label are positives."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 8))
        self.criterion = MetricNTXent(temperature=0.2)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.criterion(self.encoder(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class WordEncoder(nn.Module):
    """A small module in the place of a downloaded transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(WORDS, 64), nn.Linear(64, 8)

    def forward(self, features: dict[str, Any], **_: Any) -> dict[str, Any]:
        features["sentence_embedding"] = self.out(self.embedding(features["input_ids"]).mean(1))
        return features


class Sentences(LightningModule):
    """Questions and answers; the answers of others are negatives."""

    def __init__(self) -> None:
        super().__init__()
        self.model = SentenceTransformer(modules=[WordEncoder()], device="cpu")
        self.criterion = MultipleNegativesRankingLoss(self.model)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.criterion([{"input_ids": batch[0]}, {"input_ids": batch[1]}], None)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=0.1)


def tables(module: Callable[[], LightningModule], batch: int, callbacks: Sequence[Any]) -> LightningModule:
    """Train on numbers and labels."""
    data = TensorDataset(torch.randn(32, 12, generator=torch.Generator().manual_seed(0)), torch.arange(32) % 4)
    return train(module, partial(DataLoader, data, batch_size=batch), callbacks)


def sentences(module: Callable[[], LightningModule], batch: int, callbacks: Sequence[Any]) -> LightningModule:
    """Train on pairs of sentences."""
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(*(torch.randint(WORDS, (32, LENGTH), generator=generator) for _ in range(2)))
    return train(module, partial(DataLoader, data, batch_size=batch), callbacks)


def whole(client: str, name: str, fit: Any, module: Any, *names: str) -> Program:
    return Program(client, f"{name}, whole={names}", partial(fit, module), 8, settings={"whole": names})


PROGRAMS = [
    whole("lightly", "SimCLR", lightly.fit, partial(group_norm, lightly.SimCLR), "backbone", "projection_head"),
    whole("lightly", "Barlow Twins", lightly.fit, partial(group_norm, BarlowTwins), "backbone", "projection_head"),
    whole("lightly", "CLIP-like", lightly.fit, partial(group_norm, Pairs), "backbone", "other"),
    whole("pytorch-metric-learning", "NT-Xent", tables, MetricLearning, "encoder"),
    whole("sentence-transformers", "MultipleNegativesRankingLoss", sentences, Sentences, "model"),
]
