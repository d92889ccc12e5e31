#!/usr/bin/env bash
# PyTorch Forecasting 1.8.0, TimeSeriesDataSet(weight="column") with MAE, RMSE and their like: each error is multiplied
# by its weight, and the mean is over the number of predictions, not over the sum of the weights. So the metric is no
# weighted mean in the unit of the target: with all weights 10, MAE and the gradient are ten times as large, RMSE 3.2
# times. In training, a batch that happens to have large weights makes a larger step, and validation errors with and
# without weights cannot be compared.
#
# Seen, predictions that are all wrong by 1, weights of 10: MAE 10, RMSE 3.16; weights of 1 and 3: MAE 2.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
if [ -n "${TORCH_FROM:-}" ]; then # site-packages with PyTorch and its dependencies, to save gigabytes
    echo "$TORCH_FROM" > "$(echo "$work"/venv/lib/python3.*/site-packages)/torch.pth"
else
    "$work/venv/bin/pip" install -q torch==2.15.0 numpy==2.4.6
fi
"$work/venv/bin/pip" install -q pytorch-forecasting==1.8.0
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" - <<'END'
import warnings

warnings.simplefilter("ignore")
import numpy as np
import pandas as pd
from pytorch_forecasting import TimeSeriesDataSet
from pytorch_forecasting.metrics import MAE, RMSE


def errors(*weights):
    """Return MAE and RMSE of predictions that are too large by 1, for one series a weight."""
    series = [
        pd.DataFrame({"time": np.arange(6), "series": str(number), "value": np.arange(6.0), "weight": float(weight)})
        for number, weight in enumerate(weights)
    ]
    data = TimeSeriesDataSet(
        pd.concat(series, ignore_index=True), time_idx="time", target="value", group_ids=["series"], weight="weight",
        max_encoder_length=4, max_prediction_length=2, time_varying_unknown_reals=["value"], target_normalizer=None,
    )
    _, (target, weight) = next(iter(data.to_dataloader(train=False, batch_size=64)))
    found = []
    for metric in (MAE(), RMSE()):
        metric.update(target + 1, (target, weight))
        found.append(round(float(metric.compute()), 2))
    return found


for weights in ((1, 1), (10, 10), (1, 3)):
    print("every error is 1, weights", weights, "MAE, RMSE:", errors(*weights))
assert errors(1, 1) == [1.0, 1.0]
assert errors(10, 10) == [10.0, 3.16]
assert errors(1, 3)[0] == 2.0
END
