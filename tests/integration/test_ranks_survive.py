"""Memory runs out on some ranks only: nobody waits for ever, and gradients are those of the whole batch."""

import os
import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from ranks import ddp, on_ranks, start
from reference import FEATURES, Samples, cut, network, permutation, quiet_trainer
from torch.utils.data import DataLoader

from lightning_ga import AutoAccumulate, ExactnessWarning

pytestmark = pytest.mark.distributed


@dataclass
class Planned:
    """How often memory is still to run out: an object, because a dict among a module's attributes is put back."""

    left: dict[tuple[int, int, str], int]


class Task(pl.LightningModule):
    """A regression with parts that are hard on ranks, which runs out of memory where it is told to."""

    def __init__(self, *parts: str, dtype: torch.dtype = torch.float64, faults: Any = (), most: int = 1000) -> None:
        super().__init__()
        self.net, self.parts, self.most = network(dtype), parts, most
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.spare = torch.nn.Linear(FEATURES, 1).to(dtype) if "unused" in parts else None
            self.branch = torch.nn.Linear(FEATURES, 1).to(dtype) if "unused" in parts else None
            self.table = torch.nn.Embedding(10, 1, sparse=True).to(dtype) if "sparse" in parts else None
            self.norm = torch.nn.BatchNorm1d(FEATURES).to(dtype) if "buffers" in parts else None
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64) if "buffers" in parts else None)
        self.error = torchmetrics.MeanSquaredError()
        self.faults = Planned({(epoch, index, phase): times for epoch, index, phase, times in faults})
        self.gradients: list[list[torch.Tensor | None]] = []
        self.sizes: list[tuple[int, int]] = []
        self.after_backward: dict[int, torch.Tensor] = {}  # of a window: the first gradient

    def loss(self, batch: Any) -> torch.Tensor:
        inputs, targets, indices = batch
        hidden = self.net[1](self.net[0](inputs))
        predicted = self.net[2](hidden)
        for tensor, phase in ((hidden, "late"), (predicted, "backward")):
            if self._trainer is not None and tensor.requires_grad:
                tensor.register_hook(lambda _, phase=phase: self.fail(phase))
        chosen = (indices % 16 < 4)[:, None]
        if self.branch is not None and chosen.any():
            predicted = predicted + self.branch(inputs) * chosen
        if self.table is not None:
            predicted = predicted + self.table(indices % 10)
        if self.norm is not None:
            predicted = predicted + 0 * self.norm(torch.cat([inputs, inputs])).sum()
            self.seen += len(inputs)
        self.fail("forward")
        self.error(predicted, targets)
        is_last = self._trainer is not None and self.global_rank == self.trainer.world_size - 1
        couples = is_last and "late" in self.parts and self.current_epoch
        return (predicted - targets).square().mean() + (predicted.var() if couples else 0.0)

    def fail(self, phase: str) -> None:
        if self._trainer is None or not self.trainer.training:
            return
        key = (self.current_epoch, self.trainer.fit_loop.epoch_loop.batch_progress.current.ready - 1, phase)
        if self.faults.left.get(key, 0):
            self.faults.left[key] -= 1
            raise torch.OutOfMemoryError(f"CUDA out of memory, in {phase} on rank {self.global_rank}.")

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.sizes.append((self.current_epoch, len(batch[0])))
        value = self.loss(batch)
        if "gathers" in self.parts:
            self.all_gather(value.detach())
        self.log("loss", value, on_step=False, on_epoch=True, sync_dist=True)
        self.log("error", self.error, on_step=False, on_epoch=True)
        return value

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        value = self.loss(batch)
        self.log("val/loss", value, on_step=True, on_epoch=True, sync_dist=True)
        if len(batch[0]) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory")

    def on_after_backward(self) -> None:
        self.after_backward[self.global_step] = next(self.parameters()).grad.clone()

    def on_train_batch_end(self, *_: Any) -> None:
        if "gathers after batches" in self.parts:
            self.all_gather(torch.ones(()))

    def on_before_optimizer_step(self, optimizer: Any = None) -> None:
        gradients = (parameter.grad for parameter in self.parameters())
        self.gradients.append([None if g is None else g.detach().to_dense().clone() for g in gradients])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@dataclass(frozen=True)
