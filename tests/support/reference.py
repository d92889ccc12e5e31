"""A small task on real Trainers, and the oracle: the same training in a plain loop, batch whole."""

from collections.abc import Container, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from torch.utils.data import DataLoader, Dataset, IterableDataset

FEATURES = 5


class Samples(Dataset):
    """Sample i is a function of i alone."""

    def __init__(self, size: int, dtype: torch.dtype = torch.float64) -> None:
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(size, FEATURES, generator=generator, dtype=dtype)
        self.targets = torch.randn(size, 1, generator=generator, dtype=dtype)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        return self.inputs[index], self.targets[index], index


class StreamOf(IterableDataset):
    """The samples of a dataset in order, with no length."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        return (self.dataset[index] for index in range(len(self.dataset)))


class SizedStreamOf(StreamOf):
    """The same with a length."""

    def __len__(self) -> int:
        return len(self.dataset)


class Curves(DummyLogger):
    """The rows of the optimizer steps: values of training by name."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[str, float]] = []

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        row = {name: float(value) for name, value in metrics.items() if name.startswith("train/")}
        if row:
            self.rows.append(row)


class Regression(pl.LightningModule):
    """Mean squared error; keeps the indices of every micro-batch and the gradient of every step."""

    def __init__(self, dtype: torch.dtype = torch.float64, lr: float = 0.1) -> None:
        super().__init__()
        self.net = network(dtype)
        self.lr = lr
        self.micro_batches: list[tuple[int, list[int]]] = []
        self.gradients: list[torch.Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        inputs, targets, indices = batch
        self.micro_batches.append((self.global_step, indices.tolist()))
        return loss(self.net, inputs, targets)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.gradients.append(flat_gradient(self.net))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.net.parameters(), lr=self.lr)

    @property
    def windows(self) -> list[list[int]]:
        """Indices of the samples behind each optimizer step."""
        steps = max(step for step, _ in self.micro_batches) + 1 if self.micro_batches else 0
        windows: list[list[int]] = [[] for _ in range(steps)]
        for step, indices in self.micro_batches:
            windows[step] += indices
        return windows


class Validated(Regression):
    """The same, which notes after how many steps it is validated."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.steps_at_validation: list[int] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.steps_at_validation.append(self.global_step)


class SaveAt(pl.Callback):
    """A checkpoint after a number of optimizer steps."""

    def __init__(self, path: Path, step: int) -> None:
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == self.step and not self.path.exists():
            trainer.save_checkpoint(self.path)


class SaveAll(pl.Callback):
    """A checkpoint after every optimizer step, or after those that are named."""

    def __init__(self, folder: Path, steps: Container[int] = range(10**9)) -> None:
        self.folder, self.steps = folder, steps

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if not trainer.fit_loop._should_accumulate() and trainer.global_step in self.steps:
            trainer.save_checkpoint(self.folder / f"step{trainer.global_step}.ckpt")


def loader(samples: int, batch_size: int, **settings: Any) -> "DataLoader[Any]":
    """A loader of so many samples."""
    return DataLoader(Samples(samples), batch_size, **settings)


def network(dtype: torch.dtype = torch.float64) -> torch.nn.Sequential:
    """The same weights on every call."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(FEATURES, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1)).to(dtype)


def loss(net: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A mean over samples."""
    return torch.nn.functional.mse_loss(net(inputs), targets)


def flat_gradient(net: torch.nn.Module) -> torch.Tensor:
    """All gradients in one vector."""
    return torch.cat([parameter.grad.flatten().clone() for parameter in net.parameters()])


def plain_loop(dataset: Samples, windows: Iterable[Sequence[int]], lr: float = 0.1) -> list[torch.Tensor]:
    """Gradients of plain SGD in which each window is one batch."""
    net = network(dataset.inputs.dtype)
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    gradients = []
    for window in windows:
        optimizer.zero_grad()
        loss(net, dataset.inputs[list(window)], dataset.targets[list(window)]).backward()
        gradients.append(flat_gradient(net))
        optimizer.step()
    return gradients


def worst_error(ours: Sequence[torch.Tensor], oracle: Sequence[torch.Tensor]) -> float:
    """Largest relative error over all steps; the number of steps must be the same."""
    assert len(ours) == len(oracle), f"{len(ours)} optimizer steps instead of {len(oracle)}"
    return max(float((a - b).norm() / b.norm()) for a, b in zip(ours, oracle))


def cut(order: Sequence[int], size: int, drop_last: bool = False) -> list[list[int]]:
    """Consecutive windows of one size; the last may be smaller."""
    windows = [list(order[start : start + size]) for start in range(0, len(order), size)]
    return [window for window in windows if len(window) == size] if drop_last else windows


def permutation(size: int, seed: int, epoch: int) -> list[int]:
    """The order that torch's ``DistributedSampler`` gives an epoch."""
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed + epoch)).tolist()


def fit(
    data: "DataLoader[Any] | Any",
    *callbacks: pl.Callback,
    module: pl.LightningModule | None = None,
    ckpt_path: Any = None,
    seed: int = 7,
    **settings: Any,
) -> tuple[Any, pl.Trainer]:
    """Run a real Trainer, quietly, on one CPU process."""
    module = Regression() if module is None else module
    trainer = quiet_trainer(*callbacks, **settings)
    pl.seed_everything(seed, verbose=False)
    val_loader = DataLoader(Samples(2), batch_size=1) if isinstance(module, Validated) else None
    trainer.fit(module, data, val_loader, ckpt_path=ckpt_path)
    return module, trainer


def quiet_trainer(*callbacks: pl.Callback, **settings: Any) -> pl.Trainer:
    """A Trainer without logger, checkpoints, bars and summaries, unless they are asked for."""
    quiet = {
        "max_epochs": 2,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
        "devices": 1,
        "num_sanity_val_steps": 0,
    }
    return pl.Trainer(callbacks=list(callbacks), **{**quiet, **settings})


def fp16_on_the_cpu(scale: float = 256.0, interval: int = 2) -> Any:
    """Lightning turns 16-mixed into bf16 on the CPU; a plugin with a scaler of its own does fp16."""
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=interval)
    return pl.plugins.MixedPrecision("16-mixed", "cpu", scaler)
