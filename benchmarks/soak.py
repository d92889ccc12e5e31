"""An hour at the limit: ``python -m benchmarks.soak``.

A GPT on sentences whose lengths vary, in the micro-batches that the probe finds. Nothing may run out of
memory and the allocator may not once have to free its cache to go on. Writes
``benchmarks/results/<device>-soak.json``. Exits with 1 if it did, and with 2 where there is no CUDA device.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from benchmarks.gpu import file_name
from benchmarks.output import write_json
from benchmarks.probe import quiet
from benchmarks.probing.on_gpu import Watch, fit_at_limit
from benchmarks.probing.tables import Target, judged

MODEL, GIB, MINUTES, SHARE = "GPT, SDPA", 8.0, 60.0, 0.95


def soak_targets(record: dict[str, Any]) -> list[Target]:
    """No trouble, as near the limit as can be.

    Examples:
        >>> calm = {"ooms": 0, "errors_and_retries": (0, 0), "micro_batch": 96, "limit": 100}
        >>> all(target.met for target in soak_targets(calm))
        True
    """
    errors, retries = record["errors_and_retries"]
    share = record["micro_batch"] / record["limit"]
    return [
        Target("out-of-memory errors", record["ooms"] + errors, record["ooms"] + errors == 0, "none"),
        Target("retries of the allocator", retries, retries == 0, "none"),
        Target("micro-batch ÷ limit", share, share >= SHARE, f"at least {SHARE}"),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=MINUTES)
    parser.add_argument("--gib", type=float, default=GIB, help="memory that it may take")
    parser.add_argument("--precision", default="bf16-mixed")
    settings = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("benchmarks.soak needs a CUDA device, and PyTorch sees none.", file=sys.stderr)
        return 2
    quiet()
    watch = Watch(seconds=60 * settings.minutes)
    record = fit_at_limit(MODEL, settings.gib, watch, precision=settings.precision, varied=True)
    targets = [asdict(target) for target in soak_targets(record)]
    name = f"{file_name(torch.cuda.get_device_name())}-soak"
    write_json(name, {"targets": targets, **record})
    print(f"{name}.json: {record['windows']} windows of {2 * record['micro_batch']} samples")
    return judged(targets)


if __name__ == "__main__":
    sys.exit(main())
