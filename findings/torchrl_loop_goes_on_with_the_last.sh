#!/usr/bin/env bash
# TorchRL 0.14.1, ReplayBuffer with SamplerWithoutReplacement: a loop "for batch in buffer" does not begin a pass, it
# goes on with the pass that the sampler is in. If a loop was left early, as PPO does when the policy has changed too
# much, the next loop yields only the elements that were left. extend() with new data begins a new pass only if the
# length of the storage changes. If the storage is full and is overwritten, the next loop leaves out as many of the new
# elements as were read of the old ones, in silence. empty() before extend() helps.
#
# Seen, ten elements in batches of four, a loop that is left after the first batch: the next loop yields 6 elements.
# After extend() with ten others it yields 6 of these from a storage of ten, and everything from a storage of twenty.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
if [ -n "${TORCH_FROM:-}" ]; then # site-packages with PyTorch and its dependencies, to save gigabytes
    echo "$TORCH_FROM" > "$(echo "$work"/venv/lib/python3.*/site-packages)/torch.pth"
else
    "$work/venv/bin/pip" install -q torch==2.15.0 numpy==2.4.6
fi
"$work/venv/bin/pip" install -q torchrl==0.14.1
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" - <<'END'
import torch
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement


def make_buffer(storage_size):
    """A buffer of ten elements, after one batch of four."""
    buffer = ReplayBuffer(storage=LazyTensorStorage(storage_size), sampler=SamplerWithoutReplacement(), batch_size=4)
    buffer.extend(torch.arange(10))
    for _ in buffer:
        break
    return buffer


def read(buffer):
    elements = [element for batch in buffer for element in batch.tolist()]
    assert len(set(elements)) == len(elements)
    return elements


torch.manual_seed(0)
buffer = make_buffer(10)
rest = read(buffer)
print("next loop:", rest)
assert len(rest) == 6
assert len(read(buffer)) == 10  # the loop after a whole one

buffer = make_buffer(10)
buffer.extend(torch.arange(100, 110))
rest = read(buffer)
print("next loop after extend():", rest)
assert len(rest) == 6 and min(rest) >= 100

buffer = make_buffer(20)
buffer.extend(torch.arange(100, 110))
assert len(read(buffer)) == 20

buffer = make_buffer(10)
buffer.empty()
buffer.extend(torch.arange(100, 110))
assert len(read(buffer)) == 10
END
