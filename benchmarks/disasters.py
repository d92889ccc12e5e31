"""The trainings of ``benchmarks.chaos``: memory runs out, and processes are killed, at operations that a seed draws."""

import io
import json
import os
import signal
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.networks import Apply
from benchmarks.trainers import flat, quiet_trainer
from lightning_ga import AtomicCheckpointIO, AutoAccumulate
from lightning_ga.testing import OperationCounter

EFFECTIVE, SAMPLES, EPOCHS = 64, 200, 3
CLASSES, TOKENS, LENGTH = 5, 16, 6
FORWARD, FIRST, LATER = "forward", "backward, first of a window", "backward, later"
TRANSFER, VALIDATION, UPDATE = "batch transfer", "validation", "optimizer step"
BETWEEN, WRITE, WRITTEN = "between micro-batches", "writing a checkpoint", "after a checkpoint"
PLACES = (FORWARD, FIRST, LATER, TRANSFER, VALIDATION)  # of errors; the update is not run again
MOMENTS = (BETWEEN, FORWARD, FIRST, LATER, VALIDATION, UPDATE, WRITE, WRITTEN)  # of kills


@dataclass(frozen=True, slots=True)
class Disaster:  # an out-of-memory error or a kill, at the first visit to a place from this one on
    place: str
    rank: int
    visit: int
    operation: float  # as a share of the place's operations


@dataclass(frozen=True, slots=True)
class Process:  # on each rank
    micro_batch: int
    save_every: int
    errors: tuple[Disaster, ...]
    kill: Disaster | None


@dataclass(frozen=True, slots=True)
class Scenario:  # one training, resumed by the next process after each kill
    model: str
    mode: str
    ranks: int
    processes: tuple[Process, ...]


class Injector(OperationCounter):
    """Raises an error or kills the process at an operation of a place, and writes a diary of its rank."""

    def __init__(self, process: Process, number: int, folder: Path) -> None:
        super().__init__(0)
        self.process, self.number, self.folder = process, number, folder
        self.visits: Counter[str] = Counter()
        self.lengths: dict[str, int] = {}  # operations of each place, as last counted
        self.place = ""
        self.kills = False
        self.size = 1  # of the latest pass: a batch whose pieces are single samples gets no error either

    def begin(self, rank: int) -> None:
        kill = self.process.kill
        self.errors = [error for error in self.process.errors if error.rank == rank]
        self.ends = [kill] if kill is not None and kill.rank == rank else []
        self.diary = (self.folder / f"rank{rank}.jsonl").open("a")

    def note(self, kind: str, **record: Any) -> None:
        self.diary.write(json.dumps({"process": self.number, "kind": kind, **record}) + "\n")
        self.diary.flush()

    def enter(self, place: str, samples: int) -> None:
        """Count operations as those of this place from here on; a pass of a single sample gets no error."""
        self.leave()
        self.place, self.operations = place, 0
        self.visits[place] += 1
        visit, length = self.visits[place], self.lengths.get(place, 1)
        errors = [error for error in self.errors if error.place == place and error.visit <= visit and samples > 1]
        ends = [end for end in self.ends if end.place == place and end.visit <= visit]
        self.kills = bool(ends)
        if ends or errors:
            self.fails_at = 1 + int([*ends, *errors][0].operation * length)

    def leave(self) -> None:
        if self.place and not self.fails_at:
            self.lengths[self.place] = self.operations
        self.place, self.fails_at = "", 0

    def visit(self, place: str, samples: int) -> None:
        """Enter and leave a place that has no operations."""
        self.enter(place, samples)
        if self.fails_at:
            self.strike("there")
        self.leave()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.fails_at and self.operations + 1 == self.fails_at:
            self.strike(str(func))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def strike(self, where: str) -> None:
        place, self.fails_at, self.place, self.size = self.place, 0, "", 1
        if self.kills:
            self.note("kill", place=place, where=where)
            os.kill(os.getpid(), signal.SIGKILL)
        self.errors.remove(next(error for error in self.errors if error.place == place))
        self.note("error", place=place, where=where)
        raise torch.OutOfMemoryError(f"Injected: out of memory in {place}, {where}.")

    def interrupt_writing(self) -> None:
        """Let ``torch.save`` write half a checkpoint if the process is to be killed there."""
        save = torch.save

        def interrupted(checkpoint: Any, file: Any) -> None:
            if isinstance(file, Path):  # the result of the training, not a checkpoint
                save(checkpoint, file)
                return
            self.enter(WRITE, 1)
            if self.fails_at:
                buffer = io.BytesIO()
                save(checkpoint, buffer)
                file.write(buffer.getvalue()[: len(buffer.getvalue()) // 2])
                file.flush()
                self.strike("half written")
            save(checkpoint, file)
            self.leave()

        torch.save = interrupted


class Classifier(pl.LightningModule):
    """A network that notes the samples of every optimizer step, and keeps the result of the training."""

    def __init__(self, model: str, injector: Injector) -> None:
        super().__init__()
        self.kind = model
        self.net = transformer() if model == "transformer" else convolutional()
        self.injector = injector
        self.current: list[int] = []  # samples of this pass
        self.finished: list[int] = []  # samples of a backward pass that a retry may still undo
        self.used: list[int] = []  # samples of the window so far

    def setup(self, stage: str) -> None:
        self.injector.begin(self.global_rank)
        self.injector.interrupt_writing()

    def on_train_start(self) -> None:
        self.injector.__enter__()

    def on_train_end(self) -> None:
        self.injector.__exit__(None, None, None)
        loss = self.trainer.callback_metrics.get("val_loss")  # missing if a resumed process had nothing left to do
        end = {"weights": flat(self.parameters()), "loss": None if loss is None else float(loss)}
        torch.save({**end, "steps": self.global_step}, self.injector.folder / f"end{self.global_rank}.pt")

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        if self.trainer.training:  # evaluation does not survive it
            self.injector.visit(TRANSFER, min(len(batch[0]), self.injector.size))
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, targets, indices = batch
        self.current = indices.tolist()
        if not set(self.current) <= set(self.finished):  # else these samples run again
            self.used += self.finished
        self.finished = []
        self.injector.size = len(inputs)
        self.injector.enter(FORWARD, len(inputs))
        loss = nn.functional.cross_entropy(self.net(inputs), targets)
        self.injector.enter(LATER if self.used else FIRST, len(inputs))
        return loss

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        self.used, self.finished = [], []

    def backward(self, loss: Tensor, *arguments: Any, **settings: Any) -> None:
        super().backward(loss, *arguments, **settings)
        self.finished = self.current

    def on_after_backward(self) -> None:
        self.injector.leave()
        self.used += self.finished
        self.finished = []

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        rate = optimizer.param_groups[0]["lr"]
        self.injector.note("step", step=self.global_step + 1, epoch=self.current_epoch, rate=rate, used=self.used)
        self.used = []
        self.injector.enter(UPDATE, 2)

    def on_train_batch_end(self, *_: Any) -> None:
        self.injector.leave()
        if self.used:
            self.injector.visit(BETWEEN, 1)
        elif self.global_step % self.injector.process.save_every == 0:
            self.injector.visit(WRITTEN, 1)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.injector.enter(VALIDATION, len(batch[0]))
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.injector.leave()
        self.log("val_loss", loss, sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer: Any = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        if self.kind == "transformer":
            optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3, eps=1e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.95**step)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def transformer() -> nn.Module:
    table = nn.Embedding(TOKENS, 16)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, activation="gelu", batch_first=True)
    layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return nn.Sequential(table, layers, Apply(lambda hidden: hidden.mean(1)), nn.Linear(16, CLASSES))


def convolutional() -> nn.Module:
    layers = [nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.GELU()]
    layers += [nn.Conv2d(8, 8, 3, stride=2), nn.GroupNorm(2, 8), nn.GELU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * 2 * 2, CLASSES))


