#!/usr/bin/env bash
# PyTorch Metric Learning 2.9.0, CrossBatchMemory, a loss that compares a batch with those before: the memory and its
# labels are buffers, so a checkpoint has them and load_state_dict restores them. How many places are filled, and which
# is the oldest, are plain attributes, and stay at 0. So after a resume the memory counts as empty: the first loss sees
# the new batch alone, the next one two batches, until all places have been written again. What was restored is
# overwritten from its beginning, and never used.
#
# Seen, a memory of twelve, full, and a batch of four: the loss of the run that goes on is 8.13, that of the resumed one
# 0.009, which is the loss without a memory. With has_been_filled and queue_idx set by hand, both are equal.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
if [ -n "${TORCH_FROM:-}" ]; then # site-packages with PyTorch and its dependencies, to save gigabytes
    echo "$TORCH_FROM" > "$(echo "$work"/venv/lib/python3.*/site-packages)/torch.pth"
else
    "$work/venv/bin/pip" install -q torch==2.15.0 numpy==2.4.6
fi
"$work/venv/bin/pip" install -q pytorch-metric-learning==2.9.0
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" - <<'END'
import torch
from pytorch_metric_learning.losses import CrossBatchMemory, NTXentLoss

torch.manual_seed(0)
batches = [(torch.randn(4, 4), torch.arange(4) % 2) for _ in range(6)]


def memory():
    return CrossBatchMemory(NTXentLoss(), embedding_size=4, memory_size=12)


first, resumed, by_hand = memory(), memory(), memory()
for batch in batches[:5]:
    first(*batch)
for loss in (resumed, by_hand):
    loss.load_state_dict(first.state_dict())
    assert torch.equal(loss.embedding_memory, first.embedding_memory)
by_hand.has_been_filled, by_hand.queue_idx = first.has_been_filled, first.queue_idx

alone = NTXentLoss()(*batches[5])
went_on, went_on_by_hand, after_resume = first(*batches[5]), by_hand(*batches[5]), resumed(*batches[5])
print("loss of the run that goes on:", went_on.item(), "resumed:", after_resume.item(), "without memory:", alone.item())
assert torch.equal(after_resume, alone) and torch.equal(went_on_by_hand, went_on)
assert round(went_on.item(), 2) == 8.13 and round(alone.item(), 3) == 0.009
END
