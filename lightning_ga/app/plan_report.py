"""The plan of a run: found on the callback that plans, printed as a table and saved as JSON before the first step."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from lightning_ga.app.plots import describe_search, probe_figure
from lightning_ga.app.run_files import write_json
from lightning_ga.app.terminal import columns, warn
from lightning_ga.compat import loops
from lightning_ga.plan.accumulation import AccumulationPlan
from lightning_ga.plan.exactness import Exactness
from lightning_ga.plan.planned_device import PlannedDevice, current_device
from lightning_ga.plan.records import ProbeResult
from lightning_ga.plan.units import counted, format_bytes


@dataclass(frozen=True, slots=True)
class PlanRecords:
    """What is known before the first step; ``None`` for what did not run. The setting is a line on what is trained."""

    plan: AccumulationPlan | None = None
    probe: ProbeResult | None = None
    exactness: Exactness | None = None
    device: PlannedDevice | None = None
    setting: str = ""

    @property
    def memory(self) -> list[str]:
        """What holds the memory at the peak, in three lines; none where no step was recorded."""
        return list(self.probe.holders.lines()) if self.probe is not None and self.probe.holders is not None else []


class PlanReport(Callback):
    """Prints the plan and saves ``plan.json`` and ``probe.png`` before the first step; a dry run ends there."""

    def __init__(self, folder: Path, *, dry_run: bool = False) -> None:
        self.folder, self.dry_run = folder, dry_run
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


def find_accumulate(trainer: Trainer) -> Any:
    """The callback that plans, known by what it offers: ``plan`` and ``probe``."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return next((one for one in callbacks if hasattr(one, "plan") and hasattr(one, "probe")), None)


def current_plan(trainer: Trainer) -> AccumulationPlan | None:
    """The plan of the epoch; where nothing plans, the recipe as it is, if its loader has a batch size."""
    plan: AccumulationPlan | None = getattr(find_accumulate(trainer), "plan", None)
    batch = getattr(trainer.train_dataloader, "batch_size", None)
    if plan is not None or not isinstance(batch, int):
        return plan
    factor, ranks = trainer.accumulate_grad_batches, trainer.world_size
    return AccumulationPlan(batch * factor * ranks, ranks, batch, factor, ((batch,) * factor,) * ranks)


def read_records(trainer: Trainer, module: LightningModule) -> PlanRecords:
    """What the callback that plans has found by now, and model, parameters, precision and device in one line."""
    found, elsewhere = find_accumulate(trainer), current_device()
    millions = sum(parameter.numel() for parameter in module.parameters()) / 1e6
    ranks = f"{trainer.world_size} × " if trainer.world_size > 1 else ""
    place = f", on {ranks}{module.device.type}" if elsewhere is None else ""
    name = module.hparams.get("name", type(module).__name__)
    return PlanRecords(
        plan=current_plan(trainer),
        probe=getattr(found, "probe", None),
        exactness=getattr(found, "exactness", None),
        device=elsewhere,
        setting=f"{name}, {millions:.1f} M parameters, {trainer.precision}{place}",
    )


def plan_table(records: PlanRecords) -> Table:
    """The plan before the first step, as wide as what shows it."""
    table = Table(title="Plan", title_justify="left", title_style="bold", show_header=False, box=SIMPLE_HEAD)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in plan_rows(records):
        table.add_row(name, value)
    return table


def save_plan(path: Path, records: PlanRecords) -> None:
    """Save the records as JSON, with what is told of them."""
    write_json(path, {**asdict(records), "memory": records.memory, "told": dict(plan_rows(records))})


def plan_rows(records: PlanRecords) -> list[tuple[str, str]]:
    """The rows of the plan's table, as pairs of a name and a text."""
    plan, probe, exactness = records.plan, records.probe, records.exactness
    rows = []
    if plan is not None:
        rows.append(("effective batch", str(plan).removeprefix("effective batch ")))
    if probe is not None:
        rows += probe_rows(probe, plan) if records.device is None else estimate_rows(probe, plan, records.device)
    if exactness is not None:
        whole = plan is not None and plan.factor == 1
        rows.append(("exactness", "whole windows: nothing is accumulated" if whole else str(exactness)))
    setting = [("training", records.setting)] if records.setting else []
    return [*setting, *(rows or [("effective batch", "set by the loader")])]


def probe_rows(probe: ProbeResult, plan: AccumulationPlan | None) -> list[tuple[str, str]]:
    """The rows of what a probe found."""
    peak, budget = format_bytes(probe.peak_bytes), format_bytes(probe.budget_bytes)
    more = " or more" if plan is not None and plan.factor == 1 and plan.micro_batch_size == probe.limit else ""
    timed = f"of {len(probe.timings)} sizes that were timed (probe.png)"
    fastest = [] if probe.fastest is None else [("fastest", f"{counted(probe.fastest, 'sample')}, {timed}")]
    return [
        ("memory", f"peak {peak} at the limit, of a budget of {budget}"),
        ("limit", f"{counted(probe.limit, 'sample')} per micro-batch{more}"),
        *fastest,
        ("probe", describe_search(probe)),
    ]


def estimate_rows(probe: ProbeResult, plan: AccumulationPlan | None, device: PlannedDevice) -> list[tuple[str, str]]:
    """The rows of what was worked out for another device, with those that say which."""
    total, reserved = format_bytes(device.total_bytes), format_bytes(device.reserved_bytes)
    ranks = 1 if plan is None else plan.world_size
    buckets = ", buckets" if ranks > 1 else ""
    memory, *others = probe_rows(probe, plan)
    return [
        ("estimate", f"for {f'{ranks} devices' if ranks > 1 else 'a device'} of {total}; nothing was run"),
        memory,
        ("set aside", f"{reserved} for context, workspaces, fragmentation{buckets}"),
        *others,
        *(("unreliable", reason) for reason in device.unreliable),
    ]
