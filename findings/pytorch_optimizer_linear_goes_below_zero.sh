#!/usr/bin/env bash
# pytorch_optimizer 4.1.0, LinearScheduler(t_max=..., min_lr=...): by its page min_lr is the final learning rate. After
# t_max steps the line goes on. The learning rate falls below min_lr, then below 0, and the optimizer climbs the loss.
# So a run that is longer than planned, or a loop that steps the schedule after every micro-batch instead of every
# optimizer step, turns round in silence. PyTorch's LinearLR stays at its end.
#
# Seen, t_max=10, min_lr=0.1, SGD on w² from w=1: the learning rate of step 11 is 0.1, of the next ones 0.01, -0.08 and
# -0.17. After twelve steps w is 0.00003, after thirty 480. With LinearLR it goes on to fall.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
if [ -n "${TORCH_FROM:-}" ]; then # site-packages with PyTorch and its dependencies, to save gigabytes
    echo "$TORCH_FROM" > "$(echo "$work"/venv/lib/python3.*/site-packages)/torch.pth"
else
    "$work/venv/bin/pip" install -q torch==2.15.0 numpy==2.4.6
fi
"$work/venv/bin/pip" install -q pytorch-optimizer==4.1.0
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" - <<'END'
import torch
from pytorch_optimizer import LinearScheduler
from torch.optim.lr_scheduler import LinearLR


def trained(schedule_of):
    """The learning rate and the weight of each step."""
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    schedule = schedule_of(optimizer)
    rates, weights = [], []
    for _ in range(30):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.zero_grad()
        weight.square().sum().backward()
        optimizer.step()
        schedule.step()
        weights.append(abs(weight.item()))
    return rates, weights


def linear(optimizer):
    schedule = LinearScheduler(optimizer, t_max=10, max_lr=1.0, min_lr=0.1)
    schedule.step()  # sets max_lr for the first step
    return schedule


rates, weights = trained(linear)
print("learning rates:", [round(rate, 2) for rate in rates], "weights:", [f"{weight:.1e}" for weight in weights])
assert [round(rate, 2) for rate in rates[9:14]] == [0.19, 0.1, 0.01, -0.08, -0.17]
assert min(weights) == weights[11] < 4e-5 and sorted(weights[11:]) == weights[11:] and round(weights[-1], -1) == 480

rates, weights = trained(lambda optimizer: LinearLR(optimizer, start_factor=1.0, end_factor=0.1, total_iters=10))
print("PyTorch's:", [round(rate, 2) for rate in rates], "weights:", [f"{weight:.1e}" for weight in weights])
assert all(round(rate, 6) == 0.1 for rate in rates[10:]) and min(weights) == weights[-1] < 1e-5
END
