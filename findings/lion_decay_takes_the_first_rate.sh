#!/usr/bin/env bash
# lion-pytorch 0.2.5, Lion(..., decoupled_weight_decay=True): weight_decay then is the share of a weight that a step
# takes at the initial learning rate. That rate is the argument lr, 1e-4 if it is left out, also for groups of
# parameters that have a rate of their own. So the decay of a group is wrong by its rate over the argument. With lr=1e-2
# in the groups alone it is a hundred times too large, and turns each weight round at every step.
#
# Seen, weight_decay=0.1 and gradients of zero: lr=1e-2 as the argument takes the weight from 1 to 0.9 and 0.81; as the
# only group's lr from 1 to -9 and 81. With the argument lr=1e-3, groups of 1e-4 and 1e-2 lose 0.01 and 1 of it.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
if [ -n "${TORCH_FROM:-}" ]; then # site-packages with PyTorch and its dependencies, to save gigabytes
    echo "$TORCH_FROM" > "$(echo "$work"/venv/lib/python3.*/site-packages)/torch.pth"
else
    "$work/venv/bin/pip" install -q torch==2.15.0 numpy==2.4.6
fi
"$work/venv/bin/pip" install -q lion-pytorch==0.2.5
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" - <<'END'
import torch
from lion_pytorch import Lion


def decayed(steps, *groups, **arguments):
    """What steps with gradients of zero make of one weight of 1 for each group, and the weights."""
    weights = [torch.nn.Parameter(torch.ones(1)) for _ in groups]
    optimizer = Lion(
        [{"params": [weight], **group} for weight, group in zip(weights, groups)],
        weight_decay=0.1, decoupled_weight_decay=True, **arguments,
    )
    for weight in weights:
        weight.grad = torch.zeros(1)
    found = []
    for _ in range(steps):
        optimizer.step()
        found.append([round(weight.item(), 4) for weight in weights])
    return found


as_argument, in_the_group = decayed(2, {}, lr=1e-2), decayed(2, {"lr": 1e-2})
both = decayed(1, {"lr": 1e-4}, {"lr": 1e-2}, lr=1e-3)
print("lr=1e-2 as the argument:", as_argument, "in the group:", in_the_group, "groups beside lr=1e-3:", both)
assert as_argument == [[0.9], [0.81]] and in_the_group == [[-9.0], [81.0]]
assert both == [[0.99, 0.0]]
END
