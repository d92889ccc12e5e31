#!/usr/bin/env bash
# pytorch_optimizer 4.1.0, Lookahead(optimizer, pullback_momentum="reset") or "pullback", by its page the handling of
# the momentum when the weights go back to the slow ones: only a state named momentum_buffer is handled. Adam and its
# relatives, most of the optimizers of this package among them, keep theirs as exp_avg. For these, both choices do
# nothing but store a momentum_buffer that nobody reads, which costs the memory of the weights, and nothing warns.
#
# Seen, nine steps, back every second one: with SGD the three choices end at three different weights; with AdamW, RAdam
# and AdaBelief at weights that are equal to the bit, with a momentum_buffer of zeros for "reset".
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
from pytorch_optimizer import AdaBelief, Lookahead, RAdam


def trained(kind, choice, **arguments):
    """The weights after nine steps, and the state of the optimizer that is wrapped."""
    weight = torch.nn.Parameter(torch.ones(3))
    inner = kind([weight], lr=0.1, **arguments)
    optimizer = Lookahead(inner, k=2, alpha=0.5, pullback_momentum=choice)
    for number in range(9):
        optimizer.zero_grad()
        (weight - number * torch.tensor([1.0, 2.0, 3.0])).square().sum().backward()
        optimizer.step()
    return weight.detach(), inner.state[weight]


for kind, arguments in ((torch.optim.SGD, {"momentum": 0.9}), (torch.optim.AdamW, {}), (RAdam, {}), (AdaBelief, {})):
    (none, _), (reset, state), (pullback, _) = (
        trained(kind, choice, **arguments) for choice in ("none", "reset", "pullback")
    )
    print(f"{kind.__name__}: none {none.tolist()}, reset {reset.tolist()}, pullback {pullback.tolist()}")
    if kind is torch.optim.SGD:
        assert not (torch.equal(none, reset) or torch.equal(none, pullback) or torch.equal(reset, pullback))
    else:
        assert torch.equal(none, reset) and torch.equal(none, pullback)
        assert not state["momentum_buffer"].any() and state["exp_avg"].all()
END
