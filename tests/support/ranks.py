"""Fits on several gloo ranks, each a fork of one process; what each rank recorded."""

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from forks import Ended, forked, in_ranks
from lightning.pytorch.strategies import DDPStrategy


def on_ranks(program: Callable[..., Any], folder: Path, *arguments: Any, ranks: int = 2) -> list[Any]:
    """What a program returns on every rank; all of them end, or the test fails."""
    done = start(program, folder, *arguments, ranks=ranks)
    assert done.code == 0, done.output[-16000:]
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(ranks)]


def start(program: Callable[..., Any], folder: Path, *arguments: Any, ranks: int = 2) -> Ended:
    """Run a program on every rank."""
    folder.mkdir(exist_ok=True)
    return forked(in_ranks, ranks, life, program, folder, *arguments, folder=folder)


def life(program: Callable[..., Any], folder: Path, *arguments: Any) -> None:
    """The life of one rank."""
    warnings.simplefilter("ignore")
    torch.save(program(*arguments), folder / f"rank{os.environ['RANK']}.pt")


def ddp(**settings: Any) -> dict[str, Any]:
    """Settings of a Trainer on these ranks."""
    strategy = DDPStrategy(process_group_backend="gloo", **settings)
    return {"strategy": strategy, "devices": int(os.environ["WORLD_SIZE"])}


def joined(records: list[dict[str, Any]]) -> list[list[int]]:
    """Distinct samples of each window over all ranks: a rank without one runs a stand-in."""
    return [sorted({index for part in parts for index in part}) for parts in zip(*(r["windows"] for r in records))]
