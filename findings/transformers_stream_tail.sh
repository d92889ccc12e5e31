#!/usr/bin/env bash
# Transformers 5.24.0, Trainer on an IterableDataset, gradient_accumulation_steps=4, eleven batches an epoch: the last
# three batches of an epoch are not stepped. Their gradients, each divided by 3, stay and are added to the next epoch's
# first four, each divided by 4: that step sees 7/4 of a mean. With a dataset that has a length the three get a step.
#
# Seen: third step = (g9 + g10 + g11) / 3 + (g1 + g2 + g3 + g4 of the next epoch) / 4.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
if [ -n "${TORCH_FROM:-}" ]; then # site-packages with PyTorch and its dependencies, to save gigabytes
    echo "$TORCH_FROM" > "$(echo "$work"/venv/lib/python3.*/site-packages)/torch.pth"
else
    "$work/venv/bin/pip" install -q torch==2.15.0 numpy==2.4.6
fi
"$work/venv/bin/pip" install -q transformers==5.24.0 accelerate==1.15.0
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


from torch.utils.data import IterableDataset
from transformers import Trainer, TrainingArguments


class Stream(IterableDataset):
    def __iter__(self):
        return ({"inputs": row, "labels": target} for row, target in zip(inputs, targets))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = model

    def forward(self, inputs, labels):
        return {"loss": F.mse_loss(self.net(inputs), labels)}


arguments = TrainingArguments(
    "out", max_steps=4, per_device_train_batch_size=2, gradient_accumulation_steps=4, max_grad_norm=0.0,
    use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no",
)
optimizer = Seeing(model.parameters(), lr=0.0)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
Trainer(Model(), arguments, train_dataset=Stream(), optimizers=(optimizer, schedule)).train()
assert is_close(seen[1], gradient(4, 5, 6, 7) / 4)
assert is_close(seen[2], gradient(8, 9, 10) / 3 + gradient(0, 1, 2, 3) / 4), seen[2]
print("third step: the last three batches ÷ 3 plus the next epoch's first four ÷ 4")
END
