#!/usr/bin/env bash
# PyTorch Geometric 2.8.1, DataLoader: an attribute is counted up from graph to graph not only if its name has "index"
# in it, as its page says, but also if it has "batch" in it. Then the largest value so far plus one, as a whole number,
# is added for each graph before. A measured batch effect or the number of a minibatch changes silently, and by how much
# depends on the other graphs in the batch.
#
# Seen: batch_effect of 0.5, 0.5, 0.5 becomes 0.5, 1.5, 2.5; effect_of_run stays.
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
from torch_geometric.loader import DataLoader

value = torch.tensor([0.5])
graphs = [Data(x=torch.ones(2, 1), batch_effect=value, effect_of_run=value) for _ in range(3)]
batch = next(iter(DataLoader(graphs, batch_size=3)))
print("batch_effect:", batch.batch_effect.tolist(), "effect_of_run:", batch.effect_of_run.tolist())
assert batch.batch_effect.tolist() == [0.5, 1.5, 2.5]
assert batch.effect_of_run.tolist() == [0.5, 0.5, 0.5]
END
