#!/usr/bin/env bash
# MONAI 1.6.1, DiceMetric and MeanIoU with reduction="mean_batch", the mean over images by class: a class that no image
# has, neither in the prediction nor in the label, has no score (NaN) in any image, and its mean is reported as 0, the
# worst score, not as NaN. So with a rare class a perfect network seems to fail, and how much depends on the images that
# are in the validation set. reduction="mean" leaves such a class out, so the mean of the one is not the other.
#
# Seen, perfect predictions of two classes, the second in no image: "none" gives 1 and NaN, "mean" 1, "mean_batch" 1 and
# 0.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
if [ -n "${TORCH_FROM:-}" ]; then # site-packages with PyTorch and its dependencies, to save gigabytes
    echo "$TORCH_FROM" > "$(echo "$work"/venv/lib/python3.*/site-packages)/torch.pth"
else
    "$work/venv/bin/pip" install -q torch==2.15.0 numpy==2.4.6
fi
"$work/venv/bin/pip" install -q monai==1.6.1
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" - <<'END'
import torch
from monai.metrics import DiceMetric, MeanIoU

labels = torch.zeros(4, 2, 8, 8)  # images, classes, height, width
labels[:, 0] = 1
for metric in (DiceMetric, MeanIoU):
    scores = {}
    for reduction in ("none", "mean", "mean_batch"):
        meter = metric(include_background=True, reduction=reduction)
        meter(labels, labels)
        scores[reduction] = meter.aggregate()
    print(metric.__name__, {reduction: score.tolist() for reduction, score in scores.items()})
    assert scores["none"][:, 0].eq(1).all() and scores["none"][:, 1].isnan().all()
    assert scores["mean"].tolist() == [1.0]
    assert scores["mean_batch"].tolist() == [1.0, 0.0]
END
