#!/usr/bin/env bash
# PyTorch Geometric 2.8.1, DynamicBatchSampler(skip_too_big=True): a graph that is too big by itself is skipped, but not
# counted as read. The next batch starts as many graphs too early, so graphs that come after a skipped one are in two
# batches of the same epoch. If the skipped graph is the last one, empty batches follow until there is one batch for
# each graph, and a loader cannot collate these.
#
# Seen, graphs of 2, 30, 4 and 5 nodes in batches of up to 10: [0], [2, 3], [3]; with the big one at the end: [0, 1],
# [2], [], [].
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
if [ -n "${TORCH_FROM:-}" ]; then # site-packages with PyTorch and its dependencies, to save gigabytes
    echo "$TORCH_FROM" > "$(echo "$work"/venv/lib/python3.*/site-packages)/torch.pth"
else
    "$work/venv/bin/pip" install -q torch==2.15.0 numpy==2.4.6
fi
"$work/venv/bin/pip" install -q torch-geometric==2.8.1
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" - <<'END'
import torch
from torch_geometric.data import Data
from torch_geometric.loader import DynamicBatchSampler


def batches(*nodes):
    graphs = [Data(x=torch.ones(number, 1)) for number in nodes]
    return [batch for batch in DynamicBatchSampler(graphs, max_num=10, skip_too_big=True)]


print("a big graph in the middle:", batches(2, 30, 4, 5))
print("a big graph at the end:", batches(2, 4, 5, 30))
assert batches(2, 30, 4, 5) == [[0], [2, 3], [3]]
assert batches(2, 4, 5, 30) == [[0, 1], [2], [], []]
END
