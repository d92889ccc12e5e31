"""Runs fits in turn on several gloo ranks in which memory runs out on some; each rank writes what it saw."""

import os
import traceback
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
import torchmetrics
from faults import Faults
from forks import in_ranks
from lightning.pytorch.strategies import DDPStrategy
from reference import FEATURES, Samples, network, quiet_trainer
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_ga import AutoAccumulate, ExactnessWarning


class Task(pl.LightningModule):
    """A regression with parts that are hard on ranks, which runs out of memory where it is told to."""

    def __init__(
        self,
        parts: tuple[str, ...] = (),
        dtype: str = "float64",
        faults: Any = (),
        most: int = 1000,
        gathers: bool = False,
    ) -> None:
        super().__init__()
        kind = getattr(torch, dtype)
        self.net, self.parts = network(kind), parts
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.spare = torch.nn.Linear(FEATURES, 1).to(kind) if "unused" in parts else None
            self.branch = torch.nn.Linear(FEATURES, 1).to(kind) if "unused" in parts else None
            self.table = torch.nn.Embedding(10, 1, sparse=True).to(kind) if "sparse" in parts else None
            self.norm = torch.nn.BatchNorm1d(FEATURES).to(kind) if "buffers" in parts else None
            self.twice = torch.nn.Linear(FEATURES, 1).to(kind) if "twice" in parts else None
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64) if "buffers" in parts else None)
        self.error = torchmetrics.MeanSquaredError()
        self.faults = {(epoch, index, phase): times for epoch, index, phase, times in faults}
        self.most, self.gathers = most, gathers
        self.gradients: list[list[torch.Tensor | None]] = []
        self.sizes: list[tuple[int, int]] = []
        self.logged: list[dict[str, float]] = []
        self.unsynced: list[bool] = []
        self.after_backward: dict[int, torch.Tensor] = {}  # of a window: the first gradient

    def loss(self, batch: Any) -> torch.Tensor:
        inputs, targets, indices = batch
        hidden = self.net[1](self.net[0](inputs))
        predicted = self.net[2](hidden)
        self.fail_in_backward(hidden, "late")
        self.fail_in_backward(predicted, "backward")
        chosen = (indices % 16 < 4)[:, None]
        if self.branch is not None and chosen.any():
            predicted = predicted + self.branch(inputs) * chosen
        if self.table is not None:
            predicted = predicted + self.table(indices % 10)
        for scale in (1.0, 2.0) if self.twice is not None else ():
            predicted = predicted + checkpoint(self.twice, scale * inputs.requires_grad_(), use_reentrant=True)
        if self.norm is not None:
            predicted = predicted + 0 * self.norm(torch.cat([inputs, inputs])).sum()
            self.seen += len(inputs)
        self.fail("forward")
        self.error(predicted, targets)
        is_last = self._trainer is not None and self.global_rank == self.trainer.world_size - 1
        begins = ("late" in self.parts and self.current_epoch) or ("late step" in self.parts and self.global_step >= 3)
        couples = is_last and begins
        if "mean over ranks" in self.parts:  # of marked samples, as it is written for whole batches
            count = torch.tensor(float(marked(batch)))
            torch.distributed.all_reduce(count)
            return self.trainer.world_size * ((predicted - targets)[batch[0][:, 0] > 0]).square().sum() / count
        return (predicted - targets).square().mean() + (predicted.var() if couples else 0.0)

    def fail_in_backward(self, tensor: torch.Tensor, phase: str) -> None:
        if self._trainer is not None and tensor.requires_grad:
            tensor.register_hook(lambda _: self.fail(phase))

    def fail(self, phase: str) -> None:
        if self._trainer is None or not self.trainer.training:
            return
        key = (self.current_epoch, self.trainer.fit_loop.epoch_loop.batch_progress.current.ready - 1, phase)
        if self.faults.get(key, 0):
            self.faults[key] -= 1
            raise torch.OutOfMemoryError(f"CUDA out of memory, in {phase} on rank {self.global_rank}.")

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.sizes.append((self.current_epoch, len(batch[0])))
        value = self.loss(batch)
        if self.gathers:
            self.all_gather(value.detach())
        self.log("loss", value, on_step=True, on_epoch=True, sync_dist=True)
        self.log("error", self.error, on_step=False, on_epoch=True)
        return value

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        value = self.loss(batch)
        self.log("val/loss", value, on_step=True, on_epoch=True, sync_dist=True)
        if len(batch[0]) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory")

    def on_before_backward(self, loss: torch.Tensor) -> None:
        if self.trainer.world_size > 1:
            self.unsynced.append(not self.trainer.strategy.model.require_backward_grad_sync)

    def on_after_backward(self) -> None:
        self.after_backward[self.global_step] = next(self.parameters()).grad.clone()

    def on_train_batch_end(self, *_: Any) -> None:
        if "gathers after batches" in self.parts:
            self.all_gather(torch.ones(()))
        self.logged.append({k: float(v) for k, v in self.trainer._results.metrics(on_step=True)["callback"].items()})

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.note_gradients()

    def note_gradients(self) -> None:
        gradients = (parameter.grad for parameter in self.parameters())
        self.gradients.append([None if g is None else g.detach().to_dense().clone() for g in gradients])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def marked(batch: Any) -> int:
    """How many samples of a batch count."""
    return int((batch[0][:, 0] > 0).sum())


