"""What does the start of a fit cost beside stock Lightning? ``python -m benchmarks.startup``.

Processor seconds of the README's script, and of the same micro-batches in stock Lightning. Each process is a fork of
one that has imported PyTorch and Lightning, as both programs need them; stock Lightning, stock Lightning again (the
control) and ``AutoAccumulate`` take turns.
"""

import gc
import multiprocessing
import os
import random
import re
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.output import Record, benchmark, shown
from benchmarks.processes import forked

README = Path(__file__).parents[1] / "README.md"
STOCK, AGAIN, OURS = PROGRAMS = "stock", "again", "ours"
MICRO, FACTOR = 64, 4  # what the README's budget allows
ALLOWED_SECONDS = 1.0


def script(name: str, *, workers: int, cache: str) -> str:
    (found,) = re.findall(r"```python\n(import torch\n.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    changes = {}
    if workers:
        changes["shuffle=True"] = f"shuffle=True, num_workers={workers}, persistent_workers=True"
    if name != OURS:
        changes |= {
            "from lightning_ga import AutoAccumulate\n": "",
            'AutoAccumulate(effective_batch_size=256, memory_budget="500KiB")': "None",
            "callbacks=[accumulate]": f"accumulate_grad_batches={FACTOR}",
            "batch_size=32": f"batch_size={MICRO}",
            "accumulate.plan": "None",
        }
    elif cache == "off":
        changes['memory_budget="500KiB"'] = 'memory_budget="500KiB", cache=False'
    for old, new in changes.items():
        if old not in found:
            raise RuntimeError(f"The README's script does not hold {old!r} any more.")
        found = found.replace(old, new)
    return found


def seconds(source: str, folder: Path) -> float:
    """Return the processor seconds of a script in a fork of this process; its cache of limits lies in the folder."""

    def run() -> None:
        os.environ |= {"XDG_CACHE_HOME": str(folder), "OMP_NUM_THREADS": "1"}
        sys.dont_write_bytecode, sys.pycache_prefix = False, str(folder)  # an installed package is compiled once
        exec(compile(source, "README.md", "exec"), {"__name__": "readme"})
        gc.collect()  # loaders end their workers
        assert not multiprocessing.active_children()

    output = folder / "output.txt"
    code, used = forked(run, output)
    if code:
        raise RuntimeError(f"A fit ended with {code}: {output.read_text()[-3000:]}")
    return used


def measured(workers: int, cache: str, *, rounds: int, rng: random.Random) -> dict[str, Any]:
    """Return one row: medians and quartiles of what a fit takes more than stock Lightning's of the same round."""
    order, found = list(PROGRAMS), []
    scripts = {name: script(name, workers=workers, cache=cache) for name in order}
    with tempfile.TemporaryDirectory() as folder:
        for name in order:  # once uncounted: writes byte code, and the limit that is remembered
            seconds(scripts[name], Path(folder))
        for _ in range(rounds):
            rng.shuffle(order)
            found.append({name: seconds(scripts[name], Path(folder)) for name in order})
    return {"workers": workers, "cache": cache, **summarize(found)}


def summarize(rounds: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Return stock Lightning's median, and quartiles of what is added to it.

    Examples:
        >>> summarize([{STOCK: 1.0, AGAIN: 1.1, OURS: 1.5 + extra} for extra in (0.0, 0.1, 0.3)])
        {'stock_seconds': 1.0, 'again': [0.1, 0.1, 0.1], 'ours': [0.5, 0.6, 0.8], 'met': True}
    """
    row: dict[str, Any] = {"stock_seconds": round(statistics.median(one[STOCK] for one in rounds), 3)}
    for name in PROGRAMS[1:]:
        added = [one[name] - one[STOCK] for one in rounds]
        quartiles = statistics.quantiles(added, n=4) if len(added) > 1 else added * 3
        row[name] = [round(second, 3) for second in quartiles]
    return {**row, "met": row[OURS][1] <= ALLOWED_SECONDS}


def text(record: Record) -> str:
    rows = []
    for row in record["rows"]:
        added = [f"{row[name][1]:+.2f} ({row[name][0]:+.2f} to {row[name][2]:+.2f})" for name in PROGRAMS[1:]]
        added[-1] += "" if row["met"] else " NO"
        rows.append((str(row["workers"]), row["cache"], f"{row['stock_seconds']:.2f}", *added))
    return shown(
        (),
        ("workers", "cache", "stock, s", "stock again", "AutoAccumulate"),
        rows,
        f"Processor seconds of a fit of the README's script once PyTorch and Lightning are\n"
        f"imported: stock Lightning's, and what is added to it. Medians and quartiles of\n"
        f"{record['rounds']} rounds; {ALLOWED_SECONDS:.0f} s is allowed; one thread; "
        f"load average {record['load_average']:.1f}.",
    )


def measure(rounds: int = 5, workers: Sequence[int] = (0, 2)) -> dict[str, Any]:
    rng = random.Random(0)
    rows = [measured(number, cache, rounds=rounds, rng=rng) for number in workers for cache in ("off", "warm")]
    missed = [f"{row['workers']} workers, cache {row['cache']}" for row in rows if not row["met"]]
    return {"rows": rows, "rounds": rounds, "missed": missed}


main = benchmark("startup", __doc__, measure, text)

if __name__ == "__main__":
    raise SystemExit(main())