class Scenario:
    """A fit of 61 samples; faults are pairs of a rank and (epoch, batch, phase, times)."""

    faults: tuple[tuple[int, Any], ...] = ()
    parts: tuple[str, ...] = ()
    dtype: torch.dtype = torch.float64
    accumulate: Any = None
    counts: bool = False  # samples, by ``normalize``
    most: tuple[int, int] = (1000, 1000)  # samples of validation that fit on a rank
    validates: bool = False
    epochs: int = 2
    sanity: int = 0
    strategy: Any = None
    trainer: Any = None
    save: Path | None = None
    resume: Path | None = None
    is_elsewhere: bool = False  # the second rank, on other hardware


LOADER = {"effective_batch_size": 24, "micro_batch_size": 4}
STEP = {**LOADER, "micro_batching": "step"}
SMALL = {"effective_batch_size": 4, "micro_batch_size": 2, "on_oom": "raise", "verify": True}


def scenario(*faults: tuple[int, Any], accumulate: Any = LOADER, **settings: Any) -> Scenario:
    return Scenario(faults, accumulate=accumulate, **settings)


def trained(scenarios: dict[str, Scenario]) -> dict[str, dict[str, Any]]:
    """What this rank records of one fit after the other."""
    return {name: train_scenario(each, int(os.environ["RANK"])) for name, each in scenarios.items()}


def train_scenario(each: Scenario, rank: int) -> dict[str, Any]:
    faults, most = [fault for on, fault in each.faults if on == rank], each.most[rank]
    module = Task(*each.parts, dtype=each.dtype, faults=faults, most=most)
    normalize = {"normalize": lambda batch: float(len(batch[0]))} if each.counts else {}
    callback = AutoAccumulate(**{"verify": False, **each.accumulate}, **normalize)
    dataset = Samples(61, each.dtype)
    validation = [DataLoader(dataset, 12)] if each.validates else []
    pl.seed_everything(7, verbose=False)
    settings = {"max_epochs": each.epochs, "num_sanity_val_steps": each.sanity, **ddp(**(each.strategy or {}))}
    settings |= each.trainer or {}
    trainer = quiet_trainer(callback, **settings)
    elsewhere = mock.patch("lightning_ga.fit.limit_search.describe_hardware", return_value="another GPU")
    with (
        elsewhere if each.is_elsewhere and rank == 1 else nullcontext(),
        warnings.catch_warnings(record=True) as told,
    ):
        warnings.simplefilter("always", ExactnessWarning)
        trainer.fit(module, DataLoader(dataset, 12, shuffle=True), *validation, ckpt_path=each.resume)
    if each.save is not None:
        trainer.save_checkpoint(each.save)
    return {
        "source": callback.probe.source if callback.probe else None,
        "gradients": module.gradients,
        "seen": None if module.seen is None else int(module.seen),
        "events": callback.oom_events,
        "plan": repr(callback.plan),
        "sizes": module.sizes,
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "after_backward": list(module.after_backward.values()),
        "cause": callback.exactness.cause if callback.exactness else None,
        "told": [str(each.message) for each in told if issubclass(each.category, ExactnessWarning)],
    }


def run(folder: Path, scenarios: dict[str, Scenario], ranks: int = 2) -> dict[str, list[dict[str, Any]]]:
    """What every rank recorded of every scenario."""
    records = on_ranks(trained, folder, scenarios, ranks=ranks)
    return {name: [record[name] for record in records] for name in scenarios}


def one_rank(each: Scenario, ranks: int) -> list[list[torch.Tensor | None]]:
    """Gradients of plain SGD with whole windows."""
    task, dataset = Task(*each.parts, dtype=each.dtype), Samples(61, each.dtype)
    optimizer = task.configure_optimizers()
    orders = [permutation(61, 7, epoch) for epoch in range(each.epochs)]
    if "micro_batching" in each.accumulate:  # each rank has as many samples, as in stock Lightning
        orders = [[*order, *order[: -len(order) % ranks]] for order in orders]
    for window in (window for order in orders for window in cut(order, each.accumulate["effective_batch_size"])):
        optimizer.zero_grad()
        task.loss((dataset.inputs[window], dataset.targets[window], torch.tensor(window))).backward()
        task.on_before_optimizer_step()
        optimizer.step()
    return task.gradients


