#!/usr/bin/env bash
# diffusers 0.39.0, EMAModel(decay=...) with use_ema_warmup=False: the decay is warmed up as well, by another formula.
# In the first call of step() it is 0, and in the n-th call n / (n + 9), or the decay that was asked for if that is
# smaller. So 0.9999, the default, is in force from call 89,991 on, and up to call 8,991 it makes no difference whether
# 0.999 or 0.9999 was asked for. What use_ema_warmup chooses is the formula. With min_decay=decay, the decay is the same
# from the second call on.
#
# Seen: after 5,000 calls the averages with 0.999 and 0.9999 are equal to the bit. Of a weight that grows by 1 before
# each call, they are 500 calls behind. With min_decay=0.9999 the average is 3,934 calls behind.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
if [ -n "${TORCH_FROM:-}" ]; then # site-packages with PyTorch and its dependencies, to save gigabytes
    echo "$TORCH_FROM" > "$(echo "$work"/venv/lib/python3.*/site-packages)/torch.pth"
else
    "$work/venv/bin/pip" install -q torch==2.15.0 numpy==2.4.6
fi
"$work/venv/bin/pip" install -q diffusers==0.39.0
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" - <<'END'
import torch
from diffusers.training_utils import EMAModel


def average(decay, min_decay=0.0):
    """The average of a weight that grows by 1 before each of 5,000 calls, and the decays."""
    weight = torch.nn.Parameter(torch.zeros(1))
    model = EMAModel([weight], decay=decay, min_decay=min_decay, use_ema_warmup=False)
    decays = []
    for _ in range(5000):
        weight.data += 1
        model.step([weight])
        decays.append(model.cur_decay_value)
    return model.shadow_params[0].item(), decays


one, decays = average(0.999)
other, _ = average(0.9999)
print("average after 5,000 calls:", one, "with 0.999 and", other, "with 0.9999")
assert one == other and round(5000 - one) == 500
assert decays == [0.0] + [number / (number + 9) for number in range(2, 5001)]

model = EMAModel([torch.nn.Parameter(torch.zeros(1))], decay=0.9999, use_ema_warmup=False)
assert model.get_decay(89_990) < 0.9999 == model.get_decay(89_991)

constant, decays = average(0.9999, min_decay=0.9999)
print("with min_decay=0.9999:", constant)
assert decays == [0.0] + 4999 * [0.9999] and round(5000 - constant) == 3934
END
