"""Contrastive training on real Trainers and ranks; the oracle is the same training in a plain loop, batch whole."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from reference import StreamOf
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather
from torch.nn.functional import cross_entropy, normalize
from torch.utils.data import DataLoader, TensorDataset

from lightning_ga import AutoAccumulate
from lightning_ga.testing import limit_memory

FEATURES, WIDTH = 16, 128
FAILED: set[tuple[int, int]] = set()  # not of the module, whose state a retry puts back


class MixesSamples(nn.Module):
    """Its output for a sample depends on the others."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(FEATURES, 8)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.net(inputs)
        return outputs - outputs.mean(0)


def encoder(kind: str) -> nn.Module:
    """The encoder of a kind of model."""
    if kind == "mixes":
        return MixesSamples()
    norm = [nn.BatchNorm1d(WIDTH)] if kind == "batch norm" else []
    layers = [nn.Linear(FEATURES, WIDTH), *norm, nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 8)]
    return nn.Sequential(*layers)


class Contrastive(pl.LightningModule):
    """Two views of each sample through one encoder, ``joined`` or by turns; all ranks ``gather`` the outputs."""

    def __init__(self, kind: str = "", *, joined: bool = False, gathers: bool = False, fails_at: Any = ()) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.head = encoder(kind), nn.Linear(8, 8)
        self.temperature = nn.Parameter(torch.tensor(0.5))
        self.double()
        self.joined, self.gathers, self.fails_at = joined, gathers, fails_at
        self.gradients: list[np.ndarray] = []
        self.validated: list[Tensor] = []
        self.inputs: list[Tensor] = []
        self.steps = 0

    def loss(self, inputs: Tensor) -> Tensor:
        if self.joined:
            one, other = self.head(self.encoder(torch.cat([inputs, inputs.tanh()]))).chunk(2)
        else:
            one, other = self.head(self.encoder(inputs)), self.head(self.encoder(inputs.tanh()))
        if self.gathers and dist.is_initialized() and dist.get_world_size() > 1:
            one, other = (torch.cat(all_gather(each)) for each in (one, other))
        logits = self.temperature.exp() * normalize(one) @ normalize(other).T
        return cross_entropy(logits, torch.arange(len(logits), device=logits.device))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        place = self.trainer.global_rank, self.steps
        if place in self.fails_at and place not in FAILED:
            FAILED.add(place)
            self.encoder(batch[0])
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        loss = self.loss(batch[0])
        self.inputs += [batch[0].clone()] if self.gathers else []
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.validated.append(self.loss(batch[0]))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.steps += 1
        self.gradients.append(flat(self))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def flat(module: nn.Module) -> np.ndarray:
    """Gradients, in memory that is no tensor's."""
    return np.concatenate([p.grad.cpu().numpy().ravel() for p in module.parameters() if p.grad is not None])


def samples(count: int) -> Tensor:
    return torch.randn(count, FEATURES, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def whole_batches(module: Contrastive, count: int, batch: int, epochs: int = 1) -> list[np.ndarray]:
    """The gradients of a plain loop over whole batches in order."""
    return plain_loop(module, [part for _ in range(epochs) for part in samples(count).split(batch)])


def plain_loop(module: Contrastive, batches: list[Tensor]) -> list[np.ndarray]:
    """The gradients of a plain loop over these batches."""
    optimizer = module.configure_optimizers()
    for part in batches:
        optimizer.zero_grad()
        module.loss(part).backward()
        module.gradients.append(flat(module))
        optimizer.step()
    return module.gradients


def fit(
    module: pl.LightningModule,
    callback: Any,
    *more: Any,
    count: int = 200,
    memory: int | str | None = None,
    stream: bool = False,
    batch_size: int = 16,
    **settings: Any,
) -> pl.Trainer:
    """Train one epoch in order; the recipe has batches of 16."""
    dataset = TensorDataset(samples(count))
    loader = DataLoader(StreamOf(dataset) if stream else dataset, batch_size=batch_size)
    validation = DataLoader(TensorDataset(samples(40)), batch_size=40)
    ckpt_path = settings.pop("ckpt_path", None)
    defaults = {"max_epochs": 1, "accelerator": "cpu", "logger": False, "enable_progress_bar": False}
    defaults |= {"enable_checkpointing": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    trainer = pl.Trainer(**(defaults | settings), callbacks=[*more, callback])
    with limit_memory(memory) if memory else nullcontext():
        trainer.fit(module, loader, validation, ckpt_path=ckpt_path)
    return trainer


def worst(ours: list[np.ndarray], theirs: list[np.ndarray]) -> float:
    """The largest relative error of a step."""
    assert len(ours) == len(theirs), (len(ours), len(theirs))
    return max(float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in zip(ours, theirs))


def ranks(settings: dict[str, Any], folder: Path) -> None:
    """Train on several ranks, and let each write what it saw."""
    callback = AutoAccumulate(**settings["accumulate"])
    module = Contrastive(gathers=True, fails_at=[tuple(place) for place in settings.get("fails_at", ())])
    strategy = DDPStrategy(start_method="fork", process_group_backend="gloo")
    fit(
        module,
        callback,
        Record(folder),
        count=192,
        strategy=strategy,
        devices=settings["ranks"],
    )


class Record(pl.Callback):
    """Writes what a rank has seen."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        (callback,) = (each for each in trainer.callbacks if isinstance(each, AutoAccumulate))
        seen = {"cause": callback.exactness.cause, "events": callback.oom_events}
        seen |= {"gradients": pl_module.gradients, "inputs": pl_module.inputs}
        torch.save(seen, self.folder / f"rank{trainer.global_rank}.pt")
