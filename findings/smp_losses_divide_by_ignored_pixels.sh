#!/usr/bin/env bash
# segmentation-models-pytorch 0.6.0, SoftCrossEntropyLoss, by its docstring a drop-in replacement for
# torch.nn.CrossEntropyLoss, and SoftBCEWithLogitsLoss, both with ignore_index: the loss of an ignored pixel is 0, but
# the mean is over all pixels, also over the ignored ones. PyTorch's mean is over the pixels that count. So the larger
# the share of ignored pixels is, the smaller are the loss and the gradient, and a batch of sparsely labelled or padded
# images makes a smaller step.
#
# Seen, half of the pixels ignored: both give 0.5 times PyTorch's loss and gradient. Without ignored pixels they give
# the same.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
if [ -n "${TORCH_FROM:-}" ]; then # site-packages with PyTorch and its dependencies, to save gigabytes
    echo "$TORCH_FROM" > "$(echo "$work"/venv/lib/python3.*/site-packages)/torch.pth"
else
    "$work/venv/bin/pip" install -q torch==2.15.0 numpy==2.4.6
fi
"$work/venv/bin/pip" install -q segmentation-models-pytorch==0.6.0
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" - <<'END'
import torch
from segmentation_models_pytorch.losses import SoftBCEWithLogitsLoss, SoftCrossEntropyLoss
from torch.nn import functional as F


def loss_and_gradient(function, logits, labels):
    logits = logits.clone().requires_grad_()
    loss = function(logits, labels)
    loss.backward()
    return torch.cat([loss.detach().flatten(), logits.grad.flatten()])


def binary_reference(logits, labels):
    return F.binary_cross_entropy_with_logits(logits[labels != -100], labels[labels != -100])


torch.manual_seed(0)
for ignored_rows, ratio in ((2, 0.5), (0, 1.0)):  # of four rows
    labels = torch.randint(0, 3, (2, 4, 4))
    labels[:, :ignored_rows] = -100
    mask = torch.randint(0, 2, (2, 1, 4, 4)).float()
    mask[:, :, :ignored_rows] = -100
    for loss, reference, logits, target in (
        (SoftCrossEntropyLoss(smooth_factor=0.0, ignore_index=-100), F.cross_entropy, torch.randn(2, 3, 4, 4), labels),
        (SoftBCEWithLogitsLoss(ignore_index=-100), binary_reference, torch.randn(2, 1, 4, 4), mask),
    ):
        one = loss_and_gradient(loss, logits, target)
        other = loss_and_gradient(reference, logits, target)
        print(type(loss).__name__, ignored_rows, "of 4 rows ignored:", (one[0] / other[0]).item(), "times the loss")
        assert torch.allclose(one, ratio * other, atol=1e-6)
END
