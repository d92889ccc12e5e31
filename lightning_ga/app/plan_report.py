"""The plan of a run: found on the callback that plans, printed and saved before the first step."""

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console

from lightning_ga.app.plan_table import PlanRecords, plan_table, save_plan
from lightning_ga.app.plots import probe_figure
from lightning_ga.app.terminal import columns, warn
from lightning_ga.compat import loops
from lightning_ga.plan.accumulation import AccumulationPlan
from lightning_ga.plan.planned_device import current_device


class PlanReport(Callback):
    """Prints the plan and saves ``plan.json`` and ``probe.png`` before the first step; a dry run ends there."""

    def __init__(self, folder: Path, *, dry_run: bool = False) -> None:
        self.folder = folder
        self.dry_run = dry_run
        self.started = False  # until it is known that there is anything to train

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """AutoAccumulate, which comes first among the callbacks, has its plan by now."""
        self.started = True
        if trainer.is_global_zero:
            records = read_records(trainer, pl_module)
            save_plan(self.folder / "plan.json", records)
            if records.probe is not None:
                probe_figure(records.probe).savefig(self.folder / "probe.png", dpi=150)
            console = Console(width=columns(), highlight=False)
            console.print(plan_table(records))
            for line in records.memory:
                console.print(line, markup=False)
            mixed = any(getattr(trainer.datamodule, name, 0) for name in ("mixup", "cutmix"))  # type: ignore[attr-defined]
            if mixed and records.plan is not None and records.plan.micro_batch_size == 1:
                warn("data.mixup and data.cutmix mix the samples of a micro-batch, and these have one: none is mixed.")
        if self.dry_run:
            loops.end_training(trainer)


def describe_setting(trainer: Trainer, module: LightningModule) -> str:
    """Model, parameters, precision and device, unless it is another one, in one line."""
    name = module.hparams.get("name", type(module).__name__)
    millions = sum(parameter.numel() for parameter in module.parameters()) / 1e6
    device = f"{trainer.world_size} × {module.device.type}" if trainer.world_size > 1 else module.device.type
    place = "" if current_device() is not None else f", on {device}"
    return f"{name}, {millions:.1f} M parameters, {trainer.precision}{place}"


def find_accumulate(trainer: Trainer) -> Any:
    """The callback that plans, known by what it offers: ``plan`` and ``probe``."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return next((one for one in callbacks if hasattr(one, "plan") and hasattr(one, "probe")), None)


def read_records(trainer: Trainer, module: LightningModule) -> PlanRecords:
    """What the callback that plans has found by now."""
    found = find_accumulate(trainer)
    return PlanRecords(
        plan=current_plan(trainer),
        probe=getattr(found, "probe", None),
        exactness=getattr(found, "exactness", None),
        device=current_device(),
        setting=describe_setting(trainer, module),
    )


def current_plan(trainer: Trainer) -> AccumulationPlan | None:
    """The plan of the epoch; where nothing plans, the recipe as it is, if its loader has a batch size."""
    plan: AccumulationPlan | None = getattr(find_accumulate(trainer), "plan", None)
    batch = getattr(trainer.train_dataloader, "batch_size", None)
    if plan is not None or not isinstance(batch, int):
        return plan
    factor, ranks = trainer.accumulate_grad_batches, trainer.world_size
    return AccumulationPlan(batch * factor * ranks, ranks, batch, factor, ((batch,) * factor,) * ranks)
