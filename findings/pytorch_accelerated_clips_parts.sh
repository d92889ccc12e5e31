#!/usr/bin/env bash
# pytorch-accelerated 0.1.61, gradient_accumulation_steps=4 and gradient_clip_value: the sum so far is clipped after every
# batch, not the gradient of the window before the step. Numbers that later batches would have brought back below the
# limit are cut before.
#
# Seen: the step sees clip(clip(clip(clip(g1/4) + g2/4) + g3/4) + g4/4), not clip((g1 + g2 + g3 + g4) / 4).
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
if [ -n "${TORCH_FROM:-}" ]; then # site-packages with PyTorch and its dependencies, to save gigabytes
    echo "$TORCH_FROM" > "$(echo "$work"/venv/lib/python3.*/site-packages)/torch.pth"
else
    "$work/venv/bin/pip" install -q torch==2.15.0 numpy==2.4.6
fi
"$work/venv/bin/pip" install -q pytorch-accelerated==0.1.61
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" - <<'END'
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
inputs, targets = torch.randn(22, 3), torch.randn(22, 1)  # eleven batches of two; four are a window
model = nn.Linear(3, 1)
nn.init.zeros_(model.weight)
nn.init.zeros_(model.bias)
seen = []


class Seeing(torch.optim.SGD):
    """With lr=0 the weights stay, so every gradient is one of the same model."""

    def step(self, closure=None):
        seen.append(model.weight.grad.flatten().clone())
        return super().step(closure)


def gradient(*batches):
    """The sum of the gradients of batches, by their numbers from 0."""
    total = torch.zeros(3)
    for number in batches:
        rows = slice(2 * number, 2 * number + 2)
        loss = F.mse_loss(inputs[rows] @ model.weight.T + model.bias, targets[rows])
        total += torch.autograd.grad(loss, model.weight)[0].flatten()
    return total


def is_close(one, other):
    return torch.allclose(one, other, rtol=1e-4, atol=1e-6)


import os

os.environ["ACCELERATE_USE_CPU"] = "true"
from pytorch_accelerated import Trainer
from torch.utils.data import DataLoader, TensorDataset

LIMIT = 0.2


class InOrder(Trainer):
    def create_train_dataloader(self, *_, **__):
        return DataLoader(TensorDataset(inputs[:8], targets[:8]), batch_size=2)


optimizer = Seeing(model.parameters(), lr=0.0)
InOrder(model, F.mse_loss, optimizer, callbacks=()).train(
    TensorDataset(inputs[:8], targets[:8]), num_epochs=1, per_device_batch_size=2, gradient_accumulation_steps=4,
    gradient_clip_value=LIMIT,
)
of_window = (gradient(0, 1, 2, 3) / 4).clamp(-LIMIT, LIMIT)
of_parts = torch.zeros(3)
for number in range(4):
    of_parts = (of_parts + gradient(number) / 4).clamp(-LIMIT, LIMIT)
print("seen", seen[0].tolist(), "of the window", of_window.tolist())
assert is_close(seen[0], of_parts), of_parts
assert not is_close(seen[0], of_window)
END
