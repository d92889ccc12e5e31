"""gluonts: its PyTorch estimators, which make the Trainer and its endless stream of windows themselves."""

import logging
import random
import tempfile
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from gluonts.dataset.pandas import PandasDataset
from gluonts.torch import DeepAREstimator, SimpleFeedForwardEstimator
from lightning.pytorch import seed_everything

from clients.program import Program, trainer_settings

SAMPLES = 24  # of an epoch
FEED_FORWARD = {"prediction_length": 4, "context_length": 12, "hidden_dimensions": [16]}
DEEPAR = {"prediction_length": 4, "context_length": 8, "freq": "D", "hidden_size": 8, "dropout_rate": 0.0}


def data() -> PandasDataset:
    """Six noisy waves of 60 to 110 days."""
    rng = np.random.default_rng(0)
    frames = {}
    for item in range(6):
        days = 60 + 10 * item
        values = 5 + np.sin(np.arange(days) / (2 + item)) + 0.1 * rng.normal(size=days)
        frames[str(item)] = pd.DataFrame(
            {"target": values}, index=pd.period_range("2020-01-01", periods=days, freq="D")
        )
    return PandasDataset(frames)


def fit(estimator: type[Any], settings: dict[str, Any], batch: int, callbacks: Sequence[Any]) -> torch.nn.Module:
    """Train as the quick-start does; it keeps a checkpoint of the best epoch."""
    logging.getLogger("gluonts").setLevel(logging.ERROR)
    seed_everything(0, verbose=False)
    random.seed(0)
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_settings(callbacks) | {"enable_checkpointing": True, "default_root_dir": folder}
        made = estimator(batch_size=batch, num_batches_per_epoch=SAMPLES // batch, trainer_kwargs=trainer, **settings)
        return made.train_model(data()).trained_net


PROGRAMS = [
    Program("gluonts", "feed-forward", partial(fit, SimpleFeedForwardEstimator, FEED_FORWARD), 8),
    Program(
        "gluonts",
        "feed-forward, 8 of 8",  # as many samples as steps: a batch that comes ready-made does not tell which is which
        partial(fit, SimpleFeedForwardEstimator, FEED_FORWARD | {"context_length": 8}),
        8,
        causes=("exact", "uncuttable"),
    ),
    Program("gluonts", "DeepAR", partial(fit, DeepAREstimator, DEEPAR), 8, ("exact", "weighted")),
]
