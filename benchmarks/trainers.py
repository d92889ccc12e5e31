"""Trainers of the benchmarks, and the process that they run in."""

import logging
import warnings
from typing import Any

import lightning.pytorch as pl
import torch


def quiet() -> None:
    """One thread, the same numbers every time; no advice from the trainers."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


def quiet_trainer(**settings: Any) -> pl.Trainer:
    """Return a Trainer on one process of the CPU that writes nothing, with further settings."""
    quiet: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False}
    quiet |= {"enable_progress_bar": False, "enable_model_summary": False}
    return pl.Trainer(**{**quiet, **settings})