class LastBackward(pl.Callback):
    """Lets memory run out in the last backward pass of windows, in its first attempt alone."""

    def __init__(self, *operations: int) -> None:
        self.operations, self.faults = (0, *operations), Faults()
        self.window = 0

    def on_before_backward(self, trainer: pl.Trainer, *_: Any) -> None:
        last = not trainer.fit_loop._should_accumulate()
        if last and self.window == trainer.global_step < len(self.operations):
            self.faults.at, self.faults.count, self.faults.armed = {self.operations[self.window]}, 0, True
            self.window += 1

    def on_after_backward(self, *_: Any) -> None:
        self.faults.armed = False

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Forget that smaller pieces have been needed: every window begins as the first."""
        (callback,) = (each for each in trainer.callbacks if isinstance(each, AutoAccumulate))
        callback._started_fit.evaluation.engine.limits.clear()


@contextmanager
def noted_exchanges() -> Iterator[list[bool]]:
    """Whether each asynchronous exchange was begun within a backward pass."""
    sent: list[bool] = []
    reduce = torch.distributed.all_reduce

    def noting(*arguments: Any, async_op: bool = False, **settings: Any) -> Any:
        work = reduce(*arguments, async_op=async_op, **settings)
        sent.extend([torch._C._current_graph_task_id() >= 0] * async_op)
        return work

    with mock.patch("torch.distributed.all_reduce", noting):
        yield sent


def run(scenario: dict[str, Any]) -> dict[str, Any]:
    """One fit on this rank."""
    rank = int(os.environ["RANK"])
    trouble = {"faults": scenario["faults"].get(str(rank), ()), "most": scenario.get("most", {}).get(str(rank), 1000)}
    module = Task(**scenario["task"], **trouble)
    normalize = {"normalize": lambda batch: float(len(batch[0]))} if scenario.get("counted") else {}
    callback = AutoAccumulate(**{"verify": False, **scenario["accumulate"]}, **normalize)
    dataset = Samples(scenario["size"], getattr(torch, scenario["task"].get("dtype", "float64")))
    loader = DataLoader(dataset, scenario["batch_size"], shuffle=True)
    validation = {"val": DataLoader(dataset, scenario["batch_size"])} if scenario.get("validates") else {}
    pl.seed_everything(7, verbose=False)
    last = LastBackward(*scenario.get("operations", {}).get(str(rank), ()))
    trainer = quiet_trainer(
        *(callback, *([last] if "operations" in scenario else [])),
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=DDPStrategy(process_group_backend="gloo", **scenario.get("strategy", {})),
        **scenario.get("trainer", {}),
    )
    here = scenario.get("elsewhere", {}).get(str(rank))
    with ExitStack() as around:
        if here is not None:
            around.enter_context(mock.patch("lightning_ga.fit.limit.hardware", return_value=here))
        if "operations" in scenario:
            around.enter_context(last.faults)
        sent = around.enter_context(noted_exchanges())
        told = around.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always", ExactnessWarning)
        trainer.fit(module, loader, *validation.values(), ckpt_path=scenario.get("resume"))
    if "save" in scenario:
        trainer.save_checkpoint(scenario["save"])
    return {
        "source": callback.probe.source if callback.probe else None,
        "gradients": module.gradients,
        "buffers": {name: buffer.clone() for name, buffer in module.named_buffers()},
        "weights": [parameter.detach().clone() for parameter in module.parameters()],
        "events": callback.oom_events,
        "plan": repr(callback.plan),
        "micro_batch": callback.plan.micro_batch_size,
        "sizes": module.sizes,
        "logged": module.logged,
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "unsynced": module.unsynced,
        "after_backward": list(module.after_backward.values()),
        "operations": last.faults.count,
        "sent": sent,
        "cause": callback.exactness.cause if callback.exactness else None,
        "told": [str(each.message) for each in told if issubclass(each.category, ExactnessWarning)],
    }


def main(scenarios: dict[str, Any], folder: Path, ranks: int) -> int:
    """All scenarios on as many ranks."""
    return in_ranks(ranks, live, scenarios, folder)


def live(scenarios: dict[str, Any], folder: Path) -> int:
    """The life of one rank; its exit code."""
    warnings.simplefilter("ignore")
    rank, name = os.environ["RANK"], ""
    try:
        for name, scenario in scenarios.items():
            torch.save(run(scenario), folder / f"{name}-{rank}.pt")
    except Exception as error:
        (folder / f"error-{rank}.txt").write_text(f"{name}: {type(error).__name__}: {error}")
        traceback.print_exc()
        return 1
    return 0
