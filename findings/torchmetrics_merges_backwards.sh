#!/usr/bin/env bash
# TorchMetrics 1.9.0, Metric.merge_state(other): of a state that is a list of values the other's values come first,
# although the state is merged into one's own. What two workers have collected with CatMetric is in reverse order after
# first.merge_state(second), and no longer beside the names or weights that were concatenated in the usual order. A
# metric of pairs hides it, because both of its lists are turned round; so does every sum.
#
# Seen: [1, 2] merged with [3, 4] and then with [5, 6] gives [5, 6, 3, 4, 1, 2].
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
if [ -n "${TORCH_FROM:-}" ]; then # site-packages with PyTorch and its dependencies, to save gigabytes
    echo "$TORCH_FROM" > "$(echo "$work"/venv/lib/python3.*/site-packages)/torch.pth"
else
    "$work/venv/bin/pip" install -q torch==2.15.0 numpy==2.4.6
fi
"$work/venv/bin/pip" install -q torchmetrics==1.9.0
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" - <<'END'
import torch
from torchmetrics import CatMetric


def collected(*values):
    metric = CatMetric()
    metric.update(torch.tensor(values))
    return metric


first, second, third = collected(1.0, 2.0), collected(3.0, 4.0), collected(5.0, 6.0)
first.merge_state(second)
first.merge_state(third)
print("first, second and third merged:", first.compute().tolist())
assert first.compute().tolist() == [5, 6, 3, 4, 1, 2]
END
