"""Runs fits that are killed (SIGKILL) and resumed; each is a fork of this process, which trains nothing itself.

The settings hold chains of lives: a life is one process that trains until it is killed or done, and the next goes on
with what it left.
"""

import io
import json
import os
import signal
import warnings
from pathlib import Path
from typing import Any

import torch
from forks import exit_code, fork
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from reference import Regression, Samples, fit
from torch.utils.data import DataLoader

from lightning_ga import AtomicCheckpointIO, AutoAccumulate
from lightning_ga.fit import limit

SAMPLES, BATCH = 27, 5


def main(chains: dict[str, list[dict[str, Any]]], folder: Path) -> None:
    """Every chain in a folder of its own; the life of a chain ends before the next begins."""
    for name, lives in chains.items():
        place = folder / name
        place.mkdir()
        for number, life in enumerate(lives):
            ended = exit_code(fork(lambda life=life, place=place, number=number: live(place, number, **life)))
            expected = -signal.SIGKILL if life.get("dies") else 0
            assert ended == expected, f"life {number} of {name} ended with {ended}, not {expected}"


def live(
    folder: Path,
    number: int,
    dies: str | None = None,
    at: int = 1,
    hardware: str | None = None,
    accumulate_grad_batches: int = 2,
    samples: int = SAMPLES,
    batch: int = BATCH,
    steps: int = -1,
    by_epoch: bool = False,
    **accumulate: Any,
) -> None:
    """Train from the last checkpoint that there is, until it is time to die."""
    warnings.simplefilter("ignore")
    if hardware is not None:
        limit.hardware = lambda *_: hardware
    mortal = Mortal(folder, number, dies, at)
    if dies == "write":
        mortal.cut_writes_off()
    callback = AutoAccumulate(**accumulate, cache=False, verify=False)
    when = {"save_on_train_epoch_end": True} if by_epoch else {"every_n_train_steps": 2}
    saver = ModelCheckpoint(folder, "last", enable_version_counter=False, **when)
    _, trainer = fit(
        DataLoader(Samples(samples), batch_size=batch, shuffle=True),
        callback,
        Birth(callback),
        saver,
        module=mortal,
        ckpt_path="last",
        max_epochs=7 if steps == -1 else -1,
        max_steps=steps,
        accumulate_grad_batches=accumulate_grad_batches,
        enable_checkpointing=True,
        plugins=[AtomicCheckpointIO()],
        default_root_dir=folder,
    )
    end = {"weights": list(mortal.parameters()), "step": trainer.global_step, "epoch": trainer.current_epoch}
    torch.save(end, folder / "end.pt")


class Mortal(Regression):
    """Writes down what every optimizer step has used, and kills its process when it comes to a place so often.

    Args:
        folder: Where it writes.
        life: Which one of its chain it is.
        dies: The place: "forward", "backward", "between" two micro-batches of a window, "update" (in the middle of
            the optimizer's), "updated" (before it is counted), "write" (in the middle of a checkpoint's), "written"
            (right after it), "validation", "epoch" (at its start); ``None`` lives on.
        at: How often it has to come there.
    """

    def __init__(self, folder: Path, life: int, dies: str | None, at: int) -> None:
        super().__init__()
        self.log_file = (folder / "log.jsonl").open("a")
        self.life, self.dies, self.left = life, dies, at
        self.born = False
        self.used: list[int] = []
        self.steps = 0

    def come_to(self, place: str) -> bool:
        """Whether this is the place and the time to die."""
        self.left -= self.born and place == self.dies
        return self.born and place == self.dies and self.left == 0

    def pass_by(self, place: str) -> None:
        if self.come_to(place):
            os.kill(os.getpid(), signal.SIGKILL)

    def write(self, **record: Any) -> None:
        self.log_file.write(json.dumps({"life": self.life, **record}) + "\n")
        self.log_file.flush()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.used += batch[2].tolist()
        self.pass_by("forward")
        value = torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])
        value.register_hook(lambda gradient: self.pass_by("backward"))
        return value

    def on_train_epoch_start(self) -> None:
        self.pass_by("epoch")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.pass_by("validation")

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        pass

    def on_train_batch_end(self, *_: Any) -> None:
        """After all callbacks: a checkpoint that is due is written."""
        if self.global_step == self.steps:
            self.pass_by("between")
            return
        self.steps = self.global_step
        rates = [group["lr"] for group in self.optimizers().param_groups]
        self.write(kind="step", step=self.global_step, epoch=self.current_epoch, used=self.used, rates=rates)
        self.used = []
        if self.global_step % 2 == 0:
            self.pass_by("written")

    def val_dataloader(self) -> Any:
        return DataLoader(Samples(4), batch_size=2)

    def configure_optimizers(self) -> Any:
        optimizer = MortalSGD(self.parameters(), lr=0.1, momentum=0.9)
        optimizer.module = self
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def cut_writes_off(self) -> None:
        """Let a checkpoint be half written when it is time."""
        save = torch.save

        def cut_off(checkpoint: Any, file: Any) -> None:
            if self.come_to("write"):
                whole = io.BytesIO()
                save(checkpoint, whole)
                file.write(whole.getvalue()[: len(whole.getvalue()) // 2])
                file.flush()
                os.kill(os.getpid(), signal.SIGKILL)
            save(checkpoint, file)

        torch.save = cut_off


class Birth(Callback):
    """Training begins: what came before were the steps of a probe."""

    def __init__(self, accumulate: AutoAccumulate) -> None:
        self.accumulate = accumulate

    def on_train_start(self, trainer: Any, mortal: Any) -> None:
        probe = self.accumulate.probe
        found = {} if probe is None else {"source": probe.source, "limit": probe.limit, "probed": probe.steps}
        mortal.write(kind="start", step=trainer.global_step, **found)
        mortal.born, mortal.used, mortal.steps = True, [], trainer.global_step


class MortalSGD(torch.optim.SGD):
    """May die after it has updated one parameter of several, or all."""

    module: Mortal

    def step(self, closure: Any = None) -> Any:
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        first = self.param_groups[0]["params"][0]
        if self.module.dies == "update":
            with torch.no_grad():
                first.add_(first.grad, alpha=-0.1)
        self.module.pass_by("update")
        if self.module.dies == "update":
            with torch.no_grad():
                first.sub_(first.grad, alpha=-0.1)
        super().step()
        self.module.pass_by("updated")
        return result
