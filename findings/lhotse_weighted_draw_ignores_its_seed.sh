#!/usr/bin/env bash
# Lhotse 1.33.0, WeightedSimpleCutSampler(cuts, weights, num_samples, seed=...), whose page says that the seed makes the
# shuffle the same in all processes: the cuts are drawn by NumPy's global generator, and seed=, set_epoch and shuffle=
# have no part in it. Each rank draws for itself, and takes its share of its own draw. So two ranks train on the same
# cuts in one epoch, although the draw is without replacement, unless NumPy is in the same state in both.
#
# Seen, ten of twenty cuts for two ranks, seed=0, NumPy seeded with 0 and 1: of five cuts each, 3 are the same. With
# NumPy seeded with 0 in both, none.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
if [ -n "${TORCH_FROM:-}" ]; then # site-packages with PyTorch and its dependencies, to save gigabytes
    echo "$TORCH_FROM" > "$(echo "$work"/venv/lib/python3.*/site-packages)/torch.pth"
else
    "$work/venv/bin/pip" install -q torch==2.15.0 numpy==2.4.6
fi
"$work/venv/bin/pip" install -q lhotse==1.33.0 urllib3==2.5.0
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" - <<'END'
import numpy as np
from lhotse import CutSet
from lhotse.dataset import WeightedSimpleCutSampler
from lhotse.testing.dummies import DummyManifest

cuts = DummyManifest(CutSet, begin_id=0, end_id=20)


def drawn(numpy_seed, rank, seed=0, epoch=0, shuffle=False):
    """The numbers of the cuts that a rank of two gets."""
    np.random.seed(numpy_seed)  # the state that NumPy has in the process of this rank
    sampler = WeightedSimpleCutSampler(
        cuts, [1.0] * 20, num_samples=10, max_cuts=1, shuffle=shuffle, world_size=2, rank=rank, seed=seed
    )
    sampler.set_epoch(epoch)
    return [int(cut.id.rsplit("-", 1)[1]) for batch in sampler for cut in batch]


first, second = drawn(0, rank=0), drawn(1, rank=1)
print("rank 0:", first, "rank 1:", second, "in both:", sorted(set(first) & set(second)))
assert len(first) == len(second) == 5 and len(set(first) & set(second)) == 3
assert not set(first) & set(drawn(0, rank=1))
assert drawn(0, rank=0, seed=7, epoch=3, shuffle=True) == first
END