def same(ours: list[Any], oracle: list[Any], tolerance: float) -> None:
    """Gradients of every step, those that are none included."""
    assert len(ours) == len(oracle)
    for step, theirs in zip(ours, oracle):
        assert [g is None for g in step] == [g is None for g in theirs]
        a, b = (torch.cat([g.flatten().double() for g in one if g is not None]) for one in (step, theirs))
        assert float((a - b).norm() / b.norm()) <= tolerance


UNUSED: dict[str, Any] = {"parts": ("unused",), "strategy": {"find_unused_parameters": True}}
STATIC, BUFFERS = {"strategy": {"static_graph": True}}, {"parts": ("buffers",)}
HALF, ALONE = {"dtype": torch.bfloat16}, {"parts": ("gathers after batches",)}
EARLY, MIDDLE, LATE = (1, (0, 0, "forward", 1)), (1, (0, 1, "backward", 1)), (0, (0, 2, "late", 1))
SURVIVED: dict[int, dict[str, Scenario]] = {
    2: {
        "unused": scenario(LATE, (1, (1, 1, "late", 1)), **UNUSED),
        "unused-raise": scenario(accumulate=SMALL, **UNUSED),  # in most first micro-batches
        "static": scenario(EARLY, LATE, **STATIC),
        "static-raise": scenario(accumulate={**LOADER, "on_oom": "raise"}, **STATIC),
        "buffers": scenario(EARLY, **BUFFERS),
        "buffers-step": scenario(LATE, **BUFFERS, accumulate=STEP),
        "all": scenario(MIDDLE, **{**UNUSED, "parts": ("unused", "sparse", "buffers")}),
        "counted-step": scenario(MIDDLE, counts=True, accumulate=STEP),
        "sparse-whole": scenario(parts=("sparse",), accumulate={**LOADER, "micro_batch_size": 12}),
        "measured-whole": scenario(MIDDLE, accumulate={**LOADER, "micro_batch_size": 12, "verify": True}),
        "half-whole": scenario(MIDDLE, accumulate={**LOADER, "micro_batch_size": 12}, **HALF),
        "half-step": scenario(MIDDLE, accumulate=STEP, **HALF),
        "measured-step": scenario(MIDDLE, accumulate={**STEP, "verify": True}, **ALONE),  # asks no other rank
        "gathers": scenario(parts=("gathers",), accumulate={**STEP, "micro_batch_size": 5}),
    },
    1: {
        "views": scenario((0, MIDDLE[1]), strategy={"gradient_as_bucket_view": True}),
        "static": scenario(**STATIC),
        "static-step": scenario(LATE, **STATIC, accumulate=STEP),
        "half": scenario(LATE, **HALF),
    },
}


@pytest.mark.parametrize("ranks", SURVIVED)
def test_gradients_are_those_of_the_whole_batch(ranks: int, tmp_path: Path) -> None:
    """And buffers; errors are survived where they are raised, and nowhere else; a step that gathers is cut alike.

    Hooks after the backward pass see averages, in windows that run again too.
    """
    records = run(tmp_path, SURVIVED[ranks], ranks)
    for name, each in SURVIVED[ranks].items():
        oracle, in_step = one_rank(each, ranks), "micro_batching" in each.accumulate
        for rank, record in enumerate(records[name]):
            same(record["gradients"], oracle, 1e-12 if each.dtype == torch.float64 else 3e-2)
            assert bool(record["events"]) == (rank in dict(each.faults)), (name, rank)
            if each.dtype == torch.float64 and not in_step:
                used = [step[0] for step in record["gradients"]]
                assert all(torch.equal(*pair) for pair in zip(record["after_backward"], used, strict=True)), name
            if "buffers" in each.parts:  # rank 0's are shared as a window begins; the last one has 7 and 6 samples
                assert record["seen"] == 62 - (rank and not in_step), (name, rank)
    counts = {len([size for epoch, size in each["sizes"] if epoch == 1]) for each in records.get("gathers", ())}
    assert len(counts) < 2


