"""The plan in words: its table before the first step, and its JSON. Made from frozen records alone."""

from dataclasses import asdict, dataclass
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table

from lightning_ga.app.run_files import write_json
from lightning_ga.plan.accumulation import AccumulationPlan
from lightning_ga.plan.exactness import Exactness
from lightning_ga.plan.planned_device import PlannedDevice
from lightning_ga.plan.records import Method, ProbeResult
from lightning_ga.plan.units import counted, format_bytes

METHODS: dict[Method, str] = {  # what found a limit
    "replay": "predicted and verified",
    "prediction": "not tried",
    "below": "never near the budget",
    "phases": "tried at the limit",
    "bracket": "tried at the limit",
}


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


def describe_search(probe: ProbeResult) -> str:
    """How a limit was found, with the method by its name and in words.

    Examples:
        >>> describe_search(ProbeResult(8, 1000, 900, (), 1, 0.42, "replay", source="cache"))
        'remembered, verified by one step, 0.4 s (cache)'
    """
    seconds = f"{probe.seconds:.1f} s"
    if probe.source == "checkpoint":
        return "found before and kept in the checkpoint (checkpoint)"
    if probe.source == "cache":
        return f"remembered, verified by one step, {seconds} (cache)"
    if probe.source == "estimate":
        return f"{probe.steps} steps worked out, {seconds} (estimate)"
    tried = f"{counted(len(probe.trials), 'trial')}, {counted(probe.steps, 'step')}"
    return f"{tried}, {seconds} ({probe.method}: {METHODS[probe.method]})"
