#!/usr/bin/env bash
# TorchMetrics 1.9.0, Metric.merge_state: a metric keeps the result of compute() until it is updated, and merging does
# not count as an update. If compute() was called before, for a log line of one worker, the merged state is there, but
# compute() goes on to return the value from before the merge, until the next update or reset. Nothing warns. A metric
# whose result was not asked for before the merge is right.
#
# Seen: the mean of 1 merged with the mean of 3 is 1 after an earlier compute(), 2 without one.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
if [ -n "${TORCH_FROM:-}" ]; then # site-packages with PyTorch and its dependencies, to save gigabytes
    echo "$TORCH_FROM" > "$(echo "$work"/venv/lib/python3.*/site-packages)/torch.pth"
else
    "$work/venv/bin/pip" install -q torch==2.15.0 numpy==2.4.6
fi
"$work/venv/bin/pip" install -q torchmetrics==1.9.0
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" - <<'END'
import torch
from torchmetrics import MeanMetric
from torchmetrics.classification import BinaryAccuracy


def merged(metric, first, second, looks):
    one, other = metric(), metric()
    one.update(*first)
    other.update(*second)
    if looks:
        one.compute()
    one.merge_state(other)
    return float(one.compute())


means = [merged(MeanMetric, [1.0], [3.0], looks) for looks in (False, True)]
right, wrong = [torch.tensor([1, 1]), torch.tensor([1, 1])], [torch.tensor([1, 1]), torch.tensor([0, 0])]
accuracies = [merged(BinaryAccuracy, right, wrong, looks) for looks in (False, True)]
print("mean of 1 and 3 without, with compute() before:", means, "accuracy of half:", accuracies)
assert means == [2.0, 1.0]
assert accuracies == [0.5, 1.0]
END
