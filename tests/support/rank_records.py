"""What ranks recorded of their trainings."""

from pathlib import Path
from typing import Any

import ranks
import torch
from forks import forked


def run_ranks(folder: Path, *, program: Any = ranks, **settings: Any) -> list[dict[str, Any]]:
    """What every rank recorded."""
    folder.mkdir(exist_ok=True)
    done = forked(program.main, settings, folder, folder=folder)
    assert done.code == 0, done.output[-6000:]
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(settings["ranks"])]


def joined(records: list[dict[str, Any]]) -> list[list[int]]:
    """Distinct samples of each window over all ranks: a rank without one runs a stand-in."""
    return [sorted({index for part in parts for index in part}) for parts in zip(*(r["windows"] for r in records))]
