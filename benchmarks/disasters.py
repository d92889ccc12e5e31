"""What befalls the runs of ``benchmarks.chaos``: drawn by a seed, in processes that may be killed."""

import io
import json
import os
import random
import signal
from collections import Counter
from dataclasses import dataclass
from itertools import product
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
MODELS, MODES, RANKS = ("transformer", "convolutional"), ("loader", "step"), (1, 2)

FORWARD, LOSS, FIRST, LATER = "forward", "loss", "backward, first of a window", "backward, later"
TRANSFER, VALIDATION, UPDATE = "batch transfer", "validation", "optimizer step"
PLACES = (FORWARD, LOSS, FIRST, LATER, TRANSFER, VALIDATION)  # not the update: it is not run again
BETWEEN, WRITE, WRITTEN = "between micro-batches", "writing a checkpoint", "after a checkpoint"
MOMENTS = (BETWEEN, FORWARD, FIRST, LATER, VALIDATION, UPDATE, WRITE, WRITTEN)


@dataclass(frozen=True, slots=True)
class Blow:  # memory runs out, or the process is killed
    place: str
    rank: int
    visit: int
    operation: float


@dataclass(frozen=True, slots=True)
class Life:  # one process, or one on each rank
    micro_batch: int
    budget: str
    save_every: int
    faults: tuple[Blow, ...]
    end: Blow | None


@dataclass(frozen=True, slots=True)
class Story:  # one training, of several lives where it is killed
    model: str
    mode: str
    ranks: int
    lives: tuple[Life, ...]


CELLS = tuple(product(MODELS, MODES, RANKS))


def undisturbed(model: str) -> Story:
    """The training that all others of a model have to equal: one rank, large micro-batches, no fault."""
    return Story(model, "loader", 1, (Life(EFFECTIVE, "8GiB", 100, (), None),))


def draw(rng: random.Random, number: int) -> Story:
    """A story; all combinations of model, mode and ranks take turns."""
    model, mode, ranks = CELLS[number % len(CELLS)]
    kills = rng.randint(1, 3)
    lives = tuple(_life(rng, ranks, killed=life < kills) for life in range(kills + 1))
    return Story(model, mode, ranks, lives)


def _life(rng: random.Random, ranks: int, *, killed: bool) -> Life:
    places = [*rng.sample([FORWARD] * 2 + [LOSS] * 2 + [FIRST] * 2 + [LATER] * 2, 5), TRANSFER, VALIDATION, VALIDATION]
    faults = tuple(_blow(rng, place, ranks, latest=4 if place == VALIDATION else 6) for place in places)
    end = _blow(rng, rng.choice(MOMENTS), ranks, latest=6) if killed else None
    if end is not None and end.place in (WRITE, WRITTEN):
        end = Blow(end.place, 0, min(end.visit, 3), end.operation)  # rank 0 writes
    micro_batch = rng.choice((64, 48, 32, 24)) // ranks
    return Life(micro_batch, rng.choice(("8GiB", "8GiB", "9GiB")), rng.randint(1, 3), faults, end)


def _blow(rng: random.Random, place: str, ranks: int, *, latest: int) -> Blow:
    return Blow(place, rng.randrange(ranks), rng.randint(1, latest), rng.random())


CLASSES, TOKENS, LENGTH = 5, 16, 6


