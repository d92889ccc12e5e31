#!/usr/bin/env bash
# PyTorch 2.15.0, torch.distributed.checkpoint.state_dict.get_state_dict (and get_optimizer_state_dict): to have a state
# to return, an optimizer that has not stepped yet is stepped once with zero gradients and lr=0. The weights stay, but
# the state is left behind in the live optimizer. So a run that saves a checkpoint of its start, or only looks, trains
# otherwise than one that does not: AdamW begins at its second step, with a bias correction that does not fit; SGD has a
# momentum of zeros, so that dampening already weakens its first gradient; and Rprop has taken lr=0 for its step size,
# and hardly moves any more.
#
# Seen, the first change of a weight with lr=0.1, without and with get_state_dict before: AdamW 0.1 and 0.074; SGD with
# momentum 0.9 and dampening 0.5, 1 and 0.5 times the gradient; Rprop 0.1 and 0.000001.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
if [ -n "${TORCH_FROM:-}" ]; then # site-packages with PyTorch and its dependencies, to save gigabytes
    echo "$TORCH_FROM" > "$(echo "$work"/venv/lib/python3.*/site-packages)/torch.pth"
else
    "$work/venv/bin/pip" install -q torch==2.15.0 numpy==2.4.6
fi
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" - <<'END'
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict


def first_change(make_optimizer, looks):
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    inputs = torch.randn(4, 3)
    optimizer = make_optimizer(model.parameters())
    before = model.weight.detach().clone()
    if looks:
        get_state_dict(model, optimizer)
        assert torch.equal(model.weight, before)
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()
    return float((model.weight.detach() - before).abs().max())


def compare(name, make_optimizer):
    without, after = first_change(make_optimizer, False), first_change(make_optimizer, True)
    print(f"{name}: first change {without:.6f}, after get_state_dict {after:.6f}")
    return without, after


without, after = compare("AdamW", lambda weights: torch.optim.AdamW(weights, lr=0.1, weight_decay=0.0))
assert abs(without - 0.1) < 1e-4 and abs(after - 0.0744) < 1e-4
without, after = compare("SGD", lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9, dampening=0.5))
assert abs(after / without - 0.5) < 1e-4
without, after = compare("Rprop", lambda weights: torch.optim.Rprop(weights, lr=0.1))
assert abs(without - 0.1) < 1e-4 and after < 1e-5
END
