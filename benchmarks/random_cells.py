"""Is the limit found in cells that nobody named? ``python -m benchmarks.random_cells --cells 32 --seed 3``.

Models, precisions, optimizers, budgets and settings of the allocator are drawn at random, the same for the same seed.
Each setting has a process of its own; limits are confirmed as in ``benchmarks.allocator``, and on a simulated device
the command is called in the same way. Exits with 1 if a target is missed, and with 2 where there is no CUDA device.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from benchmarks.allocator import Setting, measure, measured_apart, targets
from benchmarks.output import as_text, empty_table, judged, lacks_cuda, options, write_json
from benchmarks.probe import quiet
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
    "max_split_size_mb:64",
    "max_split_size_mb:256",
    "roundup_power2_divisions:2",
    "roundup_power2_divisions:16",
    "garbage_collection_threshold:0.8",
    "garbage_collection_threshold:0.5,max_split_size_mb:512",
    "expandable_segments:True,roundup_power2_divisions:4",
    "backend:cudaMallocAsync",
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
    """A training as a cell says."""

    def __init__(self, cell: RandomCell) -> None:
        super().__init__(draw_model(Random(cell.number))[1], cell.setting.device)
        self.cell = cell
        self.optimizer = OPTIMIZERS[cell.optimizer](self.net.parameters())
        self.scaler = torch.amp.GradScaler("cuda", enabled=cell.precision == "16-mixed")

    def step(self, size: int) -> None:
        """One counted training step."""
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


def text(record: Mapping[str, Any]) -> str:
    families: dict[str, list[Mapping[str, Any]]] = {}
    for cell in record["cells"]:
        families.setdefault(cell["model"].split()[0], []).append(cell)
    table = empty_table(("model",), ("cells", "found ÷ limit, least", "steps, most", "OOMs, most"))
    for name, cells in sorted(families.items()):
        least = min(cell["found"] / cell["limit"] for cell in cells)
        most = (max(cell[key] for cell in cells) for key in ("steps", "errors"))
        table.add_row(name, str(len(cells)), f"{least:.3f}", *map(str, most))
    return as_text(table, f"{record['device']}: cells drawn at random, seed {', '.join(map(str, record['seeds']))}.")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = options("random_cells", __doc__)
    parser.add_argument("--cells", type=int, default=32, help="cells for each seed")
    parser.add_argument("--seeds", type=int, nargs="*", default=[3], help="what decides their draws")
    parser.add_argument("--numbers", type=int, nargs="*", help="single cells: 1000 × seed + place; shows trials")
    parser.add_argument("--record", type=Path, help=argparse.SUPPRESS)  # in a process of their own
    asked = parser.parse_args(arguments)
    if lacks_cuda("random_cells"):
        return 2
    quiet()
    if asked.record:
        drawn = map(draw_cell, asked.numbers)
        cells = [{**asdict(cell), **measure(cell.setting, cell.gib, partial(RandomTraining, cell))} for cell in drawn]
        asked.record.write_text(json.dumps(cells))
        return 0
    record = measured(asked.numbers or [1000 * seed + place for seed in asked.seeds for place in range(asked.cells)])
    print(text(record))
    if asked.numbers:
        for cell in record["cells"]:
            print(f"{cell['number']}: {cell['found']} of {cell['limit']}, {cell['tried']}")
    else:
        write_json("random_cells", record)
    return judged(record["targets"])


def measured(numbers: Sequence[int]) -> dict[str, Any]:
    """Measure cells by their numbers, those of one setting together."""
    cells: list[dict[str, Any]] = []
    drawn = [draw_cell(number) for number in numbers]
    devices = torch.cuda.device_count()
    for setting in sorted({cell.setting.text for cell in drawn}):
        chosen = [cell for cell in drawn if cell.setting.text == setting and int(cell.setting.device[-1]) < devices]
        cells += measured_apart(setting, "--numbers", *(str(cell.number) for cell in chosen))
    seeds = sorted({number // 1000 for number in numbers})
    by_seed = {str(seed): [cell for cell in cells if cell["number"] // 1000 == seed] for seed in seeds}
    record = {"device": torch.cuda.get_device_name(), "seeds": seeds, "cells": cells}
    record["targets"] = [asdict(target) for target in targets(by_seed)]
    return record


if __name__ == "__main__":
    sys.exit(main())
