"""pytorch-forecasting: its data set of windows with encoders of varying lengths, and three of its models."""

import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from lightning.pytorch import LightningModule
from pytorch_forecasting import DeepAR, NBeats, TemporalFusionTransformer, TimeSeriesDataSet
from pytorch_forecasting.data import GroupNormalizer

from clients.program import Program, train

TFT = {"hidden_size": 8, "hidden_continuous_size": 4, "attention_head_size": 2}
NBEATS = {"widths": [16, 16], "num_blocks": [1, 1], "num_block_layers": [2, 2], "backcast_loss_ratio": 0.1}
DEEPAR = {"hidden_size": 8, "rnn_layers": 1}


def frame() -> pd.DataFrame:
    """Three series of 16 steps."""
    rng = np.random.default_rng(0)
    parts = []
    for group in range(3):
        steps = np.arange(16)
        values = 10 + group + np.sin(steps / 2 + group) + 0.1 * rng.normal(size=len(steps))
        parts.append(pd.DataFrame({"series": str(group), "time": steps, "value": values}))
    return pd.concat(parts, ignore_index=True)


def windows(**settings: Any) -> TimeSeriesDataSet:
    """Windows of at most eight steps, and three to predict."""
    return TimeSeriesDataSet(
        frame(),
        time_idx="time",
        target="value",
        group_ids=["series"],
        max_encoder_length=8,
        max_prediction_length=3,
        time_varying_unknown_reals=["value"],
        target_normalizer=GroupNormalizer(groups=["series"]),
        **settings,
    )


def varying() -> TimeSeriesDataSet:
    """Encoders of four to eight steps, and what is known of each window."""
    return windows(
        min_encoder_length=4,
        static_categoricals=["series"],
        time_varying_known_reals=["time"],
        add_relative_time_idx=True,
        add_target_scales=True,
        add_encoder_length=True,
    )


def fit(model: type[Any], data: Any, settings: dict[str, Any], batch: int, callbacks: Sequence[Any]) -> LightningModule:
    """Train a model made from the data set, in the order of the data."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        training = data()
    return train(
        partial(model.from_dataset, training, log_interval=-1, dropout=0.0, **settings),
        partial(training.to_dataloader, train=True, batch_size=batch, shuffle=False),
        callbacks,
        gradient_clip_val=0.1,
    )


def programs(name: str, model: type[Any], data: Any, **settings: Any) -> list[Program]:
    """A model and its settings, with windows as they are drawn and cut by the lengths of encoders."""
    trained = partial(fit, model, data, settings)
    return [
        Program("pytorch-forecasting", name, trained, 8),
        Program("pytorch-forecasting", f"{name}, by size", trained, 8, settings={"size_of": "auto"}),
    ]


PROGRAMS = [
    *programs("TFT", TemporalFusionTransformer, varying, **TFT),
    *programs("NBeats", NBeats, windows, **NBEATS),
    *programs("DeepAR", DeepAR, partial(windows, min_encoder_length=4, time_varying_known_reals=["time"]), **DEEPAR),
]
