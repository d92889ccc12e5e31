"""How long does a window take on several ranks? ``python -m benchmarks.exchange``.

Ten layers of 1024², whose 40 MiB of gradients gloo ranks of this machine exchange. Stock Lightning under
``DistributedDataParallel``, stock Lightning again (the control) and ``AutoAccumulate`` take turns, a window each.
Exits with 1 if a median ratio to stock Lightning is above 1.02. Messages overlap with a backward pass only where
cores are left to both: with as many ranks as cores, all that shows is what is done in addition.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy
from rich import box
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.measure import quiet
from benchmarks.output import as_text, write_json
from benchmarks.turns import Stopwatch, take_turns
from lightning_ga import AutoAccumulate

LAYERS, WIDTH, MICRO = 10, 1024, 32
WARM_UP = 3  # windows that are not counted
ALLOWED = 1.02
STOCK, OURS = "stock", "ours"
PROGRAMS = (STOCK, "again", OURS)
RANKS, FACTORS = (2, 4), (1, 4)


class Layers(pl.LightningModule):
    """A chain of wide layers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Mean square of the output."""
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD: the cheapest step."""
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def fit(watch: Stopwatch, *, name: str, factor: int, windows: int) -> None:
    """Train a fresh model for some windows, on this rank of all."""
    ranks = int(os.environ["WORLD_SIZE"])
    data = TensorDataset(torch.randn(MICRO * factor * windows * ranks, WIDTH))
    program: dict[str, Any] = {"callbacks": [watch], "accumulate_grad_batches": factor}
    if name == OURS:
        ours = AutoAccumulate(MICRO * factor * ranks, micro_batch_size=MICRO, verify=False)
        program = {"callbacks": [ours, watch]}
    trainer = pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=ranks,
        strategy=DDPStrategy(process_group_backend="gloo"),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **program,
    )
    trainer.fit(Layers(), DataLoader(data, batch_size=MICRO))


def on_rank(factor: int, windows: int, written: Path) -> None:
    """Measure on this rank; the first writes down the seconds of every window."""
    quiet()
    given = {"factor": factor, "windows": windows + WARM_UP}
    watches = take_turns([partial(fit, name=name, **given) for name in PROGRAMS], [factor] * len(PROGRAMS))
    if torch.distributed.get_rank() == 0:
        written.write_text(json.dumps({name: watch.wall[WARM_UP:] for name, watch in zip(PROGRAMS, watches)}))
    torch.distributed.destroy_process_group()


def measure(ranks: int, factor: int, windows: int) -> dict[str, list[float]]:
    """Seconds of every window of each program, on the first rank.

    Raises:
        RuntimeError: If a rank fails; with the end of what it printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "seconds.json"
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        job = ["-m", "benchmarks.exchange", "--on-rank", str(factor), str(windows), str(written)]
        done = subprocess.run([sys.executable, *torchrun, *job], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{ranks} ranks: {done.stdout[-1000:]}{done.stderr[-3000:]}")
        found: dict[str, list[float]] = json.loads(written.read_text())
        return found


def summarize(seconds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Median of a stock window, and median ratios to the stock window of the same round.

    Examples:
        >>> summarize({"stock": [1.0, 2.0], "again": [1.1, 2.0], "ours": [1.0, 1.8]})
        {'stock_seconds': 1.5, 'again': 1.05, 'ours': 0.95}
    """
    ratios = {name: statistics.median(map(_ratio, seconds[name], seconds[STOCK])) for name in PROGRAMS[1:]}
    return {"stock_seconds": statistics.median(seconds[STOCK]), **{k: round(v, 4) for k, v in ratios.items()}}


def _ratio(seconds: float, stock: float) -> float:
    return seconds / stock


def table(cells: Sequence[Mapping[str, Any]]) -> Table:
    """Cells as they are shown."""
    shown = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for title in ("ranks", "factor", "stock, ms", "stock again", "AutoAccumulate"):
        shown.add_column(title, justify="right", no_wrap=True)
    for cell in cells:
        ratios = (f"{cell['again']:.3f}", f"{cell['ours']:.3f}{'' if cell['ours'] <= ALLOWED else ' NO'}")
        shown.add_row(str(cell["ranks"]), str(cell["factor"]), f"{1e3 * cell['stock_seconds']:.0f}", *ratios)
    return shown


def text(record: Mapping[str, Any]) -> str:
    """Table and legend of a record."""
    return as_text(
        table(record["cells"]),
        f"Time of a window of {LAYERS} layers of {WIDTH}² under DDP (gloo, one thread a rank), and medians of\n"
        f"the ratios to stock Lightning's window of the same round, over {record['windows']} rounds; "
        f"{os.cpu_count()} cores;\nload average {record['load_average']:.1f}.",
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, show, write; 1 if a target is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.exchange", description=__doc__)
    parser.add_argument("--windows", type=int, default=40, help="windows of each program (default: 40)")
    parser.add_argument("--ranks", type=int, nargs="*", default=RANKS, help="ranks (default: 2 4)")
    parser.add_argument("--factors", type=int, nargs="*", default=FACTORS, help="factors (default: 1 4)")
    parser.add_argument("--on-rank", nargs=3, help=argparse.SUPPRESS)
    settings = parser.parse_args(arguments)
    if settings.on_rank:
        factor, windows, written = settings.on_rank
        on_rank(int(factor), int(windows), Path(written))
        return 0
    start, cells = time.perf_counter(), []
    for ranks in settings.ranks:
        for factor in settings.factors:
            cells.append({"ranks": ranks, "factor": factor, **summarize(measure(ranks, factor, settings.windows))})
    load, seconds = os.getloadavg()[1], round(time.perf_counter() - start, 1)
    record = {"cells": cells, "windows": settings.windows, "load_average": load, "seconds": seconds}
    print(f"{text(record)}\n{write_json('exchange', record).name}, {seconds} s")
    return int(any(cell["ours"] > ALLOWED for cell in cells))


if __name__ == "__main__":
    raise SystemExit(main())
