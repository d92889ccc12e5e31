#!/usr/bin/env bash
# Opacus 1.6.0, make_private on a loader with batch_size=16 of 40 samples, loss_reduction="mean",
# poisson_sampling=False: the sum of the clipped gradients is divided by 13, the 40 samples over the three batches,
# rounded down, although the batches keep their 16, 16 and 8 samples. So the gradient of a full batch is 16/13 of the
# mean. Where a little more than one batch is in an epoch, it is almost doubled: 17 samples in batches of 16 are divided
# by 8. With Poisson sampling the batches themselves have 13.3 samples on average, not the 16 that were asked for.
#
# Seen, without noise and with a limit that clips nothing: gradient ÷ mean gradient = 16/13, 16/13, 8/13 for 40 samples;
# 2 for the first batch of 17.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
if [ -n "${TORCH_FROM:-}" ]; then # site-packages with PyTorch and its dependencies, to save gigabytes
    echo "$TORCH_FROM" > "$(echo "$work"/venv/lib/python3.*/site-packages)/torch.pth"
else
    "$work/venv/bin/pip" install -q torch==2.15.0 numpy==2.4.6
fi
"$work/venv/bin/pip" install -q opacus==1.6.0
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" - <<'END'
import torch
from opacus import PrivacyEngine
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)


def private(samples, poisson):
    data = TensorDataset(torch.randn(samples, 3), torch.randn(samples, 1))
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    return PrivacyEngine().make_private(
        module=model, optimizer=optimizer, data_loader=DataLoader(data, batch_size=16), noise_multiplier=0.0,
        max_grad_norm=1e6, poisson_sampling=poisson, loss_reduction="mean",
    )


def ratios(samples):
    """The length of the gradient that the optimizer uses over that of the mean gradient, by batch."""
    model, optimizer, loader = private(samples, poisson=False)
    weight = next(model.parameters())
    found = []
    for inputs, targets in loader:
        optimizer.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        plain = nn.Linear(3, 1)
        plain.load_state_dict(model._module.state_dict())
        F.mse_loss(plain(inputs), targets).backward()
        found.append(float(weight.grad.norm() / plain.weight.grad.norm()))
    return found


print("gradient ÷ mean gradient of 40 samples:", ratios(40), "of 17 samples:", ratios(17))
assert torch.allclose(torch.tensor(ratios(40)), torch.tensor([16 / 13, 16 / 13, 8 / 13]), rtol=1e-4)
assert abs(ratios(17)[0] - 2) < 1e-3
_, _, loader = private(40, poisson=True)
sizes = [len(inputs) for _ in range(200) for inputs, _ in loader]
print("mean size of Poisson's batches:", sum(sizes) / len(sizes))
assert 12.5 < sum(sizes) / len(sizes) < 14.2
END
