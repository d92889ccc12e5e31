"""What ``limit_memory`` costs: microseconds an operation, on a real training step."""

import time
from contextlib import nullcontext
from typing import Any

from benchmarks.probing.cells import SMALL
from benchmarks.probing.models import MODELS
from benchmarks.probing.training import Training
from lightning_ga.memory.live_tensors import LiveTensorMeter
from lightning_ga.testing import limit_memory, out_of_memory_at

MODEL = "GPT, SDPA"


def emulation_cost(rounds: int = 50) -> dict[str, Any]:
    """What a small step takes longer than without, for each operation in it: the fastest of some rounds of each."""
    training = Training(MODELS[MODEL])
    training.step(SMALL)
    with out_of_memory_at(0) as counter:
        training.step(SMALL)
    meter = LiveTensorMeter()
    plain, limited, recorded = [], [], []
    for _ in range(rounds):
        plain.append(_seconds(training, nullcontext()))
        limited.append(_seconds(training, limit_memory("1 TiB", resident=training.resident())))
        meter.start(record=True)
        recorded.append(_seconds(training, meter))
    return {
        "model": MODEL,
        "operations": counter.operations,
        "limit_us": 1e6 * (min(limited) - min(plain)) / counter.operations,
        "trace_us": 1e6 * (min(recorded) - min(plain)) / counter.operations,
    }


def _seconds(training: Training, context: Any) -> float:
    with context:
        start = time.perf_counter()
        training.step(SMALL)
        return time.perf_counter() - start
