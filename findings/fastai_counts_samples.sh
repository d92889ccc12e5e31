#!/usr/bin/env bash
# fastai 2.8.12, GradientAccumulation(n_acc=4) with batches of two samples: n_acc counts samples, not batches, so there is
# a step after every second batch. Each batch weighs samples ÷ n_acc. What is left at the end of an epoch is neither
# stepped nor zeroed: it is added to the next epoch's first window, which then is larger than a mean.
#
# Seen, two epochs of eleven batches: eleven steps, the first one of (g1 + g2) / 2; the sixth = (g11 + g1 of the next
# epoch) / 2.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
if [ -n "${TORCH_FROM:-}" ]; then # site-packages with PyTorch and its dependencies, to save gigabytes
    echo "$TORCH_FROM" > "$(echo "$work"/venv/lib/python3.*/site-packages)/torch.pth"
else
    "$work/venv/bin/pip" install -q torch==2.15.0 numpy==2.4.6
fi
"$work/venv/bin/pip" install -q fastai==2.8.12
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


from functools import partial

from fastai.callback.training import GradientAccumulation
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastai.optimizer import OptimWrapper
from torch.utils.data import DataLoader, TensorDataset

loader = DataLoader(TensorDataset(inputs, targets), batch_size=2)
learner = Learner(
    DataLoaders(loader, loader), model, F.mse_loss, opt_func=partial(OptimWrapper, opt=Seeing), lr=0.0,
    cbs=[GradientAccumulation(n_acc=4)],
)
with learner.no_bar(), learner.no_logging():
    learner.fit(2, lr=0.0)
print(len(seen), "steps in two epochs of eleven batches")
assert len(seen) == 11
assert is_close(seen[0], gradient(0, 1) / 2)
assert is_close(seen[5], gradient(10, 0) / 2), seen[5]
END
