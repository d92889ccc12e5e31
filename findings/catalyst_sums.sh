#!/usr/bin/env bash
# Catalyst 22.4, OptimizerCallback(accumulation_steps=4): the callback counts, steps every fourth batch, and divides
# nothing, nor does engine.backward. The optimizer sees the sum of four mean gradients, four times that of the large
# batch. The counter runs over the ends of epochs.
#
# Seen: first step = g1 + g2 + g3 + g4; third step = g9 + g10 + g11 + g1 of the next epoch.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
if [ -n "${TORCH_FROM:-}" ]; then # site-packages with PyTorch and its dependencies, to save gigabytes
    echo "$TORCH_FROM" > "$(echo "$work"/venv/lib/python3.*/site-packages)/torch.pth"
else
    "$work/venv/bin/pip" install -q torch==2.15.0 numpy==2.4.6
fi
"$work/venv/bin/pip" install -q catalyst==22.4
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


from catalyst import dl
from torch.utils.data import DataLoader, TensorDataset


class Runner(dl.Runner):
    def handle_batch(self, batch):
        loss = F.mse_loss(self.model(batch[0]), batch[1])
        self.batch_metrics = {"loss": loss}
        self.engine.backward(loss)


Runner().train(
    model=model,
    optimizer=Seeing(model.parameters(), lr=0.0),
    loaders={"train": DataLoader(TensorDataset(inputs, targets), batch_size=2)},
    callbacks=[dl.OptimizerCallback("loss", accumulation_steps=4)],
    num_epochs=2,
    engine=dl.CPUEngine(),
)
assert is_close(seen[0], gradient(0, 1, 2, 3)), seen[0]
assert is_close(seen[2], gradient(8, 9, 10, 0)), seen[2]
print("first step: the sum of four batches, not their mean")
END