class Fate(OperationCounter):
    """Lets memory run out, or kills the process, at an operation of a place; keeps a diary of one rank."""

    def __init__(self, life: Life, number: int, folder: Path) -> None:
        super().__init__(0)
        self.life, self.number, self.folder = life, number, folder
        self.visits: Counter[str] = Counter()
        self.lengths: dict[str, int] = {}  # operations of each place, as last counted
        self.place: str | None = None
        self.kills = False

    def begin(self, rank: int) -> None:
        self.faults = [fault for fault in self.life.faults if fault.rank == rank]
        self.ends = [end for end in (self.life.end,) if end is not None and end.rank == rank]
        self.diary = (self.folder / f"rank{rank}.jsonl").open("a")

    def note(self, kind: str, **record: Any) -> None:
        self.diary.write(json.dumps({"life": self.number, "kind": kind, **record}) + "\n")
        self.diary.flush()

    def come_to(self, place: str, samples: int) -> None:
        """What is computed from here on belongs to this place; one sample alone is spared an error."""
        self.leave()
        self.place, self.operations = place, 0
        self.visits[place] += 1
        visit, length = self.visits[place], self.lengths.get(place, 1)
        due = [fault for fault in self.faults if fault.place == place and fault.visit <= visit]
        ends = [end for end in self.ends if end.place == place and end.visit <= visit]
        self.kills = bool(ends)
        if ends or (due and samples > 1):
            self.fails_at = 1 + int([*ends, *due][0].operation * length)

    def leave(self) -> None:
        if self.place is not None and not self.fails_at:
            self.lengths[self.place] = self.operations
        self.place, self.fails_at = None, 0

    def pass_by(self, place: str, samples: int) -> None:
        self.come_to(place, samples)
        if self.fails_at:
            self.strike("there")
        self.leave()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.fails_at and self.operations + 1 == self.fails_at:
            self.strike(str(func))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def strike(self, where: str) -> None:
        place, self.fails_at, self.place = self.place, 0, None
        if self.kills:
            self.note("kill", place=place, where=where)
            os.kill(os.getpid(), signal.SIGKILL)
        self.faults.remove(next(fault for fault in self.faults if fault.place == place))
        self.note("fault", place=place, where=where)
        raise torch.OutOfMemoryError(f"Injected: out of memory in {place}, {where}.")

    def cut_writes_off(self) -> None:
        """Let a checkpoint be half written when it is time."""
        save = torch.save

        def cut_off(checkpoint: Any, file: Any) -> None:
            if isinstance(file, Path):  # what is kept of the end is no checkpoint
                save(checkpoint, file)
                return
            self.come_to(WRITE, 1)
            if self.fails_at:
                whole = io.BytesIO()
                save(checkpoint, whole)
                file.write(whole.getvalue()[: len(whole.getvalue()) // 2])
                file.flush()
                self.strike("half written")
            save(checkpoint, file)
            self.leave()

        torch.save = cut_off


class Watch(pl.Callback):
    """Brings a fate into a process, takes it out, and keeps what the training has come to."""

    def __init__(self, fate: Fate) -> None:
        self.fate = fate

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        self.fate.begin(trainer.global_rank)
        self.fate.cut_writes_off()

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.fate.__enter__()

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.fate.__exit__(None, None, None)
        loss = trainer.callback_metrics.get("val_loss")  # none if a resume was left with nothing to do
        end: dict[str, Any] = {
            "weights": flat(module.parameters()),
            "steps": trainer.global_step,
            "loss": None if loss is None else float(loss),
        }
        torch.save(end, self.fate.folder / f"end{trainer.global_rank}.pt")


class Victim(pl.LightningModule):
    """Notes the samples of every optimizer step."""

    def __init__(self, model: str, fate: Fate) -> None:
        super().__init__()
        self.kind = model
        self.net = transformer() if model == "transformer" else convolutional()
        self.fate = fate
        self.passing: list[int] = []  # samples of a pass
        self.passed: list[int] = []  # those of one that went through its backward pass, and may be undone yet
        self.used: list[int] = []  # samples of the window so far

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        self.fate.pass_by(TRANSFER, len(batch[0]))
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, targets, indices = batch
        self.passing = indices.tolist()
        if not set(self.passing) <= set(self.passed):  # else it is undone, and this is a part of it
            self.used += self.passed
        self.passed = []
        self.fate.come_to(FORWARD, len(inputs))
        logits = self.net(inputs)
        self.fate.come_to(LOSS, len(inputs))
        loss = nn.functional.cross_entropy(logits, targets)
        self.fate.come_to(LATER if self.used else FIRST, len(inputs))
        return loss

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        self.used, self.passed = [], []

    def backward(self, loss: Tensor, *arguments: Any, **settings: Any) -> None:
        super().backward(loss, *arguments, **settings)
        self.passed = self.passing

    def on_after_backward(self) -> None:
        self.fate.leave()
        self.used += self.passed
        self.passed = []

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        rate = optimizer.param_groups[0]["lr"]
        self.fate.note("step", step=self.global_step + 1, epoch=self.current_epoch, rate=rate, used=self.used)
        self.used = []
        self.fate.come_to(UPDATE, 2)

    def on_train_batch_end(self, *_: Any) -> None:
        self.fate.leave()
        if self.used:
            self.fate.pass_by(BETWEEN, 1)
        elif self.global_step % self.fate.life.save_every == 0:
            self.fate.pass_by(WRITTEN, 1)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.fate.come_to(VALIDATION, len(batch[0]))
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.fate.leave()
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
    """Inputs for a model; a sample knows its index."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(TOKENS, (size, LENGTH), generator=generator)
    images = torch.randn(size, 1, 6, 6, generator=generator)
    targets = torch.randint(CLASSES, (size,), generator=generator)
    return TensorDataset(tokens if model == "transformer" else images, targets, torch.arange(size))


def live(story: Story, number: int, folder: Path) -> None:
    """Train from the last checkpoint that there is, until it is over one way or the other."""
    life = story.lives[number]
    fate = Fate(life, number, folder)
    pl.seed_everything(0, verbose=False)
    module = Victim(story.model, fate)
    strategy: Any = DDPStrategy(start_method="fork", process_group_backend="gloo") if story.ranks > 1 else "auto"
    settings: dict[str, Any] = {"micro_batching": story.mode, "memory_budget": life.budget}
    callback = AutoAccumulate(micro_batch_size=life.micro_batch, verify=False, cache=False, **settings)
    saver = ModelCheckpoint(folder, "last", every_n_train_steps=life.save_every, enable_version_counter=False)
    trainer = quiet_trainer(
        devices=story.ranks,
        strategy=strategy,
        callbacks=[callback, Watch(fate), saver],
        plugins=[AtomicCheckpointIO()],
        accumulate_grad_batches=2,
        max_epochs=EPOCHS,
        num_sanity_val_steps=0,
        enable_checkpointing=True,
        default_root_dir=folder,
    )
    train = DataLoader(samples(story.model, SAMPLES, 1), 32 // story.ranks, shuffle=True)
    trainer.fit(module, train, DataLoader(samples(story.model, 48, 2), 24 // story.ranks), ckpt_path="last")
