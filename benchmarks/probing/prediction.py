"""How far the peak that small steps predict lies from the one that is measured."""

from typing import Any

import torch

from benchmarks.probing.cells import HIGH, SMALL, Cell
from benchmarks.probing.devices import CUDA, memory, place
from benchmarks.probing.models import MODELS
from benchmarks.probing.training import Training
from lightning_ga import find_micro_batch
from lightning_ga.testing import limit_memory

ROOM = 2  # times the budget: the measured step may take more than was predicted


def prediction(cell: Cell) -> dict[str, Any]:
    """Predict the limit and its peak without a step near it, then measure a step of that size."""
    device = place(cell.kind)
    with memory(cell.kind, cell.budget):
        training = Training(MODELS[cell.model], device)
        found = find_micro_batch(
            training.step, high=HIGH, budget=cell.budget, device=device, resident=training.resident, predict_only=True
        )
        del training
    with memory(cell.kind, ROOM * cell.budget):
        training = Training(MODELS[cell.model], device)
        training.step(SMALL)
        measured = measured_peak(training, found.limit, cell.kind)
        del training
    error = (found.peak_bytes - measured) / measured
    return {"samples": found.limit, "predicted": found.peak_bytes, "measured": measured, "error": error}


def measured_peak(training: Training, size: int, kind: str) -> int:
    """Most bytes that a step takes: the allocator's word on CUDA, live tensors elsewhere."""
    if kind == CUDA:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        training.step(size)
        torch.cuda.synchronize()
        return int(torch.cuda.max_memory_allocated())
    with limit_memory("1 TiB", resident=training.resident()) as meter:
        training.step(size)
    return meter.peak_bytes
