"""The training of ``benchmarks.elastic`` on one rank: it writes a diary, and kills itself and its agent when told."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from benchmarks.trainers import flat, quiet
from lightning_ga import AutoAccumulate
from lightning_ga.elastic import CheckpointEvery, newest_checkpoint, trainer_arguments

EFFECTIVE, SAMPLES, WIDTH = 48, 960, 24
FORWARD, BACKWARD, EXCHANGE = "forward pass", "backward pass", "exchange of gradients"
UPDATE, BETWEEN, VALIDATION, WRITE = "optimizer step", "between windows", "validation", "writing a checkpoint"
PLACES = (FORWARD, BACKWARD, EXCHANGE, UPDATE, BETWEEN, VALIDATION, WRITE)


class Diary:
    """Notes of one process, and the orders that it finds: a file that names the place at which it is to be killed."""

    def __init__(self, folder: Path) -> None:
        self.agent = os.environ.get("ELASTIC_AGENT", "0")
        self.order = folder / f"kill-{self.agent}"
        self.start = f"{time.time_ns()}"
        self.rank = int(os.environ.get("RANK", 0))
        self.file = (folder / f"diary-{self.agent}-{os.getpid()}.jsonl").open("a")

    def note(self, kind: str, **record: Any) -> None:
        line = {
            "kind": kind,
            "start": self.start,
            "agent": self.agent,
            "rank": self.rank,
            "time": time.time(),
            **record,
        }
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()

    def visit(self, place: str) -> None:
        with suppress(FileNotFoundError):
            if self.order.read_text() == place:
                self.order.unlink()
                self.note("kill", place=place)
                os.kill(os.getppid(), signal.SIGKILL)
                os.kill(os.getpid(), signal.SIGKILL)


class Net(pl.LightningModule):
    """A small network in fp64 that notes the samples of every window, which takes at least a ``pause``, in seconds."""

    def __init__(self, diary: Diary, pause: float, width: int) -> None:
        super().__init__()
        self.diary = diary
        self.pause = pause
        layers = [nn.Linear(WIDTH, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1)]
        self.net = nn.Sequential(*layers).double()
        self.samples: list[int] = []
        self.step = 0

    def setup(self, stage: str) -> None:
        self.diary.note("set up")  # the ranks have found each other

    def on_train_start(self) -> None:
        self.step = self.global_step
        pids = [os.getppid(), os.getpid()]
        self.diary.note("train", step=self.step, world=self.trainer.world_size, pids=pids)
        first = self.net[0].weight
        first.register_post_accumulate_grad_hook(lambda _: self.diary.visit(EXCHANGE))

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.diary.visit(FORWARD)
        time.sleep(self.pause * len(batch[0]) * self.trainer.world_size / EFFECTIVE)
        self.samples += batch[2].tolist()
        loss = self.loss(batch)
        loss.register_hook(lambda _: self.diary.visit(BACKWARD))
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        rate = optimizer.param_groups[0]["lr"]
        self.diary.note("step", step=self.global_step + 1, epoch=self.current_epoch, rate=rate, samples=self.samples)
        self.samples = []
        self.diary.visit(UPDATE)

    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_step != self.step:
            self.step = self.global_step
            self.diary.visit(BETWEEN)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if not self.trainer.sanity_checking:
            self.diary.visit(VALIDATION)
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3, eps=1e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.999**step)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Stream(IterableDataset[Any]):
    """All samples in one order, each rank every so-manieth."""

    def __init__(self, dataset: TensorDataset) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        rank = int(os.environ.get("RANK", 0))
        for index in range(rank, SAMPLES, int(os.environ.get("WORLD_SIZE", 1))):
            yield self.dataset[index]


def data(batch_size: int, *, is_stream: bool) -> tuple[DataLoader[Any], DataLoader[Any]]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, WIDTH, generator=generator, dtype=torch.float64)
    targets = inputs.sin().sum(1, keepdim=True)
    dataset = TensorDataset(inputs, targets, torch.arange(SAMPLES))
    validation = DataLoader(dataset, 120)
    if is_stream:
        return DataLoader(Stream(dataset), batch_size), validation
    return DataLoader(dataset, batch_size, shuffle=True), validation


def half_written(diary: Diary) -> Callable[..., None]:
    """Return ``torch.save``, but killed in the middle of a checkpoint if the order says so."""
    save = torch.save

    def write(content: Any, file: Any) -> None:
        with suppress(FileNotFoundError):
            if diary.order.read_text() == WRITE:
                file.write(b"half of a checkpoint")
                file.flush()
        diary.visit(WRITE)
        save(content, file)

    return write


def train(
    folder: str, *, mode: str, epochs: int, every: int = 5, pause: float = 0.0, width: int = 32, ranks: int = 0
) -> None:
    """Train from the newest checkpoint: ours (``loader``, ``step``), or stock Lightning (``stock``, of ``ranks``)."""
    quiet()
    place = Path(folder)
    diary = Diary(place)
    diary.note("begin")
    pl.seed_everything(0, verbose=False)
    torch.save = half_written(diary)
    settings: dict[str, Any] = trainer_arguments()
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        settings["strategy"] = DDPStrategy(bucket_cap_mb=0.001, process_group_backend="gloo")
    checkpoints = place / "checkpoints"
    batch_size = 4
    callbacks: list[Any] = []
    if mode.startswith("stock"):
        batch_size = EFFECTIVE // ranks
        if mode == "stock":
            settings |= {"devices": 1, "num_nodes": ranks}
        callbacks.append(ModelCheckpoint(checkpoints, "{step}", every_n_train_steps=every, save_top_k=-1))
    else:
        arguments: dict[str, Any] = {"effective_batch_size": EFFECTIVE, "micro_batch_size": 16, "cache": False}
        callbacks.append(AutoAccumulate(verify=False, **arguments))
        if every:
            callbacks.append(CheckpointEvery(checkpoints, every))
    trainer = pl.Trainer(
        **settings,
        accelerator="cpu",
        max_epochs=epochs,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=mode.startswith("stock"),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    net = Net(diary, pause, width)
    loaders = data(batch_size, is_stream=mode == "step")
    trainer.fit(net, *loaders, ckpt_path=newest_checkpoint(checkpoints))
    if trainer.is_global_zero:
        result = {"weights": flat(net.parameters()), "steps": trainer.global_step}
        with (place / "end.part").open("wb") as file:
            torch.save({**result, "val_loss": float(trainer.callback_metrics["val_loss"])}, file)
        (place / "end.part").rename(place / "end.pt")
    diary.note("end")


def start(folder: str, settings: str) -> None:
    """Train with settings that travel as JSON, as agents take plain arguments."""
    train(folder, **json.loads(settings))