def test_logs_are_those_of_whole_windows_and_validations(tmp_path: Path) -> None:
    """Means over the epoch, which ranks exchange at its end; in a sanity check, where they would share buffers, too."""
    common: dict[str, Any] = {**BUFFERS, "validates": True, "sanity": 1}
    within = {"accumulate_grad_batches": 2, "val_check_interval": 1}
    due: dict[str, Any] = {"validates": True, "accumulate": {"micro_batch_size": 12}, "trainer": within}
    scenarios = {
        "loader-clean": scenario(epochs=1),
        "loader-late": scenario(MIDDLE, epochs=1),
        "step-clean": scenario(accumulate=STEP, epochs=1),
        "step-late": scenario(MIDDLE, accumulate=STEP, epochs=1),
        "interval-clean": scenario(**due),
        "interval-early": scenario(EARLY, **due),
        "validation-clean": scenario(**common),
        "validation-sanity": scenario(**common, most=(1000, 3)),
        "validation-first": scenario(**common, most=(5, 1000)),
    }
    records = run(tmp_path, scenarios)
    for name, found in records.items():
        clean = records[f"{name.split('-')[0]}-clean"][0]["metrics"]
        assert clean.keys() >= ({"val/loss_epoch"} if scenarios[name].validates else {"loss", "error"})
        assert all(record["metrics"] == pytest.approx(clean, rel=1e-6) for record in found), name
    for name, survivor in (("sanity", 1), ("first", 0)):
        assert [bool(record["events"]) for record in records[f"validation-{name}"]] == [survivor == 0, survivor == 1]


SEEN, UNSEEN = (1, (0, 1, "late", 1)), (1, (0, 0, "forward", 1))
ENDED: dict[str, tuple[Scenario, str]] = {
    "one sample too large": (scenario((1, (0, 1, "late", 100))), "one sample alone"),
    "a step that asks other ranks": (scenario(SEEN, parts=("gathers",)), "exchanges values with the other ranks"),
    "not seen to ask yet": (scenario(UNSEEN, parts=("gathers",)), "exchanges values with the other ranks"),
}


@pytest.mark.parametrize("name", ENDED)
def test_what_one_rank_cannot_survive_ends_all(name: str, tmp_path: Path) -> None:
    """In one sentence with a remedy."""
    each, sentence = ENDED[name]
    done = start(trained, tmp_path, {name: each})
    assert done.code == 1
    assert sentence in done.output
    assert name == "one sample too large" or "max_micro_batch_size" in done.output
    assert not list(tmp_path.glob("rank*.pt"))


def test_ranks_on_unequal_hosts_resume_together(tmp_path: Path) -> None:
    """The checkpoint's limit was found on hardware that only one of them has: both leave it, and probe."""
    common: dict[str, Any] = {"accumulate": {"effective_batch_size": 24, "memory_budget": 6000}}
    first = scenario(**common, epochs=1, save=tmp_path / "first.ckpt")
    again, other = (scenario(**common, resume=first.save, is_elsewhere=is_other) for is_other in (False, True))
    records = run(tmp_path, {"first": first, "same": again, "other": other})
    assert [record["source"] for record in records["same"]] == ["checkpoint"] * 2
    assert "checkpoint" not in [record["source"] for record in records["other"]]
    assert len({record["plan"] for record in (*records["same"], *records["other"])}) == 1


def test_what_one_rank_finds_after_an_error_is_told_by_the_first(tmp_path: Path) -> None:
    """Its loss compares samples from the second epoch on; ranks agree as the third begins."""
    late = scenario((1, (1, 1, "forward", 1)), accumulate={**LOADER, "verify": True}, parts=("late",), epochs=3)
    first, second = run(tmp_path, {"late": late})["late"]
    assert first["cause"] == second["cause"] == "coupled"
    assert ["not exact" in text for text in first["told"]] == [True]
