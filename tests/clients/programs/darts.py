"""darts: forecasting models that own their Trainer, fitted to generated series."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from darts import TimeSeries
from darts.models import NBEATSModel, TCNModel
from lightning.pytorch import seed_everything

from clients.program import EPOCHS, Program, trainer_settings

NBEATS = {"num_stacks": 2, "num_blocks": 1, "num_layers": 2, "layer_widths": 16}
TCN = {"num_filters": 4, "kernel_size": 3, "dropout": 0.0}


def series() -> TimeSeries:
    """A noisy wave of 46 months: 30 windows of 12 and 5 steps, near enough."""
    rng = np.random.default_rng(0)
    months = pd.date_range("2000-01-01", periods=46, freq="MS")
    return TimeSeries.from_times_and_values(months, np.sin(np.arange(46) / 2) + 0.1 * rng.normal(size=46))


def fit(model: type[Any], settings: dict[str, Any], batch: int, callbacks: Sequence[Any]) -> torch.nn.Module:
    """Fit as the quick-start does, in the order of the series."""
    seed_everything(0, verbose=False)
    trainer = trainer_settings(callbacks)
    del trainer["max_epochs"], trainer["precision"]  # the model sets these by itself, as the series is
    forecaster = model(
        input_chunk_length=12,
        output_chunk_length=5,
        n_epochs=EPOCHS,
        batch_size=batch,
        random_state=0,
        pl_trainer_kwargs=trainer,
        **settings,
    )
    forecaster.fit(series(), dataloader_kwargs={"shuffle": False})
    return forecaster.model


PROGRAMS = [
    Program("darts", "NBEATS", partial(fit, NBEATSModel, NBEATS), 8),
    Program("darts", "TCN", partial(fit, TCNModel, TCN), 8),
]
