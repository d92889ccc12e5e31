"""Is the limit found in cells that nobody named? ``python -m benchmarks.random_cells --cells 32 --seeds 3``.

Models, precisions, optimizers, budgets and settings of the allocator are drawn at random, the same for the same seed,
and measured as in ``benchmarks.allocator``. ``--numbers`` (1000 × seed + place) shows the trials of single cells, and
writes nothing.
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from random import Random
from typing import Any

import torch
from torch import Tensor

from benchmarks.allocator import Setting, has_device, measured, targets, under
from benchmarks.output import Record, benchmark, plain, shown
from benchmarks.probe import prepare
from benchmarks.probing.devices import GIB
from benchmarks.probing.random_models import draw_model, size_of
from benchmarks.probing.training import Training

SMALLEST, LARGEST = 1.5, 130.0  # GiB
ROOM = 8  # times the parameters, which a budget has at least: with Adam they take four or five
PRECISIONS = ("32", "bf16-mixed", "16-mixed")
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "AdamW": torch.optim.AdamW,
    "AdamW, fused": partial(torch.optim.AdamW, fused=True),
    "AdamW, one by one": partial(torch.optim.AdamW, foreach=False),
    "RMSprop": torch.optim.RMSprop,
}
TEXTS = (
    *[""] * 6,
    *["expandable_segments:True"] * 2,
    *("max_split_size_mb:64", "max_split_size_mb:256"),
    *("roundup_power2_divisions:2", "roundup_power2_divisions:16"),
    *("garbage_collection_threshold:0.8", "garbage_collection_threshold:0.5,max_split_size_mb:512"),
    *("expandable_segments:True,roundup_power2_divisions:4", "backend:cudaMallocAsync"),
)


@dataclass(frozen=True, slots=True)
class RandomCell:
    """What was drawn, and from which number its model is drawn again."""

    number: int
    model: str
    precision: str
    optimizer: str
    clipped: bool
    gib: float
    setting: Setting


def draw_cell(number: int) -> RandomCell:
    """Draw a cell; the same number gives the same one."""
    draw = Random(number)
    name, model = draw_model(draw)
    least = max(SMALLEST, ROOM * size_of(model) / GIB)
    gib = round(least * (LARGEST / least) ** draw.random(), 2)
    text, device = draw.choice(TEXTS), draw.choice(("cuda:0",) * 5 + ("cuda:1",))
    bounded = draw.choice(("budget",) * 4 + ("fraction", "others"))
    if "cudaMallocAsync" in text and bounded == "others":
        bounded = "fraction"  # a simulated device counts what others take among the blocks of its pool
    setting = Setting(text, device, bounded)
    precision, optimizer = draw.choice(PRECISIONS), draw.choice(list(OPTIMIZERS))
    return RandomCell(number, name, precision, optimizer, draw.random() < 0.3, gib, setting)


class RandomTraining(Training):
    def __init__(self, cell: RandomCell) -> None:
        super().__init__(draw_model(Random(cell.number))[1], cell.setting.device)
        self.cell = cell
        self.optimizer = OPTIMIZERS[cell.optimizer](self.net.parameters())
        self.scaler = torch.amp.GradScaler("cuda", enabled=cell.precision == "16-mixed")

    def step(self, size: int) -> None:
        with self.counter.step(size):
            loss = self.loss(size)
            self.optimizer.zero_grad()
            self.scaler.scale(loss).backward()
            if self.cell.clipped:
                self.scaler.unscale_(self.optimizer)
                torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def loss(self, size: int) -> Tensor:
        dtype = torch.bfloat16 if self.cell.precision == "bf16-mixed" else torch.float16
        with nullcontext() if self.cell.precision == "32" else torch.autocast("cuda", dtype):
            loss: Tensor = self.net(*self.batch(size))
        return loss


def text(record: Record) -> str:
    families: dict[str, list[Record]] = {}
    for cell in record["cells"]:
        families.setdefault(cell["model"].split()[0], []).append(cell)
    rows = []
    for name, cells in sorted(families.items()):
        least = min(cell["found"] / cell["limit"] for cell in cells)
        most = (str(max(cell[key] for cell in cells)) for key in ("steps", "errors"))
        rows.append((name, str(len(cells)), f"{least:.3f}", *most))
    titles = ("cells", "found ÷ limit, least", "steps, most", "OOMs, most")
    caption = f"{record['device']}: cells drawn at random, seed {', '.join(map(str, record['seeds']))}."
    return shown(("model",), titles, rows, caption)


def of_numbers(numbers: Sequence[int]) -> list[dict[str, Any]]:
    prepare()
    drawn = map(draw_cell, numbers)
    return [{**asdict(cell), **measured(cell.setting, cell.gib, partial(RandomTraining, cell))} for cell in drawn]


def measure(cells: int = 32, seeds: Sequence[int] = (3,), numbers: Sequence[int] = ()) -> dict[str, Any]:
    drawn = [draw_cell(number) for number in numbers or [1000 * s + place for s in seeds for place in range(cells)]]
    found: list[dict[str, Any]] = []
    for setting in sorted({cell.setting.text for cell in drawn}):
        some = [cell for cell in drawn if cell.setting.text == setting and has_device(cell.setting.device)]
        found += under(setting, of_numbers, [cell.number for cell in some])
    if numbers:
        print(*(f"{cell['number']}: {cell['found']} of {cell['limit']}, {cell['tried']}" for cell in found), sep="\n")
    by_seed: dict[int, list[Record]] = {}
    for cell in found:
        by_seed.setdefault(cell["number"] // 1000, []).append(cell)
    record = {
        "device": torch.cuda.get_device_name(),
        "partial": bool(numbers),
        "seeds": sorted(by_seed),
        "cells": found,
    }
    return {**record, "targets": plain(targets({str(seed): some for seed, some in by_seed.items()}))}


main = benchmark("random_cells", __doc__, measure, text, needs_cuda=True)


if __name__ == "__main__":
    sys.exit(main())
