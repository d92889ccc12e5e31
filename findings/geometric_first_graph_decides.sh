#!/usr/bin/env bash
# PyTorch Geometric 2.8.1, DataLoader: the first graph of a batch decides which attributes the batch has. One that the
# first graph lacks is left out of the batch without a word, although the other graphs have it; one that only the first
# graph has is a KeyError. So data in which a few graphs lack a label, shuffled, loses the labels of some batches, runs
# with others, and fails with others, by the order of the epoch.
#
# Seen, two graphs of which one has a weight: no weight in the batch if it comes second, KeyError if it comes first.
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

plain = Data(x=torch.ones(2, 1))
weighted = Data(x=torch.ones(2, 1), weight=torch.ones(1))


def collate(*graphs):
    try:
        return sorted(next(iter(DataLoader(list(graphs), batch_size=2))).keys())
    except KeyError as error:
        return repr(error)


print("with the weight second:", collate(plain, weighted), "first:", collate(weighted, plain))
assert collate(plain, weighted) == ["batch", "ptr", "x"]
assert collate(weighted, plain) == "KeyError('weight')"
END
