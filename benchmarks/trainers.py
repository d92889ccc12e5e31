"""Trainers of the benchmarks."""

from typing import Any

import lightning.pytorch as pl


def quiet_trainer(**settings: Any) -> pl.Trainer:
    """Return a Trainer on one process of the CPU that writes nothing, with further settings."""
    quiet: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return pl.Trainer(**{**quiet, **settings})
