"""What does a checkpoint every 20 windows cost? ``python -m benchmarks.checkpoint_cost``

Fits with ``CheckpointEvery`` and without, in turns; a checkpoint has 15 MB. Windows compute on the processor that also
writes, or wait for 0.1 s, as for a device.
"""

import tempfile
from pathlib import Path
from typing import Any

from benchmarks.elastic import cost_of_checkpoints
from benchmarks.output import Record, at_most, benchmark, plain, shown


def measure(turns: int = 5) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        cost = cost_of_checkpoints(Path(name), turns)
        waiting = cost_of_checkpoints(Path(name), turns, pause=0.1)
    targets = [
        at_most("windows of 20 ms on the processor", cost, 1.05),
        at_most("windows of 0.1 s in which the host waits", waiting, 1.05),
    ]
    return {"cost": cost, "cost_waiting": waiting, "targets": plain(targets)}


def text(record: Record) -> str:
    rows = [
        ("windows of 20 ms on the processor that writes", f"{record['cost']:.2f}"),
        ("windows of 0.1 s in which the host waits", f"{record['cost_waiting']:.2f}"),
    ]
    return shown(("with a checkpoint every 20 windows, of the time without",), ("",), rows)


main = benchmark("checkpoint_cost", __doc__, measure, text, {"turns": 1})
if __name__ == "__main__":
    raise SystemExit(main())