def samples(model: str, size: int, seed: int) -> TensorDataset:
    """Return inputs for a model, classes, and the index of every sample."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(TOKENS, (size, LENGTH), generator=generator)
    images = torch.randn(size, 1, 6, 6, generator=generator)
    targets = torch.randint(CLASSES, (size,), generator=generator)
    return TensorDataset(tokens if model == "transformer" else images, targets, torch.arange(size))


class Saver(ModelCheckpoint):
    """Saves the last checkpoint, but not once more, in mid-window, after the first pass of a resumed process."""

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.first = trainer.global_step

    def on_train_batch_end(self, trainer: pl.Trainer, *given: Any) -> None:
        if trainer.global_step > self.first:
            super().on_train_batch_end(trainer, *given)


def train(scenario: Scenario, number: int, folder: Path) -> None:
    """Train in one process of a scenario, from the last checkpoint if there is one."""
    process = scenario.processes[number]
    injector = Injector(process, number, folder)
    pl.seed_everything(0, verbose=False)
    strategy: Any = DDPStrategy(start_method="fork", process_group_backend="gloo") if scenario.ranks > 1 else "auto"
    settings: dict[str, Any] = {"micro_batching": scenario.mode, "verify": False, "cache": False}
    accumulate = AutoAccumulate(micro_batch_size=process.micro_batch, **settings)
    in_step = scenario.mode == "step"  # a resume within an epoch reads the loader from its start, as stock Lightning
    every = {"every_n_epochs": 1} if in_step else {"every_n_train_steps": process.save_every}
    saver = Saver(folder, "last", **every, save_on_train_epoch_end=in_step, enable_version_counter=False)
    trainer = quiet_trainer(
        devices=scenario.ranks,
        strategy=strategy,
        callbacks=[accumulate, saver],
        plugins=[AtomicCheckpointIO()],
        accumulate_grad_batches=2,
        max_epochs=EPOCHS,
        num_sanity_val_steps=0,
        enable_checkpointing=True,
        default_root_dir=folder,
    )
    loader = DataLoader(samples(scenario.model, SAMPLES, 1), EFFECTIVE // 2 // scenario.ranks, shuffle=not in_step)
    validation = DataLoader(samples(scenario.model, 48, 2), 24 // scenario.ranks)
    trainer.fit(Classifier(scenario.model, injector), loader, validation, ckpt_path="last")
