"""The plan of a run: found on the callback that plans, printed as a table and saved as JSON before the first step."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from textwrap import fill
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_ga.app.mistakes import on_the_line
from lightning_ga.app.plots import probe_figure
from lightning_ga.app.run_files import write_json
from lightning_ga.app.terminal import columns, log
from lightning_ga.plan.accumulation import AccumulationPlan
from lightning_ga.plan.batch_schedule import PiecewiseSchedule
from lightning_ga.plan.exactness_verdicts import Exactness
from lightning_ga.plan.records import Fits, ProbeResult
from lightning_ga.plan.units import counted, format_bytes

MOST_CHANGES = 5  # of a schedule that are shown


@dataclass(frozen=True, slots=True)
class PlanRecords:
    """What is known before the first step; ``None`` for what did not run. The setting is a line on model and device.

    The schedule says how the batch changes.
    """

    plan: AccumulationPlan | None = None
    probe: ProbeResult | None = None
    exactness: Exactness | None = None
    setting: str = ""
    schedule: str = ""
    fits: Fits | None = None

    @property
    def is_whole(self) -> bool:
        """Whether a window is one micro-batch."""
        return self.plan is not None and self.plan.factor == 1

    def rows(self) -> dict[str, str]:
        """Texts by name; more on memory if a batch is cut, or more than half of the memory is used."""
        rows = {"training": self.setting}
        if self.plan is not None:
            rows["effective batch"] = str(self.plan).removeprefix("effective batch ")
        if self.schedule:
            rows["schedule"] = self.schedule
        if self.fits is not None:
            rows["fits"] = str(self.fits)
        if self.probe is not None:
            rows |= self._probe_rows(self.probe)
        if self.is_whole and (self.fits is not None or self.exactness is not None):
            rows["exactness"] = "whole windows: nothing is accumulated"
        elif self.exactness is not None:
            rows["exactness"] = on_the_line(str(self.exactness))
        return rows

    def _probe_rows(self, probe: ProbeResult) -> dict[str, str]:
        peak = format_bytes(probe.peak_bytes)
        rows = {"memory": f"peak {peak} at the limit, of a budget of {format_bytes(probe.budget_bytes)}"}
        if not self.is_whole or 2 * probe.peak_bytes > probe.budget_bytes:
            rows["limit"] = f"{counted(probe.limit, 'sample')} per micro-batch"
            if self.plan is not None and self.is_whole and self.plan.micro_batch_size == probe.limit:
                rows["limit"] += " or more"
            rows["probe"] = f"from the {probe.source}"
            if probe.source == "probe":
                tried = f"{counted(len(probe.trials), 'trial')}, {counted(probe.steps, 'step')}"
                rows["probe"] = f"{tried}, {probe.seconds:.1f} s"
        if probe.recomputed is not None:
            rows["computed again"] = str(probe.recomputed)
        if probe.fastest is not None:
            rows["fastest"] = f"{counted(probe.fastest, 'sample')}, of {len(probe.timings)} sizes that were timed"
        return rows


class PlanReport(Callback):
    """Prints the plan and saves ``plan.json`` and ``probe.png`` before the first step; a dry run ends there."""

    def __init__(self, folder: Path, *, dry_run: bool = False) -> None:
        self.folder = folder
        self.dry_run = dry_run
        self._records = PlanRecords()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report the plan, which AutoAccumulate has by now, as it comes first among the callbacks."""
        if trainer.is_global_zero:
            found = find_accumulate(trainer)
            known = {name: getattr(found, name, None) for name in ("plan", "probe", "exactness", "fits")}
            schedule = schedule_text(found)
            records = PlanRecords(**known, setting=setting_of(trainer, pl_module), schedule=schedule)
            self._records = records
            save_plan(self.folder / "plan.json", records)
            if records.probe is not None:
                probe_figure(records.probe).savefig(self.folder / "probe.png", dpi=150)
            log.info(printed_plan(records))
        if self.dry_run:
            trainer.fit_loop.epoch_loop.max_steps = trainer.global_step

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the verdict again, which is measured in training, too, and the plan if an error has changed it."""
        found = find_accumulate(trainer)
        records = replace(self._records, exactness=getattr(found, "exactness", None))
        if getattr(found, "oom_events", 0):
            records = replace(records, plan=found.plan, fits=None)
        if trainer.is_global_zero and records != self._records:
            save_plan(self.folder / "plan.json", records)


def setting_of(trainer: Trainer, module: LightningModule) -> str:
    """Model, number of parameters, precision and devices."""
    name = module.hparams.get("name", type(module).__name__)
    count = count_parameters(module)
    size = f"{count / 1e6:.1f} M" if count >= 1e5 else f"{count:,}"
    place = module.device.type
    if trainer.world_size > 1:
        place = f"{trainer.world_size} × {place}"
    return f"{name}, {size} parameters, {trainer.precision}, on {place}"


def count_parameters(module: LightningModule) -> int:
    """The number of a module's parameters."""
    return sum(map(torch.numel, module.parameters()))


def scheduled(accumulate: Any) -> Any:
    """What was asked of the callback, if a schedule changes the batch; ``None`` for functions of the epoch."""
    request = getattr(accumulate, "_request", None)
    schedule = getattr(request, "schedule", None)
    if isinstance(schedule, PiecewiseSchedule) and schedule.starts not in ((), (0,)):
        return request
    return None


def schedule_text(accumulate: Any) -> str:
    """How the callback's batch or factor changes: ``32, from epoch 2 on 64``; empty if no schedule does it."""
    request = scheduled(accumulate)
    if request is None:
        return ""
    schedule = request.schedule
    unit = schedule.unit.removesuffix("s")
    parts = []
    for start, count in zip(schedule.starts, schedule.counts):
        parts.append(f"from {unit} {start:,} on {count:,}")
    if schedule.starts[0]:
        parts.insert(0, "the recipe's")
    else:
        parts[0] = f"{schedule.counts[0]:,}"
    if len(parts) > MOST_CHANGES + 1:
        parts[MOST_CHANGES:-1] = ["…"]
    text = ", ".join(parts)
    if request.is_factor:
        text = f"factor {text}"
    if unit == "epoch":
        text += " (epochs count from 0)"
    return text


def find_accumulate(trainer: Trainer) -> Any:
    """The callback that plans, known by what it offers: ``plan`` and ``probe``."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        if hasattr(callback, "plan") and hasattr(callback, "probe"):
            return callback
    return None


def printed_plan(records: PlanRecords) -> str:
    """The plan before the first step, as wide as the terminal."""
    lines = ["Plan"]
    for name, value in records.rows().items():
        row = f"  {name:<17}{value}"
        lines.append(fill(row, columns(), subsequent_indent=" " * 19))
    return "\n".join(lines)


def save_plan(path: Path, records: PlanRecords) -> None:
    """Save the records as JSON, with the rows of the printed table."""
    write_json(path, {**asdict(records), "table": records.rows()})
