"""How far is a plan for another device from a measurement? ``python -m benchmarks.planning``.

Every row is probed twice on this CPU within the same budget: with real steps, and on tensors without
values as if the device were not here. Both give the peak bytes of live tensors at several sizes, and
a limit. What CUDA does otherwise (autocast, dropout) is compared in a second table with PyTorch's own
dispatch for it (``cuda_dispatch``). There is no GPU in this: scratch memory of kernels and the
allocator's fragmentation are not compared with anything.
"""

import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
from rich.table import Table
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy

from benchmarks.cuda_dispatch import forward_rows
from benchmarks.output import as_text, conclude, empty_table, error, options
from benchmarks.planning_cases import CASES, CLASSES, Case
from benchmarks.trainers import quiet, quiet_trainer
from lightning_ga import AutoAccumulate, ProbeResult
from lightning_ga.plan.planned_device import planned_device

MOST = 96  # samples of the effective batch
AMPLE = 2**36  # bytes: any step fits
MB = 10**6


class Module(pl.LightningModule):
    """The network, loss and optimizer of a case."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case, self.net = case, case.net()
        self.accuracy = MulticlassAccuracy(CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.case.loss(self, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.case.optimizer(self.parameters())


class Enough(pl.Callback):
    """Ends the fit after its first step."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.should_stop = True


def probe(case: Case, budget: int, *, estimated: bool) -> tuple[ProbeResult, tuple[str, ...]]:
    """The probe of a real Trainer, and what an estimate listed as unreliable."""
    torch.manual_seed(0)
    accumulate = AutoAccumulate(MOST, memory_budget=budget, verify=False, cache=False)
    trainer = quiet_trainer(max_epochs=1, callbacks=[accumulate, Enough()], **case.settings())
    with planned_device(budget, like_cuda=False) if estimated else nullcontext() as device:
        trainer.fit(Module(case), DataLoader(case.data(MOST), batch_size=8))
    assert accumulate.probe is not None
    return accumulate.probe, () if device is None else tuple(device.unreliable)


def row(case: Case) -> dict[str, Any]:
    """What the JSON keeps of one case; the budget is half-way between small batches and the whole one."""
    _, small, whole = probe(case, AMPLE, estimated=True)[0].trials
    budget = (small.peak_bytes + whole.peak_bytes) // 2
    (measured, _), (estimated, unreliable) = (probe(case, budget, estimated=which) for which in (False, True))
    peaks = {trial.micro_batch_size: trial.peak_bytes for trial in measured.trials if trial.fits}
    pairs = [(t.micro_batch_size, peaks[t.micro_batch_size], t.peak_bytes) for t in estimated.trials if t.fits
             and t.micro_batch_size in peaks]  # fmt: skip
    return {
        "case": case.name,
        "budget": budget,
        "limit": {"measured": measured.limit, "estimated": estimated.limit},
        "peaks": [{"samples": size, "measured": real, "estimated": fake} for size, real, fake in pairs],
        "error": max(abs(fake - real) / real for _, real, fake in pairs),
        "seconds": {"measured": measured.seconds, "estimated": estimated.seconds},
        "unreliable": unreliable,
    }


def table(rows: Sequence[dict[str, Any]]) -> Table:
    shown = empty_table(("training step",), ("samples", "peak, MB", "error", "limit", "estimate"))
    for one in rows:
        last, limit = one["peaks"][-1], one["limit"]
        exact = "0" if one["error"] == 0 else error(one["error"])
        sizes = ", ".join(str(peak["samples"]) for peak in one["peaks"])
        shown.add_row(one["case"], sizes, f"{last['measured'] / MB:.1f}", exact, *map(str, limit.values()))
    return shown


def forward_table(rows: Sequence[dict[str, Any]]) -> Table:
    """What the forward pass leaves alive."""
    shown = empty_table(("forward pass",), ("precision", "CUDA, MB", "error", "CPU as it is"))
    for one in rows:
        cuda = one["cuda"]
        errors = (f"{100 * (one[name] - cuda) / cuda:+.2f} %" for name in ("estimate", "cpu"))
        shown.add_row(one["case"], "bf16-mixed" if one["bf16-mixed"] else "fp32", f"{cuda / MB:.1f}", *errors)
    return shown


LEGEND = """\
Peak: measured at the last of these sizes. Error: the largest of the estimated
peaks at these sizes, relative to the measured ones; 0 is equality to the byte.
Limit: found with real steps, and estimated, within the same budget."""

FORWARD_LEGEND = """\
CUDA: alive after the forward pass of 16 samples, by PyTorch's own dispatch for
CUDA on tensors without values. Error: of the estimate; CPU as it is: of one
that keeps what CPU operators keep."""


def text(record: Mapping[str, Any]) -> str:
    measured = as_text(table(record["rows"]), LEGEND)
    return f"{measured}\n\n{as_text(forward_table(record['forward']), FORWARD_LEGEND)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, show, write; 1 if an estimate that is not listed as unreliable is off by 1 %."""
    options("planning", __doc__).parse_args(arguments)
    quiet()
    start = time.perf_counter()
    rows = [row(case) for case in CASES]
    forward = forward_rows()
    record = {"seconds": round(time.perf_counter() - start, 1), "rows": rows, "forward": forward}
    missed = (
        f"{one['case']}: the estimate is off by {error(one['error'])}, at most 1 % was asked."
        for one in rows
        if one["error"] > 0.01 and not one["unreliable"]
    )
    return conclude("planning", record, text, missed)


if __name__ == "__main__":
    sys.exit(main())
