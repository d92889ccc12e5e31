#!/usr/bin/env bash
# Ignite 0.5.5, create_supervised_trainer(gradient_accumulation_steps=4): windows are counted by the iterations of the
# whole run. A window goes on in the next epoch, and what is left when the run ends is never stepped: of two epochs of
# eleven batches, the last two batches are lost.
#
# Seen: five steps; third step = (g9 + g10 + g11 + g1 of the next epoch) / 4.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
if [ -n "${TORCH_FROM:-}" ]; then # site-packages with PyTorch and its dependencies, to save gigabytes
    echo "$TORCH_FROM" > "$(echo "$work"/venv/lib/python3.*/site-packages)/torch.pth"
else
    "$work/venv/bin/pip" install -q torch==2.15.0 numpy==2.4.6
fi
"$work/venv/bin/pip" install -q pytorch-ignite==0.5.5
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


from ignite.engine import create_supervised_trainer
from torch.utils.data import DataLoader, TensorDataset

optimizer = Seeing(model.parameters(), lr=0.0)
trainer = create_supervised_trainer(model, optimizer, F.mse_loss, gradient_accumulation_steps=4)
trainer.run(DataLoader(TensorDataset(inputs, targets), batch_size=2), max_epochs=2)
print(len(seen), "steps for 22 batches")
assert len(seen) == 5
assert is_close(seen[2], gradient(8, 9, 10, 0) / 4), seen[2]
assert model.weight.grad is not None  # of the last two batches
END
