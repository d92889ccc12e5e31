"""How far is a plan for another device from a measurement? ``python -m benchmarks.planning``.

Every row is probed twice on this CPU within the same budget: with real steps, and on tensors without values as if the
device were not here. What CUDA does otherwise (autocast, dropout) is compared with PyTorch's own dispatch for it.
There is no GPU in this: scratch memory of kernels and the allocator's fragmentation are not compared with anything.
"""

import sys
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy

from benchmarks import trainers
from benchmarks.cuda_dispatch import forward_rows
from benchmarks.output import Record, benchmark, error, shown
from benchmarks.planning_cases import CASES, CLASSES, Case
from lightning_ga import AutoAccumulate, ProbeResult
from lightning_ga.plan.planned_device import planned_device

MOST = 96  # samples of the effective batch
AMPLE = 2**36  # bytes: any step fits
MB = 10**6


class Module(trainers.Module):
    """The network, loss and optimizer of a case; a fit ends after its first step."""

    def __init__(self, case: Case) -> None:
        super().__init__(case.net(), case.optimizer)
        self.case, self.accuracy = case, MulticlassAccuracy(CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.case.loss(self, batch)

    def on_train_batch_end(self, *_: Any) -> None:
        self.trainer.should_stop = True


def probe(case: Case, budget: int, *, estimated: bool) -> tuple[ProbeResult, tuple[str, ...]]:
    """The probe of a real Trainer, and what an estimate listed as unreliable."""
    torch.manual_seed(0)
    accumulate = AutoAccumulate(MOST, memory_budget=budget, verify=False, cache=False)
    trainer = trainers.quiet_trainer(max_epochs=1, callbacks=[accumulate], **case.settings())
    with planned_device(budget, like_cuda=False) if estimated else nullcontext() as device:
        trainer.fit(Module(case), DataLoader(case.data(MOST), batch_size=8))
    assert accumulate.probe is not None
    return accumulate.probe, () if device is None else tuple(device.unreliable)


def row(case: Case) -> dict[str, Any]:
    _, small, whole = probe(case, AMPLE, estimated=True)[0].trials
    budget = (small.peak_bytes + whole.peak_bytes) // 2
    (measured, _), (estimated, unreliable) = (probe(case, budget, estimated=which) for which in (False, True))
    peaks = {trial.micro_batch_size: trial.peak_bytes for trial in measured.trials if trial.fits}
    fitting = ((trial.micro_batch_size, trial.peak_bytes) for trial in estimated.trials if trial.fits)
    pairs = [(size, peaks[size], peak) for size, peak in fitting if size in peaks]
    return {
        "case": case.name,
        "budget": budget,
        "limit": {"measured": measured.limit, "estimated": estimated.limit},
        "peaks": [{"samples": size, "measured": real, "estimated": fake} for size, real, fake in pairs],
        "error": max(abs(fake - real) / real for _, real, fake in pairs),
        "unreliable": unreliable,
    }


def probed_text(record: Record) -> str:
    rows = []
    for one in record["rows"]:
        exact = "0" if one["error"] == 0 else error(one["error"])
        sizes = ", ".join(str(peak["samples"]) for peak in one["peaks"])
        limits = map(str, one["limit"].values())
        rows.append((one["case"], sizes, f"{one['peaks'][-1]['measured'] / MB:.1f}", exact, *limits))
    return shown(
        ("training step",),
        ("samples", "peak, MB", "error", "limit", "estimate"),
        rows,
        "Peak: measured at the last of these sizes. Error: the largest of the estimated\n"
        "peaks at these sizes, relative to the measured ones; 0 is equality to the byte.\n"
        "Limit: found with real steps, and estimated, within the same budget.",
    )


def text(record: Record) -> str:
    rows = []
    for one in record["forward"]:
        cuda = one["cuda"]
        errors = (f"{100 * (one[name] - cuda) / cuda:+.2f} %" for name in ("estimate", "cpu"))
        rows.append((one["case"], "bf16-mixed" if one["bf16-mixed"] else "fp32", f"{cuda / MB:.1f}", *errors))
    forward = shown(
        ("forward pass",),
        ("precision", "CUDA, MB", "error", "CPU as it is"),
        rows,
        "CUDA: alive after the forward pass of 16 samples, by PyTorch's own dispatch for\n"
        "CUDA on tensors without values. Error: of the estimate; CPU as it is: of one\n"
        "that keeps what CPU operators keep.",
    )
    return f"{probed_text(record)}\n\n{forward}"


def measure() -> dict[str, Any]:
    rows = [row(case) for case in CASES]
    wrong = [one for one in rows if one["error"] > 0.01 and not one["unreliable"]]
    missed = [f"{one['case']}: the estimate is off by {error(one['error'])}, at most 1 % was asked." for one in wrong]
    return {"rows": rows, "forward": forward_rows(), "missed": missed}


main = benchmark("planning", __doc__, measure, text)


if __name__ == "__main__":
    sys.exit(main())
