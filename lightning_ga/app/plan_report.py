"""The plan of a run: found on the callback that plans, printed as a table and saved as JSON before the first step."""

from pathlib import Path
from textwrap import fill
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_ga.app.mistakes import on_the_line
from lightning_ga.app.plots import as_svg, probe_figure
from lightning_ga.app.run_files import PROBE, write_json, write_text
from lightning_ga.app.terminal import columns, log
from lightning_ga.plan.batch_schedule import PiecewiseSchedule
from lightning_ga.plan.exactness_verdicts import warning
from lightning_ga.plan.records import ProbeResult
from lightning_ga.plan.units import counted, format_bytes

MOST_CHANGES = 5  # of a schedule that are shown


Records = dict[str, Any]
"""What is known before the first step, by name; ``None`` for what did not run."""


def records_of(accumulate: Any, setting: str) -> Records:
    """The records of the callback that plans, if there is one, with a line on model and device."""
    records: Records = {name: getattr(accumulate, name, None) for name in ("plan", "probe", "exactness", "fits")}
    records["batch_norm"] = getattr(getattr(accumulate, "_options", None), "batch_norm", "warn")
    return {**records, "setting": setting, "schedule": schedule_text(accumulate)}


def warning_of(records: Records) -> str | None:
    """What a reader of the run has to know first: that its gradients were not exact, or that this is not known."""
    plan = records["plan"]
    if plan is None or plan.factor == 1:
        return None
    return warning(records["exactness"], batch_norm=records["batch_norm"])


def rows(records: Records) -> dict[str, str]:
    """Texts by name; more on memory if a batch is cut, or more than half of the memory is used."""
    plan = records["plan"]
    is_whole = plan is not None and plan.factor == 1
    texts = {"training": records["setting"]}
    if plan is not None:
        texts["effective batch"] = str(plan).removeprefix("effective batch ")
    if records["schedule"]:
        texts["schedule"] = records["schedule"]
    if records["fits"] is not None:
        texts["fits"] = str(records["fits"])
    if records["probe"] is not None:
        texts |= probe_rows(records["probe"], is_whole=is_whole)
    if is_whole and (records["fits"] is not None or records["exactness"] is not None):
        texts["exactness"] = "whole windows: nothing is accumulated"
    elif records["exactness"] is not None:
        texts["exactness"] = on_the_line(str(records["exactness"]))
    return texts


def probe_rows(probe: ProbeResult, *, is_whole: bool) -> dict[str, str]:
    """What the probe found, and how; only its peak if a window is one micro-batch in less than half of the memory."""
    texts = {
        "memory": (
            f"peak {format_bytes(probe.peak_bytes)} at the limit, of a budget of {format_bytes(probe.budget_bytes)}"
        )
    }
    if not is_whole or 2 * probe.peak_bytes > probe.budget_bytes:
        texts["limit"] = f"{counted(probe.limit, 'sample')} per micro-batch"
        texts["probe"] = f"from the {probe.source}"
        if probe.source == "probe":
            tried = f"{counted(len(probe.trials), 'trial')}, {counted(probe.steps, 'step')}"
            texts["probe"] = f"{tried}, {probe.seconds:.1f} s"
    if probe.recomputed is not None:
        texts["computed again"] = str(probe.recomputed)
    if probe.fastest is not None:
        texts["fastest"] = f"{counted(probe.fastest, 'sample')}, of {len(probe.timings)} sizes that were timed"
    return texts


class PlanReport(Callback):
    """Prints the plan and saves ``plan.json`` and the probe's pictures before the first step; a dry run ends there."""

    def __init__(self, folder: Path, *, dry_run: bool = False) -> None:
        self.folder = folder
        self.dry_run = dry_run
        self._records: Records = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report the plan, which AutoAccumulate has by now, as it comes first among the callbacks."""
        if trainer.is_global_zero:
            self._records = records_of(find_accumulate(trainer), setting_of(trainer, pl_module))
            save_plan(self.folder / "plan.json", self._records)
            probe = self._records["probe"]
            if probe is not None:
                figure = probe_figure(probe)
                figure.savefig(self.folder / "probe.png", dpi=150)
                write_text(self.folder / PROBE, as_svg(figure, "Memory by micro-batch"))
            log.info(printed_plan(self._records))
        if self.dry_run:
            trainer.fit_loop.epoch_loop.max_steps = trainer.global_step

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the verdict again, which is measured in training, too, and the plan if an error has changed it."""
        if trainer.is_global_zero:
            found = find_accumulate(trainer)
            self._records["exactness"] = getattr(found, "exactness", None)
            if getattr(found, "oom_events", 0):
                self._records.update(plan=found.plan, fits=None)
            save_plan(self.folder / "plan.json", self._records)


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
    """How the callback's batch or factor changes, ``from epoch 0 on 32, from epoch 2 on 64``; empty if it does not."""
    request = scheduled(accumulate)
    if request is None:
        return ""
    schedule = request.schedule
    unit = schedule.unit.removesuffix("s")
    parts = [f"from {unit} {start:,} on {count:,}" for start, count in zip(schedule.starts, schedule.counts)]
    if len(parts) > MOST_CHANGES:
        parts[MOST_CHANGES:-1] = ["…"]
    text = ", ".join(parts)
    return f"factor {text}" if request.is_factor else text


def find_accumulate(trainer: Trainer) -> Any:
    """The callback that plans, known by what it offers: ``plan`` and ``probe``."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        if hasattr(callback, "plan") and hasattr(callback, "probe"):
            return callback
    return None


def printed_plan(records: Records) -> str:
    """The plan before the first step, as wide as the terminal."""
    lines = [f"  {name:<17}{value}" for name, value in rows(records).items()]
    return "\n".join(["Plan", *(fill(line, columns(), subsequent_indent=" " * 19) for line in lines)])


def save_plan(path: Path, records: Records) -> None:
    """Save the records as JSON, with the rows of the printed table and the warning of the page."""
    write_json(path, {**records, "table": rows(records), "warning": warning_of(records)})
